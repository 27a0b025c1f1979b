//! Common code of all stream sockets.
//!
//! Opening one is up to the modules of the families. A stream socket of a family without a module (vsock), given as
//! `fd:N`, uses this alone.
//!
//! The descriptor is a blocking one. Timeouts are the kernel's (`SO_RCVTIMEO`, `SO_SNDTIMEO`), which rounds them up to
//! its clock tick; waking is `shutdown(2)`.

use crate::channel::{check_recv, check_send, check_timeouts};
use crate::sys::io;
use crate::{
    CallCounters, Capabilities, Channel, Error, Flushed, IoBuf, IoBufMut, RecvFlags, Result, SendFlags,
};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Capabilities of every stream socket.
pub(crate) const STREAM: Capabilities = Capabilities::SEND
    .union(Capabilities::RECV)
    .union(Capabilities::BIDIRECTIONAL)
    .union(Capabilities::SHUTDOWN)
    .union(Capabilities::PEEK);

/// A connected stream socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    peer: String,
    capabilities: Capabilities,
    calls: Arc<CallCounters>,
}

impl Socket {
    /// Takes a connected stream socket and makes it a blocking one.
    pub(crate) fn new(fd: OwnedFd, peer: String, capabilities: Capabilities) -> Result<Self> {
        rustix::io::ioctl_fionbio(&fd, false).map_err(|errno| Error::io("fionbio", &peer, errno))?;
        Ok(Self { fd, peer, capabilities, calls: Arc::default() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// One call that is not checked, with the system's own answer.
    pub(crate) fn send_once(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> std::io::Result<usize> {
        self.calls.count_send(bufs.len());
        io::sendmsg(self.fd(), bufs, flags)
    }

    /// The timeout that is set for one direction.
    pub(crate) fn timeout(&self, id: Timeout) -> Option<Duration> {
        socket_timeout(&self.fd, id).ok().flatten()
    }

    /// The error of a call; it is a timeout if that timeout was set.
    pub(crate) fn failed(&self, op: &'static str, id: Timeout, source: std::io::Error) -> Error {
        match self.timeout(id) {
            Some(after) if source.kind() == std::io::ErrorKind::WouldBlock => {
                Error::timeout(op, &self.peer, after)
            }
            _ => Error::io(op, &self.peer, source),
        }
    }
}

impl Channel for Socket {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        check_send(&self.peer, self.capabilities, flags)?;
        self.send_once(bufs, flags).map_err(|source| self.failed("send", Timeout::Send, source))
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        check_recv(&self.peer, self.capabilities, flags)?;
        self.calls.count_receive(bufs.len());
        io::recvmsg(self.fd(), bufs, flags.contains(RecvFlags::PEEK))
            .map_err(|source| self.failed("recv", Timeout::Recv, source))
    }

    fn flush(&self) -> Result<Flushed> {
        Ok(Flushed::Done)
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        match rustix::net::shutdown(&self.fd, how) {
            // The peer closed first: there is nothing to shut down and no blocked thread.
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(errno) => Err(Error::io("shutdown", &self.peer, errno)),
        }
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> Result<()> {
        check_timeouts(&self.peer, [recv, send])?;
        set_socket_timeout(&self.fd, Timeout::Recv, recv)
            .and_then(|()| set_socket_timeout(&self.fd, Timeout::Send, send))
            .map_err(|errno| Error::io("set_timeouts", &self.peer, errno))
    }

    fn calls(&self) -> Option<Arc<CallCounters>> {
        Some(Arc::clone(&self.calls))
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd())
    }
}
