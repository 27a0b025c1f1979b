//! Source and destination of a copy, as requested.

use std::fmt;
use std::path::{Path, PathBuf};

use towline_channel::Address;
use towline_migration::synthetic;

/// Source of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A running QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// An address on which towline listens for another QEMU or towline.
    Stream(Address),
    /// An image.
    Image(PathBuf),
    /// An image in an object store; refused by a build without the feature `store`.
    Store(towline_image::Location),
    /// A synthetic guest of this process.
    Memory(synthetic::Shape),
}

/// Destination of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A QEMU that waits with `-incoming defer`, by its QMP socket.
    Qmp(PathBuf),
    /// A QEMU or towline that listens there.
    Stream(Address),
    /// An image to be written.
    Image(PathBuf),
    /// An image to be written to an object store; refused by a build without the feature `store`.
    Store(towline_image::Location),
    /// Memory of this process, in which the guest is verified (or hashed) and then discarded.
    Memory(MemoryOptions),
    /// Nothing: counts and discards. The source gets an error, so its guest runs on.
    Null,
}

/// Identity of a destination that takes one guest only.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) enum DestinationKey {
    Path(PathBuf),
    Address(String),
    /// A destination that takes any number of guests.
    Many(usize),
}

impl Source {
    /// Returns true if it is a stored guest.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Store(_))
    }

    /// The QMP socket, if it is a QEMU.
    pub(super) fn monitor(&self) -> Option<&Path> {
        match self {
            Self::Qmp(path) => Some(path),
            _ => None,
        }
    }

    /// The address, if it is a stream.
    pub(super) fn stream(&self) -> Option<&Address> {
        match self {
            Self::Stream(address) => Some(address),
            _ => None,
        }
    }
}

impl Destination {
    /// Returns true if the guest is stored there.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Store(_))
    }

    /// The QMP socket, if it is a QEMU.
    pub(super) fn monitor(&self) -> Option<&Path> {
        match self {
            Self::Qmp(path) => Some(path),
            _ => None,
        }
    }

    /// The address, if it is a stream.
    pub(super) fn stream(&self) -> Option<&Address> {
        match self {
            Self::Stream(address) => Some(address),
            _ => None,
        }
    }

    /// Identity, by which two destinations that cannot both take a guest are equal.
    pub(super) fn key(&self) -> DestinationKey {
        match self {
            Self::Qmp(path) | Self::Image(path) => {
                DestinationKey::Path(path.canonicalize().unwrap_or_else(|_| path.clone()))
            }
            Self::Stream(address) if !matches!(address, Address::Exec(_)) => {
                DestinationKey::Address(address.to_string())
            }
            Self::Store(location) => DestinationKey::Address(location.to_string()),
            Self::Stream(_) | Self::Memory(_) | Self::Null => {
                DestinationKey::Many(std::ptr::from_ref(self).addr())
            }
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
            Self::Memory(_) => f.write_str("mem:"),
            Self::Null => f.write_str("null:"),
        }
    }
}

/// Memory of this process as a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryOptions {
    /// Bytes to allocate and populate before the source is queried; `None` to allocate as many as the guest
    /// has once that is known.
    pub length: Option<u64>,
    /// In reserved huge pages; needs a length.
    pub is_huge: bool,
}
