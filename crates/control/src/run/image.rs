//! The image that guests run from: a file of this host, or an image in an object store.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
#[cfg(feature = "store")]
use std::thread::{Builder, JoinHandle};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use towline_channel::Cancel;
use towline_image::manifest::sidecar_path;
#[cfg(feature = "store")]
use towline_image::store::{self, StoredImage, UnopenedImage};
use towline_image::{Image, Origin, StoredGuest as _};
use towline_launch::{GuestName, HostArguments, LaunchError, Overlay, QemuVersion};
use towline_protocol::BlockIndex;
use towline_protocol::ram::PAGE_SIZE;

#[cfg(feature = "store")]
use super::cache::CacheFile;
#[cfg(feature = "store")]
use super::options::MemoryRequest;
use super::options::{Disks, Error, ImageLocation, PrepareContext, RunOptions};
use super::parent::{Parent, Parted};
use crate::in_place::{Reflink, continues_in};
use crate::lock::lock;
use crate::plan::{self, Clones, CopyResult, Failure};

/// Number of forks from which on they may map an image that is made for them.
const MANY: u32 = 8;

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
    /// Of a guest that ran, which was stored because it has many forks.
    Stored {
        file: Box<ImageFile>,
        made: MadeImage,
        parted: Parted,
    },
    /// Not in a file of this host: its guests get their memory from the store.
    #[cfg(feature = "store")]
    Store {
        image: OpeningImage,
        location: towline_image::Location,
    },
}

/// An image that was made for forks. It is removed when this value is dropped, unless one of them may have run.
#[derive(Debug)]
struct MadeImage {
    path: PathBuf,
    is_kept: AtomicBool,
}

impl Drop for MadeImage {
    fn drop(&mut self) {
        if self.is_kept.load(Ordering::Relaxed) {
            return;
        }
        for path in [&self.path, &sidecar_path(&self.path)] {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "the image of forks that did not run is left");
            }
        }
    }
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
    fn start(image: UnopenedImage) -> towline_channel::Result<Self> {
        let thread = Builder::new().spawn(|| image.open()).map_err(towline_channel::Error::NoThread)?;
        Ok(Self(Mutex::new(Some(thread))))
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
pub struct ImageChange {
    /// The file.
    pub path: PathBuf,
    /// The difference.
    pub difference: String,
}

impl ImageFile {
    fn open(image: Image) -> Result<Box<Self>, Error> {
        // Guests map that file.
        let whole = image.whole();
        let lock = whole.reopen()?;
        if flock(&lock, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK) {
            return Err(Error::BeingReplaced { image: whole.path().to_owned() });
        }
        // A filesystem without locks has none that would be violated.
        Ok(Box::new(Self { opened: lock.metadata().ok(), image: Arc::new(image), lock }))
    }

    fn name(&self) -> PathBuf {
        self.image.path().canonicalize().unwrap_or_else(|_| self.image.path().to_owned())
    }
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
        let file = ImageFile::open(image)?;
        let (name, origin) = (file.name(), file.image.origin().cloned());
        Ok(Self { stem, name, directory, origin, kind: OpenImage::File(file) })
    }

    /// The image that the guest of a QEMU maps.
    fn of_guest(socket: &Path, context: PrepareContext<'_>) -> Result<Self, Error> {
        let mut parent = Parent::connect(socket, context.cancel)?;
        let path = parent.image()?;
        let origin = Some(parent.origin()?);
        let stem = format!("{}-fork", path.file_stem().unwrap_or_default().to_string_lossy());
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        let file = ImageFile::open(Image::open(&path)?)?;
        let (name, parent) = (file.name(), Box::new(Mutex::new(parent)));
        Ok(Self { stem, name, directory, origin, kind: OpenImage::Guest { file, parent } })
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
        let working_directory = parent.qemu.working_directory().or_else(|| given.working_directory.clone());
        let is_given = !given.binary.as_os_str().is_empty();
        let binary = if is_given { given.binary.clone() } else { parent.qemu.program() };
        HostArguments { binary, working_directory, ..given.clone() }
    }

    /// Version of the QEMU of forks.
    pub(super) fn version(&self, host: &HostArguments) -> Option<Result<QemuVersion, LaunchError>> {
        let parent = self.parent()?;
        let is_own = parent.qemu.program() == host.binary;
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
            OpenImage::Guest { file, parent } => lock(parent).prepare(&file.image).map(drop),
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
        let cache = CacheFile::of(&image.index, location, options.cache_directory.as_deref())?;
        // A file that is there already needs nothing else of the store.
        if let Some(file) = cache.find(&image.index, context.observer)? {
            return Self::of_file(file, stem, directory);
        }
        if options.memory == MemoryRequest::Postcopy {
            let origin = Some(image.index.origin.clone());
            let image = OpeningImage::start(image)?;
            let kind = OpenImage::Store { image, location: location.clone() };
            return Ok(Self { stem, name: text.into(), directory, origin, kind });
        }
        // Of the same index, or this is an error.
        let image = image.open()?;
        Self::of_file(cache.make(&image, context)?, stem, directory)
    }

    fn locked(&self) -> Option<&ImageFile> {
        match &self.kind {
            OpenImage::File(file) | OpenImage::Guest { file, .. } | OpenImage::Stored { file, .. } => {
                Some(file)
            }
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

    /// Keeps an image that was made for these guests.
    pub(super) fn keep(&self) {
        if let OpenImage::Stored { made, .. } = &self.kind {
            made.is_kept.store(true, Ordering::Relaxed);
        }
    }

    /// A descriptor whose lock keeps the image from being replaced, for a QEMU.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        self.locked().map(|file| file.lock.try_clone()).transpose()
    }

    /// Stores the guest that is forked if its forks are at least [`MANY`] and get it with fewer bytes from there: they map one file, which
    /// has what the guest has written. Returns true if it was stored.
    pub(super) fn store_for_many(&mut self, options: &RunOptions, cancel: &Cancel) -> Result<bool, Error> {
        let OpenImage::Guest { file, parent } = &self.kind else { return Ok(false) };
        let path = self.path_for_many(options);
        if options.count < MANY || path.exists() {
            return Ok(false);
        }
        let mut parent = lock(parent);
        let prepared = parent.prepare(&file.image)?;
        let (data, written) = (data_bytes(&file.image), prepared.written_bytes());
        let chunks = prepared.written_chunk_bytes();
        // With reflinks the image's own data is not copied.
        let device = |path: Option<&Path>| path?.metadata().ok().map(|found| found.dev());
        let is_beside = device(Some(file.image.path())) == device(path.parent());
        let has_reflinks = is_beside && Reflink::create(&file.image).is_ok();
        let stored = if has_reflinks { chunks } else { data + chunks };
        if stored >= written * u64::from(options.count) || !has_room(&path, stored) {
            return Ok(false);
        }
        let taken = parent.take(self.origin.clone().unwrap_or_default())?;
        let parted = parent.parted(&taken);
        drop(parent);
        plan::store_captured(&taken, &path, cancel).map_err(|failure| {
            let overlays = parted.overlays.clone();
            Error::NotStored { path: path.clone(), overlays, source: failure.error }
        })?;
        let made = MadeImage { path: path.clone(), is_kept: AtomicBool::new(false) };
        let file = ImageFile::open(Image::open(&path)?)?;
        (self.name, self.kind) = (path, OpenImage::Stored { file, made, parted });
        Ok(true)
    }

    /// The image of many forks: `NAME.img` beside their overlays.
    fn path_for_many(&self, options: &RunOptions) -> PathBuf {
        let directory = match &options.disks {
            Disks::Overlays(Some(directory)) => directory,
            _ => &self.directory,
        };
        let name = options.name.as_ref().map_or(self.stem.as_str(), GuestName::as_str);
        let path = directory.join(format!("{name}.img"));
        std::path::absolute(&path).unwrap_or(path)
    }

    /// Takes the guest, and brings it into the QEMUs.
    fn fork(&self, parent: &mut Parent, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
        let read = parent.read_again();
        let taken = read.and_then(|()| parent.take(self.origin.clone().unwrap_or_default()));
        if taken.is_err() {
            parent.disks.used_overlays().for_each(|overlay| clones.observer.notice(&continues_in(overlay)));
        }
        let taken = taken.map_err(Failure::untouched)?;
        Ok(parent.parted(&taken).report(plan::copy_captured_to_all(&taken, clones)?, clones))
    }

    /// Copies it to all destinations, once: what was opened, though its name may be another one's by now.
    pub(super) fn copy_to_all(&self, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
        match &self.kind {
            OpenImage::File(file) => plan::copy_image_to_all(&file.image, clones),
            OpenImage::Guest { parent, .. } => self.fork(&mut lock(parent), clones),
            OpenImage::Stored { file, parted, .. } => {
                clones.observer.notice(&format!("the forks map {}", self.name.display()));
                Ok(parted.report(plan::copy_image_to_all(&file.image, clones)?, clones))
            }
            #[cfg(feature = "store")]
            OpenImage::Store { image, location, .. } => {
                plan::copy_stored_image_to_all(location, || image.wait(), clones)
            }
        }
    }
}

impl Parted {
    /// Reports to the user where the guest continues, and adds its standstill to the results of its forks.
    fn report(&self, mut copied: Vec<CopyResult>, clones: &Clones<'_>) -> Vec<CopyResult> {
        self.overlays.iter().for_each(|overlay| clones.observer.notice(&continues_in(overlay)));
        for report in copied.iter_mut().flatten() {
            report.downtime_ms = u64::try_from(self.standstill.as_millis()).ok();
        }
        copied
    }
}

/// Bytes of an image's pages that are not zero.
fn data_bytes(image: &Image) -> u64 {
    let blocks = (0..).map(BlockIndex).take(image.ram_blocks().len());
    blocks.map(|block| image.count_pages(block).plain * PAGE_SIZE).sum()
}

/// Returns true if the filesystem of this file has twice this room.
fn has_room(path: &Path, bytes: u64) -> bool {
    let free = rustix::fs::statvfs(path.parent().unwrap_or(path)).map(|free| free.f_bavail * free.f_frsize);
    free.is_ok_and(|free| free / 2 > bytes)
}

fn working_directory(options: &RunOptions) -> PathBuf {
    options.host.working_directory.clone().unwrap_or_else(|| "/".into())
}
