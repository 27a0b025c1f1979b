//! Where journals are: `/run/towline/journal` for root, else `$XDG_RUNTIME_DIR/towline/journal`.
//!
//! What is recorded there is done to QEMUs, and files are removed by it. So each directory on the way, from `/run` or `XDG_RUNTIME_DIR`
//! on, must be our own and writable by no one else, and none is a symbolic link; the last one is for us alone (0700). Each is opened
//! below the one before, so that nothing can be put in between.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Dir, Mode, OFlags, fchmod, fstat, mkdirat, openat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Where root's runtime files are.
const ROOT: &str = "/run";
/// Names where those of other users are.
const VARIABLE: &str = "XDG_RUNTIME_DIR";
/// Below them: towline's, which others may enter (it has sockets too), and its journals, which they may not.
const LEVELS: [(&str, u32); 2] = [("towline", 0o755), ("journal", 0o700)];
/// Write permission of others.
const WRITABLE: u32 = 0o022;
/// Any permission of others.
const ANY: u32 = 0o077;
/// Opens a directory, but no symbolic link, to look at it and to open what is in it.
const PASS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// The same, to list it and to change what is in it.
const READ: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Maximum number of files that are looked at: those of a thousand QEMUs and their moves fit many times.
const NAMES_MAX: usize = 100_000;

/// Why journals cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeDirectoryError {
    /// Only root has a runtime directory without it.
    #[error("no directory for journals: XDG_RUNTIME_DIR is not set to an absolute path")]
    NoRuntimeDirectory,
    /// Somebody else could write there.
    #[error("directory {path} is not safe for journals: {reason}; remove it or correct its owner and mode")]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It cannot be made or opened.
    #[error("directory {path} for journals: {source}")]
    Io {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// The directory of journals, made if it was missing.
#[derive(Clone, Debug)]
pub struct RuntimeDirectory {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

impl RuntimeDirectory {
    /// That of this user.
    ///
    /// # Errors
    /// Why there is none that can be used.
    pub fn open() -> Result<Self, RuntimeDirectoryError> {
        if geteuid().is_root() {
            return Self::below(Path::new(ROOT));
        }
        match std::env::var_os(VARIABLE).map(PathBuf::from) {
            Some(path) if path.is_absolute() => Self::below(&path),
            _ => Err(RuntimeDirectoryError::NoRuntimeDirectory),
        }
    }

    /// That below a runtime directory.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn below(base: &Path) -> Result<Self, RuntimeDirectoryError> {
        let mut path = base.to_owned();
        let mut fd = openat(CWD, base, PASS, Mode::empty()).map_err(|errno| refused(&path, errno))?;
        check(&fd, &path, WRITABLE)?;
        for (name, mode) in LEVELS {
            path.push(name);
            fd = level(&fd, name, mode).map_err(|errno| refused(&path, errno))?;
            check(&fd, &path, if mode & ANY == 0 { ANY } else { WRITABLE })?;
        }
        // Only now that it is known to be safe: a confined process may read no other one.
        let fd = openat(&fd, ".", READ, Mode::empty()).map_err(|errno| refused(&path, errno))?;
        Ok(Self { fd: Arc::new(fd), path })
    }

    /// The same directory by a descriptor that cannot be synced: fsync refuses one of `O_PATH`.
    #[cfg(test)]
    pub(crate) fn unsyncable(&self) -> Self {
        let fd = openat(&self.fd, ".", PASS, Mode::empty()).expect("the directory is there");
        Self { fd: Arc::new(fd), path: self.path.clone() }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// The names of its files.
    pub(crate) fn names(&self) -> Vec<String> {
        let Ok(entries) = Dir::read_from(&self.fd) else { return Vec::new() };
        let names = entries
            .take(NAMES_MAX)
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
        names.collect()
    }
}

/// Opens a directory below another one, and makes it if it is missing. It is opened first: a confined process may not make it.
fn level(parent: &OwnedFd, name: &str, mode: u32) -> Result<OwnedFd, Errno> {
    match openat(parent, name, PASS, Mode::empty()) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        // Whatever the umask is.
        Ok(()) => fchmod(openat(parent, name, READ, Mode::empty())?, Mode::from_raw_mode(mode))?,
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    openat(parent, name, PASS, Mode::empty())
}

fn check(fd: &OwnedFd, path: &Path, forbidden: u32) -> Result<(), RuntimeDirectoryError> {
    let stat = fstat(fd).map_err(|errno| refused(path, errno))?;
    let (own, mode) = (geteuid().as_raw(), stat.st_mode & 0o7777);
    let unsafe_for = |reason| Err(RuntimeDirectoryError::Unsafe { path: path.to_owned(), reason });
    if stat.st_uid != own {
        return unsafe_for(format!("its owner is user {}, expected {own}", stat.st_uid));
    }
    if mode & forbidden != 0 {
        return unsafe_for(format!("its mode is {mode:04o}, expected {:04o}", mode & !forbidden));
    }
    Ok(())
}

fn refused(path: &Path, errno: Errno) -> RuntimeDirectoryError {
    let path = path.to_owned();
    match errno {
        Errno::LOOP | Errno::NOTDIR => {
            RuntimeDirectoryError::Unsafe { path, reason: "it is a symbolic link or no directory".into() }
        }
        errno => RuntimeDirectoryError::Io { path, source: errno.into() },
    }
}
