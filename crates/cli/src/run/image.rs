//! The image that guests run from: a file of this host, or an image in an object store.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_control::plan::Source;
use towline_image::{Image, Origin, StoredGuest as _};

use super::rejection::Rejection;
use crate::args::RunArgs;
use crate::endpoint::Endpoint;
use crate::progress::Reporter;

/// An image, open.
pub(crate) struct RunImage {
    /// Its guests' name, unless another one is given.
    pub(crate) stem: String,
    place: OpenedFrom,
    kind: OpenImage,
}

/// Origin of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenedFrom {
    /// A file that the user named.
    File,
    /// An object store, perhaps by a file that was made of it.
    #[cfg(feature = "store")]
    Store,
}

enum OpenImage {
    File {
        image: Box<Image>,
        /// The file, locked as its readers do, so that no towline replaces it.
        lock: File,
    },
    /// Not in a file of this host: its guests get their memory from the store.
    #[cfg(feature = "store")]
    Store { image: Box<towline_image::store::StoredImage>, location: towline_image::Location },
}

impl RunImage {
    /// Opens the image of a command line. One in a store is copied to a file of this host first, unless there is such a file or its
    /// guests are to run at once.
    pub(crate) fn open(args: &RunArgs, cancel: &Cancel, reporter: &Reporter) -> Result<Self, Rejection> {
        match &args.image {
            Endpoint::Image(path) => {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                Self::of_file(path, stem, OpenedFrom::File)
            }
            #[cfg(feature = "store")]
            Endpoint::Store(location) => Self::of_store(location, args, cancel, reporter),
            Endpoint::Secret(why) => Err(Rejection::usage(why.clone())),
            other => {
                let _ = (cancel, reporter);
                Err(Rejection::usage(format!(
                    "{other} is not an image; copy the guest to one first: towline copy {other} IMAGE"
                )))
            }
        }
    }

    fn of_file(path: &Path, stem: String, place: OpenedFrom) -> Result<Self, Rejection> {
        let image = Image::open(path).map_err(|error| Rejection::refused(&error))?;
        let lock = image.reopen().map_err(|error| Rejection::refused(&error))?;
        match flock(&lock, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(Rejection::refused(&format!(
                "image {} is being replaced by another towline; try again",
                path.display()
            ))),
            // A filesystem without locks has none that would be violated.
            _ => Ok(Self { stem, place, kind: OpenImage::File { image: Box::new(image), lock } }),
        }
    }

    #[cfg(feature = "store")]
    fn of_store(
        location: &towline_image::Location,
        args: &RunArgs,
        cancel: &Cancel,
        reporter: &Reporter,
    ) -> Result<Self, Rejection> {
        use super::materialised::{FileState, Materialised};
        use towline_image::store::StoredImage;

        let text = location.to_string();
        let stem = text.rsplit(['/', ':']).next().unwrap_or_default().to_owned();
        let image = StoredImage::open(location, Some(cancel.clone()));
        let image = image.map_err(|error| Rejection::refused(&error))?;
        let materialised = Materialised::of(&image, location, args.cache_dir.as_deref())?;
        match materialised.find()? {
            FileState::Complete(path) => Self::of_file(&path, stem, OpenedFrom::Store),
            FileState::Missing if args.postcopy => {
                let kind = OpenImage::Store { image: Box::new(image), location: location.clone() };
                Ok(Self { stem, place: OpenedFrom::Store, kind })
            }
            FileState::Missing => {
                let path = materialised.make(&image, cancel, reporter)?;
                Self::of_file(&path, stem, OpenedFrom::Store)
            }
        }
    }

    /// Where its guest came from, if that was recorded.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        match &self.kind {
            OpenImage::File { image, .. } => image.origin(),
            #[cfg(feature = "store")]
            OpenImage::Store { image, .. } => image.origin(),
        }
    }

    /// The image that guests can map.
    pub(crate) fn file(&self) -> Option<&Image> {
        match &self.kind {
            OpenImage::File { image, .. } => Some(image),
            #[cfg(feature = "store")]
            OpenImage::Store { .. } => None,
        }
    }

    /// A descriptor whose lock keeps the image from being replaced, for a QEMU.
    pub(crate) fn lock(&self) -> std::io::Result<Option<File>> {
        match &self.kind {
            OpenImage::File { lock, .. } => lock.try_clone().map(Some),
            #[cfg(feature = "store")]
            OpenImage::Store { .. } => Ok(None),
        }
    }

    /// The image as the source of a copy.
    pub(crate) fn source(&self) -> Source {
        match &self.kind {
            OpenImage::File { image, .. } => Source::Image(image.path().to_owned()),
            #[cfg(feature = "store")]
            OpenImage::Store { location, .. } => Source::Store(location.clone()),
        }
    }

    /// Its absolute path or its location, for the list of guests.
    pub(crate) fn name(&self) -> PathBuf {
        match &self.kind {
            OpenImage::File { image, .. } => {
                image.path().canonicalize().unwrap_or_else(|_| image.path().to_owned())
            }
            #[cfg(feature = "store")]
            OpenImage::Store { location, .. } => location.to_string().into(),
        }
    }

    /// Directory of overlays, unless another one is given.
    pub(crate) fn directory(&self) -> PathBuf {
        let of_file = match self.place {
            OpenedFrom::File => {
                self.file().and_then(|image| Some(image.path().canonicalize().ok()?.parent()?.to_owned()))
            }
            #[cfg(feature = "store")]
            OpenedFrom::Store => None,
        };
        of_file.unwrap_or_else(|| std::env::current_dir().unwrap_or_else(|_| "/".into()))
    }
}
