//! Files that appear under their final name only when they are complete.
//!
//! ```text
//!   open      .NAME.partial, created or taken over from a crashed writer · flock · check the name again
//!             NAME, if it is to be replaced: flock, so no increment is stored on it meanwhile
//!   write     through the page cache, or past it (direct I/O) if the filesystem supports that
//!   commit    fsync file · rename to NAME · fsync directory
//!   drop      without a commit: the partial is removed
//! ```
//!
//! A crash leaves a partial without a lock; the next writer of the same name takes it over and empties it.
//! Two writers of one name are impossible: the second one fails with [`Error::Busy`]. Readers that have the
//! replaced file open keep it. A process that needs the file to stay under its name has a shared `flock` on
//! it, and the writer fails with [`Error::InUse`].
//!
//! Every step goes through the crate's journal, so tests can derive all states of a crash.
//!
//! Not a lock against other programs (`flock` is advisory). Limits: one directory, so one filesystem, which
//! must support `flock`, across hosts if several write there (NFS mounted with `local_lock` or `nolock` does
//! not). Files have mode 0600, as they contain a guest's memory.

mod directory_entry;
mod error;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{self, FallocateFlags, FlockOperation, SeekFrom};
use rustix::io::{Errno, pwritev};

pub(crate) use directory_entry::DirectoryEntry;
pub use directory_entry::{Existing, LockedFile, Partial};
pub use error::{Error, Result};

use crate::journal::{self, FileNumber, Op};
use crate::regular_file::FileId;
use error::failed;

/// Bytes that are copied by one write.
const COPIED_BYTES: usize = 1 << 20;

/// A file being written, under the name `.NAME.partial` until [`commit`](Self::commit).
#[derive(Debug)]
pub struct AtomicFile {
    entry: Arc<DirectoryEntry>,
    file: File,
    direct: Option<File>,
    existing: Existing,
    /// The file to be replaced, locked.
    replaced: Option<LockedFile>,
    node: FileNumber,
    /// True if the partial must be removed on drop.
    is_partial: bool,
}

impl AtomicFile {
    /// Opens an empty file for reading and writing that will be `path`.
    ///
    /// # Errors
    /// The final name exists ([`Error::Exists`], with [`Existing::Refuse`]), is in use ([`Error::InUse`]) or
    /// not a regular file; another writer is active; the file cannot be created.
    pub fn open(path: &Path, existing: Existing) -> Result<Self> {
        let entry = Arc::new(DirectoryEntry::open(path)?);
        entry.check_final(existing)?;
        let node = journal::next_file_number();
        let file = entry.lock_partial(node)?;
        // From here on the partial is ours and removed on drop.
        let mut this = Self { entry, file, direct: None, existing, replaced: None, node, is_partial: true };
        this.lock_replaced()?;
        this.set_length(0).map_err(|error| failed("empty", &this.entry.partial_path(), errno_of(&error)))?;
        this.direct = this.entry.open_direct(&this.file)?;
        Ok(this)
    }

    /// The file through the page cache, for reading; to be written by the methods below.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The final and temporary names, and their directory.
    pub(crate) fn entry(&self) -> &Arc<DirectoryEntry> {
        &self.entry
    }

    /// Writes `bytes` at offset `at`.
    ///
    /// # Errors
    /// The kernel's error; a part may have been written.
    pub fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_vectored_at(&[bytes], at)
    }

    /// Writes the slices consecutively from offset `at` on.
    ///
    /// # Errors
    /// The kernel's error; a part may have been written.
    pub fn write_all_vectored_at(&self, contents: &[&[u8]], at: u64) -> io::Result<()> {
        let op = || Op::Write { node: self.node, at, bytes: contents.concat() };
        Ok(journal::step(op, || write_all_vectored_at(&self.file, contents, at))?)
    }

    /// Writes `bytes` past the page cache (`O_DIRECT`); `None` if the filesystem does not support that.
    ///
    /// # Errors
    /// `InvalidInput` if memory, offset or length are not aligned for the device; else the kernel's error.
    pub fn write_all_direct_at(&self, bytes: &[u8], at: u64) -> Option<io::Result<()>> {
        let direct = self.direct.as_ref()?;
        let op = || Op::Write { node: self.node, at, bytes: bytes.to_vec() };
        let write = || direct.write_all_at(bytes, at).map_err(|error| errno_of(&error));
        Some(journal::step(op, write).map_err(io::Error::from))
    }

    /// Copies `length` bytes of another file into this one, at these offsets: by reference where both are on a filesystem with reflinks.
    ///
    /// # Errors
    /// The kernel's error; a part may have been written. The range after the end of the other file is a hole.
    pub(crate) fn take(&self, from: &File, from_at: u64, at: u64, length: u64) -> io::Result<()> {
        let op = || {
            let mut bytes = vec![0; length as usize];
            from.read_exact_at(&mut bytes, from_at).expect("read again in a test");
            Op::Write { node: self.node, at, bytes }
        };
        Ok(journal::step(op, || take(from, from_at, &self.file, at, length))?)
    }

    /// Punches a hole of `length` bytes at offset `at`, which then reads as zeros.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on a filesystem without holes; else the kernel's error.
    pub fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let op = || Op::Punch { node: self.node, at, length };
        Ok(journal::step(op, || fs::fallocate(&self.file, flags, at, length))?)
    }

    /// Truncates the file to `length`, or extends it by a hole.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_length(&self, length: u64) -> io::Result<()> {
        Ok(journal::step(|| Op::SetLength { node: self.node, length }, || fs::ftruncate(&self.file, length))?)
    }

    /// Syncs the file to disk.
    ///
    /// # Errors
    /// The kernel's error; written data may be lost.
    pub fn sync(&self) -> io::Result<()> {
        Ok(journal::step(|| Op::Sync { node: self.node }, || fs::fsync(&self.file))?)
    }

    /// Syncs the file and renames it to the final name.
    ///
    /// # Errors
    /// After any failure the old file, if any, keeps the final name and the partial is removed; only if the
    /// sync of the directory fails, the new file has the name but may lose it in a power failure.
    pub fn commit(self) -> Result<()> {
        self.rename()?.sync_directory()
    }

    /// The first part of [`commit`](Self::commit): renames the file, without syncing the directory.
    ///
    /// # Errors
    /// The old file, if any, keeps the final name, and the partial is removed.
    pub(crate) fn rename(mut self) -> Result<RenamedFile> {
        let partial = self.entry.partial_path();
        self.sync().map_err(|error| failed("write to disk", &partial, errno_of(&error)))?;
        if !self.entry.is_partial(&self.file)? {
            self.is_partial = false;
            return Err(Error::PartialGone { partial });
        }
        self.lock_replaced()?;
        self.entry.rename_partial(self.existing)?;
        self.is_partial = false;
        Ok(RenamedFile(self))
    }

    /// Locks the file that is about to be replaced.
    fn lock_replaced(&mut self) -> Result<()> {
        if self.existing == Existing::Replace {
            self.replaced = self.entry.lock_final(self.replaced.take())?;
        }
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Before the lock is released with the file: after that the name may be another writer's.
        if self.is_partial && matches!(self.entry.is_partial(&self.file), Ok(true)) {
            let _ = self.entry.unlink_partial();
        }
        // Explicitly, as a process that is being started may have a copy of the descriptor.
        let _ = fs::flock(&self.file, FlockOperation::Unlock);
    }
}

/// A file under its final name, locked until this is dropped.
#[derive(Debug)]
pub(crate) struct RenamedFile(AtomicFile);

impl RenamedFile {
    /// Makes the rename permanent.
    pub(crate) fn sync_directory(&self) -> Result<()> {
        self.0.entry.sync()
    }

    /// Returns true if the name still belongs to this file.
    pub(crate) fn still_has_name(&self) -> bool {
        let named = self.0.entry.stat(&self.0.entry.name);
        matches!(named, Ok(Some(named)) if FileId::of_file(&self.0.file) == Some(FileId::of(&named)))
    }
}

/// Writes a small file in the same steps.
///
/// # Errors
/// As [`AtomicFile::open`] and [`AtomicFile::commit`].
pub fn write_sidecar(path: &Path, bytes: &[u8], existing: Existing) -> Result<()> {
    #[cfg(test)]
    if journal::is_on(journal::PublicationBug::SidecarInPlace) {
        return write_in_place(path, bytes);
    }
    let sidecar = AtomicFile::open(path, existing)?;
    let written = sidecar.write_all_at(bytes, 0);
    written.map_err(|error| failed("write", &sidecar.entry.partial_path(), errno_of(&error)))?;
    sidecar.commit()
}

/// Implements [`journal::PublicationBug::SidecarInPlace`].
#[cfg(test)]
fn write_in_place(path: &Path, bytes: &[u8]) -> Result<()> {
    let entry = DirectoryEntry::open(path)?;
    let (node, name) = (journal::next_file_number(), entry.name.to_string_lossy().into_owned());
    let file = journal::step(
        || Op::Open { name, node },
        || {
            let flags = fs::OFlags::CREATE | fs::OFlags::RDWR;
            fs::openat(entry.directory(), &entry.name, flags, fs::Mode::RUSR | fs::Mode::WUSR)
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

fn take(from: &File, mut from_at: u64, file: &File, mut at: u64, length: u64) -> Result<(), Errno> {
    let end = at + length;
    while at < end {
        // Holes stay holes.
        let (data, hole) = match fs::seek(from, SeekFrom::Data(from_at)) {
            Ok(data) => (data, fs::seek(from, SeekFrom::Hole(data))?),
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        (from_at, at) = (data, at + (data - from_at));
        let left = (hole - data).min(end.saturating_sub(at));
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        if left == 0 {
            return Ok(());
        }
        match fs::copy_file_range(from, Some(&mut from_at), file, Some(&mut at), left) {
            Ok(0) => return Err(Errno::IO),
            Ok(_) | Err(Errno::INTR) => {}
            // Between filesystems of two kinds, or by one that has no such call.
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let mut bytes = vec![0; left.min(COPIED_BYTES)];
                from.read_exact_at(&mut bytes, from_at).map_err(|error| errno_of(&error))?;
                write_all_vectored_at(file, &[&bytes], at)?;
                (from_at, at) = (from_at + bytes.len() as u64, at + bytes.len() as u64);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
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
