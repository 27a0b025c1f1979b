//! Memory for one checkpoint, used again for later ones.

use alloc::vec::Vec;
use core::fmt;
use core::mem::size_of;
use core::num::NonZeroUsize;

use crate::wire::Reader;
use crate::{InvalidMessage, PageRef, Result};

/// Bytes that are received at once, at least.
const ROOM_BYTES_MIN: usize = 256 << 10;

/// Memory for the stream of one checkpoint and the index of its pages. It grows with the largest checkpoint
/// so far, up to its limit.
pub struct CheckpointBuffer {
    bytes: Vec<u8>,
    /// Bytes received.
    filled: usize,
    /// Bytes decoded. The content of the last page may be outstanding, so this may be more than was received.
    decoded: usize,
    pub(super) pages: Vec<BufferedPage>,
    limit: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct BufferedPage {
    pub(super) page: PageRef,
    /// Where its content begins; `None`: it is zero. A checkpoint never begins with a page.
    pub(super) content: Option<NonZeroUsize>,
}

impl CheckpointBuffer {
    /// A buffer for checkpoints of at most `limit` bytes of stream and index together. A page takes 4128
    /// bytes (33 if it is zero), and a QEMU sends each page at most once in a checkpoint.
    pub fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), filled: 0, decoded: 0, pages: Vec::new(), limit }
    }

    /// Forgets the checkpoint; keeps the memory.
    pub(super) fn clear(&mut self) {
        (self.filled, self.decoded) = (0, 0);
        self.pages.clear();
    }

    /// Room for further bytes, never none.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.bytes.len() - self.filled < ROOM_BYTES_MIN {
            // One more than fits, so a checkpoint that does not is noticed.
            let length = (self.filled + self.filled.max(ROOM_BYTES_MIN)).min(self.limit.saturating_add(1));
            let length = length.max(self.filled + 1).max(self.bytes.len());
            self.bytes.reserve_exact(length - self.bytes.len());
            self.bytes.resize(length, 0);
        }
        &mut self.bytes[self.filled..]
    }

    pub(super) fn received(&mut self, bytes: usize) {
        self.filled = self.bytes.len().min(self.filled + bytes);
    }

    /// The bytes that are to be decoded; `None` while those of the last page are outstanding.
    pub(super) fn reader(&self) -> Option<Reader<'_>> {
        self.bytes[..self.filled].get(self.decoded..).map(Reader::new)
    }

    pub(super) fn decoded(&mut self, bytes: usize) {
        self.decoded += bytes;
    }

    /// Adds a page to the index, whose content of this length begins after the decoded bytes.
    pub(super) fn add(&mut self, page: PageRef, length: usize) {
        let content = NonZeroUsize::new(self.decoded).filter(|_| length > 0);
        self.pages.push(BufferedPage { page, content });
        self.decoded += length;
    }

    pub(super) fn check_limit(&self) -> Result<()> {
        let used = self.filled.max(self.decoded) + self.pages.len() * size_of::<BufferedPage>();
        let limit = self.limit;
        if used > limit { Err(InvalidMessage::CheckpointTooLarge { limit }.into()) } else { Ok(()) }
    }

    /// Bytes received in all.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// `length` bytes from `start` on.
    pub(super) fn bytes(&self, start: usize, length: usize) -> &[u8] {
        &self.bytes[start..start + length]
    }
}

impl fmt::Debug for CheckpointBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { filled, pages, limit, .. } = self;
        let pages = pages.len();
        write!(f, "CheckpointBuffer {{ filled: {filled}, pages: {pages}, limit: {limit}, .. }}")
    }
}
