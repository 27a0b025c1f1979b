//! A byte that is changed in transit.

use super::limit_mut;
use crate::channel::forward_channel;
use crate::lock::lock;
use crate::{Channel, IoBufMut, RecvFlags, Result, gather, scatter, total_len_mut};
use std::sync::Mutex;

/// Changes bits of one received byte, like a faulty network card that computes the checksums itself. Bytes
/// that are received with descriptors do not count.
#[derive(Debug)]
pub struct FlipReceived {
    inner: Box<dyn Channel>,
    bits: u8,
    /// Number of bytes before it; `None` once it has passed. Held while bytes are received.
    before: Mutex<Option<u64>>,
}

impl FlipReceived {
    /// Changes `bits` of byte `at` that comes over `inner`, counted from 0.
    pub fn new(inner: Box<dyn Channel>, at: u64, bits: u8) -> Self {
        Self { inner, bits, before: Mutex::new(Some(at)) }
    }
}

impl Channel for FlipReceived {
    forward_channel!(inner: peer, calls, send, send_fds, recv_fds, capabilities, flush, zero_copy_ticket, zero_copy_statistics, shutdown, reset, set_timeouts, wait_recv, as_fd, finish);

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        let room = total_len_mut(bufs);
        let mut before = lock(&self.before);
        let received = self.inner.recv(&mut limit_mut(bufs, room), flags)?;
        let Some(at) = *before else { return Ok(received) };
        let left = at.checked_sub(received as u64);
        if left.is_none() {
            let at = usize::try_from(at).expect("less than what was received");
            let mut bytes = vec![0; at + 1];
            gather(&bufs.iter().map(IoBufMut::as_io_buf).collect::<Vec<_>>(), &mut bytes);
            bytes[at] ^= self.bits;
            scatter(&bytes, bufs);
        }
        if !flags.contains(RecvFlags::PEEK) {
            *before = left;
        }
        Ok(received)
    }
}
