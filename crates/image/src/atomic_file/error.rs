//! Errors of writing a file.

use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Result of the operations of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to write a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process is writing the file.
    #[error("{}: another process is writing this file (it holds {} locked); wait for it, or choose another name", path.display(), partial.display())]
    Busy { path: PathBuf, partial: PathBuf },
    /// Another process needs the file under the final name to stay there.
    #[error("{} is in use: {holder} runs a guest from it, reads it, or stores an increment on it; wait until it has finished, or choose another name", path.display())]
    InUse {
        path: PathBuf,
        /// The process that uses it, if known.
        holder: String,
    },
    /// The name is reserved for parts of images.
    #[error("{}: names that end in {suffix:?} are reserved for parts of images; choose another name", path.display())]
    Reserved { path: PathBuf, suffix: &'static str },
    /// A file of another kind has the name of a part of the image.
    #[error("{} is not {expected}, which would be written under this name; move it away, or choose another name for the image", path.display())]
    Foreign {
        path: PathBuf,
        /// Kind of file that is expected there.
        expected: &'static str,
    },
    /// The final name exists.
    #[error("{} exists already", path.display())]
    Exists { path: PathBuf },
    /// The file is not a regular one.
    #[error("{} is a {found}, expected a regular file or nothing; name the file itself, in a separate directory", path.display())]
    NotRegular { path: PathBuf, found: &'static str },
    /// The path does not end in a file name.
    #[error("{:?} does not name a file; give a directory and a file name", path)]
    NoName { path: PathBuf },
    /// The directory does not exist.
    #[error("{}: {} is not a directory; create it, or correct the path", path.display(), directory.display())]
    NoDirectory { path: PathBuf, directory: PathBuf },
    /// The filesystem is read-only.
    #[error("{}: {op}: the filesystem is mounted read-only; choose another directory, or remount it", path.display())]
    ReadOnly { op: &'static str, path: PathBuf },
    /// The user lacks permission.
    #[error("{}: {op}: not permitted; write as the directory's owner, or choose another directory", path.display())]
    Permission { op: &'static str, path: PathBuf },
    /// The filesystem or the user's quota is full.
    #[error("{}: {op}: no space left; free some, or choose another filesystem", path.display())]
    NoSpace { op: &'static str, path: PathBuf },
    /// The filesystem does not support `flock`.
    #[error("{}: this filesystem cannot lock files ({source}); choose a local one, or mount it with locking", path.display())]
    NoLocks { path: PathBuf, source: std::io::Error },
    /// Another process removed or replaced the partial.
    #[error("{} was removed or replaced while it was being written; repeat the command", partial.display())]
    PartialGone { partial: PathBuf },
    /// Any other error of the kernel.
    #[error("{}: {op}: {source}", path.display())]
    Io { op: &'static str, path: PathBuf, source: std::io::Error },
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
