//! Zero-copy sends of a socket that is its owner's, and that never waits.

use super::ZeroCopyStatistics;
use super::ledger::SendLedger;
use crate::sys::{io as calls, zero_copy};
use crate::{IoBuf, SendFlags};
use std::io;
use std::os::fd::BorrowedFd;

/// The books of one TCP socket's zero-copy sends, for a loop that serves many: no call of it waits, if the socket does not.
/// Sends are counted from 1, and are over in any order; the memory of one is free when it and all before it are.
///
/// The caller passes the same socket to each call. While completions are pending, polls report `POLLERR` for it.
#[derive(Debug)]
pub struct ZeroCopySends(SendLedger);

impl ZeroCopySends {
    /// Enables zero-copy sends on the socket. `None` if the kernel lacks them, or if another user of the socket
    /// enabled them, whose sends are not counted here.
    ///
    /// # Errors
    /// `setsockopt(2)`'s own.
    pub fn enable(socket: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let enabled = zero_copy::enable(socket)?;
        Ok((enabled == zero_copy::Enabled::Now).then(|| Self(SendLedger::default())))
    }

    /// `sendmsg(2)` with `MSG_ZEROCOPY`: the kernel reads the bytes that it took until this send is over.
    ///
    /// # Errors
    /// The call's own; `ENOBUFS` if the kernel has no memory for the books of one more send, or pins no more.
    pub fn send(&mut self, socket: BorrowedFd<'_>, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
        self.0.begin();
        let sent = calls::sendmsg(socket, bufs, SendFlags::ZERO_COPY);
        self.0.end(sent.as_ref().ok().copied());
        sent
    }

    /// Number of sends so far.
    pub fn issued(&self) -> u64 {
        self.0.issued()
    }

    /// Drains the error queue; returns the number of sends, from the first, that have finished.
    ///
    /// # Errors
    /// `recvmsg(2)`'s own.
    pub fn reap_completions(&mut self, socket: BorrowedFd<'_>) -> io::Result<u64> {
        super::read(&mut self.0, socket)?;
        Ok(self.0.finished())
    }

    /// Totals of the sends so far.
    pub fn statistics(&self) -> ZeroCopyStatistics {
        self.0.statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::time::{Duration, Instant};

    #[test]
    fn sends_are_over_when_the_peer_has_the_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        let mut sends = ZeroCopySends::enable(near.as_fd()).unwrap().unwrap();
        assert!(ZeroCopySends::enable(near.as_fd()).unwrap().is_none(), "whose sends would be whose?");
        let content = vec![7; 20_000];
        let mut sent = 0;
        for _ in 0..3 {
            sent += sends.send(near.as_fd(), &[IoBuf::from(&content[..])]).unwrap();
        }
        assert_eq!(sends.issued(), 3);
        far.read_exact(&mut vec![0; sent]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while sends.reap_completions(near.as_fd()).unwrap() < 3 {
            assert!(Instant::now() < deadline, "{:?}", sends.statistics());
            std::thread::yield_now();
        }
        let statistics = sends.statistics();
        assert_eq!((statistics.sends, statistics.copied, statistics.bytes), (3, 3, sent as u64));
    }
}
