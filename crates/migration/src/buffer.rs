//! Receive buffers of a lane: one, unless their reader is slow.
//!
//! ```text
//!   Buffers   current ── filled, delivered ──► ticket not done? ──► leased (oldest first) ── done ──► current again
//! ```
//!
//! A sink that sends without a copy ([`crate::Sink::zero_copy_ticket`]) reads a buffer after it was
//! delivered. The lane then fills another buffer; once the maximum number exists, the lane waits for the
//! oldest ticket, which makes the source wait.

use std::collections::VecDeque;
use std::time::Instant;

use memmap2::MmapMut;
use towline_channel::{Error as ChannelError, IoBufMut, ZeroCopyTicket};

use crate::session::POLL_INTERVAL;
use crate::{Result, Session};

/// Maximum size of the buffers of all lanes together, unless each has only one.
const BUFFER_BYTES_MAX: usize = 96 << 20;
/// Maximum number of buffers of one lane: no more is in flight than a socket's own buffer holds.
const BUFFERS_MAX: usize = 16;

/// Receive buffers of one lane.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// The one to be filled.
    pub(crate) current: AlignedBuffer,
    leased: VecDeque<(AlignedBuffer, ZeroCopyTicket)>,
    length: usize,
    most: usize,
}

impl Buffers {
    /// Buffers for one of `lanes` lanes, each of `length` bytes, a multiple of the page size.
    pub(crate) fn new(length: usize, lanes: usize) -> Result<Self> {
        let most = (BUFFER_BYTES_MAX / length / lanes.max(1)).clamp(1, BUFFERS_MAX);
        Ok(Self { current: AlignedBuffer::new(length)?, leased: VecDeque::new(), length, most })
    }

    /// Makes another buffer the current one if this one is read until `ticket` is done.
    pub(crate) fn rotate(&mut self, ticket: ZeroCopyTicket, session: &Session) -> Result<()> {
        if ticket.is_done()? {
            return Ok(());
        }
        let is_free = match self.leased.front() {
            Some((_, oldest)) => oldest.is_done()?,
            None => false,
        };
        let fresh = if self.leased.len() + 1 < self.most && !is_free {
            AlignedBuffer::new(self.length)?
        } else {
            match self.leased.pop_front() {
                Some((buffer, oldest)) => {
                    wait(&oldest, session)?;
                    buffer
                }
                // Only one exists.
                None => return wait(&ticket, session),
            }
        };
        let handed_on = std::mem::replace(&mut self.current, fresh);
        self.leased.push_back((handed_on, ticket));
        Ok(())
    }
}

/// Waits for a ticket, or for the failure of the migration, which resets its connection.
fn wait(ticket: &ZeroCopyTicket, session: &Session) -> Result<()> {
    loop {
        match ticket.wait(Instant::now() + POLL_INTERVAL) {
            Err(ChannelError::Timeout { .. }) => session.check()?,
            result => return Ok(result?),
        }
    }
}

/// Page-aligned private memory, so pages can go from it to a file without the page cache (`O_DIRECT`).
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    mapping: MmapMut,
}

impl AlignedBuffer {
    /// `length` bytes, a multiple of the page size.
    pub(crate) fn new(length: usize) -> Result<Self> {
        let mapping = MmapMut::map_anon(length).map_err(crate::Error::guest)?;
        Ok(Self { mapping })
    }

    /// The first `length` bytes, to be received into.
    pub(crate) fn receive(&mut self, length: usize) -> IoBufMut<'_> {
        IoBufMut::from(&mut self.mapping[..length])
    }

    /// The first `length` bytes, to be written.
    pub(crate) fn bytes_mut(&mut self, length: usize) -> &mut [u8] {
        &mut self.mapping[..length]
    }

    /// The first `length` bytes.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        &self.mapping[..length]
    }
}
