//! Zero-copy sends to TCP (`MSG_ZEROCOPY`): the choice of sockets, and their completions.
//!
//! Where the kernel has to copy nevertheless (on the same host, to a local tap, with a network card without scatter-gather,
//! while packets are captured), the completion reports that. Then, with [`ZeroCopySend::Auto`], the socket sends with copies
//! again, and new ones to the same address do so from the beginning, for a while.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{IoBuf, ZeroCopySend, ZeroCopySends};

use super::socket::{HostSocket, ZeroCopyState};
use crate::lock::lock;
use crate::sockets::SendOutcome;

/// Time for which an address is not tried again after the kernel has copied.
const COPIES_FOR_MS: u64 = 60_000;
/// Maximum number of addresses that are remembered.
const ADDRESSES_MAX: usize = 1024;
/// Time for which the kernel is assumed to read guest memory where completions cannot be read.
const UNKNOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of polling where a failed socket is always ready.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Choice of the sockets that send without a copy.
#[derive(Debug, Default)]
pub(super) struct ZeroCopyPolicy {
    mode: ZeroCopySend,
    /// Addresses to which the kernel copies, with the time until when that is assumed.
    copying: HashMap<IpAddr, u64>,
}

impl ZeroCopyPolicy {
    pub(super) fn new(mode: ZeroCopySend) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Returns true if this socket sends without a copy.
    pub(super) fn is_used(&self, socket: &HostSocket, now_ms: u64) -> bool {
        let Some(peer) = socket.peer else { return false };
        let mut state = socket.zero_copy.borrow_mut();
        if matches!(*state, ZeroCopyState::Undecided) {
            *state = self.decide(socket, peer, now_ms);
        }
        matches!(*state, ZeroCopyState::Enabled(_))
    }

    fn decide(&self, socket: &HostSocket, peer: IpAddr, now_ms: u64) -> ZeroCopyState {
        let copies = peer.is_loopback() || self.copying.get(&peer).is_some_and(|until| now_ms < *until);
        if self.mode == ZeroCopySend::Off || (self.mode == ZeroCopySend::Auto && copies) {
            return ZeroCopyState::Disabled;
        }
        match ZeroCopySends::enable(socket.as_fd()) {
            Ok(Some(sends)) => ZeroCopyState::Enabled(sends),
            Ok(None) => ZeroCopyState::Disabled,
            Err(error) => {
                tracing::debug!(%error, "cannot enable zero-copy sends for a socket");
                ZeroCopyState::Disabled
            }
        }
    }

    /// Reads the completions of a socket, and learns from them. Returns the number of the last completed send; 0 if they cannot be
    /// read: what the kernel may still read stays in flight.
    pub(super) fn completed(&mut self, socket: &HostSocket, now_ms: u64) -> u64 {
        let mut state = socket.zero_copy.borrow_mut();
        let (ZeroCopyState::Enabled(sends) | ZeroCopyState::Stopped(sends)) = &mut *state else {
            return u64::MAX;
        };
        let completed = match sends.reap_completions(socket.as_fd()) {
            Ok(completed) => completed,
            Err(error) => {
                tracing::error!(%error, "cannot read completions of zero-copy sends: their chains stay in flight");
                state.stop();
                return 0;
            }
        };
        let was_copied = sends.statistics().copied > 0;
        if was_copied && self.mode == ZeroCopySend::Auto && matches!(*state, ZeroCopyState::Enabled(_)) {
            if let Some(peer) = socket.peer {
                if self.copying.len() >= ADDRESSES_MAX {
                    self.copying.clear();
                }
                self.copying.insert(peer, now_ms + COPIES_FOR_MS);
            }
            state.stop();
        }
        completed
    }
}

/// Sockets whose worker has ended, while the kernel may still read guest memory for them.
#[derive(Debug, Default)]
pub(crate) struct UnfinishedSends(Mutex<Vec<UnfinishedSocket>>);

/// A socket with the time at which its worker ended.
#[derive(Debug)]
struct UnfinishedSocket {
    socket: HostSocket,
    since: Instant,
    /// The connection was reset: the kernel retransmits nothing.
    is_reset: bool,
}

impl UnfinishedSocket {
    /// Returns true if the kernel may still read guest memory. A connection that cannot be reset is given up after a while:
    /// otherwise a peer that acknowledges nothing would hold the device.
    fn is_pending(&mut self, now: Instant) -> bool {
        self.is_reset = self.is_reset || self.socket.disconnect();
        let is_recent = now.saturating_duration_since(self.since) < UNKNOWN_TIMEOUT;
        match self.socket.has_unfinished_sends() {
            Ok(false) => return false,
            Ok(true) if self.is_reset || is_recent => return true,
            Err(_) if is_recent => return true,
            Ok(true) => {
                tracing::error!("a connection cannot be reset; its socket is closed with data in flight");
            }
            Err(error) => tracing::error!(%error, "cannot read completions of zero-copy sends"),
        }
        self.socket.reset_on_close();
        false
    }
}

impl UnfinishedSends {
    /// Adds sockets, which are closed when their sends have completed.
    pub(crate) fn add(&self, sockets: impl Iterator<Item = HostSocket>) {
        let since = Instant::now();
        lock(&self.0).extend(sockets.map(|socket| UnfinishedSocket { socket, since, is_reset: false }));
    }

    /// Closes the sockets whose sends have completed. Returns the number of the others.
    pub(crate) fn pending(&self) -> usize {
        self.pending_at(Instant::now())
    }

    fn pending_at(&self, now: Instant) -> usize {
        let mut sockets = lock(&self.0);
        sockets.retain_mut(|socket| socket.is_pending(now));
        sockets.len()
    }
}

impl HostSocket {
    /// Returns true if a zero-copy send has not completed.
    ///
    /// # Errors
    /// The completions cannot be read.
    fn has_unfinished_sends(&self) -> io::Result<bool> {
        match &mut *self.zero_copy.borrow_mut() {
            ZeroCopyState::Enabled(sends) | ZeroCopyState::Stopped(sends) => {
                Ok(sends.reap_completions(self.as_fd())? < sends.issued())
            }
            ZeroCopyState::Undecided | ZeroCopyState::Disabled => Ok(false),
        }
    }

    /// Sends without a copy, or with one if the kernel has no memory for the bookkeeping of another zero-copy send.
    pub(super) fn send_zero_copy(&self, bufs: &[IoBuf<'_>]) -> io::Result<SendOutcome> {
        if let ZeroCopyState::Enabled(sends) = &mut *self.zero_copy.borrow_mut() {
            match sends.send(self.as_fd(), bufs) {
                Ok(bytes) => return Ok(SendOutcome { bytes, zero_copy: Some(sends.issued()) }),
                Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(SendOutcome { bytes: crate::sys::send(self.as_fd(), bufs)?, zero_copy: None })
    }
}

/// Waits until zero-copy sends of these sockets may have completed. Returns false at the deadline.
pub(crate) fn wait_for_completions<'s>(
    sockets: impl Iterator<Item = &'s HostSocket>,
    deadline: Instant,
) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let mut fds: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::empty())).collect();
    let timeout = Timespec::try_from(left).ok();
    match poll(&mut fds, timeout.as_ref()) {
        // A failed socket is ready whether or not a send has completed.
        Ok(_) if fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP)) => {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => tracing::error!(%errno, "poll"),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::socket_fd::SocketFd;
    use crate::packet::SocketType;
    use std::net::{TcpListener, TcpStream};

    /// Address of another host, although the bytes do not leave the loopback.
    const ELSEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn connected(peer: IpAddr) -> (HostSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.set_nonblocking(true).unwrap();
        (
            HostSocket::new(SocketFd::new(near.into()), SocketType::Stream, Some(peer)),
            listener.accept().unwrap().0,
        )
    }

    /// Sends without a copy, and waits for the completion.
    fn send(policy: &mut ZeroCopyPolicy, socket: &HostSocket, now_ms: u64) {
        let sent = socket.send_zero_copy(&[IoBuf::from(&[7; 5000][..])]).unwrap();
        assert_eq!(sent.bytes, 5000);
        let deadline = Instant::now() + Duration::from_secs(10);
        while policy.completed(socket, now_ms) < sent.zero_copy.unwrap() {
            assert!(wait_for_completions(std::iter::once(socket), deadline));
        }
    }

    #[test]
    fn an_address_to_which_the_kernel_copies_is_not_tried_again_for_a_while() {
        let mut policy = ZeroCopyPolicy::new(ZeroCopySend::Auto);
        let (first, _far) = connected(ELSEWHERE);
        assert!(policy.is_used(&first, 5));
        send(&mut policy, &first, 5);
        assert!(!policy.is_used(&first, 5), "it was copied");
        let copied = first.send_zero_copy(&[IoBuf::from(b"x")]).unwrap();
        assert_eq!(copied, SendOutcome { bytes: 1, zero_copy: None });
        assert_eq!(policy.completed(&first, 5), 1);
        let (second, _far) = connected(ELSEWHERE);
        assert!(!policy.is_used(&second, 5 + COPIES_FOR_MS - 1));
        let (third, _far) = connected(ELSEWHERE);
        assert!(policy.is_used(&third, 5 + COPIES_FOR_MS));
        // The decision for a socket is made once.
        assert!(!policy.is_used(&second, 5 + COPIES_FOR_MS));
    }

    #[test]
    fn loopback_unix_sockets_and_off_send_with_copies() {
        let ((near, _near), (elsewhere, _far)) = (connected(LOOPBACK), connected(ELSEWHERE));
        assert!(!ZeroCopyPolicy::new(ZeroCopySend::Auto).is_used(&near, 0));
        assert!(!ZeroCopyPolicy::new(ZeroCopySend::Off).is_used(&elsewhere, 0));
        let mut always = ZeroCopyPolicy::new(ZeroCopySend::On);
        let (here, _near) = connected(LOOPBACK);
        for now_ms in 0..3 {
            assert!(always.is_used(&here, now_ms));
            send(&mut always, &here, now_ms);
        }
        let (unix, _other) = HostSocket::pair(SocketType::Stream).unwrap();
        assert!(!always.is_used(&unix, 0));
        assert_eq!(always.completed(&unix, 0), u64::MAX);
    }

    #[test]
    fn waiting_ends_at_the_deadline() {
        let (socket, _far) = connected(ELSEWHERE);
        assert!(!wait_for_completions(std::iter::once(&socket), Instant::now()));
        let until = Instant::now() + Duration::from_millis(20);
        while wait_for_completions(std::iter::once(&socket), until) {}
        assert!(Instant::now() >= until);
    }

    /// Returns sockets with a connection whose peer reads nothing, and the peer.
    fn unfinished() -> (UnfinishedSends, TcpStream) {
        let (socket, far) = connected(ELSEWHERE);
        assert!(ZeroCopyPolicy::new(ZeroCopySend::On).is_used(&socket, 0));
        let content = vec![7; 64 << 10];
        while socket.send_zero_copy(&[IoBuf::from(&content[..])]).is_ok() {}
        assert!(socket.has_unfinished_sends().unwrap());
        let sends = UnfinishedSends::default();
        sends.add(std::iter::once(socket));
        far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        (sends, far)
    }

    #[track_caller]
    fn assert_reset(mut far: TcpStream) {
        let ended = std::io::copy(&mut far, &mut std::io::sink());
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn unfinished_connections_are_reset() {
        let (sends, far) = unfinished();
        let deadline = Instant::now() + Duration::from_secs(10);
        while sends.pending() > 0 {
            assert!(Instant::now() < deadline);
            std::thread::sleep(POLL_INTERVAL);
        }
        assert_reset(far);
    }

    #[test]
    fn a_connection_that_cannot_be_reset_is_given_up_after_a_while() {
        let policy = towline_sandbox::Policy::default();
        // The filter holds for the thread.
        let confined = std::thread::spawn(move || {
            let (sends, far) = unfinished();
            policy.filter_calls_of_thread().unwrap();
            let now = Instant::now();
            assert_eq!(sends.pending_at(now), 1);
            assert_eq!(sends.pending_at(now + UNKNOWN_TIMEOUT - Duration::from_secs(1)), 1);
            assert_eq!(sends.pending_at(now + UNKNOWN_TIMEOUT), 0);
            assert_reset(far);
        });
        confined.join().unwrap();
    }
}
