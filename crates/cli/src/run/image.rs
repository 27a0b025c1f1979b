//! The image that guests run from: a file of this host, or an image in an object store.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
#[cfg(feature = "store")]
use std::thread::{self, JoinHandle};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_control::plan::{self, Clones, CopyResult, Failure};
#[cfg(feature = "store")]
use towline_image::store::{self, StoredImage, UnopenedImage};
use towline_image::{Image, Origin, StoredGuest as _};

#[cfg(feature = "store")]
use super::materialised::Materialised;
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
        /// State of the file when it was opened.
        state: Option<FileVersion>,
    },
    /// Not in a file of this host: its guests get their memory from the store.
    #[cfg(feature = "store")]
    Store {
        /// `None` once it was copied.
        image: Option<OpeningImage>,
        origin: Box<Origin>,
        location: towline_image::Location,
    },
}

/// An image in a store that is opened by a thread, while its guests' QEMUs start.
#[cfg(feature = "store")]
struct OpeningImage(Option<JoinHandle<store::Result<StoredImage>>>);

#[cfg(feature = "store")]
impl OpeningImage {
    fn start(image: UnopenedImage) -> Self {
        Self(Some(thread::spawn(|| image.open())))
    }

    fn wait(mut self) -> store::Result<StoredImage> {
        let thread = self.0.take().expect("only this and drop take it");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(feature = "store")]
impl Drop for OpeningImage {
    /// Waits for the thread, so that its lease is removed: it would keep the image's chunks for an hour.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic has printed its own message.
            let _ = thread.join();
        }
    }
}

/// Length and time of the last write of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    length: u64,
    modified: [i64; 2],
}

impl FileVersion {
    fn of(file: &File) -> Option<Self> {
        let found = file.metadata().ok()?;
        Some(Self { length: found.len(), modified: [found.mtime(), found.mtime_nsec()] })
    }
}

impl RunImage {
    /// Opens the image of a command line. One in a store is copied to a file of this host first, unless there is such a file or its
    /// guests are to run at once.
    pub(crate) fn open_or_download(
        args: &RunArgs,
        cancel: &Cancel,
        reporter: &Reporter,
    ) -> Result<Self, Rejection> {
        match &args.image {
            Endpoint::Image(path) => {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let image = Image::open(path).map_err(|error| Rejection::of_image(&error))?;
                Self::of_file(image, stem, OpenedFrom::File)
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

    fn of_file(image: Image, stem: String, place: OpenedFrom) -> Result<Self, Rejection> {
        let lock = image.reopen().map_err(|error| Rejection::of_image(&error))?;
        match flock(&lock, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(Rejection::refused(&format!(
                "image {} is being replaced by another towline; try again",
                image.path().display()
            ))),
            // A filesystem without locks has none that would be violated.
            _ => {
                let state = FileVersion::of(&lock);
                Ok(Self { stem, place, kind: OpenImage::File { image: Box::new(image), lock, state } })
            }
        }
    }

    #[cfg(feature = "store")]
    fn of_store(
        location: &towline_image::Location,
        args: &RunArgs,
        cancel: &Cancel,
        reporter: &Reporter,
    ) -> Result<Self, Rejection> {
        let text = location.to_string();
        let stem = text.rsplit(['/', ':']).next().unwrap_or_default().to_owned();
        let image = UnopenedImage::read(location, Some(cancel.clone()));
        let image = image.map_err(|error| Rejection::of_image(&error))?;
        let materialised = Materialised::of(image.index(), location, args.cache_dir.as_deref())?;
        // A file that is there already needs nothing else of the store.
        if let Some(file) = materialised.find(reporter)? {
            return Self::of_file(file, stem, OpenedFrom::Store);
        }
        if args.postcopy {
            let origin = Box::new(image.index().origin().clone());
            let image = Some(OpeningImage::start(image));
            let kind = OpenImage::Store { image, origin, location: location.clone() };
            return Ok(Self { stem, place: OpenedFrom::Store, kind });
        }
        let image = image.open().map_err(|error| Rejection::of_image(&error))?;
        let materialised = Materialised::of(image.index(), location, args.cache_dir.as_deref())?;
        Self::of_file(materialised.make(&image, cancel, reporter)?, stem, OpenedFrom::Store)
    }

    /// Where its guest came from, if that was recorded.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        match &self.kind {
            OpenImage::File { image, .. } => image.origin(),
            #[cfg(feature = "store")]
            OpenImage::Store { origin, .. } => Some(origin),
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

    /// The difference of the file from what it was when it was opened: guests that map it have that difference too.
    pub(crate) fn change(&self) -> Option<String> {
        let (image, lock, opened) = match &self.kind {
            OpenImage::File { image, lock, state } => (image, lock, (*state)?),
            #[cfg(feature = "store")]
            OpenImage::Store { .. } => return None,
        };
        let now = FileVersion::of(lock)?;
        let what = match now {
            now if now == opened => return None,
            now if now.length == opened.length => "it was written".to_owned(),
            now => format!("it has {} bytes, expected {}", now.length, opened.length),
        };
        let path = image.path().display();
        Some(format!(
            "image {path} was changed while its memory was in use: {what}; `towline inspect --verify {path}` names what differs"
        ))
    }

    /// A descriptor whose lock keeps the image from being replaced, for a QEMU.
    pub(crate) fn lock(&self) -> std::io::Result<Option<File>> {
        match &self.kind {
            OpenImage::File { lock, .. } => lock.try_clone().map(Some),
            #[cfg(feature = "store")]
            OpenImage::Store { .. } => Ok(None),
        }
    }

    /// Copies it to all destinations, once: what was opened, though its name may be another one's by now.
    pub(crate) fn copy_to_all(&mut self, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
        match &mut self.kind {
            OpenImage::File { image, .. } => plan::copy_image_to_all(image, clones),
            #[cfg(feature = "store")]
            OpenImage::Store { image, location, .. } => {
                let open = || image.take().expect("it is copied once").wait();
                plan::copy_stored_image_to_all(location, open, clones)
            }
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
