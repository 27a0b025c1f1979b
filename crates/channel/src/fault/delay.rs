//! A slow answerer.

use super::pause::Pause;
use super::{Direction, FaultRng};
use crate::channel::forward_channel;
use crate::{Channel, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use std::net::Shutdown;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Lets each transfer wait a random time before it begins. A shutdown ends that wait; the channel's own
/// timeouts begin after it.
#[derive(Debug)]
pub struct Delay {
    inner: Box<dyn Channel>,
    /// Shortest and longest, in nanoseconds.
    nanoseconds: RangeInclusive<u64>,
    rng: FaultRng,
    pause: Pause,
}

impl Delay {
    /// Delays transfers over `inner` by a time from `range`, which may be a single value.
    pub fn new(inner: Box<dyn Channel>, range: RangeInclusive<Duration>, seed: u64) -> Self {
        let nanoseconds = |time: &Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let shortest = nanoseconds(range.start());
        let longest = nanoseconds(range.end()).max(shortest);
        Self { inner, nanoseconds: shortest..=longest, rng: FaultRng::new(seed), pause: Pause::default() }
    }

    fn wait(&self, direction: Direction) {
        let time = self.rng.draw(direction, |rng| rng.u64(self.nanoseconds.clone()));
        self.pause.until(Instant::now() + Duration::from_nanos(time), direction);
    }
}

impl Channel for Delay {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        self.wait(Direction::Send);
        self.inner.send(bufs, flags)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        self.wait(Direction::Recv);
        self.inner.recv(bufs, flags)
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        // In this order: a woken thread must find the channel shut down.
        let result = self.inner.shutdown(how);
        self.pause.end(how);
        result
    }

    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        self.wait(Direction::Send);
        self.inner.send_fds(bytes, fds)
    }

    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        self.wait(Direction::Recv);
        self.inner.recv_fds(bytes, fds)
    }
}
