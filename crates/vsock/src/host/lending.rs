//! Sends to TCP without a copy (`MSG_ZEROCOPY`): which sockets make them, and what the kernel says of them.
//!
//! Where the kernel has to copy all the same (on this machine itself, to a local tap, with a network card that cannot, while
//! somebody captures packets), it says so when it is done. Then, with [`ZeroCopySend::Auto`], the socket sends plainly again,
//! and others to the same address do so from the beginning, for a while.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{IoBuf, ZeroCopySend, ZeroCopySends};

use super::HostSocket;

/// How long an address is taken for one to which the kernel copies.
const COPIES_FOR_MS: u64 = 60_000;
/// Addresses that are remembered.
const ADDRESSES_MAX: usize = 1024;
/// The pause where a socket is always ready because it has failed.
const PAUSE: Duration = Duration::from_micros(100);

/// How a socket sends.
#[derive(Debug, Default)]
pub(crate) enum Lending {
    /// It was not asked yet.
    #[default]
    Unknown,
    /// Plainly.
    Never,
    /// Without a copy.
    Lends(ZeroCopySends),
    /// Plainly again, with sends of before under way, perhaps.
    Lent(ZeroCopySends),
}

/// What is known of addresses.
#[derive(Debug, Default)]
pub(super) struct Lenders {
    mode: ZeroCopySend,
    /// Those to which the kernel copies, and until when that is believed.
    copies: HashMap<IpAddr, u64>,
}

impl Lenders {
    pub(super) fn new(mode: ZeroCopySend) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Whether this socket sends without a copy.
    pub(super) fn lends(&self, socket: &HostSocket, now_ms: u64) -> bool {
        let Some(peer) = socket.peer else { return false };
        let mut lending = socket.lending.borrow_mut();
        if matches!(*lending, Lending::Unknown) {
            *lending = self.begin(socket, peer, now_ms);
        }
        matches!(*lending, Lending::Lends(_))
    }

    fn begin(&self, socket: &HostSocket, peer: IpAddr, now_ms: u64) -> Lending {
        let copies = peer.is_loopback() || self.copies.get(&peer).is_some_and(|until| now_ms < *until);
        if self.mode == ZeroCopySend::Off || (self.mode == ZeroCopySend::Auto && copies) {
            return Lending::Never;
        }
        match ZeroCopySends::enable(socket.as_fd()) {
            Ok(Some(sends)) => Lending::Lends(sends),
            Ok(None) => Lending::Never,
            Err(error) => {
                tracing::debug!(%error, "a socket sends with copies");
                Lending::Never
            }
        }
    }

    /// Reads which sends are over, and learns from it.
    pub(super) fn freed(&mut self, socket: &HostSocket, now_ms: u64) -> u64 {
        let mut lending = socket.lending.borrow_mut();
        let (Lending::Lends(sends) | Lending::Lent(sends)) = &mut *lending else { return u64::MAX };
        let over = sends.finished(socket.as_fd()).unwrap_or_else(|error| {
            tracing::error!(%error, "what the kernel says of sends cannot be read");
            u64::MAX
        });
        let copied = sends.statistics().copied > 0;
        if copied && self.mode == ZeroCopySend::Auto && matches!(*lending, Lending::Lends(_)) {
            if let Some(peer) = socket.peer {
                if self.copies.len() >= ADDRESSES_MAX {
                    self.copies.clear();
                }
                self.copies.insert(peer, now_ms + COPIES_FOR_MS);
            }
            *lending = match std::mem::take(&mut *lending) {
                Lending::Lends(sends) => Lending::Lent(sends),
                other => other,
            };
        }
        over
    }
}

impl HostSocket {
    /// Sends, if the kernel has memory for its books without a copy, else with one.
    pub(super) fn lend(&self, bufs: &[IoBuf<'_>]) -> io::Result<(usize, Option<u64>)> {
        let mut lending = self.lending.borrow_mut();
        let Lending::Lends(sends) = &mut *lending else {
            return Ok((crate::sys::send(self.as_fd(), bufs)?, None));
        };
        match sends.send(self.as_fd(), bufs) {
            Ok(sent) => Ok((sent, Some(sends.issued()))),
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                Ok((crate::sys::send(self.as_fd(), bufs)?, None))
            }
            Err(error) => Err(error),
        }
    }
}

/// Waits until something may be free of what these sockets have lent. False at the deadline.
pub(crate) fn wait_for_freed<'s>(sockets: impl Iterator<Item = &'s HostSocket>, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let mut fds: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::empty())).collect();
    let timeout = Timespec::try_from(left).ok();
    match poll(&mut fds, timeout.as_ref()) {
        // One that has failed is ready whatever is free.
        Ok(_) if fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP)) => std::thread::sleep(PAUSE),
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => tracing::error!(%errno, "poll"),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Kind;
    use std::net::{TcpListener, TcpStream};

    /// The address of another machine, though the bytes come no further than the loopback.
    const ELSEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn connected(peer: IpAddr) -> (HostSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.set_nonblocking(true).unwrap();
        (HostSocket::new(near.into(), Kind::Stream, Some(peer), false), listener.accept().unwrap().0)
    }

    /// Lends something, and waits until it is free.
    fn lend(lenders: &mut Lenders, socket: &HostSocket, now_ms: u64) {
        let (sent, number) = socket.lend(&[IoBuf::from(&[7; 5000][..])]).unwrap();
        assert_eq!(sent, 5000);
        let deadline = Instant::now() + Duration::from_secs(10);
        while lenders.freed(socket, now_ms) < number.unwrap() {
            assert!(wait_for_freed(std::iter::once(socket), deadline));
        }
    }

    #[test]
    fn addresses_to_which_the_kernel_copies_are_remembered_for_a_while() {
        let mut lenders = Lenders::new(ZeroCopySend::Auto);
        let (first, _far) = connected(ELSEWHERE);
        assert!(lenders.lends(&first, 5));
        lend(&mut lenders, &first, 5);
        assert!(!lenders.lends(&first, 5), "it was copied");
        assert_eq!(first.lend(&[IoBuf::from(b"x")]).unwrap(), (1, None));
        assert_eq!(lenders.freed(&first, 5), 1);
        let (second, _far) = connected(ELSEWHERE);
        assert!(!lenders.lends(&second, 5 + COPIES_FOR_MS - 1));
        let (third, _far) = connected(ELSEWHERE);
        assert!(lenders.lends(&third, 5 + COPIES_FOR_MS));
        // A socket keeps to what it began with.
        assert!(!lenders.lends(&second, 5 + COPIES_FOR_MS));
    }

    #[test]
    fn who_sends_plainly() {
        let ((here, _near), (elsewhere, _far)) = (connected(HERE), connected(ELSEWHERE));
        assert!(!Lenders::new(ZeroCopySend::Auto).lends(&here, 0));
        assert!(!Lenders::new(ZeroCopySend::Off).lends(&elsewhere, 0));
        let mut always = Lenders::new(ZeroCopySend::On);
        let (here, _near) = connected(HERE);
        for now_ms in 0..3 {
            assert!(always.lends(&here, now_ms));
            lend(&mut always, &here, now_ms);
        }
        let (unix, _other) = HostSocket::pair(Kind::Stream).unwrap();
        assert!(!always.lends(&unix, 0));
        assert_eq!(always.freed(&unix, 0), u64::MAX);
    }

    #[test]
    fn nobody_waits_beyond_the_deadline() {
        let (socket, _far) = connected(ELSEWHERE);
        assert!(!wait_for_freed(std::iter::once(&socket), Instant::now()));
        let until = Instant::now() + Duration::from_millis(20);
        while wait_for_freed(std::iter::once(&socket), until) {}
        assert!(Instant::now() >= until);
    }
}
