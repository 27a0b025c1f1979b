//! A connection that ends.

use super::{Direction, Transfer, limit, limit_mut, pass_transfers};
use crate::channel::forward_channel;
use crate::lock::lock;
use crate::{Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, total_len, total_len_mut};
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// Ends the connection exactly after byte N of one direction, for any division into transfers.
///
/// As soon as byte N has passed, the channel inside is shut down both ways. Then `send` is [`Error::Fault`]
/// if sending was counted (and the channel's own `EPIPE` if receiving was), and `recv` returns what had
/// arrived and then the end of the stream. Bytes read with `PEEK` do not count, but none after N are
/// returned.
#[derive(Debug)]
pub struct Cut {
    inner: Box<dyn Channel>,
    after: u64,
    direction: Direction,
    /// Number of bytes that may still pass. Held during a transfer of the direction that is counted, and only
    /// that.
    left: Mutex<u64>,
}

impl Cut {
    /// Ends `inner` after `after` bytes in `direction`; at once if that is 0.
    pub fn new(inner: Box<dyn Channel>, after: u64, direction: Direction) -> Self {
        let cut = Self { inner, after, direction, left: Mutex::new(after) };
        if after == 0 {
            cut.end();
        }
        cut
    }

    fn pass(
        &self,
        transfer: Transfer,
        len: usize,
        run: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<usize> {
        if transfer.direction() != self.direction || len == 0 {
            return run(len);
        }
        let mut left = lock(&self.left);
        match (budget(*left, len), transfer) {
            (0, Transfer::Send) => Err(Error::Fault {
                peer: self.peer().to_owned(),
                what: format!("the connection was cut after {} bytes sent", self.after),
            }),
            (0, Transfer::Recv | Transfer::Peek) => Ok(0),
            (allowed, Transfer::Peek) => run(allowed),
            (allowed, Transfer::Send | Transfer::Recv) => {
                run(allowed).inspect(|bytes| self.count(&mut left, *bytes))
            }
        }
    }

    fn count(&self, left: &mut u64, bytes: usize) {
        *left -= bytes as u64;
        if *left == 0 && bytes > 0 {
            self.end();
        }
    }

    fn end(&self) {
        // Where the channel inside cannot be shut down, our own count still ends it.
        let _ = self.inner.shutdown(Shutdown::Both);
    }
}

impl Channel for Cut {
    forward_channel!(inner: peer, calls, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, has_buffered, finish);

    pass_transfers!();
}

fn budget(left: u64, len: usize) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(len)
}
