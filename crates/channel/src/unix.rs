//! Unix stream sockets, which also carry file descriptors.

use crate::channel::forward_channel;
use crate::flags::{check_recv, check_send};
use crate::socket::{STREAM, Socket};
use crate::wait::Deadline;
use crate::{Address, Capabilities, Channel, Error, FDS_MAX, RecvFlags, Result, SendFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::Timeout;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Maximum number of descriptors with one message (`SCM_MAX_FD`).
const PASSED_MAX: usize = 253;
/// Interval between attempts to connect to a listener whose queue is full: the kernel has no event for it.
const QUEUE_INTERVAL: Duration = Duration::from_millis(10);

/// A connected Unix stream socket.
#[derive(Debug)]
pub struct UnixChannel {
    socket: Socket,
}

impl UnixChannel {
    /// Takes a connected Unix stream socket. `peer` is the name of the other end in messages, such as
    /// `unix:/run/x`.
    ///
    /// # Errors
    /// [`Error::Io`] if it is not one.
    pub fn new(fd: OwnedFd, peer: impl Into<String>) -> Result<Self> {
        Ok(Self { socket: Socket::new(fd, peer.into(), STREAM | Capabilities::FD_PASSING)? })
    }

    /// Two ends of one connection, for two threads or a child process.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has no descriptor left.
    pub fn pair() -> Result<(Self, Self)> {
        let (a, b) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| Error::io("socketpair", "this process", errno))?;
        Ok((Self::new(a, "unix:pair:1")?, Self::new(b, "unix:pair:0")?))
    }
}

impl Channel for UnixChannel {
    forward_channel!(socket: peer, calls, capabilities, send, recv, flush, shutdown, set_timeouts, as_fd);

    fn splice_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_fd()
    }

    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        check_send(self.peer(), self.capabilities(), SendFlags::empty())?;
        if bytes.is_empty() {
            return Err(Error::unsupported(
                self.peer(),
                "sending descriptors without a byte to attach them to",
            ));
        }
        if fds.len() > FDS_MAX {
            return Err(Error::TooManyFds { peer: self.peer().to_owned(), count: fds.len(), limit: FDS_MAX });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = ancillary.push(SendAncillaryMessage::ScmRights(fds));
            assert!(fits, "the space is for FDS_MAX descriptors");
        }
        let flags = net::SendFlags::NOSIGNAL;
        retry_on_intr(|| net::sendmsg(self.socket.fd(), &[IoSlice::new(bytes)], &mut ancillary, flags))
            .map_err(|errno| self.socket.failed("send_fds", Timeout::Send, errno.into()))
    }

    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        check_recv(self.peer(), self.capabilities(), RecvFlags::empty())?;
        // The kernel closes those that do not fit in this call, and the last close of one may wait.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = net::RecvFlags::CMSG_CLOEXEC;
        let message = retry_on_intr(|| {
            net::recvmsg(self.socket.fd(), &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)
        })
        .map_err(|errno| self.socket.failed("recv_fds", Timeout::Recv, errno.into()))?;
        let before = fds.len();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() - before > FDS_MAX {
            return Err(Error::FdsTruncated { peer: self.peer().to_owned(), limit: FDS_MAX });
        }
        Ok(message.bytes)
    }
}

/// Connects to the socket at `path`.
pub(crate) fn connect(path: &Path, deadline: &Deadline<'_>) -> Result<UnixChannel> {
    loop {
        match try_connect(&socket_address(path)?) {
            Ok(fd) => return UnixChannel::new(fd, deadline.peer()),
            Err(Errno::AGAIN) if deadline.remaining().is_zero() => return Err(deadline.timeout()),
            Err(Errno::AGAIN) => deadline.pause(QUEUE_INTERVAL)?,
            Err(errno) => return Err(deadline.io(errno)),
        }
    }
}

/// One attempt that does not block: a Unix socket connects at once, or its queue is full (`EAGAIN`), or it
/// never will.
pub(super) fn try_connect(address: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let fd = socket()?;
    net::connect(&fd, address)?;
    Ok(fd)
}

pub(super) fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

pub(super) fn socket_address(path: &Path) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|_| {
        Address::Unix(path.to_owned())
            .bad("a socket's path has 1 to 107 bytes and no NUL; choose a shorter one")
    })
}
