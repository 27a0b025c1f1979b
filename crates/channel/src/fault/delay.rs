//! A slow answerer.

use super::pause::Pause;
use super::{FaultRng, Transfer, limit, limit_mut, pass_transfers};
use crate::channel::forward_channel;
use crate::{Channel, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len, total_len_mut};
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

    fn pass(
        &self,
        transfer: Transfer,
        len: usize,
        run: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<usize> {
        let direction = transfer.direction();
        let time = self.rng.draw(direction, |rng| rng.u64(self.nanoseconds.clone()));
        self.pause.until(Instant::now() + Duration::from_nanos(time), direction);
        run(len)
    }
}

impl Channel for Delay {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    pass_transfers!();

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        // In this order: a woken thread must find the channel shut down.
        let result = self.inner.shutdown(how);
        self.pause.end(how);
        result
    }
}
