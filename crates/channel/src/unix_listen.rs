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
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

impl UnixListener {
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let address = socket_address(path)?;
        let io = |op, errno: Errno| Error::io(op, &format!("unix:{}", path.display()), errno);
        let fd = socket().map_err(|errno| io("socket", errno))?;
        let _lock = lock_directory(path).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => Error::NoDirectory { path: path.to_owned() },
            errno => io("listen", errno),
        })?;
        match net::bind(&fd, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                net::bind(&fd, &address)
            }
            other => other,
        }
        .map_err(|errno| io("bind", errno))?;
        net::listen(&fd, BACKLOG).map_err(|errno| io("listen", errno))?;
        let identity = identity(path).map_err(|errno| io("stat", errno))?;
        Ok(Self { fd, path: path.to_owned(), identity })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        // Without the lock there is a race only if the file is replaced at this very moment.
        let _lock = lock_directory(&self.path);
        if identity(&self.path) == Ok(self.identity) {
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

/// Device and inode of the file at the path itself.
fn identity(path: &Path) -> Result<(u64, u64), Errno> {
    rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Locks the directory of a socket, for as long as the descriptor is open: another process that binds at the same time would take a socket that
/// does not listen yet for that of a process that has ended, and remove it.
///
/// # Errors
/// The directory cannot be opened, or another process has had its lock for 10 s (`EAGAIN`).
pub fn lock_directory(path: &Path) -> Result<OwnedFd, Errno> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty())?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(fd),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(LOCK_INTERVAL),
            Err(errno) => return Err(errno),
        }
    }
}
