//! Bytes to and from one Unix socket, with deadlines and file descriptors. Independent of JSON.
//!
//! Each call is non-blocking (`MSG_DONTWAIT`) and then waits in `poll`, so a caller's stream keeps its mode.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::error::{DisconnectReason, Error};

/// Maximum number of descriptors per command; QEMU takes one.
pub(crate) const FDS_MAX: usize = 16;
/// Time from a socket's creation until its process listens, at most, on a loaded machine.
const LISTENS_WITHIN: Duration = Duration::from_secs(1);
/// Interval between attempts to connect while the socket's backlog is full.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(20);
const READ_BYTES_MAX: usize = 64 << 10;

/// Returns true for a file to which the kernel refuses connections because it is not a socket.
fn is_other_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket())
}

/// Returns true if connecting again may succeed: the backlog is full, or the socket was made a moment ago, as a process makes it
/// before it listens.
fn may_listen_soon(errno: Errno, path: &Path) -> bool {
    let is_new = || {
        let made = std::fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
        made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age < LISTENS_WITHIN))
    };
    errno == Errno::AGAIN || errno == Errno::CONNREFUSED && !is_other_file(path) && is_new()
}

/// The process that last called `listen` on a socket (`SO_PEERCRED`).
///
/// That is QEMU for a socket that QEMU listens on, also if another process created it, and the proxy where
/// there is one: this does not prove whose monitor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id in the caller's pid namespace; 0 where it has none there.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

#[derive(Debug)]
pub(crate) struct MonitorConnection {
    stream: UnixStream,
    /// Readable once waits are to end.
    interrupt: Option<Arc<OwnedFd>>,
    scratch: Box<[u8]>,
}

/// Reason for which a send or a receive ended.
#[derive(Debug)]
pub(crate) enum Interruption {
    /// The deadline, after this many bytes.
    Deadline {
        sent_bytes: usize,
    },
    /// The caller's descriptor became readable.
    Cancelled,
    Disconnected(DisconnectReason),
}

impl MonitorConnection {
    pub(crate) fn new(stream: UnixStream, interrupt: Option<Arc<OwnedFd>>) -> Self {
        Self { stream, interrupt, scratch: vec![0; READ_BYTES_MAX].into_boxed_slice() }
    }

    pub(crate) fn set_interrupt(&mut self, interrupt: Option<Arc<OwnedFd>>) {
        self.interrupt = interrupt;
    }

    /// Connects without ever blocking in `connect`, which for a Unix socket waits for as long as its queue is
    /// full.
    pub(crate) fn connect(
        path: &Path,
        within: Duration,
        interrupt: Option<Arc<OwnedFd>>,
    ) -> Result<Self, Error> {
        let socket = path.display().to_string();
        let fail = |errno: Errno| Error::Connect { socket: socket.clone(), source: errno.into() };
        let address = SocketAddrUnix::new(path).map_err(fail)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd: OwnedFd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(fail)?;
        let connection = Self::new(UnixStream::from(fd), interrupt);
        let started = Instant::now();
        loop {
            match rustix::net::connect(&connection.stream, &address) {
                Ok(()) => return Ok(connection),
                Err(Errno::INTR) => {}
                Err(errno) if started.elapsed() < within && may_listen_soon(errno, path) => {
                    if connection.is_cancelled_within(CONNECT_RETRY_INTERVAL) {
                        return Err(Error::Cancelled { socket });
                    }
                }
                Err(Errno::AGAIN) => return Err(Error::Busy { socket, waited: started.elapsed() }),
                Err(Errno::NOENT) => return Err(Error::Missing { socket }),
                Err(Errno::CONNREFUSED) if is_other_file(path) => {
                    return Err(Error::Connect { socket, source: io::Error::other("it is not a socket") });
                }
                Err(Errno::CONNREFUSED) => return Err(Error::Refused { socket }),
                Err(errno) => return Err(fail(errno)),
            }
        }
    }

    /// Sends all of `bytes`, and `fds` with the first of them.
    pub(crate) fn send(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        until: Instant,
    ) -> Result<(), Interruption> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut sent = 0;
        while sent < bytes.len() {
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() {
                let fitted = ancillary.push(SendAncillaryMessage::ScmRights(fds));
                assert!(fitted, "callers pass at most FDS_MAX descriptors");
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let rest = [IoSlice::new(&bytes[sent..])];
            match rustix::net::sendmsg(&self.stream, &rest, &mut ancillary, flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // Half a command would make the next one unreadable.
                    let interrupt = self.interrupt.as_deref().filter(|_| sent == 0);
                    if !self.wait(PollFlags::OUT, interrupt, until)? {
                        return Err(Interruption::Deadline { sent_bytes: sent });
                    }
                }
                Err(errno) => return Err(disconnected(errno)),
            }
        }
        Ok(())
    }

    /// The next bytes. With a deadline in the past, only the bytes already received, by one system call.
    pub(crate) fn receive(&mut self, until: Instant) -> Result<&[u8], Interruption> {
        loop {
            match rustix::net::recv(&self.stream, &mut self.scratch[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Interruption::Disconnected(DisconnectReason::PeerClosed)),
                Ok((count, _)) => return Ok(&self.scratch[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::IN, self.interrupt.as_deref(), until)? {
                        return Err(Interruption::Deadline { sent_bytes: 0 });
                    }
                }
                Err(errno) => return Err(disconnected(errno)),
            }
        }
    }

    pub(crate) fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        let peer = crate::sys::peer_credentials(self.stream.as_fd())?;
        Ok(PeerCredentials { pid: peer.pid, uid: peer.uid, gid: peer.gid })
    }

    /// Waits between two attempts to connect: an unconnected socket cannot be waited for.
    fn is_cancelled_within(&self, within: Duration) -> bool {
        let Some(interrupt) = &self.interrupt else {
            std::thread::sleep(within);
            return false;
        };
        let timeout = Timespec::try_from(within).ok();
        let mut fds = [PollFd::from_borrowed_fd(interrupt.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// The one wait of a connected client. Returns true if the socket became ready before the deadline.
    fn wait(
        &self,
        what: PollFlags,
        interrupt: Option<&OwnedFd>,
        until: Instant,
    ) -> Result<bool, Interruption> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // A wait too long for the kernel's clock is split into shorter ones.
            let left = Timespec::try_from(left.min(Duration::from_secs(3600)))
                .map_err(|_| disconnected(Errno::INVAL))?;
            let socket = PollFd::from_borrowed_fd(self.stream.as_fd(), what);
            // Without an interrupt the socket is its placeholder, with no events requested.
            let interrupt = interrupt
                .map_or(PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::empty()), |interrupt| {
                    PollFd::from_borrowed_fd(interrupt.as_fd(), PollFlags::IN)
                });
            let mut fds = [socket, interrupt];
            match rustix::event::poll(&mut fds, Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) if fds[1].revents().contains(PollFlags::IN) => return Err(Interruption::Cancelled),
                Ok(_) => return Ok(true),
                Err(errno) => return Err(disconnected(errno)),
            }
        }
    }
}

fn disconnected(errno: Errno) -> Interruption {
    Interruption::Disconnected(match errno {
        Errno::PIPE | Errno::CONNRESET => DisconnectReason::PeerClosed,
        other => DisconnectReason::System(io::Error::from(other).to_string()),
    })
}
