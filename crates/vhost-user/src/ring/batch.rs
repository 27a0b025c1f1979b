//! Chains that were taken from a ring together.

use std::sync::Arc;

use towline_channel::{IoBuf, IoBufMut, gather, scatter};

use super::BATCH_PIECES_MAX;
use crate::memory::{Memory, Piece, Place};

/// Room for chains, to be used again and again; it keeps the memory that they are in.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) memory: Arc<Memory>,
    pub(super) pieces: Vec<Piece>,
    pub(super) chains: Vec<Shape>,
    pub(super) epoch: u64,
}

/// Where a chain's pieces are: first those to read, then those to write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) head: u16,
    pub(super) start: usize,
    pub(super) writable: usize,
    pub(super) end: usize,
    pub(super) readable_bytes: u32,
    pub(super) writable_bytes: u32,
}

/// A chain: buffers that the driver has filled, then buffers that it wants filled.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'b> {
    pub(super) batch: &'b Batch,
    pub(super) shape: &'b Shape,
}

/// What is left of a chain that is completed later, in any order. Not of use once its ring was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub(super) index: u16,
    pub(super) epoch: u64,
}

impl Batch {
    /// A batch with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many chains are in it.
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Whether it was cut at [`BATCH_PIECES_MAX`]: the ring may have more chains, and reports them again.
    pub fn is_full(&self) -> bool {
        self.pieces.len() >= BATCH_PIECES_MAX
    }

    /// Drops its chains, the memory that they are in, and its capacity. For batches that a worker keeps: guest memory stays
    /// mapped as long as a batch refers to it ([`Worker::release`](crate::Worker::release)).
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// One of them.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn chain(&self, index: usize) -> Chain<'_> {
        Chain { batch: self, shape: &self.chains[index] }
    }

    /// All of them, in the driver's order.
    pub fn chains(&self) -> impl ExactSizeIterator<Item = Chain<'_>> {
        self.chains.iter().map(|shape| Chain { batch: self, shape })
    }

    /// The memory that its buffers are in, for whoever uses them longer than the batch lives.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn begin(&mut self, memory: &Arc<Memory>, epoch: u64) {
        if !Arc::ptr_eq(&self.memory, memory) {
            self.memory = Arc::clone(memory);
        }
        self.epoch = epoch;
        self.pieces.clear();
        self.chains.clear();
    }
}

impl<'b> Chain<'b> {
    /// What the driver has to say.
    pub fn readable(&self) -> impl ExactSizeIterator<Item = IoBuf<'b>> + use<'b> {
        let memory = &self.batch.memory;
        self.batch.pieces[self.shape.start..self.shape.writable].iter().map(|piece| memory.io_buf(piece))
    }

    /// Where the driver wants an answer. Say how much of it was written with
    /// [`Ring::complete`](super::Ring::complete); what is written and not said is lost in a migration.
    pub fn writable(&self) -> impl ExactSizeIterator<Item = IoBufMut<'b>> + use<'b> {
        let memory = &self.batch.memory;
        self.writable_pieces().iter().map(|piece| memory.io_buf_mut(piece))
    }

    /// Where [`Self::readable`] is in the batch's memory.
    pub fn readable_places(&self) -> impl ExactSizeIterator<Item = Place> + use<'b> {
        self.batch.pieces[self.shape.start..self.shape.writable].iter().map(Piece::place)
    }

    /// Bytes in [`Self::readable`].
    pub fn readable_bytes(&self) -> u32 {
        self.shape.readable_bytes
    }

    /// Bytes in [`Self::writable`].
    pub fn writable_bytes(&self) -> u32 {
        self.shape.writable_bytes
    }

    /// Copies what the driver says from byte `offset` on; how many bytes there were. For headers: decide on the copy.
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

    /// Copies `bytes` to where the driver wants the answer, from byte `offset` on; how many bytes there was room for.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for piece in self.writable_pieces() {
            let here = skip.min(piece.len as usize);
            skip -= here;
            if here < piece.len as usize {
                let rest = self.batch.memory.io_buf_mut(&piece.behind(here));
                done += scatter(&bytes[done..], &mut [rest]);
            }
        }
        done
    }

    /// To complete it later, when nothing is written to it: a packet that others still send.
    pub fn head(&self) -> Head {
        Head { index: self.shape.head, epoch: self.batch.epoch }
    }

    pub(super) fn writable_pieces(&self) -> &'b [Piece] {
        &self.batch.pieces[self.shape.writable..self.shape.end]
    }
}
