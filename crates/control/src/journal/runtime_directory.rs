//! Directory of journals and records: `/run/towline/journal` for root, else
//! `$XDG_RUNTIME_DIR/towline/journal`.
//!
//! The files in it decide about changes of QEMUs and the removal of files. So each directory of the path,
//! from `/run` or `XDG_RUNTIME_DIR` on, must be our own, writable only by us, and not a symbolic link; the
//! last one is private (0700). Each is opened relative to its parent, so none can be replaced in between.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Dir, Mode, OFlags, fchmod, fstat, mkdirat, openat, stat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Directory of root's runtime files.
const ROOT: &str = "/run";
/// Variable with the directory of other users' runtime files.
const VARIABLE: &str = "XDG_RUNTIME_DIR";
/// Subdirectories: towline's, which others may enter (it also has sockets), and the journals', which they may
/// not.
const LEVELS: [(&str, u32); 2] = [("towline", 0o755), ("journal", 0o700)];
/// Write permission for others.
const WRITABLE: u32 = 0o022;
/// Any permission for others.
const ANY: u32 = 0o077;
/// Opens a directory, but no symbolic link, to check it and to open files below it.
const PASS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Opens it to list and change its entries.
const READ: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Maximum number of files that are listed: enough for a thousand QEMUs and their moves.
const NAMES_MAX: usize = 100_000;

/// Error of the directory of journals.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirectoryError {
    /// Only root has a runtime directory without this variable.
    #[error("no directory for journals: XDG_RUNTIME_DIR is not set to an absolute path")]
    NoRuntimeDirectory,
    /// Another user could write there.
    #[error("directory {path} is not safe for journals: {reason}; remove it or correct its owner and mode")]
    Unsafe { path: PathBuf, reason: String },
    /// The directory cannot be created or opened.
    #[error("directory {path} for journals: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// The directory of journals, created if it was missing.
#[derive(Clone, Debug)]
pub struct RuntimeDirectory {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

impl RuntimeDirectory {
    /// Opens the directory of this user.
    ///
    /// # Errors
    /// There is none that can be used.
    pub fn open() -> Result<Self, RuntimeDirectoryError> {
        if geteuid().is_root() {
            return Self::below(Path::new(ROOT));
        }
        match std::env::var_os(VARIABLE).map(PathBuf::from) {
            Some(path) if path.is_absolute() => Self::below(&path),
            _ => Err(RuntimeDirectoryError::NoRuntimeDirectory),
        }
    }

    /// Opens the directory below a runtime directory.
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
        // Only after the checks: a confined process may read no other directory.
        let fd = openat(&fd, ".", READ, Mode::empty()).map_err(|errno| refused(&path, errno))?;
        Ok(Self { fd: Arc::new(fd), path })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if its path still leads to it: files in one that was removed or mounted over are not
    /// found.
    pub(crate) fn is_in_place(&self) -> bool {
        match (fstat(&self.fd), stat(&self.path)) {
            (Ok(open), Ok(named)) => (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino),
            _ => false,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// Names of its files.
    pub(crate) fn names(&self) -> Vec<String> {
        let Ok(entries) = Dir::read_from(&self.fd) else { return Vec::new() };
        let names = entries
            .take(NAMES_MAX)
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
        names.collect()
    }
}

/// Opens a subdirectory, and creates it if it is missing. Opening comes first: a confined process may not
/// create it.
fn level(parent: &OwnedFd, name: &str, mode: u32) -> Result<OwnedFd, Errno> {
    match openat(parent, name, PASS, Mode::empty()) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        // Independently of the umask.
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
