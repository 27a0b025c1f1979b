//! A file's final name, its directory, and operations on names there.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{self, AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::error::failed;
use super::{Error, Result};
use crate::journal::{self, FileNumber, Op};
use crate::lock_holder::lock_holder;
use crate::regular_file::{FileId, allocated};

/// Number of attempts if other writers rename the file between opening and locking it.
const TAKE_OVER_ATTEMPTS_MAX: usize = 16;
/// Attempts of a list, and of a writer, that find the file locked by a writer before that is believed: a removal of partials locks each
/// for a moment, or for as long as a busy host lets it.
const WRITER_ATTEMPTS_MAX: [usize; 2] = [5, 100];
/// Attempts in all: a list of partials has each locked for a moment, or for as long as a busy host lets it.
const LOCKED_ATTEMPTS_MAX: usize = 2000;
/// Pause before each of them; the release of a lock is not notified.
const LOCKED_PAUSE: Duration = Duration::from_millis(5);

/// Action if the final name already exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Keep the file and fail.
    #[default]
    Refuse,
    /// Replace the file atomically.
    Replace,
}

/// A file's directory, its final name and its partial's name.
#[derive(Debug)]
pub(crate) struct DirectoryEntry {
    pub(super) path: PathBuf,
    directory: OwnedFd,
    pub(super) name: OsString,
    pub(super) partial: OsString,
}

/// A file that this process has locked by `flock`. The lock is released explicitly, as a process that is being started may have a
/// copy of the descriptor.
#[derive(Debug)]
pub struct LockedFile(pub File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// A partial file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial {
    /// The file.
    pub path: PathBuf,
    /// Disk space of the file in bytes.
    pub allocated: u64,
    /// The process that writes it, if known; `None` if it is left over.
    pub writer: Option<String>,
}

impl DirectoryEntry {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let no_name = || Error::NoName { path: path.into() };
        let name = path.file_name().ok_or_else(no_name)?;
        // `file_name` ignores a trailing slash, which denotes a directory.
        if !path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes()) {
            return Err(no_name());
        }
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = fs::open(parent, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => {
                Error::NoDirectory { path: path.into(), directory: parent.into() }
            }
            errno => failed("open the directory", parent, errno),
        })?;
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(".partial");
        Ok(Self { path: path.into(), directory, name: name.into(), partial })
    }

    #[cfg(test)]
    pub(super) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(super) fn partial_path(&self) -> PathBuf {
        self.path.with_file_name(&self.partial)
    }

    /// Metadata of this name in the directory; symbolic links are not followed.
    pub(crate) fn stat(&self, name: &OsStr) -> Result<Option<Stat>> {
        match fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed("stat", &self.path.with_file_name(name), errno)),
        }
    }

    pub(super) fn check_final(&self, existing: Existing) -> Result<()> {
        let Some(stat) = self.stat(&self.name)? else { return Ok(()) };
        check_regular(&self.path, &stat)?;
        match existing {
            Existing::Refuse => Err(Error::Exists { path: self.path.clone() }),
            Existing::Replace => Ok(()),
        }
    }

    /// Opens or creates the partial and locks it.
    pub(super) fn lock_partial(&self, node: FileNumber) -> Result<File> {
        let partial = self.partial_path();
        let busy = || Error::Busy { path: self.path.clone(), partial: partial.clone() };
        // Without NONBLOCK, opening a FIFO of that name would block.
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        for _ in 0..TAKE_OVER_ATTEMPTS_MAX {
            let op = || Op::Open { name: text(&self.partial), node };
            let open = || fs::openat(&self.directory, &self.partial, flags, Mode::RUSR | Mode::WUSR);
            let file = match journal::step(op, open) {
                Ok(file) => File::from(file),
                Err(errno @ (Errno::LOOP | Errno::ISDIR | Errno::NXIO)) => {
                    let stat = self.stat(&self.partial)?;
                    stat.map_or(Ok(()), |stat| check_regular(&partial, &stat))?;
                    return Err(failed("open", &partial, errno));
                }
                Err(errno) => return Err(failed("create", &partial, errno)),
            };
            let stat = fs::fstat(&file).map_err(|errno| failed("stat", &partial, errno))?;
            check_regular(&partial, &stat)?;
            if !self.try_lock(&file, FlockOperation::NonBlockingLockExclusive)? {
                return Err(busy());
            }
            // The previous writer may have renamed or removed the file before we locked it.
            if self.is_partial(&file)? {
                return Ok(file);
            }
        }
        Err(busy())
    }

    /// Locks a partial. Returns false if a writer has it.
    fn try_lock(&self, partial: &File, operation: FlockOperation) -> Result<bool> {
        let mut writers = 0;
        let writers_max =
            WRITER_ATTEMPTS_MAX[usize::from(operation == FlockOperation::NonBlockingLockExclusive)];
        for _ in 0..LOCKED_ATTEMPTS_MAX {
            match fs::flock(partial, operation) {
                Err(Errno::WOULDBLOCK) => {}
                done => {
                    let failed =
                        |errno: Errno| Error::NoLocks { path: self.partial_path(), source: errno.into() };
                    return done.map(|()| true).map_err(failed);
                }
            }
            // Those who have it locked shared are no writers.
            match fs::flock(partial, FlockOperation::NonBlockingLockShared) {
                Ok(()) => {
                    let _ = fs::flock(partial, FlockOperation::Unlock);
                }
                Err(_) if writers == writers_max => return Ok(false),
                Err(_) => writers += 1,
            }
            sleep(LOCKED_PAUSE);
        }
        Ok(false)
    }

    /// Opens the partial, if it exists, and locks it, shared or not, until the file is dropped, unless a writer has.
    pub(crate) fn find_partial(&self, operation: FlockOperation) -> Result<Option<(Partial, File)>> {
        let path = self.partial_path();
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match fs::openat(&self.directory, &self.partial, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => {
                let stat = self.stat(&self.partial)?;
                stat.map_or(Ok(()), |stat| check_regular(&path, &stat))?;
                return Err(failed("open", &path, errno));
            }
        };
        let stat = fs::fstat(&file).map_err(|errno| failed("stat", &path, errno))?;
        check_regular(&path, &stat)?;
        let writer = (!self.try_lock(&file, operation)?).then(|| lock_holder(&file));
        // Its writer may have renamed it in between.
        let allocated = file.metadata().as_ref().map_or(0, allocated);
        Ok(self.is_partial(&file)?.then_some((Partial { path, allocated, writer }, file)))
    }

    /// Removes the partial, which the caller has locked.
    pub(crate) fn unlink_partial(&self) -> Result<(), Errno> {
        self.unlink(&self.partial)
    }

    /// Returns true if the partial's name still belongs to `file`, and fails if the file has other names:
    /// truncating and renaming must not affect another program's file.
    pub(super) fn is_partial(&self, file: impl AsFd) -> Result<bool> {
        let ours = fs::fstat(file).map_err(|errno| failed("stat", &self.partial_path(), errno))?;
        let Some(named) = self.stat(&self.partial)? else { return Ok(false) };
        if named.st_nlink > 1 {
            return Err(Error::NotRegular { path: self.partial_path(), found: "file with several names" });
        }
        Ok(FileId::of(&ours) == FileId::of(&named))
    }

    pub(super) fn open_direct(&self, file: &File) -> Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::openat(&self.directory, &self.partial, flags, Mode::empty()) {
            Ok(direct) if self.is_partial(&direct)? && self.is_partial(file)? => Ok(Some(direct.into())),
            Ok(_) | Err(Errno::NOENT) => Err(Error::PartialGone { partial: self.partial_path() }),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(failed("open for direct I/O", &self.partial_path(), errno)),
        }
    }

    /// Renames the partial to the final name.
    pub(super) fn rename_partial(&self, existing: Existing) -> Result<()> {
        let rename = |flags| self.rename(&self.partial, &self.name, flags);
        let renamed = match existing {
            Existing::Replace => {
                self.check_final(existing)?;
                rename(RenameFlags::empty())
            }
            Existing::Refuse => match rename(RenameFlags::NOREPLACE) {
                // Without NOREPLACE the two steps are not atomic, but the lock excludes other writers.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    self.check_final(existing)?;
                    rename(RenameFlags::empty())
                }
                renamed => renamed,
            },
        };
        renamed.map_err(|errno| match errno {
            Errno::EXIST => Error::Exists { path: self.path.clone() },
            errno => failed("rename to", &self.path, errno),
        })
    }

    /// Renames within the directory; [`RenameFlags::EXCHANGE`] swaps the two files.
    pub(crate) fn rename(&self, from: &OsStr, to: &OsStr, flags: RenameFlags) -> Result<(), Errno> {
        let op = || {
            if flags.contains(RenameFlags::EXCHANGE) {
                Op::Exchange { first: text(from), second: text(to) }
            } else {
                Op::Rename { from: text(from), to: text(to) }
            }
        };
        journal::step(op, || fs::renameat_with(&self.directory, from, &self.directory, to, flags))
    }

    /// Removes a name from the directory.
    pub(crate) fn unlink(&self, name: &OsStr) -> Result<(), Errno> {
        let unlink = || fs::unlinkat(&self.directory, name, AtFlags::empty());
        journal::step(|| Op::Unlink { name: text(name) }, unlink)
    }

    /// Syncs the directory: all changes of names are permanent.
    pub(crate) fn sync(&self) -> Result<()> {
        match journal::step(|| Op::SyncDirectory, || fs::fsync(&self.directory)) {
            // Some network filesystems do not support fsync of a directory, since they write it through.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(failed("fsync its directory", &self.path, errno)),
        }
    }

    /// Opens and locks the file under the final name, if it exists, unless it is `locked` already. A file
    /// that cannot be opened, or is on a filesystem without locks, is not locked.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Busy`].
    pub(crate) fn lock_final(&self, locked: Option<LockedFile>) -> Result<Option<LockedFile>> {
        let mut in_use = None;
        for _ in 0..TAKE_OVER_ATTEMPTS_MAX {
            let Some(named) = self.stat(&self.name)? else { return Ok(None) };
            let is_named = |file: &File| FileId::of_file(file) == Some(FileId::of(&named));
            if locked.as_ref().is_some_and(|locked| is_named(&locked.0)) {
                return Ok(locked);
            }
            let Some(file) = self.open_final() else { return Ok(None) };
            match fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_named(&file) => return Ok(Some(LockedFile(file))),
                // Another process has just replaced it.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => match fs::flock(&file, FlockOperation::NonBlockingLockShared) {
                    // In use, or since replaced by a writer: the next attempt shows which.
                    Ok(()) => {
                        let _ = fs::flock(&file, FlockOperation::Unlock);
                        in_use = Some(file);
                    }
                    // Another writer has just renamed its file to this name.
                    Err(_) => {
                        in_use = None;
                        break;
                    }
                },
                Err(_) => return Ok(None),
            }
        }
        let path = self.path.clone();
        Err(match in_use {
            Some(file) => Error::InUse { path, holder: lock_holder(&file) },
            None => Error::Busy { partial: path.clone(), path },
        })
    }

    fn open_final(&self) -> Option<File> {
        let open = |mode| {
            let flags = mode | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            fs::openat(&self.directory, &self.name, flags, Mode::empty())
        };
        // Network filesystems require a writable descriptor for an exclusive lock.
        open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY)).ok().map(File::from)
    }
}

fn text(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

fn check_regular(path: &Path, stat: &Stat) -> Result<()> {
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(()),
        FileType::Directory => "directory",
        FileType::Symlink => "symbolic link",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::BlockDevice => "block device",
        FileType::CharacterDevice => "character device",
        _ => "file of an unknown kind",
    };
    Err(Error::NotRegular { path: path.into(), found })
}
