//! From the tap to the guest: one `readv` a frame, straight into the guest's buffers.
//!
//! ```text
//!   pop a window of chains ─► gather as many as frames took lately, and the spill behind them ─► readv
//!                               │ it fits: chains completed, num_buffers written; the next frame begins behind them
//!                               │ longer:  what is in the spill goes into further chains
//!                               └ the guest has too few: the frame is held until it gives more
//! ```
//! A tap does not say how long its next frame is, and what `readv` has no room for is lost. Gathering 64 KiB for each small
//! frame would be a waste, so as much is gathered as the longest of the last frames took, and behind it stands a spill of
//! this process's own: nothing is lost, and copied is only what was longer than any before it. No frame is dropped for want
//! of buffers either, and none is read while the guest has given none.

use std::io;

use towline_channel::{IOV_MAX, IoBufMut, gather};
use towline_vhost_user::{Batch, Chain, Ring};

use crate::statistics::{DropReason, Tally};
use crate::tap::Tap;
use crate::{BYTES_A_BATCH, FRAME_BYTES_MAX};

/// Frames in one turn; then the other direction, and the session, have theirs.
const FRAMES_A_TURN: usize = 256;
/// Frames after which the guest sees them, if more are there.
const FRAMES_A_BATCH: usize = 64;
/// Chains taken at a time, at least and at most.
const WINDOW: std::ops::RangeInclusive<usize> = 8..=256;
/// Chains that a frame that is held may be spread over.
const HELD_CHAINS_MAX: usize = 4096;
/// Frames after which the longest of them is what the next ones are expected to be.
const MEMORY_FRAMES: usize = 64;
/// `num_buffers` of the virtio header.
const NUM_BUFFERS: usize = 10;
/// Errors in a row after which a tap is taken for gone.
const FAILURES_MAX: usize = 16;

/// How frames look to this guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bytes of virtio header.
    pub(crate) header_bytes: usize,
    /// Whether a frame may be spread over several chains.
    pub(crate) mergeable: bool,
}

/// Where frames come from, and how they are to look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line<'a> {
    pub(crate) tap: &'a Tap,
    pub(crate) format: Format,
    /// Whether anything goes over it.
    pub(crate) linked: bool,
}

/// The receiving half of a pair.
pub(crate) struct Receiver {
    batch: Batch,
    window: usize,
    spill: Box<[u8]>,
    /// A frame for which the guest had too few buffers, if it is not empty.
    held: Vec<u8>,
    /// Bytes that frames take, and what they took since that was last decided.
    expected: usize,
    longest: usize,
    seen: usize,
    failures: usize,
    /// Waits for buffers of the guest's, not for frames.
    pub(crate) starved: bool,
    /// The tap is of no use any more.
    pub(crate) gone: bool,
}

/// What became of an attempt to receive one frame.
enum Received {
    /// So many chains were completed with it.
    Frame(usize),
    /// There was none.
    Nothing,
    /// It is held, or was dropped; no chain was used.
    Aside,
    /// There are fewer chains left than frames took lately.
    Short,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            batch: Batch::new(),
            window: *WINDOW.start(),
            spill: vec![0; FRAME_BYTES_MAX].into(),
            held: Vec::new(),
            expected: 0,
            longest: 0,
            seen: 0,
            failures: 0,
            starved: false,
            gone: false,
        }
    }

    /// The guest has another driver: what is held was made for the one before.
    pub(crate) fn forget(&mut self) {
        self.held.clear();
        self.starved = false;
    }

    /// Guest memory changes: nothing of the former one is kept mapped.
    pub(crate) fn release(&mut self) {
        self.batch.clear();
    }

    /// Receives for one turn. True if there may be more.
    pub(crate) fn run(&mut self, ring: &mut Ring, line: Line<'_>, tally: &mut Tally) -> bool {
        if self.gone {
            ring.set_notification(false);
            return false;
        }
        if !line.linked {
            // Frames are dropped without the guest's buffers, so nobody has to be kicked for more of them.
            ring.set_notification(false);
            return self.discard(line, tally);
        }
        if !self.held.is_empty() && !self.deliver_held(ring, line.format, tally) {
            return self.starve(ring);
        }
        let mut left = FRAMES_A_TURN;
        loop {
            if ring.pop(&mut self.batch, self.window) == 0 {
                return self.starve(ring);
            }
            self.starved = false;
            let (used, over) = self.fill(ring, line, tally, &mut left);
            let taken = self.batch.len();
            ring.rewind(&mut self.batch, used);
            ring.publish();
            if over || left == 0 {
                ring.set_notification(false);
                if used < taken / 4 {
                    self.window = (self.window / 2).max(*WINDOW.start());
                }
                return left == 0;
            }
            if !self.held.is_empty() {
                if !self.deliver_held(ring, line.format, tally) {
                    return self.starve(ring);
                }
                // `fill` ended before it counted this frame.
                left -= 1;
                if left == 0 {
                    ring.set_notification(false);
                    return true;
                }
            }
            self.window = (self.window * 2).min(*WINDOW.end());
        }
    }

    /// While the link is down: what comes is thrown away, and what is held too. True if there may be more.
    fn discard(&mut self, line: Line<'_>, tally: &mut Tally) -> bool {
        if !self.held.is_empty() {
            tally.drop(DropReason::Unlinked);
            self.held.clear();
        }
        for _ in 0..FRAMES_A_TURN {
            match line.tap.read(&mut [IoBufMut::from(&mut *self.spill)]) {
                Ok(_) => tally.drop(DropReason::Unlinked),
                Err(error) => {
                    self.fail(&error);
                    return false;
                }
            }
        }
        true
    }

    /// Nothing came. A tap that says so too often for another reason than that there is nothing is gone.
    fn fail(&mut self, error: &io::Error) {
        if error.kind() == io::ErrorKind::WouldBlock {
            return;
        }
        self.failures += 1;
        if self.failures == FAILURES_MAX {
            tracing::error!(%error, "the tap is gone; nothing is received from it any more");
            self.gone = true;
        }
    }

    /// The guest wakes us when it has more buffers.
    fn starve(&mut self, ring: &mut Ring) -> bool {
        self.starved = true;
        ring.set_notification(true);
        false
    }

    /// Receives into the chains of the batch. How many were used, and whether there are no more frames.
    fn fill(
        &mut self,
        ring: &mut Ring,
        line: Line<'_>,
        tally: &mut Tally,
        left: &mut usize,
    ) -> (usize, bool) {
        // Whether the ring may have more chains than these.
        let more = self.batch.len() == self.window;
        let (mut at, mut unpublished, mut shown) = (0, 0, tally.bytes);
        let mut bufs = Vec::new();
        while *left > 0 && at < self.batch.len() {
            let may_wait = at > 0 || (more && self.window < *WINDOW.end());
            let received;
            (received, bufs) = self.receive(ring, line, tally, (at, may_wait), bufs);
            match received {
                Received::Frame(chains) => at += chains,
                Received::Nothing => return (at, true),
                Received::Aside if self.held.is_empty() => {}
                Received::Aside | Received::Short => return (at, false),
            }
            *left -= 1;
            unpublished += 1;
            if unpublished == FRAMES_A_BATCH || tally.bytes - shown >= BYTES_A_BATCH {
                ring.publish();
                (unpublished, shown) = (0, tally.bytes);
            }
        }
        (at, false)
    }

    /// Receives one frame into the chains from `at` on.
    fn receive<'b>(
        &mut self,
        ring: &mut Ring,
        Line { tap, format, .. }: Line<'_>,
        tally: &mut Tally,
        (at, may_wait): (usize, bool),
        bufs: Vec<IoBufMut<'_>>,
    ) -> (Received, Vec<IoBufMut<'b>>) {
        let Self { batch, spill, held, expected, .. } = self;
        let mut bufs = emptied(bufs);
        let (mut room, mut chains) = (0, 0);
        let most = if format.mergeable { batch.len() - at } else { 1 };
        for chain in (at..at + most).map(|index| batch.chain(index)) {
            if (room >= *expected && room > 0) || bufs.len() + chain.writable().len() >= IOV_MAX {
                break;
            }
            bufs.extend(chain.writable());
            room += chain.writable_bytes() as usize;
            chains += 1;
        }
        if room < *expected && format.mergeable && may_wait {
            return (Received::Short, emptied(bufs));
        }
        let spill_bytes = spill.len();
        bufs.push(IoBufMut::from(&mut **spill));
        let length = match tap.read(&mut bufs) {
            Ok(length) => length,
            Err(error) => {
                let bufs = emptied(bufs);
                self.fail(&error);
                return (Received::Nothing, bufs);
            }
        };
        self.failures = 0;
        let bufs = emptied(bufs);
        let behind = length.saturating_sub(room);
        let received = if length < format.header_bytes || behind >= spill_bytes {
            tally.drop(DropReason::TooLong);
            Received::Aside
        } else if behind == 0 {
            Received::Frame(complete(ring, batch, at, length, format))
        } else if !format.mergeable {
            tally.drop(DropReason::TooLong);
            Received::Aside
        } else if spread(batch, at + chains, &spill[..behind]) {
            tally.copied += 1;
            Received::Frame(complete(ring, batch, at, length, format))
        } else {
            // What is in the guest's buffers already is taken out again: they are given back.
            tally.copied += 1;
            held.resize(room, 0);
            let filled: Vec<_> =
                batch.chains().skip(at).take(chains).flat_map(|chain| chain.writable()).collect();
            gather(&filled.iter().map(IoBufMut::as_io_buf).collect::<Vec<_>>(), held);
            held.extend_from_slice(&spill[..behind]);
            Received::Aside
        };
        if matches!(received, Received::Frame(_)) {
            tally.packets += 1;
            tally.bytes += (length - format.header_bytes) as u64;
        }
        self.learn(length);
        (received, bufs)
    }

    /// What the next frames are expected to take.
    fn learn(&mut self, length: usize) {
        self.expected = self.expected.max(length);
        self.longest = self.longest.max(length);
        self.seen += 1;
        if self.seen == MEMORY_FRAMES {
            (self.expected, self.longest, self.seen) = (self.longest, 0, 0);
        }
    }

    /// Gives the guest the frame that is held, if it has the buffers by now. False if not.
    fn deliver_held(&mut self, ring: &mut Ring, format: Format, tally: &mut Tally) -> bool {
        let (batch, length) = (&mut self.batch, self.held.len());
        ring.pop(batch, HELD_CHAINS_MAX);
        let room: usize = batch.chains().map(|chain| chain.writable_bytes() as usize).sum();
        if room >= length && format.mergeable {
            spread(batch, 0, &self.held);
            let used = complete(ring, batch, 0, length, format);
            ring.rewind(batch, used);
            ring.publish();
            tally.packets += 1;
            tally.bytes += (length - format.header_bytes) as u64;
        } else {
            let too_many = batch.len() == HELD_CHAINS_MAX || batch.is_full();
            ring.rewind(batch, 0);
            if !too_many && format.mergeable {
                return false;
            }
            tally.drop(DropReason::TooLong);
        }
        // It may have grown to thousands of chains.
        batch.clear();
        self.held.clear();
        true
    }
}

/// Writes `bytes` to the chains from `first` on; false if there is not the room.
fn spread(batch: &Batch, first: usize, bytes: &[u8]) -> bool {
    let room: usize = batch.chains().skip(first).map(|chain| chain.writable_bytes() as usize).sum();
    if room < bytes.len() {
        return false;
    }
    let mut done = 0;
    for chain in batch.chains().skip(first) {
        if done == bytes.len() {
            break;
        }
        done += chain.write_at(0, &bytes[done..]);
    }
    true
}

/// Completes the chains from `at` on that a frame of this length has filled; how many.
fn complete(ring: &mut Ring, batch: &Batch, at: usize, length: usize, format: Format) -> usize {
    let (mut left, mut used) = (length, 0);
    while left > 0 {
        left = left.saturating_sub(batch.chain(at + used).writable_bytes() as usize);
        used += 1;
    }
    // Before any chain is completed: that marks its pages in the dirty log, and what is written after a page was marked is lost
    // in a migration.
    if format.header_bytes > NUM_BUFFERS {
        let count = u16::try_from(used).expect("the window is smaller").to_le_bytes();
        batch.chain(at).write_at(NUM_BUFFERS, &count);
    }
    let mut left = length;
    for index in at..at + used {
        let chain: Chain<'_> = batch.chain(index);
        let here = left.min(chain.writable_bytes() as usize);
        left -= here;
        ring.complete(chain, u32::try_from(here).expect("a frame is shorter"));
    }
    used
}

/// The same allocation, for buffers of another lifetime.
fn emptied<'b>(mut bufs: Vec<IoBufMut<'_>>) -> Vec<IoBufMut<'b>> {
    bufs.clear();
    bufs.into_iter().map(|_| unreachable!("it is empty")).collect()
}
