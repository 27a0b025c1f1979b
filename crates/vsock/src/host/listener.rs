//! Listening sockets of the host.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, lstat, unlink};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketType as KernelSocketType, acceptfrom_with, bind, connect, listen,
    socket_with, sockopt,
};

use super::socket::{FLAGS, Family, HostSocket, socket_type};
use super::socket_fd::SocketFd;
use towline_channel::{SocketFile, lock_directory, refuse_descriptors};

use crate::packet::SocketType;
use crate::rules::HostAddress;
use crate::sys::VsockAddress;

/// Length of the backlog.
const BACKLOG: i32 = 1024;

/// A listening socket. The file of a Unix socket is removed with it.
#[derive(Debug)]
pub(crate) struct HostListener {
    /// Of a Unix socket.
    file: Option<SocketFile>,
    fd: OwnedFd,
    kind: SocketType,
}

impl AsFd for HostListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl HostListener {
    /// Listens on an address. Only streams can be forwarded.
    pub(crate) fn bind(address: &HostAddress) -> io::Result<Self> {
        match address {
            HostAddress::Vsock { cid, port } => Self::bind_vsock(*cid, *port),
            HostAddress::Unix(path) => Self::bind_unix(path, SocketType::Stream),
            HostAddress::Tcp(address) => Self::bind_tcp(address),
        }
    }

    /// Listens on a path. The socket of a process that has ended is replaced; one on which a process listens
    /// is not.
    pub(crate) fn bind_unix(path: &Path, kind: SocketType) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let fd = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        // A client may send before it is accepted. Without this the descriptors are received, and closed
        // elsewhere.
        let _ = refuse_descriptors(fd.as_fd());
        let _lock = lock_directory(path)?;
        if let Err(errno) = bind(&fd, &address) {
            let is_socket =
                lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
            let probe = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
            if errno != Errno::ADDRINUSE || !is_socket || connect(&probe, &address) != Err(Errno::CONNREFUSED)
            {
                return Err(errno.into());
            }
            unlink(path)?;
            bind(&fd, &address)?;
        }
        listen(&fd, BACKLOG)?;
        let file = Some(SocketFile::new(path)?);
        Ok(Self { fd, kind, file })
    }

    fn bind_tcp(address: &SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = socket_with(family, KernelSocketType::STREAM, FLAGS, None)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        bind(&fd, address)?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: SocketType::Stream, file: None })
    }

    fn bind_vsock(cid: Option<u32>, port: u32) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::VSOCK, KernelSocketType::STREAM, FLAGS, None)?;
        bind(&fd, &VsockAddress::new(cid, port))?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: SocketType::Stream, file: None })
    }

    /// Accepts a connection.
    pub(super) fn accept(&self) -> io::Result<HostSocket> {
        let (fd, from) = acceptfrom_with(&self.fd, FLAGS)?;
        // Clients of a Unix socket have no address.
        let is_tcp = from.is_some_and(|from| SocketAddr::try_from(from).is_ok());
        let family = if is_tcp { Family::Tcp } else { Family::Other };
        // Those of a Unix socket inherit the listener's refusal of descriptors; this reports whether the
        // kernel has it.
        let fd = if self.file.is_some() { SocketFd::unix(fd) } else { SocketFd::new(fd) };
        Ok(HostSocket::new(fd, self.kind, family))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_socket_that_does_not_listen_yet_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let lock = lock_directory(&path).unwrap();
        let other = socket_with(AddressFamily::UNIX, KernelSocketType::STREAM, FLAGS, None).unwrap();
        bind(&other, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let own = path.clone();
        let waits = std::thread::spawn(move || HostListener::bind_unix(&own, SocketType::Stream));
        let until = Instant::now() + Duration::from_millis(100);
        while !waits.is_finished() && Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(!waits.is_finished(), "it has not waited for the lock");
        listen(&other, BACKLOG).unwrap();
        drop(lock);
        let error = waits.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE));
        std::os::unix::net::UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_file_that_another_socket_has_replaced_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = HostListener::bind_unix(&path, SocketType::Stream).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = HostListener::bind_unix(&path, SocketType::Stream).unwrap();
        drop(first);
        assert!(path.exists(), "the file of the second one");
        drop(second);
        assert!(!path.exists());
    }
}
