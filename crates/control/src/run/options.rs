//! The request of a run, and the reasons for which its guests are not started.

use std::io;
use std::path::PathBuf;

use towline_channel::Cancel;
use towline_image::Location;
use towline_launch::{
    GuestGenerations, GuestName, HostArguments, HostError, InUse, LaunchError, Lifetime, NameError,
    OverlayError, ParseError, Refused, RuntimeError, RuntimeRoot,
};

use crate::plan::{Failure, Observer};

/// Request for the guests of an image.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The image.
    pub image: ImageLocation,
    /// Name of the guest, or beginning of the clones' names; `None`: that of the image.
    pub name: Option<GuestName>,
    /// Number of clones.
    pub count: u32,
    /// Way in which the guests get their memory.
    pub memory: MemoryRequest,
    /// End of their QEMUs' lives.
    pub lifetime: Lifetime,
    /// Disks that they write.
    pub disks: Disks,
    /// Networks that they are in.
    pub networks: Networks,
    /// State of the guests once they are there.
    pub state: FirstState,
    /// Directory of the files of images from object stores; `None`: that of this user.
    pub cache_directory: Option<PathBuf>,
    /// Trust in the image's command line.
    pub trust: CommandLineTrust,
    /// The QEMU, its working directory, and settings and arguments with the variables of clones. An empty binary is that of the
    /// guest that is forked.
    pub host: HostArguments,
    /// Directory of the guests that towline starts.
    pub root: RuntimeRoot,
    /// Generations of the only guest. It is restored by a caller that has taken the next one for it.
    pub generations: Option<GuestGenerations>,
}

impl RunOptions {
    /// Options of one guest of this user, as far as nothing is said about it.
    pub fn of_one(image: ImageLocation) -> Self {
        Self {
            image,
            name: None,
            count: 1,
            memory: MemoryRequest::MappedOrCopied,
            lifetime: Lifetime::WithOwner,
            disks: Disks::Own,
            networks: Networks::Same,
            state: FirstState::Running,
            cache_directory: None,
            trust: CommandLineTrust::Untrusted,
            host: HostArguments::default(),
            root: RuntimeRoot::of_user(),
            generations: None,
        }
    }
}

/// Place of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageLocation {
    /// A file of this host.
    File(PathBuf),
    /// An object store; refused by a build without the feature `store`.
    Store(Location),
    /// The image that a running guest maps, with what that has written: the guest of the QEMU with this monitor, which runs on.
    Guest(PathBuf),
}

/// Way in which guests get their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryRequest {
    /// Mapped from the image if that is possible, else copied.
    MappedOrCopied,
    /// Mapped from the image.
    Mapped,
    /// Copied.
    Copied,
    /// On demand, while the guest runs.
    Postcopy,
}

impl MemoryRequest {
    /// Returns true if memory is mapped where that is possible.
    pub(super) fn is_mapped(self) -> bool {
        matches!(self, Self::MappedOrCopied | Self::Mapped)
    }
}

/// Networks that guests are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Networks {
    /// Those of the command line.
    Same,
    /// Others than the guest that the command line is of.
    Separate,
}

/// State of guests once they are in their QEMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstState {
    /// They run.
    Running,
    /// They wait for `cont`.
    Paused,
}

/// Disks that guests write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disks {
    /// The disks of the command line.
    Own,
    /// Overlays of them, in this directory; `None`: that of the image, or the working directory for an image
    /// in a store.
    Overlays(Option<PathBuf>),
}

/// Trust in the command line of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandLineTrust {
    /// The command line may come from anyone: only options that are known to be harmless are used.
    Untrusted,
    /// The command line is used unchanged, with its files and programs.
    Trusted,
}

/// Cancellation and observer of the preparation.
#[derive(Clone, Copy)]
pub struct PrepareContext<'a> {
    /// Ends every wait.
    pub cancel: &'a Cancel,
    /// Observes the copy of an image from a store to a file, and receives notices.
    pub observer: &'a dyn Observer,
    /// Called before a wait for that file.
    pub downloading: &'a dyn Fn(Download),
}

/// A wait for the file of an image in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Download {
    /// The image is copied to the file.
    Copies {
        /// The image.
        image: Location,
        /// The file.
        path: PathBuf,
        /// Bytes that will be written.
        bytes: u64,
    },
    /// Another process makes the file.
    Awaits {
        /// The file.
        path: PathBuf,
    },
}

/// Reason for which guests are not started; the image is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    #[error("{0}")]
    Index(#[from] towline_image::index::Error),
    #[error("{0}")]
    Qemu(#[from] crate::qemu::Error),
    #[error("{0}")]
    InPlace(#[from] crate::in_place::Error),
    #[error(
        "the guest of QEMU on {socket} does not run on an image: save it (`towline copy qmp:{socket} IMAGE`) and run that"
    )]
    NoBase { socket: String },
    #[error(
        "disk {setting} ({file}) is a backing file of the disk that the guest of image {image} continued with; writing to it would destroy \
         that disk: give the guest its own overlay, or another disk"
    )]
    BackingFile { image: String, setting: String, file: String },
    #[error(
        "disk {setting} ({file}) was changed or removed since image {image} was stored: the guest's memory is of another instant, and would \
         destroy its file system; give it an unchanged copy under another name"
    )]
    OtherInstant { image: String, setting: String, file: String },
    #[error(
        "the guest runs on{}, and the image of its forks {} was not made: {source}; fork it again", in_overlays(overlays), path.display()
    )]
    NotStored { path: PathBuf, overlays: Vec<PathBuf>, source: Box<crate::plan::Error> },
    #[error("{0}")]
    SharedNetwork(#[from] towline_launch::SharedNetwork),
    #[error("{0}")]
    CommandLineRecord(#[from] crate::plan::CommandLineRecordError),
    #[error("{image}: this towline was built without object stores (feature `store`); use one that has them")]
    NoStores { image: Location },
    #[error("image {} is being replaced by another towline; try again", image.display())]
    BeingReplaced { image: PathBuf },
    #[error("lock of the image: {0}")]
    Lock(io::Error),
    #[error("no directory for images of object stores: HOME is not set")]
    NoCacheDirectory,
    #[error("directory {} of images from object stores: {reason}", directory.display())]
    Cache { directory: PathBuf, reason: String },
    #[error("directory {} has {free} bytes free, expected {needed} for {image}", directory.display())]
    NoRoom { directory: PathBuf, free: u64, needed: u64, image: Location },
    #[error("{image} was replaced while it was read; try again")]
    Replaced { image: Location },
    #[error("cancelled while another towline copies the image from the store")]
    CacheWaitCancelled,
    #[error("{0}")]
    Download(#[source] Failure),
    /// The QEMU's version is not known.
    #[error("{0}")]
    Version(#[from] LaunchError),
    #[error("image {image} has no command line")]
    NoCommandLine { image: String },
    /// The image's command line cannot be read.
    #[error("{0}")]
    CommandLine(#[from] ParseError),
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("{0}")]
    Name(#[from] NameError),
    #[error("{0}")]
    Variable(#[from] HostError),
    #[error("{0}")]
    Overlay(#[from] OverlayError),
    #[error("{0}")]
    InUse(#[from] InUse),
    #[error("memory cannot be mapped from {}: {reason}", image.display())]
    NotMapped {
        image: PathBuf,
        #[source]
        reason: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
    #[error("guest {guest}: {source}")]
    NotStarted { guest: GuestName, source: LaunchError },
    #[error("waiting for the end of guests: {0}")]
    Wait(io::Error),
}

fn in_overlays(overlays: &[PathBuf]) -> String {
    let names: Vec<_> = overlays.iter().map(|path| path.display().to_string()).collect();
    if names.is_empty() { String::new() } else { format!(" in overlays {}", names.join(", ")) }
}

#[cfg(feature = "store")]
impl From<towline_image::store::Error> for Error {
    fn from(error: towline_image::store::Error) -> Self {
        Self::Image(towline_image::Error::Store(Box::new(error)))
    }
}
