//! Transfers that stop early.

use super::{FaultRng, Transfer, limit, limit_mut, pass_transfers};
use crate::channel::forward_channel;
use crate::{Channel, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len, total_len_mut};
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

    fn pass(
        &self,
        transfer: Transfer,
        len: usize,
        run: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<usize> {
        let most = self.rng.draw(transfer.direction(), |rng| rng.usize(1..=self.most.get()));
        run(most.min(len))
    }
}

impl Channel for ShortIo {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    pass_transfers!();
}
