//! A socket as a channel.

use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::Socket;
use crate::flags::{check_recv, check_send, check_timeouts};
use crate::sys::io;
use crate::{CallCounters, Capabilities, Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};

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
        io::recvmsg(self.fd(), bufs, flags).map_err(|source| self.failed("recv", Timeout::Recv, source))
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
