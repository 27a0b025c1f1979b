//! Files that appear under their final name complete or not at all.
//!
//! ```text
//!   open      .NAME.partial, created or taken over from a crashed writer · flock · is it still that name's file?
//!             NAME, if it is to be replaced: flock, so that nobody stores an increment on what goes away
//!   write     through the page cache, or past it (direct I/O) where the filesystem takes that
//!   commit    fsync file · rename to NAME · fsync directory
//!   drop      without commit: the partial is removed
//! ```
//!
//! A crash leaves a partial, which nobody holds locked; the next writer of the same name takes it over, emptied. Two
//! writers of one name at once are impossible: the second one gets [`Error::Busy`]. Whoever has the old file of the final name open
//! keeps that; whoever needs it to stay what it is holds a shared `flock` of it, and the writer gets [`Error::InUse`].
//!
//! Every step goes through the crate's journal, so that tests can make each state of a crash out of them.
//!
//! What it is not: a lock against other programs (`flock` is advisory). Limits: one directory, so one filesystem, which
//! must know `flock`, across hosts too if several write there (NFS mounted with `local_lock` or `nolock` does not);
//! files are made with mode 0600, for they hold a guest's memory.

mod error;
mod place;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{self, FallocateFlags};
use rustix::io::{Errno, pwritev};

pub use error::{Error, Result};
pub(crate) use place::{Left, Place};

use crate::journal::{self, Node, Op};
use error::failed;

/// What to do with a file that has the final name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Leave it, and fail.
    #[default]
    Refuse,
    /// Put the new file in its stead, at once and completely.
    Replace,
}

/// A file being written, under the name `.NAME.partial` until [`commit`](Self::commit).
#[derive(Debug)]
pub struct AtomicFile {
    place: Place,
    file: File,
    direct: Option<File>,
    existing: Existing,
    /// The file that is to be replaced, locked.
    replaced: Option<File>,
    node: Node,
    /// Whether the partial is still there for us to remove.
    is_partial: bool,
}

impl AtomicFile {
    /// Begins the file that will be `path`; an empty one, open for reading and writing.
    ///
    /// # Errors
    /// The final name is taken ([`Error::Exists`], with [`Existing::Refuse`]), in use ([`Error::InUse`]) or no file, another writer is
    /// at it, or the directory takes no file.
    pub fn open(path: &Path, existing: Existing) -> Result<Self> {
        let place = Place::find(path)?;
        place.check_final(existing)?;
        let node = journal::node();
        let file = place.lock_partial(node)?;
        // From here on the partial is ours, and goes when this is dropped.
        let mut this = Self { place, file, direct: None, existing, replaced: None, node, is_partial: true };
        this.lock_replaced()?;
        this.set_length(0).map_err(|errno| failed("empty", &this.place.partial_path(), errno))?;
        this.direct = this.place.open_direct(&this.file)?;
        Ok(this)
    }

    /// The file, through the page cache; to be read, and written by the calls below.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether its filesystem takes writes past the page cache (`O_DIRECT`).
    pub fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The final name.
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// The directory, and the names in it.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Writes these bytes at byte `at`.
    ///
    /// # Errors
    /// The kernel's answer; a part may have been written.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_vectored_at(&[bytes], at)
    }

    /// Writes these bytes, one slice behind the other, from byte `at` on.
    ///
    /// # Errors
    /// The kernel's answer; a part may have been written.
    pub fn write_all_vectored_at(&self, contents: &[&[u8]], at: u64) -> io::Result<()> {
        let op = || Op::Write { node: self.node, at, bytes: contents.concat() };
        Ok(journal::step(op, || write_all_vectored_at(&self.file, contents, at))?)
    }

    /// The same past the page cache; `None` where [`has_direct`](Self::has_direct) is not.
    ///
    /// # Errors
    /// `InvalidInput` where memory, offset or length are not aligned as the device wants it; the kernel's answer.
    pub fn write_all_direct_at(&self, bytes: &[u8], at: u64) -> Option<io::Result<()>> {
        let direct = self.direct.as_ref()?;
        let op = || Op::Write { node: self.node, at, bytes: bytes.to_vec() };
        let write = || direct.write_all_at(bytes, at).map_err(|error| errno_of(&error));
        Some(journal::step(op, write).map_err(io::Error::from))
    }

    /// Makes a hole: `length` bytes from byte `at` on read as zeros, and take no room.
    ///
    /// # Errors
    /// `EOPNOTSUPP` and `ENOSYS` on a filesystem without holes; the kernel's answer.
    pub fn punch(&self, at: u64, length: u64) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let op = || Op::Punch { node: self.node, at, length };
        journal::step(op, || fs::fallocate(&self.file, flags, at, length))
    }

    /// Cuts the file to this length, or extends it by a hole.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn set_length(&self, length: u64) -> Result<(), Errno> {
        journal::step(|| Op::SetLength { node: self.node, length }, || fs::ftruncate(&self.file, length))
    }

    /// Has all that was written on the disk when it returns.
    ///
    /// # Errors
    /// The kernel's answer; what was written may be lost.
    pub fn sync(&self) -> Result<(), Errno> {
        journal::step(|| Op::Sync { node: self.node }, || fs::fsync(&self.file))
    }

    /// Gives the file its final name, once its bytes are on the disk.
    ///
    /// # Errors
    /// Whatever fails, the final name has its old file or none, and the partial is removed; only where the directory's
    /// own fsync fails, the new file is there, but may be gone again after a power failure.
    pub fn commit(self) -> Result<()> {
        self.rename()?.sync_directory()
    }

    /// The first part of [`commit`](Self::commit): the new file has the name, but may lose it again by a power failure.
    ///
    /// # Errors
    /// The final name has its old file or none, and the partial is removed.
    pub(crate) fn rename(mut self) -> Result<Named> {
        let partial = self.place.partial_path();
        self.sync().map_err(|errno| failed("write to disk", &partial, errno))?;
        if !self.place.is_partial(&self.file)? {
            self.is_partial = false;
            return Err(Error::PartialGone { partial });
        }
        self.lock_replaced()?;
        self.place.rename_partial(self.existing)?;
        self.is_partial = false;
        Ok(Named(self))
    }

    /// Locks the file that has the final name, for it is to be replaced.
    fn lock_replaced(&mut self) -> Result<()> {
        if self.existing == Existing::Replace {
            self.replaced = self.place.lock_final(self.replaced.as_ref())?;
        }
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Before the lock goes with the file: afterwards the name may be another writer's.
        if self.is_partial && matches!(self.place.is_partial(&self.file), Ok(true)) {
            let _ = self.place.unlink_partial();
        }
    }
}

/// A file under its final name, which stays locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Named(AtomicFile);

impl Named {
    /// Has the name last.
    pub(crate) fn sync_directory(&self) -> Result<()> {
        self.0.place.sync()
    }

    /// Whether the name is still this file's.
    pub(crate) fn is_named(&self) -> bool {
        let place = &self.0.place;
        matches!((place.stat(&place.name), fs::fstat(&self.0.file)), (Ok(Some(named)), Ok(ours))
            if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino))
    }
}

/// Writes a small file in the same steps.
///
/// # Errors
/// As [`AtomicFile::open`] and [`AtomicFile::commit`].
pub fn write_sidecar(path: &Path, bytes: &[u8], existing: Existing) -> Result<()> {
    #[cfg(test)]
    if journal::is_on(journal::Fault::SidecarInPlace) {
        return write_in_place(path, bytes);
    }
    let sidecar = AtomicFile::open(path, existing)?;
    let written = sidecar.write_all_at(bytes, 0);
    written.map_err(|error| failed("write", &sidecar.place.partial_path(), errno_of(&error)))?;
    sidecar.commit()
}

/// What [`journal::Fault::SidecarInPlace`] does instead.
#[cfg(test)]
fn write_in_place(path: &Path, bytes: &[u8]) -> Result<()> {
    let place = Place::find(path)?;
    let (node, name) = (journal::node(), place.name.to_string_lossy().into_owned());
    let file = journal::step(
        || Op::Open { name, node },
        || {
            let flags = fs::OFlags::CREATE | fs::OFlags::RDWR;
            fs::openat(place.directory(), &place.name, flags, fs::Mode::RUSR | fs::Mode::WUSR)
        },
    );
    let file = File::from(file.map_err(|errno| failed("open", path, errno))?);
    let write = || file.write_all_at(bytes, 0).map_err(|error| errno_of(&error));
    let set = || fs::ftruncate(&file, 0);
    let written = journal::step(|| Op::SetLength { node, length: 0 }, set)
        .and_then(|()| journal::step(|| Op::Write { node, at: 0, bytes: bytes.to_vec() }, write))
        .and_then(|()| journal::step(|| Op::Sync { node }, || fs::fsync(&file)));
    written.map_err(|errno| failed("write", path, errno))
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn write_all_vectored_at(file: &File, contents: &[&[u8]], offset: u64) -> Result<(), Errno> {
    let mut slices: Vec<IoSlice<'_>> = contents.iter().map(|slice| IoSlice::new(slice)).collect();
    let (mut left, mut offset) = (&mut slices[..], offset);
    while left.iter().any(|slice| !slice.is_empty()) {
        let written = match pwritev(file, left, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => written,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        };
        IoSlice::advance_slices(&mut left, written);
        offset += written as u64;
    }
    Ok(())
}
