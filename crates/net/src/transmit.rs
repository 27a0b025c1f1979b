//! From the guest to the tap: one `writev` per frame, straight from the guest's buffers, its own virtio header first.
//!
//! The kernel copies the frame once and validates the copied header, so a guest that changes the header meanwhile affects
//! only itself.

use std::io;

use towline_channel::{IOV_MAX, IoBuf};
use towline_vhost_user::{Batch, Chain, Next, Ring};

use crate::statistics::{BatchCounters, DropReason};
use crate::tap::{CarrierState, TapContext};
use crate::{FRAME_BYTES_MAX, PUBLISHED_BYTES};

/// Frames that are popped and completed together.
const FRAMES_PER_BATCH: usize = 64;
/// Maximum number of batches in one run; then the other direction and the session have theirs.
const BATCHES_PER_RUN: usize = 4;

/// The transmitting half of a queue pair.
pub(crate) struct Transmitter {
    batch: Batch,
    /// True while it waits for room in the tap, not for frames of the guest.
    pub(crate) blocked: bool,
}

/// Result of an attempt to send a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The frame was sent, or dropped and counted.
    Done,
    /// The tap has no room; the frame is to be sent again later.
    TapFull,
}

/// Reason why a frame was not written.
enum WriteError {
    TapFull,
    Dropped(DropReason),
}

impl Transmitter {
    pub(crate) fn new() -> Self {
        Self { batch: Batch::new(), blocked: false }
    }

    /// Releases guest memory that is about to be unmapped.
    pub(crate) fn release_memory(&mut self) {
        self.batch.clear();
    }

    /// Sends up to [`BATCHES_PER_RUN`] batches.
    pub(crate) fn run(&mut self, ring: &mut Ring, tap: TapContext<'_>, counted: &mut BatchCounters) -> Next {
        self.blocked = false;
        for _ in 0..BATCHES_PER_RUN {
            let popped = ring.pop(&mut self.batch, FRAMES_PER_BATCH);
            if popped == 0 {
                ring.set_notification(true);
                return Next::Wait;
            }
            let sent = self.send_batch(ring, tap, counted);
            ring.rewind(&mut self.batch, sent);
            ring.publish();
            if sent < popped {
                self.blocked = true;
                ring.set_notification(false);
                return Next::Wait;
            }
        }
        Next::Again
    }

    /// Sends the batch until the tap has no room. Returns the number of frames sent.
    fn send_batch(&mut self, ring: &mut Ring, tap: TapContext<'_>, counted: &mut BatchCounters) -> usize {
        let mut bufs = Vec::with_capacity(IOV_MAX.min(64));
        let mut published_bytes = counted.bytes;
        for (index, chain) in self.batch.chains().enumerate() {
            if send_frame(chain, tap, &mut bufs, counted) == Sent::TapFull {
                return index;
            }
            ring.complete(chain, 0);
            if counted.bytes - published_bytes >= PUBLISHED_BYTES {
                ring.publish();
                published_bytes = counted.bytes;
            }
        }
        self.batch.len()
    }
}

/// Sends one frame, or drops it. `bufs` is kept by the caller for its allocation.
pub(crate) fn send_frame<'b>(
    chain: Chain<'b>,
    tap: TapContext<'_>,
    bufs: &mut Vec<IoBuf<'b>>,
    counted: &mut BatchCounters,
) -> Sent {
    match write_frame(chain, tap, bufs) {
        Ok(bytes) => counted.add_frame(bytes),
        Err(WriteError::Dropped(reason)) => counted.add_drop(reason),
        Err(WriteError::TapFull) => return Sent::TapFull,
    }
    Sent::Done
}

/// Writes one frame to the tap. Returns its length without the virtio header.
fn write_frame<'b>(
    chain: Chain<'b>,
    tap: TapContext<'_>,
    bufs: &mut Vec<IoBuf<'b>>,
) -> Result<usize, WriteError> {
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
    bufs.clear();
    bufs.extend(chain.readable());
    tap.queue.write(bufs)?;
    Ok(length - header_bytes)
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
