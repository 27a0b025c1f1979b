//! Transfers that stop early.

use super::{Direction, FaultRng, limit_mut};
use crate::channel::forward_channel;
use crate::sys::iobuf::limit;
use crate::{Channel, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use std::num::NonZeroUsize;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Lets each call transfer at most a random number of bytes, so every seam between two calls is met sooner or
/// later. Descriptors are transferred with the first piece of their bytes.
#[derive(Debug)]
pub struct ShortIo {
    inner: Box<dyn Channel>,
    most: NonZeroUsize,
    rng: FaultRng,
}

impl ShortIo {
    /// Cuts each transfer over `inner` to 1 to `most` bytes.
    pub fn new(inner: Box<dyn Channel>, most: NonZeroUsize, seed: u64) -> Self {
        Self { inner, most, rng: FaultRng::new(seed) }
    }

    fn size(&self, direction: Direction) -> usize {
        self.rng.draw(direction, |rng| rng.usize(1..=self.most.get()))
    }
}

impl Channel for ShortIo {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        self.inner.send(&limit(bufs, self.size(Direction::Send)), flags)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        self.inner.recv(&mut limit_mut(bufs, self.size(Direction::Recv)), flags)
    }

    fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
        let len = self.size(Direction::Send).min(bytes.len());
        self.inner.send_fds(&bytes[..len], fds)
    }

    fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let len = self.size(Direction::Recv).min(bytes.len());
        self.inner.recv_fds(&mut bytes[..len], fds)
    }
}
