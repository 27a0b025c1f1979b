//! The engine's side of a connection: its socket, and what is on the way to it.

use std::collections::VecDeque;

use towline_channel::{IOV_MAX, IoBuf};
use towline_vhost_user::{Batch, Head};

use super::SKIP;
use super::chunk::Chunk;
use super::loans::Loans;
use crate::connection::ConnectionId;
use crate::packet::{Kind, SeqFlags};

/// Packets shorter than this are copied when the host side is behind: a chain of the ring is worth more.
pub(super) const HOLD_BYTES_MIN: u32 = 4096;
/// Chains that one connection may hold while its host side is behind: a window's worth of the largest packets, which
/// are then not copied at all.
pub(super) const HELD_PER_LINE_MAX: usize = 16;
/// Packets shorter than this are not lent: to pin their pages and to be told of it costs more than to copy them.
pub(super) const LEND_BYTES_MIN: u32 = 16 << 10;
/// Chains of one connection that may be lent at a time; what comes beyond is copied by the kernel.
pub(super) const LENT_PER_LINE_MAX: usize = 16;
/// The sizes of a chunk of copied payload, in bytes: an eighth of the window within these.
const CHUNK_BYTES_MIN: u32 = 1 << 10;
const CHUNK_BYTES_MAX: u32 = 64 << 10;
/// The most chains of a ring that connections may hold, or have lent to the kernel, at a time.
pub(super) const HELD_MAX: usize = 256;
/// The most pieces of memory in a batch of which chains are held: a description of each piece stays with the batch.
const PIECES_HELD_MAX: usize = 1024;
/// Idle batches that are left for the next packets.
const IDLE_MAX: usize = 4;
/// Entries of a queue of packets that are left to a connection.
const ENTRIES_IDLE_MAX: usize = 16;

/// A connection's socket, and what is on the way to it.
pub(super) struct Line<S> {
    pub(super) id: ConnectionId,
    pub(super) kind: Kind,
    /// None as long as it is being connected.
    pub(super) socket: Option<S>,
    pub(super) out: VecDeque<Out>,
    /// How many entries of `out`, from the front, are held or kept: not of the batch that is looked at.
    pub(super) settled: usize,
    /// Chains that it holds.
    pub(super) held: usize,
    /// Bytes that it keeps.
    pub(super) kept: usize,
    /// Chains that have left, and that the kernel still reads.
    pub(super) loans: Loans,
    /// The socket took less than there was; it says when it takes more.
    pub(super) blocked: bool,
    /// Something of the guest's came since it was last flushed.
    pub(super) touched: bool,
    /// It may have something for the guest.
    pub(super) readable: bool,
    /// It waits for its turn to be read.
    pub(super) in_line: bool,
    /// The guest has no room.
    pub(super) stalled: bool,
    /// The guest will be asked for credit if that lasts.
    pub(super) stall_noted: bool,
    /// The other end of the socket sends no more: what is left ends with its end.
    pub(super) ending: bool,
    /// And it receives no more either.
    pub(super) hung_up: bool,
    /// All that it had for the guest was sent.
    pub(super) ended: bool,
    /// It takes nothing any more.
    pub(super) deaf: bool,
    pub(super) write_shut: bool,
    pub(super) read_shut: bool,
    /// Buffers of the guest's that the next read may fill.
    pub(super) appetite: usize,
    /// Urgent data came: a short read may have stopped at its mark, and does not mean that the socket is empty.
    pub(super) urgent: bool,
    /// A message that did not fit into the guest's buffers at once, how much of it has left, and what it ends.
    pub(super) message: Option<(Vec<u8>, usize, SeqFlags)>,
    pub(super) statistics: ConnectionStatistics,
}

/// What a connection has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionStatistics {
    /// Bytes to the host side.
    pub bytes_to_host: u64,
    /// Bytes to the guest.
    pub bytes_to_guest: u64,
    /// Packets from the guest.
    pub packets_from_guest: u64,
    /// Packets to the guest.
    pub packets_to_guest: u64,
    /// Bytes that were copied because a side was behind.
    pub bytes_copied: u64,
    /// Bytes of those to the host side that were lent to the kernel.
    pub bytes_zero_copy: u64,
}

/// Something on the way to the socket.
pub(super) enum Out {
    /// In the guest's memory. `loan`: until when the kernel reads what has left of it.
    Chain { slot: usize, chain: usize, offset: u32, len: u32, end: SeqFlags, loan: Option<u64> },
    /// Copied.
    Kept(Box<Chunk>),
}

impl Out {
    /// Whether it is worth being lent, or was begun to be.
    fn is_large(&self, shelf: &Shelf) -> bool {
        match self {
            Self::Chain { slot, len, loan, .. } => {
                loan.is_some() || (*len >= LEND_BYTES_MIN && shelf.may_stay(*slot))
            }
            Self::Kept(_) => false,
        }
    }
}

/// How large chunks of copied payload are for this window: the first may be sent and not free, and the last one empty.
pub(super) fn chunk_bytes(window: u32) -> usize {
    (window / 8).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX) as usize
}

impl<S> Line<S> {
    pub(super) fn new(id: ConnectionId, kind: Kind, socket: Option<S>) -> Self {
        Self {
            id,
            kind,
            socket,
            out: VecDeque::new(),
            settled: 0,
            held: 0,
            kept: 0,
            loans: Loans::default(),
            blocked: false,
            touched: false,
            readable: false,
            in_line: false,
            stalled: false,
            stall_noted: false,
            ending: false,
            hung_up: false,
            ended: false,
            deaf: false,
            write_shut: false,
            read_shut: false,
            appetite: 2,
            urgent: false,
            message: None,
            statistics: ConnectionStatistics::default(),
        }
    }

    /// The buffers of the next call and their bytes: as many as a call takes of these entries, or, `whole`, those of one
    /// message; nothing as long as it is not complete; and what ends with them. `None` if a message has more pieces than a
    /// call takes.
    pub(super) fn gather<'s>(
        &'s self,
        shelf: &'s Shelf,
        whole: bool,
        entries: usize,
        bufs: &mut Vec<IoBuf<'s>>,
    ) -> Option<(usize, SeqFlags)> {
        let mut bytes = 0;
        for out in self.out.iter().take(entries) {
            let end = match out {
                Out::Chain { slot, chain, offset, len, end, .. } => {
                    let (mut skip, mut left) = (SKIP + *offset as usize, *len as usize);
                    for buf in shelf.batch(*slot).chain(*chain).readable() {
                        let here = skip.min(buf.len());
                        skip -= here;
                        let buf = buf.skip(here).prefix(left);
                        if buf.is_empty() {
                            continue;
                        }
                        if bufs.len() == IOV_MAX {
                            return if whole { None } else { Some((bytes, SeqFlags::empty())) };
                        }
                        left -= buf.len();
                        bytes += buf.len();
                        bufs.push(buf);
                    }
                    *end
                }
                Out::Kept(chunk) => {
                    if bufs.len() == IOV_MAX {
                        return if whole { None } else { Some((bytes, SeqFlags::empty())) };
                    }
                    let (part, end) = chunk.front(whole);
                    bytes += part.len();
                    bufs.push(IoBuf::from(part));
                    end
                }
            };
            if whole && !end.is_empty() {
                return Some((bytes, end));
            }
        }
        Some((if whole { 0 } else { bytes }, SeqFlags::empty()))
    }

    /// So many bytes of what waits have left; `loan`: until when the kernel reads them.
    pub(super) fn advance(&mut self, bytes: usize, loan: Option<u64>, shelf: &mut Shelf) {
        let mut left = bytes;
        while let Some(out) = self.out.front_mut() {
            let gone = match out {
                Out::Chain { slot, chain, offset, len, loan: before, .. } => {
                    let here = left.min(*len as usize);
                    let step = u32::try_from(here).expect("at most `len`");
                    (*offset, *len) = (*offset + step, *len - step);
                    left -= here;
                    if here > 0 {
                        *before = loan.or(*before);
                    }
                    (*len == 0).then_some(Some(((*slot, *chain), *before)))
                }
                Out::Kept(chunk) => {
                    let here = chunk.advance(left);
                    left -= here;
                    self.kept -= here;
                    chunk.is_sent().then_some(None)
                }
            };
            let Some(gone) = gone else { return };
            self.out.pop_front();
            let held = self.settled > 0;
            self.settled = self.settled.saturating_sub(1);
            if let Some((place, loan)) = gone {
                self.held -= usize::from(held);
                self.part(place, held, loan, shelf);
            }
            if left == 0 {
                return;
            }
        }
    }

    /// This line needs a chain no more; somebody else may.
    fn part(&mut self, place: (usize, usize), held: bool, loan: Option<u64>, shelf: &mut Shelf) {
        match loan {
            Some(until) => self.loans.enter(until, place, held, shelf),
            None => shelf.finish(place.0, place.1, held),
        }
    }

    /// Whether something is worth being lent.
    pub(super) fn has_large(&self, shelf: &Shelf) -> bool {
        self.out.iter().any(|out| out.is_large(shelf))
    }

    /// How many entries the next call takes, and whether they are lent: those that are worth it, as many as may be, or all
    /// before the first of them.
    pub(super) fn lendable(&self, shelf: &Shelf) -> (usize, bool) {
        let room = shelf.held_max.saturating_sub(shelf.held);
        let room = room.min(LENT_PER_LINE_MAX.saturating_sub(self.loans.len()));
        if room == 0 {
            return (usize::MAX, false);
        }
        match self.out.iter().take_while(|out| out.is_large(shelf)).count() {
            0 => (self.out.iter().take_while(|out| !out.is_large(shelf)).count(), false),
            large => (large.min(room), true),
        }
    }

    /// What came with this batch and did not leave stays where it is, if that is worth a chain of the ring, else it is
    /// copied into chunks of `size` bytes. Returns the bytes copied.
    pub(super) fn settle(&mut self, shelf: &mut Shelf, size: usize) -> usize {
        let mut copied = 0;
        for out in self.out.split_off(self.settled) {
            let Out::Chain { slot, chain, offset, len, end, loan } = out else {
                self.out.push_back(out);
                continue;
            };
            let fits = self.held < HELD_PER_LINE_MAX && shelf.held < shelf.held_max;
            if len >= HOLD_BYTES_MIN && fits && shelf.may_stay(slot) {
                self.held += 1;
                shelf.held += 1;
                self.out.push_back(out);
                continue;
            }
            copied += self.keep(shelf, &Copied { slot, chain, offset, len, end }, size);
            self.part((slot, chain), false, loan, shelf);
        }
        self.settled = self.out.len();
        copied
    }

    /// Everything that is in the ring is copied into chunks of `size` bytes: the ring goes, or a message has more pieces
    /// than a call takes. Returns the bytes copied.
    pub(super) fn let_go(&mut self, shelf: &mut Shelf, size: usize) -> usize {
        let mut copied = 0;
        let (settled, all) = (self.settled, std::mem::take(&mut self.out));
        for (index, out) in all.into_iter().enumerate() {
            if let Out::Chain { slot, chain, offset, len, end, loan } = out {
                copied += self.keep(shelf, &Copied { slot, chain, offset, len, end }, size);
                self.held -= usize::from(index < settled);
                self.part((slot, chain), index < settled, loan, shelf);
            } else {
                self.out.push_back(out);
            }
        }
        self.settled = self.out.len();
        copied
    }

    fn keep(&mut self, shelf: &Shelf, from: &Copied, size: usize) -> usize {
        let chain = shelf.batch(from.slot).chain(from.chain);
        let (mut offset, mut left) = (SKIP + from.offset as usize, from.len as usize);
        while left > 0 {
            if !matches!(self.out.back(), Some(Out::Kept(chunk)) if chunk.room() > 0) {
                self.out.push_back(Out::Kept(Box::new(Chunk::new(size))));
            }
            let Some(Out::Kept(chunk)) = self.out.back_mut() else { break };
            let here = left.min(chunk.room());
            chunk.append(here, |room| {
                chain.read_at(offset, room);
            });
            (offset, left) = (offset + here, left - here);
        }
        if let Some(Out::Kept(chunk)) = self.out.back_mut()
            && !from.end.is_empty()
        {
            chunk.end(from.end);
        }
        self.kept += from.len as usize;
        from.len as usize
    }

    /// Frees the room for packets that a batch took and that are gone.
    pub(super) fn trim(&mut self) {
        if self.out.capacity() > ENTRIES_IDLE_MAX {
            self.out.shrink_to(ENTRIES_IDLE_MAX);
        }
    }

    /// Bytes of memory that it takes beside its socket and a message on its way to the guest.
    pub(super) fn footprint(&self) -> usize {
        let chunks = self.out.iter().map(|out| match out {
            Out::Kept(chunk) => chunk.footprint(),
            Out::Chain { .. } => 0,
        });
        size_of::<Self>()
            + self.out.capacity() * size_of::<Out>()
            + self.loans.footprint()
            + chunks.sum::<usize>()
    }

    /// All that waits is dropped.
    pub(super) fn discard(&mut self, shelf: &mut Shelf) {
        for (index, out) in std::mem::take(&mut self.out).into_iter().enumerate() {
            if let Out::Chain { slot, chain, loan, .. } = out {
                self.part((slot, chain), index < self.settled, loan, shelf);
            }
        }
        (self.settled, self.held, self.kept) = (0, 0, 0);
    }
}

/// The part of a chain's payload that is copied, and what ends with it.
struct Copied {
    slot: usize,
    chain: usize,
    offset: u32,
    len: u32,
    end: SeqFlags,
}

/// Batches of the guest's packets, as long as somebody still needs one of their chains.
#[derive(Default)]
pub(super) struct Shelf {
    places: Vec<Place>,
    /// Chains that lines hold beyond their batch, or have lent.
    pub(super) held: usize,
    /// How many those may be.
    pub(super) held_max: usize,
    /// Chains that nobody needs any more.
    pub(super) done: Vec<Head>,
}

#[derive(Default)]
struct Place {
    batch: Batch,
    /// Chains of the batch that are in use.
    users: usize,
    /// Pieces of memory of all chains in the batch.
    pieces: usize,
}

impl Shelf {
    /// A place whose batch nobody needs.
    pub(super) fn free(&mut self) -> usize {
        self.places.iter().position(|place| place.users == 0).unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        })
    }

    /// Counts the pieces of a batch that was just taken.
    pub(super) fn measure(&mut self, slot: usize) {
        let place = &mut self.places[slot];
        place.pieces = pieces(&place.batch);
    }

    /// Whether chains of this batch may be held or lent.
    pub(super) fn may_stay(&self, slot: usize) -> bool {
        self.places[slot].pieces <= PIECES_HELD_MAX
    }

    /// Frees the memory of idle batches that hold much of it, and of those that are too many.
    pub(super) fn trim(&mut self) {
        for place in &mut self.places {
            if place.users == 0 && place.pieces > PIECES_HELD_MAX {
                *place = Place::default();
            }
        }
        while self.places.len() > IDLE_MAX && self.places.last().is_some_and(|place| place.users == 0) {
            self.places.pop();
        }
    }

    /// Drops all idle batches, which refer to the guest's memory.
    pub(super) fn clear_idle(&mut self) {
        self.places.iter_mut().filter(|place| place.users == 0).for_each(|place| *place = Place::default());
    }

    /// Pieces of memory that are described by batches in use.
    pub(super) fn pieces(&self) -> usize {
        self.places.iter().filter(|place| place.users > 0).map(|place| place.pieces).sum()
    }

    pub(super) fn batch(&self, slot: usize) -> &Batch {
        &self.places[slot].batch
    }

    pub(super) fn batch_mut(&mut self, slot: usize) -> &mut Batch {
        debug_assert_eq!(self.places[slot].users, 0);
        &mut self.places[slot].batch
    }

    /// A chain is needed.
    pub(super) fn take(&mut self, slot: usize) {
        self.places[slot].users += 1;
    }

    /// It has left, and only its head is needed: it goes back when whoever reads it is done. `held`: it counts among those
    /// that are held already.
    pub(super) fn lend(&mut self, slot: usize, chain: usize, held: bool) -> Head {
        self.places[slot].users -= 1;
        self.held += usize::from(!held);
        self.places[slot].batch.chain(chain).head()
    }

    /// It is lent no more.
    pub(super) fn take_back(&mut self, head: Head) {
        self.done.push(head);
        self.held -= 1;
    }

    /// It is not needed any more.
    pub(super) fn finish(&mut self, slot: usize, chain: usize, held: bool) {
        self.done.push(self.places[slot].batch.chain(chain).head());
        self.places[slot].users -= 1;
        self.held -= usize::from(held);
    }
}

/// The pieces of memory of all chains in a batch.
pub(super) fn pieces(batch: &Batch) -> usize {
    batch.chains().map(|chain| chain.readable().len() + chain.writable().len()).sum()
}

/// Whether a batch with so many pieces keeps too much memory to be left for the next packets.
pub(super) fn is_heavy(pieces: usize) -> bool {
    pieces > PIECES_HELD_MAX
}
