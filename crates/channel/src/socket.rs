//! Common code of all stream sockets.
//!
//! The modules of the families open sockets. A stream socket of a family without a module (vsock), given as
//! `fd:N`, uses this alone.
//!
//! The descriptor is a blocking one. Timeouts are the kernel's (`SO_RCVTIMEO`, `SO_SNDTIMEO`), which rounds
//! them up to its clock tick; waking is `shutdown(2)`.

mod channel;

use crate::sys::io;
use crate::{CallCounters, Capabilities, Error, IoBuf, Result, SendFlags};
use rustix::net::sockopt::{Timeout, socket_timeout};
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

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// The timeout that is set for one direction.
    pub(crate) fn timeout(&self, id: Timeout) -> Option<Duration> {
        socket_timeout(&self.fd, id).ok().flatten()
    }

    /// The error of a call; a timeout if one was set.
    pub(crate) fn failed(&self, op: &'static str, id: Timeout, source: std::io::Error) -> Error {
        match self.timeout(id) {
            Some(after) if source.kind() == std::io::ErrorKind::WouldBlock => {
                Error::timeout(op, &self.peer, after)
            }
            _ => Error::io(op, &self.peer, source),
        }
    }
}
