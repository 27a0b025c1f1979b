//! Chains that were popped together.

use std::sync::Arc;

use towline_channel::{IoBuf, IoBufMut, gather, scatter};

use super::BATCH_SEGMENTS_MAX;
use crate::memory::{GuestMemory, GuestRange};

/// Popped chains, and a reference to the guest memory that they are in. Reusable.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) segments: Vec<GuestRange>,
    pub(super) chains: Vec<ChainLayout>,
    pub(super) epoch: u64,
}

/// Position of a chain's segments in its batch: first the readable, then the writable ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChainLayout {
    pub(super) head: u16,
    pub(super) start: usize,
    pub(super) writable_start: usize,
    pub(super) end: usize,
    pub(super) readable_bytes: u32,
    pub(super) writable_bytes: u32,
}

/// A descriptor chain: readable buffers, then writable ones.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'b> {
    pub(super) batch: &'b Batch,
    pub(super) layout: &'b ChainLayout,
}

/// Head of a chain that is completed later, in any order. Ignored once its ring was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainHead {
    pub(super) index: u16,
    pub(super) epoch: u64,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of chains.
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Returns true if there is no chain.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Returns true if the batch was cut at [`BATCH_SEGMENTS_MAX`]. The ring may have more chains then, and
    /// reports them again.
    pub fn is_full(&self) -> bool {
        self.segments.len() >= BATCH_SEGMENTS_MAX
    }

    /// Drops the chains, the reference to their memory, and the capacity. Guest memory stays mapped as long
    /// as a batch refers to it ([`Worker::release`](crate::Worker::release)).
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// A chain, counted from 0.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn chain(&self, index: usize) -> Chain<'_> {
        Chain { batch: self, layout: &self.chains[index] }
    }

    /// The chains, in the order in which the driver made them available.
    pub fn chains(&self) -> impl ExactSizeIterator<Item = Chain<'_>> {
        self.chains.iter().map(|layout| Chain { batch: self, layout })
    }

    pub(super) fn begin(&mut self, memory: &Arc<GuestMemory>, epoch: u64) {
        if !Arc::ptr_eq(&self.memory, memory) {
            self.memory = Arc::clone(memory);
        }
        self.epoch = epoch;
        self.segments.clear();
        self.chains.clear();
    }
}

impl<'b> Chain<'b> {
    /// Buffers that the driver filled.
    pub fn readable(&self) -> impl ExactSizeIterator<Item = IoBuf<'b>> + use<'b> {
        let memory = &self.batch.memory;
        self.batch.segments[self.layout.start..self.layout.writable_start]
            .iter()
            .map(|segment| memory.io_buf(segment))
    }

    /// Buffers for the device to fill. [`Ring::complete`](super::Ring::complete) needs the number of bytes
    /// written: others are lost in a migration.
    pub fn writable(&self) -> impl ExactSizeIterator<Item = IoBufMut<'b>> + use<'b> {
        let memory = &self.batch.memory;
        self.writable_segments().iter().map(|segment| memory.io_buf_mut(segment))
    }

    /// Positions of [`Self::readable`] in the batch's memory.
    pub fn readable_ranges(&self) -> impl ExactSizeIterator<Item = GuestRange> + use<'b> {
        self.batch.segments[self.layout.start..self.layout.writable_start].iter().copied()
    }

    /// Number of bytes in [`Self::readable`].
    pub fn readable_bytes(&self) -> u32 {
        self.layout.readable_bytes
    }

    /// Number of bytes in [`Self::writable`].
    pub fn writable_bytes(&self) -> u32 {
        self.layout.writable_bytes
    }

    /// Copies readable bytes from `offset` on. Returns their number. For headers, which must be validated as
    /// a copy.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let mut skip = offset;
        let bufs = self.readable().filter_map(|buf| {
            let here = skip.min(buf.len());
            skip -= here;
            let buf = buf.skip(here);
            (!buf.is_empty()).then_some(buf)
        });
        let mut done = 0;
        for buf in bufs {
            done += gather(&[buf], &mut bytes[done..]);
        }
        done
    }

    /// Copies `bytes` to the writable buffers from `offset` on. Returns the number of bytes that fit.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> usize {
        let mut skip = offset;
        let mut done = 0;
        for segment in self.writable_segments() {
            let here = skip.min(segment.len as usize);
            skip -= here;
            if here < segment.len as usize {
                let rest = self.batch.memory.io_buf_mut(&segment.skip(here));
                done += scatter(&bytes[done..], &mut [rest]);
            }
        }
        done
    }

    /// Head, to complete the chain later without having written to it: a packet that the kernel still sends.
    pub fn head(&self) -> ChainHead {
        ChainHead { index: self.layout.head, epoch: self.batch.epoch }
    }

    pub(super) fn writable_segments(&self) -> &'b [GuestRange] {
        &self.batch.segments[self.layout.writable_start..self.layout.end]
    }
}
