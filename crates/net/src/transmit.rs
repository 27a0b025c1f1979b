//! From the guest to the tap, straight from the guest's buffers: each frame is one write, its own virtio
//! header first. Frames that are available together are written by one call ([`crate::sys::tap_ring`]).
//!
//! The kernel copies the frame once and validates the copied header, so a guest that changes the header at
//! the same time affects only itself.

use std::io;
use std::ops::Range;

use towline_channel::IoBuf;
use towline_vhost_user::{Batch, Chain, Next, Ring};

use crate::hold::{HEADER_BYTES, HeldPair};
use crate::pause::Frame;
use crate::statistics::{BatchCounters, DropReason};
use crate::sys::tap_ring::FRAMES_MAX;
use crate::tap::{CarrierState, TapContext};
use crate::{FRAME_BYTES_MAX, PUBLISHED_BYTES};

/// Frames that are popped and completed together.
const FRAMES_PER_BATCH: usize = FRAMES_MAX;
/// Maximum number of batches in one run; then the other direction and the session have theirs.
const BATCHES_PER_RUN: usize = 4;

/// The transmitting half of a queue pair.
pub(crate) struct Transmitter {
    batch: Batch,
    /// True while it waits for room in the tap, not for frames of the guest.
    pub(crate) blocked: bool,
    /// True while it waits for room for frames that are held.
    pub(crate) held_full: bool,
    /// Frames that are written together, as ranges of their buffers, and their results; kept for their
    /// allocations.
    frames: Vec<Range<usize>>,
    results: Vec<i32>,
}

/// Result of an attempt to send a frame.
#[cfg(feature = "af-xdp")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The frame was sent, or dropped and counted.
    Done,
    /// The tap has no room; send the frame again later.
    TapFull,
    /// The same for the queue of AF_XDP.
    QueueFull,
}

/// Reason why a frame was not written.
#[derive(Clone, Copy)]
enum WriteError {
    TapFull,
    Dropped(DropReason),
}

impl Transmitter {
    pub(crate) fn new() -> Self {
        Self {
            batch: Batch::new(),
            blocked: false,
            held_full: false,
            frames: Vec::new(),
            results: Vec::new(),
        }
    }

    /// Releases guest memory that is about to be unmapped.
    pub(crate) fn release_memory(&mut self) {
        self.batch.clear();
    }

    /// Sends up to [`BATCHES_PER_RUN`] batches, or holds copies of their frames.
    pub(crate) fn run(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        held: Option<HeldPair<'_>>,
        counted: &mut BatchCounters,
    ) -> Next {
        self.blocked = false;
        for _ in 0..BATCHES_PER_RUN {
            let popped = ring.pop(&mut self.batch, FRAMES_PER_BATCH);
            if popped == 0 {
                ring.set_notification(true);
                return Next::Wait;
            }
            let sent = match held {
                Some(held) => self.hold_batch(ring, tap, held, counted),
                None => self.send_batch(ring, tap, counted),
            };
            ring.rewind(&mut self.batch, sent);
            ring.publish();
            if sent < popped {
                (self.blocked, self.held_full) = (held.is_none(), held.is_some());
                ring.set_notification(false);
                return Next::Wait;
            }
        }
        Next::Again
    }

    /// Holds copies of the batch while there is room. Returns the number of frames held or dropped.
    fn hold_batch(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        held: HeldPair<'_>,
        counted: &mut BatchCounters,
    ) -> usize {
        for (done, chain) in self.batch.chains().enumerate() {
            match check(chain, tap) {
                Ok(_) if !held.push(copy(chain, tap.format.header_bytes)) => return done,
                Err(WriteError::Dropped(reason)) => counted.add_drop(reason),
                _ => {}
            }
            ring.complete(chain, 0);
        }
        self.batch.len()
    }

    /// Sends the batch until the tap has no room. Returns the number of frames sent.
    fn send_batch(&mut self, ring: &mut Ring, tap: TapContext<'_>, counted: &mut BatchCounters) -> usize {
        let mut bufs = Vec::with_capacity(FRAMES_PER_BATCH);
        let mut sent = 0;
        while sent < self.batch.len() {
            let group = sent..self.group_end(sent);
            bufs.clear();
            self.frames.clear();
            for chain in group.clone().map(|index| self.batch.chain(index)) {
                if check(chain, tap).is_ok() {
                    let start = bufs.len();
                    bufs.extend(chain.readable());
                    self.frames.push(start..bufs.len());
                }
            }
            tap.queue.write_frames(&bufs, &self.frames, &mut self.results);
            let complete = self.complete_group(ring, tap, counted, group.clone());
            if complete < group.len() {
                return sent + complete;
            }
            sent = group.end;
            // Earlier than the rest of the batch, so the guest and the device work at the same time.
            if sent < self.batch.len() {
                ring.publish();
            }
        }
        sent
    }

    /// Returns the end of the chains from `first` on that are written together.
    fn group_end(&self, first: usize) -> usize {
        let mut bytes = 0;
        let chains = self.batch.chains().skip(first);
        let together = chains.take_while(|chain| {
            let more = bytes < PUBLISHED_BYTES;
            bytes += u64::from(chain.readable_bytes());
            more
        });
        first + together.count()
    }

    /// Completes the chains of a group whose frames were written or dropped, up to the first one for which
    /// the tap had no room. Returns their number.
    fn complete_group(
        &self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
        group: Range<usize>,
    ) -> usize {
        let (count, mut results) = (group.len(), self.results.iter().copied());
        for (done, chain) in group.map(|index| self.batch.chain(index)).enumerate() {
            let written =
                check(chain, tap).and_then(|bytes| written(results.next().unwrap_or(-libc::EAGAIN), bytes));
            if !settle(written, results.clone(), counted) {
                return done;
            }
            ring.complete(chain, 0);
        }
        count
    }
}

/// Sends held frames of the pair of this tap's queue. Returns the number of frames sent or dropped; for the next one the tap has no room.
pub(crate) fn send_held(frames: &[Frame], tap: TapContext<'_>, counted: &mut BatchCounters) -> usize {
    if tap.link == CarrierState::Down {
        frames.iter().for_each(|_| counted.add_drop(DropReason::LinkDown));
        return frames.len();
    }
    let parts = frames.iter().map(|frame| {
        let (header, rest) = frame.bytes.split_at(HEADER_BYTES);
        [&header[..tap.format.header_bytes], rest]
    });
    let bufs: Vec<_> = parts.flatten().map(IoBuf::from).collect();
    let ranges: Vec<_> = (0..frames.len()).map(|index| 2 * index..2 * index + 2).collect();
    let mut results = Vec::new();
    tap.queue.write_frames(&bufs, &ranges, &mut results);
    let mut later = results.into_iter();
    for (done, frame) in frames.iter().enumerate() {
        let result = later.next().unwrap_or(-libc::EAGAIN);
        if !settle(written(result, frame.bytes.len() - HEADER_BYTES), later.clone(), counted) {
            return done;
        }
    }
    frames.len()
}

/// Copies a frame, with its header.
fn copy(chain: Chain<'_>, header_bytes: usize) -> Box<[u8]> {
    let length = HEADER_BYTES + chain.readable_bytes() as usize - header_bytes;
    let mut bytes = vec![0; length];
    chain.read_at(0, &mut bytes[..header_bytes]);
    chain.read_at(header_bytes, &mut bytes[HEADER_BYTES..]);
    bytes.into_boxed_slice()
}

/// Sends one frame, or drops it. Returns false if the tap has no room.
#[cfg(feature = "af-xdp")]
pub(crate) fn send_frame(chain: Chain<'_>, tap: TapContext<'_>, counted: &mut BatchCounters) -> bool {
    let written = check(chain, tap).and_then(|bytes| {
        tap.queue.write(&chain.readable().collect::<Vec<_>>())?;
        Ok(bytes)
    });
    settle(written, std::iter::empty(), counted)
}

/// Returns the length of a frame without the virtio header, or the reason for not writing it.
fn check(chain: Chain<'_>, tap: TapContext<'_>) -> Result<usize, WriteError> {
    let (length, header_bytes) = (chain.readable_bytes() as usize, tap.format.header_bytes);
    if tap.link == CarrierState::Down {
        return Err(WriteError::Dropped(DropReason::LinkDown));
    }
    if length <= header_bytes {
        return Err(WriteError::Dropped(DropReason::Malformed));
    }
    if length > FRAME_BYTES_MAX {
        return Err(WriteError::Dropped(DropReason::TooLong));
    }
    Ok(length - header_bytes)
}

/// Counts a frame that was written or dropped. Returns false if the tap had no room for it; it is dropped if one of the `later` results is a
/// success: that order is not changed, as this happens once (`write_frames`).
fn settle(
    written: Result<usize, WriteError>,
    mut later: impl Iterator<Item = i32>,
    counted: &mut BatchCounters,
) -> bool {
    match written {
        Ok(bytes) => counted.add_frame(bytes),
        Err(WriteError::TapFull) if later.any(|result| result >= 0) => counted.add_drop(DropReason::NoRoom),
        Err(WriteError::TapFull) => return false,
        Err(WriteError::Dropped(reason)) => counted.add_drop(reason),
    }
    true
}

/// Returns the length of a frame with this result of its write.
fn written(result: i32, bytes: usize) -> Result<usize, WriteError> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result).into()) } else { Ok(bytes) }
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Dropped(match error.raw_os_error() {
            Some(libc::EAGAIN) => return Self::TapFull,
            Some(libc::EIO | libc::ENETDOWN) => DropReason::InterfaceDown,
            Some(libc::EINVAL) => DropReason::Malformed,
            Some(libc::EMSGSIZE) => DropReason::TooLong,
            Some(libc::ENOBUFS | libc::ENOMEM) => DropReason::NoRoom,
            _ => DropReason::Refused,
        })
    }
}
