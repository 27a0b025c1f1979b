//! Source and destination of a copy, as requested.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use towline_channel::Address;
use towline_migration::{Guest, Result, Sink};

/// Source of a guest.
#[derive(Debug, Clone)]
pub enum Source {
    /// A running QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// An address on which towline listens for another QEMU or towline.
    Stream(Address),
    /// An image.
    Image(PathBuf),
    /// An image in an object store; refused by a build without the feature `store`.
    Store(towline_image::Location),
    /// A guest of this process.
    Process(Arc<dyn ProcessSource>),
}

/// Destination of a guest.
#[derive(Debug, Clone)]
pub enum Destination {
    /// A QEMU that waits with `-incoming defer`, by its QMP socket.
    Qmp(PathBuf),
    /// A QEMU or towline that listens there.
    Stream(Address),
    /// An image to be written.
    Image(PathBuf),
    /// An image to be written to an object store; refused by a build without the feature `store`.
    Store(towline_image::Location),
    /// A sink of this process, with which the guest ends.
    Process(Arc<dyn ProcessDestination>),
    /// Nothing: counts and discards. The source gets an error, so its guest runs on.
    Null,
}

/// A guest that the caller has in this process.
pub trait ProcessSource: fmt::Debug + Send + Sync {
    /// Name of the source, for the manifest of an image.
    fn name(&self) -> &str;

    /// Creates the guest: the request was validated, and nothing else was touched.
    ///
    /// # Errors
    /// The guest cannot be created, for example because there is too little memory.
    fn create(&self) -> Result<Box<dyn ProcessGuest>>;
}

/// A guest of this process. It ends when this is dropped.
pub trait ProcessGuest {
    /// Runs the guest while `send` sends it. The engine stops it for the last pass.
    ///
    /// # Errors
    /// The guest cannot be run. `send` was not called.
    fn run(&self, send: &mut dyn FnMut(&dyn Guest)) -> Result<()>;
}

/// A sink that the caller has in this process. Its name is that of the destination in messages.
pub trait ProcessDestination: fmt::Debug + fmt::Display + Send + Sync {
    /// Creates the sink, before the destination is connected to its source.
    ///
    /// # Errors
    /// The sink cannot be created, for example because there is too little memory.
    fn create(&self) -> Result<Arc<dyn Sink>>;
}

impl Source {
    /// Returns true if it is a stored guest.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Store(_))
    }

    /// The QMP socket, if it is a QEMU.
    pub(super) fn monitor(&self) -> Option<&Path> {
        let Self::Qmp(path) = self else { return None };
        Some(path)
    }

    /// The address, if it is a stream.
    pub(super) fn stream(&self) -> Option<&Address> {
        let Self::Stream(address) = self else { return None };
        Some(address)
    }
}

impl Destination {
    /// Returns true if the guest is stored there.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Store(_))
    }

    /// The QMP socket, if it is a QEMU.
    pub(super) fn monitor(&self) -> Option<&Path> {
        let Self::Qmp(path) = self else { return None };
        Some(path)
    }

    /// The address, if it is a stream.
    pub(super) fn stream(&self) -> Option<&Address> {
        let Self::Stream(address) = self else { return None };
        Some(address)
    }

    /// Identity, by which two destinations that cannot both take a guest are equal; `None`: it takes any number of guests.
    pub(super) fn key(&self) -> Option<PathBuf> {
        match self {
            Self::Qmp(path) | Self::Image(path) => {
                path.canonicalize().or_else(|_| std::path::absolute(path)).ok()
            }
            Self::Stream(Address::Exec(_)) | Self::Process(_) | Self::Null => None,
            // No path begins like these.
            Self::Stream(address) => Some(address.to_string().into()),
            Self::Store(location) => Some(location.to_string().into()),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "qmp:{}", path.display()),
            Self::Image(path) => write!(f, "file:{}", path.display()),
            Self::Store(location) => write!(f, "{location}"),
            Self::Stream(address) => write!(f, "{address}"),
            Self::Process(process) => write!(f, "{process}"),
            Self::Null => f.write_str("null:"),
        }
    }
}
