//! From the guest to the tap: one `writev` a frame, straight from the guest's buffers, its own virtio header first.
//!
//! The kernel copies the frame once and judges its header, so a header that changes meanwhile harms nobody but its guest.

use std::io;

use towline_channel::{IOV_MAX, IoBuf};
use towline_vhost_user::{Batch, Chain, Ring};

use crate::receive::Line;
use crate::statistics::{DropReason, Tally};
use crate::{BYTES_A_BATCH, FRAME_BYTES_MAX};

/// Frames that are taken, and given back, together.
const FRAMES_A_BATCH: usize = 64;
/// Batches in one turn; then the other direction, and the session, have theirs.
const BATCHES_A_TURN: usize = 4;

/// The sending half of a pair.
pub(crate) struct Transmitter {
    batch: Batch,
    /// Waits for room in the tap, not for frames of the guest's.
    pub(crate) blocked: bool,
}

impl Transmitter {
    pub(crate) fn new() -> Self {
        Self { batch: Batch::new(), blocked: false }
    }

    /// Guest memory changes: nothing of the former one is kept mapped.
    pub(crate) fn release(&mut self) {
        self.batch.clear();
    }

    /// Sends for one turn. True if there may be more.
    pub(crate) fn run(&mut self, ring: &mut Ring, line: Line<'_>, tally: &mut Tally) -> bool {
        self.blocked = false;
        for _ in 0..BATCHES_A_TURN {
            let taken = ring.pop(&mut self.batch, FRAMES_A_BATCH);
            if taken == 0 {
                ring.set_notification(true);
                return false;
            }
            let sent = self.send(ring, line, tally);
            ring.rewind(&mut self.batch, sent);
            ring.publish();
            if sent < taken {
                self.blocked = true;
                ring.set_notification(false);
                return false;
            }
        }
        true
    }

    /// Sends the batch; how many frames of it until the tap had no room.
    fn send(&mut self, ring: &mut Ring, line: Line<'_>, tally: &mut Tally) -> usize {
        let mut bufs = Vec::with_capacity(IOV_MAX.min(64));
        let mut shown = tally.bytes;
        for (index, chain) in self.batch.chains().enumerate() {
            if !frame(chain, line, &mut bufs, tally) {
                return index;
            }
            ring.complete(chain, 0);
            if tally.bytes - shown >= BYTES_A_BATCH {
                ring.publish();
                shown = tally.bytes;
            }
        }
        self.batch.len()
    }
}

/// Sends one frame, or drops it. False if the tap has no room.
pub(crate) fn frame<'b>(
    chain: Chain<'b>,
    Line { tap, format, linked }: Line<'_>,
    bufs: &mut Vec<IoBuf<'b>>,
    tally: &mut Tally,
) -> bool {
    let length = chain.readable_bytes() as usize;
    bufs.clear();
    bufs.extend(chain.readable());
    let written = match length {
        _ if !linked => Err(io::Error::from_raw_os_error(libc::ENOLINK)),
        _ if length <= format.header_bytes => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        ..=FRAME_BYTES_MAX => tap.write(bufs),
        _ => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
    };
    match written {
        Ok(_) => {
            tally.packets += 1;
            tally.bytes += (length - format.header_bytes) as u64;
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
        Err(error) => tally.drop(reason(&error)),
    }
    true
}

fn reason(error: &io::Error) -> DropReason {
    match error.raw_os_error() {
        Some(libc::EIO | libc::ENETDOWN) => DropReason::Down,
        Some(libc::ENOLINK) => DropReason::Unlinked,
        Some(libc::EINVAL) => DropReason::Malformed,
        Some(libc::EMSGSIZE) => DropReason::TooLong,
        Some(libc::ENOBUFS | libc::ENOMEM) => DropReason::NoRoom,
        _ => DropReason::Refused,
    }
}
