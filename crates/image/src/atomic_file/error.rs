//! Why a file could not be written.

use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// The result of every call here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

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
    /// The file that has the name must stay what it is for somebody.
    #[error("{} is in use: {holder} stores an increment on it and needs it as it is; wait for that, or choose another name", path.display())]
    InUse {
        /// The final name.
        path: PathBuf,
        /// The process that uses it, as far as it can be told.
        holder: String,
    },
    /// A file that belongs to an image, or to a writer, would be taken for something else.
    #[error("{}: a name that ends in {suffix:?} is that of a part of another image; choose another name", path.display())]
    Reserved {
        /// The name that was asked for.
        path: PathBuf,
        /// The ending that is reserved.
        suffix: &'static str,
    },
    /// A part of the image would replace a file that is something else.
    #[error("{} is not {expected}, which would be written under this name; move it away, or choose another name for the image", path.display())]
    Foreign {
        /// The file that is in the way.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
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

pub(super) fn failed(op: &'static str, path: &Path, errno: Errno) -> Error {
    let path = path.to_owned();
    match errno {
        Errno::ROFS => Error::ReadOnly { op, path },
        Errno::ACCESS | Errno::PERM => Error::Permission { op, path },
        Errno::NOSPC | Errno::DQUOT => Error::NoSpace { op, path },
        errno => Error::Io { op, path, source: errno.into() },
    }
}
