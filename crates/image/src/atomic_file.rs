//! Files that appear under their final name complete or not at all.
//!
//! ```text
//!   open      .NAME.partial, created or taken over from a crashed writer · flock · is it still that name's file?
//!   write     through the page cache, or past it (direct I/O) where the filesystem takes that
//!   commit    fsync file · rename to NAME · fsync directory
//!   drop      without commit: the partial is removed
//! ```
//!
//! A crash leaves a partial, which nobody holds locked; the next writer of the same name takes it over, emptied. Two
//! writers of one name at once are impossible: the second one gets [`Error::Busy`]. The final name is never locked, and
//! whoever has its old file open keeps that.
//!
//! What it is not: a lock against other programs (`flock` is advisory). Limits: one directory, so one filesystem, which
//! must know `flock`; files are made with mode 0600, for they hold a guest's memory.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

/// The result of every call here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How often the partial may vanish between opening and locking it, because other writers finish just then.
const TAKE_OVER_TRIES_MAX: usize = 16;

/// What to do with a file that has the final name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Leave it, and fail.
    #[default]
    Refuse,
    /// Put the new file in its stead, at once and completely.
    Replace,
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another writer is at it.
    #[error("{}: another process is writing this file (it holds {} locked); wait for it, or choose another name", path.display(), partial.display())]
    Busy {
        /// The final name.
        path: PathBuf,
        /// The file that is locked.
        partial: PathBuf,
    },
    /// The final name is taken.
    #[error("{} exists already; choose another name, remove it, or pass --overwrite", path.display())]
    Exists {
        /// The final name.
        path: PathBuf,
    },
    /// Something there is no ordinary file.
    #[error("{} is a {found}, expected a regular file or nothing; name the file itself, in a directory of its own", path.display())]
    NotRegular {
        /// What was found.
        path: PathBuf,
        /// Its kind.
        found: &'static str,
    },
    /// The path has no last part that could name a file.
    #[error("{:?} does not name a file; give a directory and a file name", path)]
    NoName {
        /// The path as given.
        path: PathBuf,
    },
    /// The directory is not there, or is none.
    #[error("{}: {} is no directory; create it, or correct the path", path.display(), directory.display())]
    NoDirectory {
        /// The final name.
        path: PathBuf,
        /// Where it should be.
        directory: PathBuf,
    },
    /// The filesystem takes no writes.
    #[error("{}: {op}: the filesystem is mounted read-only; choose another directory, or remount it", path.display())]
    ReadOnly {
        /// What was being done.
        op: &'static str,
        /// With what.
        path: PathBuf,
    },
    /// This user may not.
    #[error("{}: {op}: not permitted; write as the directory's owner, or choose another directory", path.display())]
    Permission {
        /// What was being done.
        op: &'static str,
        /// With what.
        path: PathBuf,
    },
    /// The filesystem or the user's quota is full.
    #[error("{}: {op}: no space left; free some, or choose another filesystem", path.display())]
    NoSpace {
        /// What was being done.
        op: &'static str,
        /// With what.
        path: PathBuf,
    },
    /// The filesystem has no `flock`.
    #[error("{}: this filesystem cannot lock files ({source}); choose a local one, or mount it with locking", path.display())]
    NoLocks {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Somebody removed or replaced the partial under our hands.
    #[error("{} was removed or replaced while it was being written; leave such files alone and write again", partial.display())]
    PartialGone {
        /// The partial.
        partial: PathBuf,
    },
    /// Anything else that the kernel says.
    #[error("{}: {op}: {source}", path.display())]
    Io {
        /// What was being done.
        op: &'static str,
        /// With what.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// A file being written, under the name `.NAME.partial` until [`commit`](Self::commit).
#[derive(Debug)]
pub struct AtomicFile {
    place: Place,
    file: File,
    direct: Option<File>,
    existing: Existing,
    /// Whether the partial is still there for us to remove.
    is_partial: bool,
}

impl AtomicFile {
    /// Begins the file that will be `path`; an empty one, open for reading and writing.
    ///
    /// # Errors
    /// The final name is taken ([`Error::Exists`], with [`Existing::Refuse`]) or no file, another writer is at it, or the
    /// directory takes no file.
    pub fn open(path: &Path, existing: Existing) -> Result<Self> {
        let place = Place::find(path)?;
        place.check_final(existing)?;
        let file = place.lock_partial()?;
        // From here on the partial is ours, and goes when this is dropped.
        let mut this = Self { place, file, direct: None, existing, is_partial: true };
        fs::ftruncate(&this.file, 0).map_err(|errno| failed("empty", &this.place.partial_path(), errno))?;
        this.direct = this.place.open_direct(&this.file)?;
        Ok(this)
    }

    /// The file, through the page cache.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The same file past the page cache (`O_DIRECT`); `None` if its filesystem does not take that.
    pub fn direct(&self) -> Option<&File> {
        self.direct.as_ref()
    }

    /// The final name.
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// Gives the file its final name, once its bytes are on the disk.
    ///
    /// # Errors
    /// Whatever fails, the final name has its old file or none, and the partial is removed; only where the directory's
    /// own fsync fails, the new file is there, but may be gone again after a power failure.
    pub fn commit(mut self) -> Result<()> {
        let partial = self.place.partial_path();
        fs::fsync(&self.file).map_err(|errno| failed("write to disk", &partial, errno))?;
        if !self.place.is_partial(&self.file)? {
            self.is_partial = false;
            return Err(Error::PartialGone { partial });
        }
        self.place.rename(self.existing)?;
        self.is_partial = false;
        match fs::fsync(&self.place.directory) {
            // Some network filesystems know no fsync of a directory, as they write it through.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(failed("fsync its directory", &self.place.path, errno)),
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Before the lock goes with the file: afterwards the name may be another writer's.
        if self.is_partial && matches!(self.place.is_partial(&self.file), Ok(true)) {
            let _ = fs::unlinkat(&self.place.directory, &self.place.partial, AtFlags::empty());
        }
    }
}

/// Writes a small file in the same steps.
///
/// # Errors
/// As [`AtomicFile::open`] and [`AtomicFile::commit`].
pub fn write_sidecar(path: &Path, bytes: &[u8], existing: Existing) -> Result<()> {
    let sidecar = AtomicFile::open(path, existing)?;
    let written = sidecar.file().write_all(bytes);
    written.map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        failed("write", &sidecar.place.partial_path(), errno)
    })?;
    sidecar.commit()
}

/// A final name, its directory and its partial's name.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    partial: OsString,
}

impl Place {
    fn find(path: &Path) -> Result<Self> {
        let no_name = || Error::NoName { path: path.into() };
        let name = path.file_name().ok_or_else(no_name)?;
        // `file_name` looks past a trailing slash, which asks for a directory.
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

    fn partial_path(&self) -> PathBuf {
        self.path.with_file_name(&self.partial)
    }

    fn stat(&self, name: &OsStr) -> Result<Option<Stat>> {
        match fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed("look at", &self.path.with_file_name(name), errno)),
        }
    }

    fn check_final(&self, existing: Existing) -> Result<()> {
        let Some(stat) = self.stat(&self.name)? else { return Ok(()) };
        check_regular(&self.path, &stat)?;
        match existing {
            Existing::Refuse => Err(Error::Exists { path: self.path.clone() }),
            Existing::Replace => Ok(()),
        }
    }

    /// Opens and locks the partial, whoever made it.
    fn lock_partial(&self) -> Result<File> {
        let partial = self.partial_path();
        let busy = || Error::Busy { path: self.path.clone(), partial: partial.clone() };
        // Without NONBLOCK a FIFO of that name could keep us here for ever.
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        for _ in 0..TAKE_OVER_TRIES_MAX {
            let file = match fs::openat(&self.directory, &self.partial, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => file,
                Err(errno @ (Errno::LOOP | Errno::ISDIR | Errno::NXIO)) => {
                    let stat = self.stat(&self.partial)?;
                    stat.map_or(Ok(()), |stat| check_regular(&partial, &stat))?;
                    return Err(failed("open", &partial, errno));
                }
                Err(errno) => return Err(failed("create", &partial, errno)),
            };
            let stat = fs::fstat(&file).map_err(|errno| failed("look at", &partial, errno))?;
            check_regular(&partial, &stat)?;
            match fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(busy()),
                Err(errno) => return Err(Error::NoLocks { path: partial, source: errno.into() }),
            }
            // The writer before us may have renamed or removed the file while we were about to lock it.
            if self.is_partial(&file)? {
                return Ok(file.into());
            }
        }
        Err(busy())
    }

    /// Whether the partial's name still belongs to `file`, and no other name does: what is emptied and renamed here is
    /// not to be somebody's file.
    fn is_partial(&self, file: impl AsFd) -> Result<bool> {
        let ours = fs::fstat(file).map_err(|errno| failed("look at", &self.partial_path(), errno))?;
        let Some(named) = self.stat(&self.partial)? else { return Ok(false) };
        if named.st_nlink > 1 {
            return Err(Error::NotRegular { path: self.partial_path(), found: "file with several names" });
        }
        Ok((ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino))
    }

    fn open_direct(&self, file: &File) -> Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::openat(&self.directory, &self.partial, flags, Mode::empty()) {
            Ok(direct) if self.is_partial(&direct)? && self.is_partial(file)? => Ok(Some(direct.into())),
            Ok(_) | Err(Errno::NOENT) => Err(Error::PartialGone { partial: self.partial_path() }),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(failed("open for direct I/O", &self.partial_path(), errno)),
        }
    }

    fn rename(&self, existing: Existing) -> Result<()> {
        let rename =
            |flags| fs::renameat_with(&self.directory, &self.partial, &self.directory, &self.name, flags);
        let renamed = match existing {
            Existing::Replace => {
                self.check_final(existing)?;
                rename(RenameFlags::empty())
            }
            Existing::Refuse => match rename(RenameFlags::NOREPLACE) {
                // A filesystem without NOREPLACE: the two steps are not one there, but the lock keeps other writers off.
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

fn failed(op: &'static str, path: &Path, errno: Errno) -> Error {
    let path = path.to_owned();
    match errno {
        Errno::ROFS => Error::ReadOnly { op, path },
        Errno::ACCESS | Errno::PERM => Error::Permission { op, path },
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { op, path },
        errno => Error::Io { op, path, source: errno.into() },
    }
}

#[cfg(test)]
#[path = "atomic_file_tests.rs"]
mod tests;
