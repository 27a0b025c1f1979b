//! A narrow line.

use super::pause::Pause;
use super::{Direction, Transfer, limit, limit_mut, pass_transfers};
use crate::channel::forward_channel;
use crate::lock::lock;
use crate::{Channel, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len, total_len_mut};
use std::net::Shutdown;
use std::num::NonZeroU64;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Size of one piece, as a fraction of the bytes per second.
const PIECES_PER_SECOND: u64 = 100;

/// Limits the average rate of each direction in bytes per second: after a transfer, the next one waits until
/// its bytes would have passed. A shutdown ends that wait. `PEEK` is free.
#[derive(Debug)]
pub struct Throttle {
    inner: Box<dyn Channel>,
    bytes_per_second: NonZeroU64,
    /// When the line is free again.
    send_free: Mutex<Option<Instant>>,
    recv_free: Mutex<Option<Instant>>,
    pause: Pause,
}

impl Throttle {
    /// Slows `inner` down.
    pub fn new(inner: Box<dyn Channel>, bytes_per_second: NonZeroU64) -> Self {
        let (send_free, recv_free) = (Mutex::default(), Mutex::default());
        Self { inner, bytes_per_second, send_free, recv_free, pause: Pause::default() }
    }

    /// Waits for the line, transfers at most one piece of `len` and books it.
    fn pass(
        &self,
        transfer: Transfer,
        len: usize,
        run: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<usize> {
        if transfer == Transfer::Peek {
            return run(len);
        }
        let direction = transfer.direction();
        let free = match direction {
            Direction::Send => &self.send_free,
            Direction::Recv => &self.recv_free,
        };
        let wait_for = *lock(free);
        if let Some(end) = wait_for {
            self.pause.until(end, direction);
        }
        let piece = (self.bytes_per_second.get() / PIECES_PER_SECOND).max(1);
        let bytes = run(usize::try_from(piece).unwrap_or(usize::MAX).min(len))?;
        let mut free = lock(free);
        let begin = free.map_or_else(Instant::now, |free| free.max(Instant::now()));
        *free = Some(begin + self.time_of(bytes));
        Ok(bytes)
    }

    fn time_of(&self, bytes: usize) -> Duration {
        let nanoseconds = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

impl Channel for Throttle {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    pass_transfers!();

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        // In this order: a woken thread must find the channel shut down.
        let result = self.inner.shutdown(how);
        self.pause.end(how);
        result
    }
}
