//! From the tap to the guest: one `readv` per frame, straight into the guest's buffers.
//!
//! ```text
//!   pop a window of chains ─► gather as many as recent frames took, then the overflow buffer ─► readv
//!                               │ it fits:    chains completed, num_buffers written; the next frame follows them
//!                               │ longer:     the contents of the overflow buffer are copied to further chains
//!                               └ no buffers: the frame is deferred until the driver makes more available
//! ```
//! A tap does not report the length of its next frame, and discards what `readv` has no room for. Gathering
//! 64 KiB for each small frame would be wasteful, so buffers are gathered for the longest of the recent
//! frames, followed by an overflow buffer of this process. Nothing is lost, and only frames that are longer
//! than those before are copied. No frame is dropped for lack of buffers either, and none is read while the
//! receive ring is empty.

use std::io;

use towline_channel::{IoBufMut, gather};
use towline_vhost_user::{Batch, Next, Ring};

use crate::chains::{Gathered, complete, gather_chains, mark_written, recycled, write_chains};
use crate::pause::{Backlog, TapGate};
use crate::statistics::{BatchCounters, DropReason};
use crate::tap::{CarrierState, FrameFormat, TapContext};
use crate::{FRAME_BYTES_MAX, PUBLISHED_BYTES};

/// Maximum number of frames in one run; then the other direction and the session have theirs.
const FRAMES_PER_RUN: usize = 256;
/// Frames after which a batch is published, if more follow.
const FRAMES_PER_BATCH: usize = 64;
/// Minimum and maximum number of chains that are popped at once.
const WINDOW: std::ops::RangeInclusive<usize> = 8..=256;
/// Maximum number of chains of a deferred frame.
const DEFERRED_CHAINS_MAX: usize = 4096;
/// Frames after which the longest of them becomes the expected length.
const PREDICTION_FRAMES: usize = 64;
/// Frames of the tap that are held at most; more wait in the tap.
const HELD_MAX: usize = 1024;
/// Consecutive errors after which a tap is considered gone.
const FAILURES_MAX: usize = 16;

/// The receiving half of a queue pair.
pub(crate) struct Receiver {
    batch: Batch,
    /// Number of chains that are popped at once.
    window: usize,
    /// Follows the guest's buffers in each `readv`.
    overflow: Box<[u8]>,
    /// A frame for which there were too few buffers; empty if there is none.
    deferred: Vec<u8>,
    /// Follow it.
    pub(crate) backlog: Backlog,
    lengths: LengthPrediction,
    failures: usize,
    /// True while the ring is empty: the driver has to make buffers available before the next frame is read.
    pub(crate) buffers_exhausted: bool,
    /// True once the tap is gone; nothing is read from it again.
    pub(crate) tap_failed: bool,
    /// The list for `readv`, empty between frames; kept for its allocation.
    bufs: Vec<IoBufMut<'static>>,
}

/// Predicts the length of the next frame from the recent ones.
#[derive(Debug, Default)]
struct LengthPrediction {
    expected: usize,
    /// Longest of the frames since the expected length was last lowered, and their number.
    longest: usize,
    frames: usize,
}

/// Result of an attempt to receive one frame.
enum Received {
    /// The frame fills this number of chains, which are completed.
    Frame { chains: usize },
    /// The tap has no frame.
    TapEmpty,
    /// The frame was discarded; no chain was used.
    Dropped,
    /// The frame waits for more buffers; no chain was used.
    Deferred,
    /// Fewer chains are left in the batch than recent frames took; nothing was read.
    TooFewChains,
}

/// State of a deferred frame after an attempt to deliver it.
#[derive(PartialEq, Eq)]
enum Delivery {
    /// Delivered or dropped.
    Done,
    /// Waits: there are still too few buffers.
    Waits,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            batch: Batch::new(),
            window: *WINDOW.start(),
            overflow: vec![0; FRAME_BYTES_MAX].into(),
            deferred: Vec::new(),
            backlog: Backlog::default(),
            lengths: LengthPrediction::default(),
            failures: 0,
            buffers_exhausted: false,
            tap_failed: false,
            bufs: Vec::new(),
        }
    }

    /// Discards the frames whose header has the format of a former driver.
    pub(crate) fn reset(&mut self) {
        drop(self.undelivered());
        self.buffers_exhausted = false;
    }

    /// Takes the frames that were read, and for which there were no buffers.
    pub(crate) fn undelivered(&mut self) -> impl Iterator<Item = Box<[u8]>> + use<> {
        let Backlog { frames, held } = std::mem::take(&mut self.backlog);
        let deferred = Some(std::mem::take(&mut self.deferred)).filter(|frame| !frame.is_empty());
        deferred.map(Vec::into_boxed_slice).into_iter().chain(frames).chain(held)
    }

    /// Releases guest memory that is about to be unmapped.
    pub(crate) fn release_memory(&mut self) {
        self.batch.clear();
    }

    /// Receives up to [`FRAMES_PER_RUN`] frames.
    pub(crate) fn run(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        gate: TapGate,
        counted: &mut BatchCounters,
    ) -> Next {
        if self.tap_failed {
            ring.set_notification(false);
            return Next::Wait;
        }
        if tap.link == CarrierState::Down {
            // Frames are discarded without the guest's buffers, so kicks for more of them are not needed.
            ring.set_notification(false);
            return self.discard(tap, counted);
        }
        if gate == TapGate::Open {
            self.backlog.frames.extend(self.backlog.held.drain(..));
        }
        if self.deliver_backlog(ring, tap.format, counted) == Delivery::Waits {
            return self.wait_for_buffers(ring);
        }
        if gate == TapGate::Held {
            ring.set_notification(false);
            return self.hold(tap);
        }
        let mut left = FRAMES_PER_RUN;
        loop {
            if ring.pop(&mut self.batch, self.window) == 0 {
                return self.wait_for_buffers(ring);
            }
            self.buffers_exhausted = false;
            let (filled, tap_empty) = self.fill(ring, tap, counted, &mut left);
            let popped = self.batch.len();
            ring.rewind(&mut self.batch, filled);
            ring.publish();
            if tap_empty || left == 0 {
                ring.set_notification(false);
                if filled < popped / 4 {
                    self.window = (self.window / 2).max(*WINDOW.start());
                }
                return if left == 0 { Next::Again } else { Next::Wait };
            }
            if !self.deferred.is_empty() {
                if self.deliver_deferred(ring, tap.format, counted) == Delivery::Waits {
                    return self.wait_for_buffers(ring);
                }
                // `fill` returned before it counted this frame.
                left -= 1;
                if left == 0 {
                    ring.set_notification(false);
                    return Next::Again;
                }
            }
            self.window = (self.window * 2).min(*WINDOW.end());
        }
    }

    /// Discards the frames of the tap, and the deferred one, while the link is down.
    fn discard(&mut self, tap: TapContext<'_>, counted: &mut BatchCounters) -> Next {
        self.undelivered().for_each(|_| counted.add_drop(DropReason::LinkDown));
        for _ in 0..FRAMES_PER_RUN {
            if self.read_aside(tap).is_none() {
                return Next::Wait;
            }
            counted.add_drop(DropReason::LinkDown);
        }
        Next::Again
    }

    /// Delivers the deferred frame, and those that follow it.
    fn deliver_backlog(
        &mut self,
        ring: &mut Ring,
        format: FrameFormat,
        counted: &mut BatchCounters,
    ) -> Delivery {
        while self.deliver_deferred(ring, format, counted) == Delivery::Done {
            let Some(frame) = self.backlog.frames.pop_front() else { return Delivery::Done };
            self.deferred = frame.into();
        }
        Delivery::Waits
    }

    /// Reads frames of the tap that wait for those of the guest's former host.
    fn hold(&mut self, tap: TapContext<'_>) -> Next {
        while self.backlog.held.len() < HELD_MAX
            && let Some(length) = self.read_aside(tap)
        {
            self.backlog.held.push(self.overflow[..length].into());
        }
        // Until the hold ends, the tap is not polled if it has more.
        self.buffers_exhausted = self.backlog.held.len() == HELD_MAX;
        Next::Wait
    }

    /// Reads a frame into the overflow buffer.
    fn read_aside(&mut self, tap: TapContext<'_>) -> Option<usize> {
        let read = tap.queue.read(&mut [IoBufMut::from(&mut *self.overflow)]);
        self.count_failure(read)
    }

    /// Counts errors other than an empty tap; gives the tap up after [`FAILURES_MAX`] of them in a row.
    fn count_failure(&mut self, read: io::Result<usize>) -> Option<usize> {
        match &read {
            Ok(_) => self.failures = 0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                self.failures += 1;
                if self.failures == FAILURES_MAX {
                    tracing::error!(%error, "the tap is gone; no more frames are received");
                    self.tap_failed = true;
                }
            }
        }
        read.ok()
    }

    /// Requests a kick for the next buffers.
    fn wait_for_buffers(&mut self, ring: &mut Ring) -> Next {
        self.buffers_exhausted = true;
        ring.set_notification(true);
        Next::Wait
    }

    /// Receives frames into the chains of the batch, `left` at most. Returns the number of chains that were used,
    /// and true if the tap has no more.
    fn fill(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
        left: &mut usize,
    ) -> (usize, bool) {
        // A full window: the ring may have more chains.
        let window_full = self.batch.len() == self.window;
        let can_grow = window_full && self.window < *WINDOW.end();
        let (mut used, mut unpublished, mut published_bytes) = (0, 0, counted.since.bytes);
        while *left > 0 && used < self.batch.len() {
            // Too few chains for frames like the recent ones are used if another batch would have no more.
            let least = if used > 0 || can_grow { self.lengths.expected } else { 0 };
            match self.receive(ring, tap, counted, used, least) {
                Received::Frame { chains } => used += chains,
                Received::Dropped => {}
                Received::TapEmpty => return (used, true),
                Received::Deferred | Received::TooFewChains => break,
            }
            *left -= 1;
            unpublished += 1;
            if unpublished == FRAMES_PER_BATCH || counted.since.bytes - published_bytes >= PUBLISHED_BYTES {
                ring.publish();
                (unpublished, published_bytes) = (0, counted.since.bytes);
            }
        }
        (used, false)
    }

    /// Receives one frame into the chains from `first` on, unless they have less than `least` bytes.
    fn receive(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
        first: usize,
        least: usize,
    ) -> Received {
        let (format, expected) = (tap.format, self.lengths.expected);
        let mut bufs: Vec<IoBufMut<'_>> = std::mem::take(&mut self.bufs);
        let gathered = gather_chains(&self.batch, first, format, expected, &mut bufs);
        if gathered.bytes < least && format.mergeable {
            self.bufs = recycled(bufs);
            return Received::TooFewChains;
        }
        bufs.push(IoBufMut::from(&mut *self.overflow));
        let read = tap.queue.read(&mut bufs);
        self.bufs = recycled(bufs);
        let Some(length) = self.count_failure(read) else { return Received::TapEmpty };
        self.lengths.record(length);
        self.complete_frame(ring, format, counted, gathered, length)
    }

    /// Completes the chains of a frame that was read into `gathered` and the overflow buffer.
    fn complete_frame(
        &mut self,
        ring: &mut Ring,
        format: FrameFormat,
        counted: &mut BatchCounters,
        gathered: Gathered,
        length: usize,
    ) -> Received {
        let overflow = length.saturating_sub(gathered.bytes);
        let too_long = overflow >= self.overflow.len() || (overflow > 0 && !format.mergeable);
        if length < format.header_bytes || too_long {
            mark_written(ring, &self.batch, gathered);
            counted.add_drop(DropReason::TooLong);
            return Received::Dropped;
        }
        if overflow > 0 {
            counted.since.copied += 1;
            let next = gathered.first + gathered.chains;
            if !write_chains(&self.batch, next, &self.overflow[..overflow]) {
                mark_written(ring, &self.batch, gathered);
                self.defer(gathered, overflow);
                return Received::Deferred;
            }
        }
        let chains = complete(ring, &self.batch, gathered.first, length, format);
        counted.add_frame(length - format.header_bytes);
        Received::Frame { chains }
    }

    /// Copies a frame out of the guest's buffers and the overflow buffer, to be delivered later.
    fn defer(&mut self, gathered: Gathered, overflow: usize) {
        self.deferred.resize(gathered.bytes, 0);
        let chains = self.batch.chains().skip(gathered.first).take(gathered.chains);
        let filled: Vec<_> = chains.flat_map(|chain| chain.writable()).collect();
        gather(&filled.iter().map(IoBufMut::as_io_buf).collect::<Vec<_>>(), &mut self.deferred);
        self.deferred.extend_from_slice(&self.overflow[..overflow]);
    }

    /// Delivers the deferred frame, if there is one and the driver has made enough buffers available.
    fn deliver_deferred(
        &mut self,
        ring: &mut Ring,
        format: FrameFormat,
        counted: &mut BatchCounters,
    ) -> Delivery {
        if self.deferred.is_empty() {
            return Delivery::Done;
        }
        let (batch, length) = (&mut self.batch, self.deferred.len());
        ring.pop(batch, DEFERRED_CHAINS_MAX);
        // A driver without mergeable buffers has one that is long enough, or the frame is too long for it.
        let fits = format.mergeable || batch.is_empty() || batch.chain(0).writable_bytes() as usize >= length;
        if fits && write_chains(batch, 0, &self.deferred) {
            let used = complete(ring, batch, 0, length, format);
            ring.rewind(batch, used);
            ring.publish();
            counted.add_frame(length - format.header_bytes);
        } else {
            let too_many = batch.len() == DEFERRED_CHAINS_MAX || batch.is_full();
            ring.rewind(batch, 0);
            if !too_many && fits {
                return Delivery::Waits;
            }
            counted.add_drop(DropReason::TooLong);
        }
        // It may have grown to thousands of chains.
        batch.clear();
        self.deferred.clear();
        Delivery::Done
    }
}

impl LengthPrediction {
    /// Takes a frame of this length into account.
    fn record(&mut self, length: usize) {
        self.expected = self.expected.max(length);
        self.longest = self.longest.max(length);
        self.frames += 1;
        if self.frames == PREDICTION_FRAMES {
            *self = Self { expected: self.longest, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_length_is_that_of_the_longest_recent_frame() {
        let mut lengths = LengthPrediction::default();
        [60, 1514, 90].into_iter().for_each(|length| lengths.record(length));
        assert_eq!(lengths.expected, 1514);
        (3..PREDICTION_FRAMES).for_each(|_| lengths.record(90));
        assert_eq!(lengths.expected, 1514, "the longest of these frames");
        (0..PREDICTION_FRAMES).for_each(|_| lengths.record(90));
        assert_eq!(lengths.expected, 90);
    }
}
