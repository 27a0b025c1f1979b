//! The calls that make sockets, none of which waits.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, FileType, lstat, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, send, shutdown, socket_with, socketpair, sockopt,
};

use crate::packet::{Kind, Shut};
use crate::rules::Place;
use crate::sys::VsockAddress;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A socket of the host's side.
#[derive(Debug)]
pub(crate) struct HostSocket {
    fd: OwnedFd,
    kind: Kind,
    is_tcp: bool,
    /// Whoever connected waits for `OK`.
    pub(super) convention: bool,
}

/// How a connection that was begun stands.
#[derive(Debug)]
pub(super) enum Begun {
    Connected(HostSocket),
    /// Writable when it is connected, or is not.
    Waits(HostSocket),
    /// The listener has no room for now.
    Full,
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket_type(kind: Kind) -> SocketType {
    match kind {
        Kind::Stream => SocketType::STREAM,
        Kind::Seqpacket => SocketType::SEQPACKET,
    }
}

impl HostSocket {
    pub(super) fn new(fd: OwnedFd, kind: Kind, is_tcp: bool, convention: bool) -> Self {
        if is_tcp {
            // Packets of the guest's go out as they come; whoever wants them joined has done so.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
        }
        Self { fd, kind, is_tcp, convention }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Begins to connect.
    pub(super) fn begin(place: &Place, kind: Kind) -> io::Result<Begun> {
        let (fd, connected) = match place {
            Place::Unix(path) => {
                let fd = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
                let connected = connect(&fd, &SocketAddrUnix::new(path)?);
                (fd, connected)
            }
            Place::Tcp(address) => {
                if kind != Kind::Stream {
                    return Err(Errno::PROTOTYPE.into());
                }
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
                let connected = connect(&fd, address);
                (fd, connected)
            }
            Place::Vsock { cid, port } => {
                let fd = socket_with(AddressFamily::VSOCK, socket_type(kind), FLAGS, None)?;
                let connected = connect(&fd, &VsockAddress::new(*cid, *port));
                (fd, connected)
            }
        };
        let socket = Self::new(fd, kind, matches!(place, Place::Tcp(_)), false);
        match connected {
            Ok(()) => Ok(Begun::Connected(socket)),
            Err(Errno::INPROGRESS | Errno::INTR) => Ok(Begun::Waits(socket)),
            Err(Errno::AGAIN) => Ok(Begun::Full),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Two that are connected with each other.
    pub(super) fn pair(kind: Kind) -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        Ok((Self::new(one, kind, false, false), Self::new(other, kind, false, true)))
    }

    /// What became of a connection that waited.
    pub(super) fn outcome(&self) -> io::Result<()> {
        sockopt::socket_error(&self.fd)??;
        Ok(())
    }

    /// Looks at what is there without taking it.
    pub(super) fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.fd, bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?.0)
    }

    /// Takes so many bytes that were looked at; of messages, one.
    pub(super) fn take(&self, count: usize) -> io::Result<()> {
        recv(&self.fd, &mut vec![0u8; count][..], RecvFlags::DONTWAIT)?;
        Ok(())
    }

    /// Sends a line, which always fits into a socket that nobody has written to.
    pub(super) fn say(&self, line: &str) -> io::Result<()> {
        let sent = send(&self.fd, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent < line.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
    }

    /// The length of the next message, 0 at the end. Empty ones, which vsock does not carry, are passed over.
    pub(super) fn next_message(&self) -> io::Result<usize> {
        loop {
            let (_, len) =
                recv(&self.fd, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
            if len > 0 || self.kind == Kind::Stream || self.is_at_end()? {
                return Ok(len);
            }
            self.take(1)?;
        }
    }

    /// Of one that gives nothing: whether that is not just an empty message.
    fn is_at_end(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let ended = fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        Ok(ended && rustix::io::ioctl_fionread(&self.fd)? == 0)
    }

    pub(super) fn shutdown(&self, what: Shut) {
        let how = match (what.contains(Shut::SEND), what.contains(Shut::RECEIVE)) {
            (true, true) => rustix::net::Shutdown::Both,
            (true, false) => rustix::net::Shutdown::Write,
            (false, true) => rustix::net::Shutdown::Read,
            (false, false) => return,
        };
        // Its other end may have gone: that is what was wanted.
        let _ = shutdown(&self.fd, how);
    }

    /// Lets its other end see that this is no orderly end.
    pub(super) fn make_reset(&self) {
        if self.is_tcp {
            let _ = sockopt::set_socket_linger(&self.fd, Some(std::time::Duration::ZERO));
        }
    }
}

/// A socket that listens. Its file goes with it.
#[derive(Debug)]
pub(crate) struct Listening {
    fd: OwnedFd,
    kind: Kind,
    is_tcp: bool,
    path: Option<std::path::PathBuf>,
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Listening {
    /// Listens at a path. What another process left there is replaced; a socket that somebody listens at is not.
    pub(crate) fn unix(path: &Path, kind: Kind) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let fd = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        if let Err(errno) = bind(&fd, &address) {
            let is_socket =
                lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
            let probe = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
            if errno != Errno::ADDRINUSE || !is_socket || connect(&probe, &address) != Err(Errno::CONNREFUSED)
            {
                return Err(errno.into());
            }
            unlinkat(CWD, path, rustix::fs::AtFlags::empty())?;
            bind(&fd, &address)?;
        }
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind, is_tcp: false, path: Some(path.to_owned()) })
    }

    /// Listens at an address.
    pub(crate) fn tcp(address: &SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        bind(&fd, address)?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: Kind::Stream, is_tcp: true, path: None })
    }

    /// Listens at a port of the host's own AF_VSOCK.
    fn vsock(cid: Option<u32>, port: u32) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::VSOCK, SocketType::STREAM, FLAGS, None)?;
        bind(&fd, &VsockAddress::new(cid, port))?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: Kind::Stream, is_tcp: false, path: None })
    }

    pub(crate) fn place(place: &Place) -> io::Result<Self> {
        match place {
            Place::Vsock { cid, port } => Self::vsock(*cid, *port),
            Place::Unix(path) => Self::unix(path, Kind::Stream),
            Place::Tcp(address) => Self::tcp(address),
        }
    }

    /// Who comes next; `convention`: who will say where to.
    pub(super) fn accept(&self, convention: bool) -> io::Result<HostSocket> {
        let fd = accept_with(&self.fd, FLAGS)?;
        Ok(HostSocket::new(fd, self.kind, self.is_tcp, convention))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = unlinkat(CWD, path, rustix::fs::AtFlags::empty());
        }
    }
}
