//! Files of images from object stores: made once on a host, and mapped by all guests of that image.
//!
//! ```text
//!   s3://BUCKET/vm/a ── index ─► its hash ─► CACHE/HASH.img   complete: mapped, nothing else is fetched
//!                                            CACHE/HASH.lock  of the towline that makes it; the others wait
//! ```
//! The name is the hash of the index, which names every chunk by its hash, so a replaced image has another
//! file. Each chunk is compared with its hash on its way, and a file is used only if its device state is that
//! of the index. Holes stay holes. The file appears by its rename once it is complete. Directory and file
//! belong to this user alone, since they are the memory of guests: those that others could write are refused.
//!
//! Out of scope: removal. A file may be removed at any time; guests keep what they have mapped.

use std::fmt::Display;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use rustix::process::geteuid;
use towline_channel::Cancel;
use towline_image::index::Index;
use towline_image::manifest::{Digest, StoredBlock, sidecar_path};
use towline_image::store::{StoredImage, UnopenedImage};
use towline_image::{Image, Location};
use towline_migration::Guest as _;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use super::options::{Download, Error, PrepareContext};
use crate::plan::{self, CopyRequest, Destination, Observer, Source};
use crate::waits::{Woken, wait};

/// Interval at which a lock is tried again that another towline has.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// The file of one image.
#[derive(Debug)]
pub(super) struct CacheFile {
    location: Location,
    directory: PathBuf,
    path: PathBuf,
}

impl CacheFile {
    /// The file of the image with this index.
    pub(super) fn of(index: &Index, location: &Location, directory: Option<&Path>) -> Result<Self, Error> {
        let directory = directory.map(Path::to_owned).or_else(default_directory);
        let directory = directory.ok_or(Error::NoCacheDirectory)?;
        let path = directory.join(format!("{}.img", Digest::of(&index.encode()?)));
        Ok(Self { location: location.clone(), directory, path })
    }

    /// Opens the file; `None` if there is none of this image. A file of its name that belongs to another
    /// image, or is no longer one, is reported, and made again.
    ///
    /// # Errors
    /// A directory or a file that others could have written: the guests' memory would be theirs.
    pub(super) fn find(&self, index: &Index, observer: &dyn Observer) -> Result<Option<Image>, Error> {
        if !self.is_own(&self.directory, fs::metadata(&self.directory))? {
            return Ok(None);
        }
        let found = fs::symlink_metadata(&self.path);
        if found.as_ref().is_ok_and(|found| !found.is_file()) {
            return Err(self.failed(format!("{} is not a file", self.path.display())));
        }
        if !self.is_own(&self.path, found)? {
            return Ok(None);
        }
        match open_if_of(&self.path, index) {
            Ok(file) => Ok(Some(file)),
            Err(reason) => {
                let (path, image) = (self.path.display(), &self.location);
                observer.notice(&format!("{path} is not the file of {image}: {reason}; it is not used"));
                Ok(None)
            }
        }
    }

    /// Returns true if it is this user's alone, and false if there is none.
    fn is_own(&self, path: &Path, found: io::Result<fs::Metadata>) -> Result<bool, Error> {
        let found = match found {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            found => found.map_err(|error| self.failed(error))?,
        };
        let (owner, expected, mode) = (found.uid(), geteuid().as_raw(), found.mode() & 0o7777);
        if owner == expected && mode & 0o022 == 0 {
            return Ok(true);
        }
        Err(self.failed(format!(
            "{} has owner {owner} and mode {mode:03o}, expected {expected} and no right of others to write",
            path.display()
        )))
    }

    /// Makes the file of `image`, or waits until another towline has made it.
    pub(super) fn make(&self, image: &StoredImage, context: PrepareContext<'_>) -> Result<Image, Error> {
        // Memory of guests is its owner's alone.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(|error| self.failed(error))?;
        let _lock = self.lock(context)?;
        if let Some(file) = self.find(image.index(), context.observer)? {
            return Ok(file);
        }
        let bytes = self.check_room(image)?;
        let (location, path) = (self.location.clone(), self.path.clone());
        (context.downloading)(Download::Copies { image: location.clone(), path, bytes });
        let (from, to) = (Source::Store(location), Destination::Image(self.unchecked()));
        let request = CopyRequest { overwrite: true, ..CopyRequest::default() };
        plan::copy(&from, &to, &request, context.cancel, context.observer).map_err(Error::Download)?;
        self.publish(image.index())
    }

    /// The file before it is known to be of this image.
    fn unchecked(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    /// Gives the file its name. It was read from the location separately: if the image there was replaced in
    /// between, it may be the other one, and is removed.
    fn publish(&self, index: &Index) -> Result<Image, Error> {
        let (file, manifest) = (self.unchecked(), sidecar_path(&self.unchecked()));
        let now = UnopenedImage::read(&self.location, None);
        if now.as_ref().is_ok_and(|now| now.index == *index) {
            // The image last: its name says that all is there.
            let named = fs::rename(manifest, sidecar_path(&self.path));
            named.and_then(|()| fs::rename(file, &self.path)).map_err(|error| self.failed(error))?;
            return open_if_of(&self.path, index).map_err(|reason| self.failed(reason));
        }
        let removed = fs::remove_file(manifest).and_then(|()| fs::remove_file(file));
        removed.map_err(|error| self.failed(error))?;
        now?;
        Err(Error::Replaced { image: self.location.clone() })
    }

    /// Waits until no other towline makes the file, or until the cancellation.
    fn lock(&self, context: PrepareContext<'_>) -> Result<fs::File, Error> {
        let mut options = fs::File::options();
        let file = options.create(true).truncate(false).write(true).mode(0o600);
        let file = file.open(self.path.with_extension("lock")).map_err(|error| self.failed(error))?;
        let awaits = || (context.downloading)(Download::Awaits { path: self.path.clone() });
        match lock_exclusively(&file, context.cancel, awaits) {
            Ok(()) => Ok(file),
            Err(_) if context.cancel.is_cancelled() => Err(Error::CacheWaitCancelled),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Returns the bytes that will be written.
    fn check_room(&self, image: &StoredImage) -> Result<u64, Error> {
        let blocks = 0..u32::try_from(image.blocks().len()).unwrap_or(u32::MAX);
        let needed: u64 = blocks.map(|block| image.count_pages(BlockIndex(block)).plain * PAGE_SIZE).sum();
        let found = statvfs(&self.directory).map_err(|errno| self.failed(errno))?;
        let free = found.f_bavail * found.f_frsize;
        if free >= needed {
            return Ok(needed);
        }
        let (directory, image) = (self.directory.clone(), self.location.clone());
        Err(Error::NoRoom { directory, free, needed, image })
    }

    fn failed(&self, reason: impl Display) -> Error {
        Error::Cache { directory: self.directory.clone(), reason: reason.to_string() }
    }
}

/// Opens a file if it is of the image with this index: a whole image, which its seal binds to its manifest,
/// with the same blocks of memory and the same device state, whose clocks differ between any two images of a
/// guest. The memory itself is not read: its chunks have other sizes than those of the index, so their hashes
/// cannot be compared.
fn open_if_of(path: &Path, index: &Index) -> Result<Image, String> {
    let file = Image::open(path).map_err(|error| error.to_string())?;
    let manifest = file.manifest().ok_or("it has no manifest")?;
    if manifest.base.is_some() || !file.is_sealed() {
        return Err("it is incremental, or its seal is missing".into());
    }
    let state = &manifest.device_state;
    if (state.length, state.blake3) != index.device_state() {
        return Err("it has another device state".into());
    }
    let blocks = index.blocks();
    let is_same = |(block, stored): (&RamBlock, &StoredBlock)| {
        block.name == stored.name && block.length == stored.length
    };
    if blocks.len() != manifest.blocks.len() || !blocks.iter().zip(&manifest.blocks).all(is_same) {
        return Err("it has other blocks of memory".into());
    }
    Ok(file)
}

/// Locks a file. A lock that another process has is tried again, after a call of `awaits`, until `cancel` is
/// an error.
pub(super) fn lock_exclusively(file: &fs::File, cancel: &Cancel, awaits: impl FnOnce()) -> io::Result<()> {
    let mut awaits = Some(awaits);
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {}
            locked => return Ok(locked?),
        }
        if let Some(awaits) = awaits.take() {
            awaits();
        }
        if wait(cancel, None, LOCK_INTERVAL) == Woken::Cancelled {
            return Err(ErrorKind::Interrupted.into());
        }
    }
}

/// The directory of this user, or of the host for root.
fn default_directory() -> Option<PathBuf> {
    if geteuid().is_root() {
        return Some("/var/cache/towline/images".into());
    }
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("towline/images"))
}
