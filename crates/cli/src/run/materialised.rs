//! Files of images from object stores: made once on a host, and mapped by all guests of that image.
//!
//! ```text
//!   s3://BUCKET/vm/a ── index ─► its hash ─► CACHE/HASH.img   complete: mapped, nothing else is fetched
//!                                            CACHE/HASH.lock  of the towline that makes it; the others wait
//! ```
//! The name is the hash of the index, which names every chunk by its hash, so that a replaced image has another file. Each chunk is
//! compared with its hash on its way, and a file is used only if its device state is that of the index. Holes stay holes. The file appears by its rename once it is complete. Directory and file belong to this
//! user alone, since they are the memory of guests: those that others could write are refused.
//!
//! Out of scope: removal. A file may be removed at any time; guests keep what they have mapped.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use rustix::process::geteuid;
use towline_channel::Cancel;
use towline_control::plan::{self, CopyRequest, Destination, Observer as _, Source};
use towline_image::index::Index;
use towline_image::manifest::{Digest, StoredBlock, sidecar_path};
use towline_image::store::{StoredImage, read_index};
use towline_image::{Image, Location};
use towline_migration::Guest as _;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use super::rejection::Rejection;
use crate::progress::Reporter;
use crate::units::size;

/// The file of one image.
pub(super) struct Materialised<'a> {
    index: &'a Index,
    location: Location,
    directory: PathBuf,
    path: PathBuf,
}

impl<'a> Materialised<'a> {
    pub(super) fn of(
        index: &'a Index,
        location: &Location,
        directory: Option<&Path>,
    ) -> Result<Self, Rejection> {
        let directory = match directory {
            Some(directory) => directory.to_owned(),
            None => default_directory().ok_or_else(|| {
                Rejection::usage(
                    "no directory for images of object stores: HOME is not set; give --cache-dir",
                )
            })?,
        };
        let encoded = index.encode().map_err(|error| Rejection::refused(&error))?;
        let path = directory.join(format!("{}.img", Digest::of(&encoded)));
        Ok(Self { index, location: location.clone(), directory, path })
    }

    /// Opens the file; `None` if there is none of this image. A file of its name that is another image's, or none any more, is reported,
    /// and made again.
    ///
    /// # Errors
    /// A directory or a file that others could have written: the guests' memory would be theirs.
    pub(super) fn find(&self, reporter: &Reporter) -> Result<Option<Image>, Rejection> {
        match fs::metadata(&self.directory) {
            Ok(found) => self.check_own(&self.directory, &found)?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.refused(&error)),
        }
        match fs::symlink_metadata(&self.path) {
            Ok(found) if found.is_file() => self.check_own(&self.path, &found)?,
            Ok(_) => return Err(self.refused(&format!("{} is not a file", self.path.display()))),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.refused(&error)),
        }
        match open_if_of(&self.path, self.index) {
            Ok(file) => Ok(Some(file)),
            Err(reason) => {
                let path = self.path.display();
                reporter.notice(&format!(
                    "{path} is not the file of {}: {reason}; it is not used",
                    self.location
                ));
                Ok(None)
            }
        }
    }

    fn check_own(&self, path: &Path, found: &fs::Metadata) -> Result<(), Rejection> {
        let (owner, expected, mode) = (found.uid(), geteuid().as_raw(), found.mode() & 0o7777);
        if owner == expected && mode & 0o022 == 0 {
            return Ok(());
        }
        Err(self.refused(&format!(
            "{} has owner {owner} and mode {mode:03o}, expected {expected} and no right of others to write",
            path.display()
        )))
    }

    /// Makes the file of `image`, whose index this is, or waits until another towline has made it.
    pub(super) fn make(
        &self,
        image: &StoredImage,
        cancel: &Cancel,
        reporter: &Reporter,
    ) -> Result<Image, Rejection> {
        self.make_directory().map_err(|error| self.refused(&error))?;
        let _lock = self.lock(cancel, reporter)?;
        if let Some(file) = self.find(reporter)? {
            return Ok(file);
        }
        let bytes = self.check_room(image)?;
        reporter.line(&format!(
            "{} is copied to {} first, {} (--postcopy runs the guest meanwhile)",
            self.location,
            self.path.display(),
            size(bytes)
        ));
        let (from, to) = (Source::Store(self.location.clone()), Destination::Image(self.unchecked()));
        if let Err(error) = fs::remove_file(self.unchecked())
            && error.kind() != ErrorKind::NotFound
        {
            return Err(self.refused(&error));
        }
        match plan::copy(&from, &to, &CopyRequest::default(), cancel, reporter) {
            Ok(_) => self.publish(),
            Err(failure) => Err(Rejection::refused(&failure)),
        }
    }

    /// The file before it is known to be of this image.
    fn unchecked(&self) -> PathBuf {
        self.path.with_extension("new")
    }

    /// Gives the file its name. It was read from the location by itself: if the image there was replaced meanwhile, it may be of the other
    /// one, and is removed.
    fn publish(&self) -> Result<Image, Rejection> {
        let now = read_index(&self.location, None).map_err(|error| Rejection::refused(&error));
        if now.as_ref().is_ok_and(|now| now == self.index) {
            // The image last: its name says that all is there.
            fs::rename(sidecar_path(&self.unchecked()), sidecar_path(&self.path))
                .and_then(|()| fs::rename(self.unchecked(), &self.path))
                .map_err(|error| self.refused(&error))?;
            return open_if_of(&self.path, self.index).map_err(|reason| self.refused(&reason));
        }
        fs::remove_file(sidecar_path(&self.unchecked()))
            .and_then(|()| fs::remove_file(self.unchecked()))
            .map_err(|error| self.refused(&error))?;
        now?;
        Err(Rejection::refused(&format!("{} was replaced while it was read; try again", self.location)))
    }

    fn make_directory(&self) -> std::io::Result<()> {
        // Memory of guests is its owner's alone.
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
    }

    /// Waits until no other towline makes the file, or until `cancel`.
    fn lock(&self, cancel: &Cancel, reporter: &Reporter) -> Result<fs::File, Rejection> {
        let mut options = fs::File::options();
        let file = options.create(true).truncate(false).write(true).mode(0o600);
        let file = file.open(self.path.with_extension("lock")).map_err(|error| self.refused(&error))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok(file);
        }
        reporter.line(&format!("{} is made by another towline", self.path.display()));
        match lock_exclusively(&file, cancel).map_err(|error| self.refused(&error))? {
            LockWait::Locked => Ok(file),
            LockWait::Cancelled => {
                Err(Rejection::refused(&"cancelled while another towline copies the image from the store"))
            }
        }
    }

    /// Returns the bytes that will be written.
    fn check_room(&self, image: &StoredImage) -> Result<u64, Rejection> {
        let blocks = 0..u32::try_from(image.blocks().len()).unwrap_or(u32::MAX);
        let needed: u64 = blocks.map(|block| image.count_pages(BlockIndex(block)).plain * PAGE_SIZE).sum();
        match statvfs(&self.directory) {
            Ok(free) if free.f_bavail * free.f_frsize < needed => Err(Rejection::refused(&format!(
                "directory {} has {} free, expected {} for {}; choose another with --cache-dir, or use --postcopy",
                self.directory.display(),
                size(free.f_bavail * free.f_frsize),
                size(needed),
                self.location
            ))),
            Ok(_) => Ok(needed),
            Err(errno) => Err(self.refused(&errno)),
        }
    }

    fn refused(&self, error: &dyn std::fmt::Display) -> Rejection {
        Rejection::refused(&format!(
            "directory {} of images from object stores: {error}; choose another with --cache-dir, or use --postcopy",
            self.directory.display()
        ))
    }
}

/// Opens a file if it is of the image with this index: a whole image, which its seal binds to its manifest, with the same blocks of memory
/// and the same device state, whose clocks differ between any two images of a guest. The memory itself is not read: its chunks have other
/// sizes than those of the index, so that their hashes cannot be compared.
fn open_if_of(path: &Path, index: &Index) -> Result<Image, String> {
    let file = Image::open(path).map_err(|error| error.to_string())?;
    let manifest = file.manifest().ok_or("it has no manifest")?;
    if manifest.base().is_some() || !file.is_sealed() {
        return Err("it is incremental, or its seal is missing".into());
    }
    let state = manifest.device_state();
    if (state.length, state.blake3) != index.device_state() {
        return Err("it has another device state".into());
    }
    let blocks = index.blocks();
    let is_same = |(block, stored): (&RamBlock, &StoredBlock)| {
        block.name == stored.name && block.length == stored.length
    };
    if blocks.len() != manifest.blocks().len() || !blocks.iter().zip(manifest.blocks()).all(is_same) {
        return Err("it has other blocks of memory".into());
    }
    Ok(file)
}

/// End of a wait for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LockWait {
    Locked,
    Cancelled,
}

/// Waits for the lock of a file, or until `cancel`. A lock cannot be polled, so a thread waits for it, which ends with the process if the
/// command is cancelled first.
fn lock_exclusively(file: &fs::File, cancel: &Cancel) -> std::io::Result<LockWait> {
    let (done, ended) = UnixStream::pair()?;
    let waiting = file.try_clone()?;
    let waiter = thread::Builder::new().name("lock".into()).spawn(move || {
        let _done = done;
        loop {
            match flock(&waiting, FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                result => return result,
            }
        }
    })?;
    loop {
        let mut fds = [PollFd::new(&ended, PollFlags::IN), PollFd::new(cancel, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    if cancel.is_cancelled() {
        return Ok(LockWait::Cancelled);
    }
    match waiter.join() {
        Ok(result) => Ok(result.map(|()| LockWait::Locked)?),
        Err(panic) => std::panic::resume_unwind(panic),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_another_towline_ends_with_its_lock_or_with_a_cancellation() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let holder = named.reopen().unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let cancel = Cancel::new().unwrap();
        cancel.cancel();
        assert_eq!(lock_exclusively(&named.reopen().unwrap(), &cancel).unwrap(), LockWait::Cancelled);
        let waiter = thread::spawn({
            let file = named.reopen().unwrap();
            move || lock_exclusively(&file, &Cancel::new().unwrap()).unwrap()
        });
        drop(holder);
        // The first waiter's thread has the lock now, or gets it, until it drops its file.
        assert_eq!(waiter.join().unwrap(), LockWait::Locked);
    }
}
