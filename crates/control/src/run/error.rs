//! Reasons for which guests are not started, or not supervised any more.

use std::io;
use std::path::PathBuf;

use towline_image::Location;
use towline_launch::{
    GuestName, HostError, InUse, LaunchError, NameError, OverlayError, ParseError, Refused, RuntimeError,
};

use crate::plan::Failure;

/// Reason for which guests are not started; the image is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum Error {
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    #[error("{0}")]
    Index(#[from] towline_image::index::Error),
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

#[cfg(feature = "store")]
impl From<towline_image::store::Error> for Error {
    fn from(error: towline_image::store::Error) -> Self {
        Self::Image(towline_image::Error::Store(Box::new(error)))
    }
}
