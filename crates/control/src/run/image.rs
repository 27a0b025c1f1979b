//! The image that guests run from: a file of this host, or an image in an object store.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
#[cfg(feature = "store")]
use std::thread::{self, JoinHandle};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
#[cfg(feature = "store")]
use towline_image::store::{self, StoredImage, UnopenedImage};
use towline_image::{Image, Origin, StoredGuest as _};
use towline_launch::{HostArguments, LaunchError, Overlay, QemuVersion};

#[cfg(feature = "store")]
use super::cache::CacheFile;
#[cfg(feature = "store")]
use super::options::MemoryRequest;
use super::options::{Error, ImageLocation, PrepareContext, RunOptions};
use super::parent::Parent;
use crate::in_place::Capture;
use crate::lock::lock;
use crate::plan::{self, Clones, CopyResult, Failure};

/// An image, open.
#[derive(Debug)]
pub(super) struct RunImage {
    /// Name of its guests, unless another one is given.
    pub(super) stem: String,
    /// Absolute path or location, for the list of guests.
    pub(super) name: PathBuf,
    /// Directory of overlays, unless another one is given.
    pub(super) directory: PathBuf,
    /// Where its guest came from, if that was recorded.
    pub(super) origin: Option<Origin>,
    kind: OpenImage,
}

#[derive(Debug)]
enum OpenImage {
    File(Box<ImageFile>),
    /// Mapped by a guest that runs.
    Guest {
        file: Box<ImageFile>,
        parent: Box<Mutex<Parent>>,
    },
    /// Not in a file of this host: its guests get their memory from the store.
    #[cfg(feature = "store")]
    Store {
        image: OpeningImage,
        location: towline_image::Location,
    },
}

#[derive(Debug)]
struct ImageFile {
    image: Arc<Image>,
    /// The file, locked as its readers do, so no towline replaces it.
    lock: File,
    /// State of the file when it was opened.
    opened: Option<Metadata>,
}

/// An image in a store that is opened by a thread, while its guests' QEMUs start; `None` once it was waited
/// for.
#[cfg(feature = "store")]
#[derive(Debug)]
struct OpeningImage(Mutex<Option<JoinHandle<store::Result<StoredImage>>>>);

#[cfg(feature = "store")]
impl OpeningImage {
    fn start(image: UnopenedImage) -> Self {
        Self(Mutex::new(Some(thread::spawn(|| image.open()))))
    }

    fn wait(&self) -> store::Result<StoredImage> {
        let thread = lock(&self.0).take().expect("an image is copied once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(feature = "store")]
impl Drop for OpeningImage {
    /// Waits for the thread, so its lease is removed: it would keep the image's chunks for an hour.
    fn drop(&mut self) {
        if let Some(thread) = lock(&self.0).take() {
            // A panic has printed its own message.
            let _ = thread.join();
        }
    }
}

/// An image file that was changed while guests mapped it: they have the change in their memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageChange {
    /// The file.
    pub path: PathBuf,
    /// The difference.
    pub difference: String,
}

impl RunImage {
    /// Opens the image. One in a store is copied to a file of this host first, unless there is such a file or
    /// its guests are to run at once.
    pub(super) fn open(options: &RunOptions, context: PrepareContext<'_>) -> Result<Self, Error> {
        match &options.image {
            ImageLocation::Guest(socket) => Self::of_guest(socket, context),
            ImageLocation::File(path) => {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let image = Self::of_file(Image::open(path)?, stem, working_directory(options))?;
                let directory = image.name.parent().filter(|parent| parent.is_absolute()).map(Path::to_owned);
                Ok(Self { directory: directory.unwrap_or(image.directory), ..image })
            }
            #[cfg(feature = "store")]
            ImageLocation::Store(location) => Self::of_store(location, options, context),
            #[cfg(not(feature = "store"))]
            ImageLocation::Store(location) => {
                // Without object stores there is no wait to cancel or to observe.
                let _ = context;
                Err(Error::NoStores { image: location.clone() })
            }
        }
    }

    fn of_file(image: Image, stem: String, directory: PathBuf) -> Result<Self, Error> {
        // Guests map that file.
        let whole = image.whole();
        let lock = whole.reopen()?;
        match flock(&lock, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => Err(Error::BeingReplaced { image: whole.path().to_owned() }),
            // A filesystem without locks has none that would be violated.
            _ => {
                let name = image.path().canonicalize().unwrap_or_else(|_| image.path().to_owned());
                let (origin, opened) = (image.origin().cloned(), lock.metadata().ok());
                let file = ImageFile { image: Arc::new(image), lock, opened };
                Ok(Self { stem, name, directory, origin, kind: OpenImage::File(Box::new(file)) })
            }
        }
    }

    /// The image that the guest of a QEMU maps.
    fn of_guest(socket: &Path, context: PrepareContext<'_>) -> Result<Self, Error> {
        let mut parent = Parent::connect(socket, context.cancel)?;
        let path = parent.image()?;
        let origin = Some(parent.origin()?);
        let stem = format!("{}-fork", path.file_stem().unwrap_or_default().to_string_lossy());
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        let image = Self::of_file(Image::open(&path)?, stem, directory)?;
        let OpenImage::File(file) = image.kind else { unreachable!("of a file") };
        let kind = OpenImage::Guest { file, parent: Box::new(Mutex::new(parent)) };
        Ok(Self { origin, kind, ..image })
    }

    /// The guest that is forked.
    fn parent(&self) -> Option<MutexGuard<'_, Parent>> {
        match &self.kind {
            OpenImage::Guest { parent, .. } => Some(lock(parent)),
            _ => None,
        }
    }

    /// The host's arguments for the guests. Forks are in the directory of their guest, and in its QEMU unless another one is given.
    pub(super) fn host(&self, given: &HostArguments) -> HostArguments {
        let Some(parent) = self.parent() else { return given.clone() };
        let working_directory = parent.working_directory().or_else(|| given.working_directory.clone());
        let is_given = !given.binary.as_os_str().is_empty();
        let binary = if is_given { given.binary.clone() } else { parent.program() };
        HostArguments { binary, working_directory, ..given.clone() }
    }

    /// Version of the QEMU of forks.
    pub(super) fn version(&self, host: &HostArguments) -> Option<Result<QemuVersion, LaunchError>> {
        let parent = self.parent()?;
        let is_own = parent.program() == host.binary;
        Some(if is_own { Ok(parent.version()) } else { QemuVersion::of_binary(host) })
    }

    /// Plans what the disks of the guest that is forked become, since its forks have overlays of them.
    pub(super) fn plan_snapshots(&self, overlays: &[Overlay]) -> Result<(), Error> {
        self.parent().map_or(Ok(()), |mut parent| parent.plan_snapshots(overlays))
    }

    /// Makes the overlays in which the guest that is forked goes on.
    pub(super) fn make_overlays(&self, host: &HostArguments) -> Result<(), Error> {
        self.parent().map_or(Ok(()), |mut parent| parent.make_overlays(host))
    }

    /// Prepares the guest that is forked, while the QEMUs of its forks start.
    pub(super) fn prepare(&self) -> Result<(), Error> {
        match &self.kind {
            OpenImage::Guest { file, parent } => lock(parent).prepare(&file.image),
            _ => Ok(()),
        }
    }

    #[cfg(feature = "store")]
    fn of_store(
        location: &towline_image::Location,
        options: &RunOptions,
        context: PrepareContext<'_>,
    ) -> Result<Self, Error> {
        let text = location.to_string();
        let stem = text.rsplit(['/', ':']).next().unwrap_or_default().to_owned();
        let directory = working_directory(options);
        let image = UnopenedImage::read(location, Some(context.cancel.clone()))?;
        let cache = CacheFile::of(image.index(), location, options.cache_directory.as_deref())?;
        // A file that is there already needs nothing else of the store.
        if let Some(file) = cache.find(image.index(), context.observer)? {
            return Self::of_file(file, stem, directory);
        }
        if options.memory == MemoryRequest::Postcopy {
            let origin = Some(image.index().origin().clone());
            let image = OpeningImage::start(image);
            let kind = OpenImage::Store { image, location: location.clone() };
            return Ok(Self { stem, name: text.into(), directory, origin, kind });
        }
        // Of the same index, or this is an error.
        let image = image.open()?;
        Self::of_file(cache.make(&image, context)?, stem, directory)
    }

    fn locked(&self) -> Option<&ImageFile> {
        match &self.kind {
            OpenImage::File(file) | OpenImage::Guest { file, .. } => Some(file),
            #[cfg(feature = "store")]
            OpenImage::Store { .. } => None,
        }
    }

    /// The image that guests can map.
    pub(super) fn file(&self) -> Option<&Image> {
        Some(&self.locked()?.image)
    }

    /// The difference of the file from what it was when it was opened: guests that map it have that
    /// difference too.
    pub(super) fn change(&self) -> Option<ImageChange> {
        let ImageFile { image, lock, opened } = self.locked()?;
        let (now, opened) = (lock.metadata().ok()?, opened.as_ref()?);
        let difference = if now.len() != opened.len() {
            format!("it has {} bytes, expected {}", now.len(), opened.len())
        } else if now.modified().ok() != opened.modified().ok() {
            "it was written".to_owned()
        } else {
            return None;
        };
        Some(ImageChange { path: image.whole().path().to_owned(), difference })
    }

    /// A descriptor whose lock keeps the image from being replaced, for a QEMU.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        self.locked().map(|file| file.lock.try_clone()).transpose()
    }

    /// Takes the guest, and brings it into the QEMUs.
    fn fork(&self, parent: &mut Parent, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
        let origin = self.origin.clone().unwrap_or_default();
        let Capture { guest, standstill } = parent.take().map_err(Failure::untouched)?;
        let guest = guest.with_origin(origin);
        tracing::info!(
            socket = parent.socket(),
            written = guest.written_bytes(),
            standstill_us = standstill.as_micros(),
            "guest taken"
        );
        for overlay in parent.overlays() {
            clones.observer.notice(&format!("the guest continues in overlay {}", overlay.display()));
        }
        let mut copied = plan::copy_captured_to_all(&guest, clones)?;
        for report in copied.iter_mut().flatten() {
            report.downtime_ms = u64::try_from(standstill.as_millis()).ok();
        }
        Ok(copied)
    }

    /// Copies it to all destinations, once: what was opened, though its name may be another one's by now.
    pub(super) fn copy_to_all(&self, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
        match &self.kind {
            OpenImage::File(file) => plan::copy_image_to_all(&file.image, clones),
            OpenImage::Guest { parent, .. } => self.fork(&mut lock(parent), clones),
            #[cfg(feature = "store")]
            OpenImage::Store { image, location, .. } => {
                plan::copy_stored_image_to_all(location, || image.wait(), clones)
            }
        }
    }
}

fn working_directory(options: &RunOptions) -> PathBuf {
    options.host.working_directory.clone().unwrap_or_else(|| "/".into())
}
