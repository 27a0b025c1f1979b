//! A listening Unix socket and its file.
//!
//! A socket file outlives its listener if that was killed. The next one to bind tries to connect: without a
//! listener, the file is removed and created again. Two processes that do so at once must not remove each
//! other's new file, so both hold a lock (`flock`) on the directory: it needs no extra file, and the kernel
//! drops it with the process.
//!
//! ```text
//!   lock directory → bind ─ok→ listen → remember the file's inode → unlock
//!                     └ EADDRINUSE → not a socket, or connected? InUse
//!                                    refused? remove it, bind once more
//! ```
//!
//! Limits: another process's listener that is between its own bind and listen seems to be a stale file.

use crate::unix::{socket, socket_address, try_connect};
use crate::{Error, Result};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Number of connections that may wait to be accepted; the kernel limits it to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
/// Time limit for the lock of other processes that bind in the same directory. They hold it for microseconds,
/// or for as long as a busy host gives them no processor meanwhile.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// A listening socket; its file is removed with it, unless it has been replaced.
#[derive(Debug)]
pub(crate) struct UnixListener {
    _file: SocketFile,
    fd: OwnedFd,
}

impl UnixListener {
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let address = socket_address(path)?;
        let io = |op, error: io::Error| Error::io(op, &format!("unix:{}", path.display()), error);
        let fd = socket().map_err(|errno| io("socket", errno.into()))?;
        let _lock = lock_directory(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Error::NoDirectory { path: path.to_owned() },
            _ => io("listen", error),
        })?;
        match net::bind(&fd, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                net::bind(&fd, &address)
            }
            other => other,
        }
        .map_err(|errno| io("bind", errno.into()))?;
        net::listen(&fd, BACKLOG).map_err(|errno| io("listen", errno.into()))?;
        let file = SocketFile::new(path).map_err(|error| io("stat", error))?;
        Ok(Self { _file: file, fd })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// File of a listening Unix socket. It is removed on drop, unless another socket has replaced it. Drop it before the socket: then the number of
/// its inode is not that of a file that replaces it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// The file of a socket that has just been bound to this path, under [`lock_directory`].
    ///
    /// # Errors
    /// It is not there.
    pub fn new(path: &Path) -> io::Result<Self> {
        let stat = rustix::fs::lstat(path)?;
        Ok(Self { path: path.to_owned(), device: stat.st_dev, inode: stat.st_ino })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own = |stat: rustix::fs::Stat| stat.st_dev == self.device && stat.st_ino == self.inode;
        // Without the lock there is a race only if the file is replaced at this very moment.
        let _lock = lock_directory(&self.path);
        if rustix::fs::lstat(&self.path).is_ok_and(is_own) {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn remove_stale(path: &Path, address: &net::SocketAddrUnix) -> Result<()> {
    let in_use = |by| Err(Error::InUse { path: path.to_owned(), by });
    match rustix::fs::lstat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return in_use("a file that is not a socket");
        }
        Err(Errno::NOENT) => return Ok(()),
        Ok(_) | Err(_) => {}
    }
    match try_connect(address) {
        Ok(_) | Err(Errno::AGAIN) => in_use("a listening process"),
        Err(Errno::CONNREFUSED) => match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::io("remove stale", &format!("unix:{}", path.display()), errno)),
        },
        Err(Errno::PROTOTYPE) => in_use("a socket of another type"),
        Err(_) => in_use("a socket that we may not connect to"),
    }
}

/// Locks the directory of a socket, for as long as the descriptor is open: another process that binds at the same time would take a socket that
/// does not listen yet for that of a process that has ended, and remove it.
///
/// # Errors
/// The directory cannot be opened, or another process has had its lock for 10 s (`EAGAIN`).
pub fn lock_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty())?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(fd),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(LOCK_INTERVAL),
            Err(errno) => return Err(errno.into()),
        }
    }
}
