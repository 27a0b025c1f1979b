//! Transport reset after a migration: the driver is notified that all connections are gone, and until it has
//! processed the event, none is opened. A driver closes all connections that it has when it sees the event,
//! including new ones.

use std::sync::atomic::{AtomicBool, Ordering};

use towline_vhost_user::{Batch, Ring};

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the only event of the specification.
const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();
/// Maximum number of event buffers that are counted; Linux posts eight.
const BUFFERS_MAX: usize = 64;
/// Time within which a frontend starts the event queue, if it leaves it to the device. QEMU does not: it
/// sends the event itself.
const QUEUE_TIMEOUT_MS: u64 = 2_000;

/// Progress of a transport reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum TransportReset {
    /// None is in progress: connections can be opened.
    #[default]
    Done,
    /// The event must be sent if the event queue is the device's.
    Pending {
        /// Time when the reset began.
        since_ms: u64,
    },
    /// The event was sent.
    Sent {
        /// Event buffers that the driver had left available.
        buffers_left: usize,
    },
}

impl TransportReset {
    /// Returns true if connections can be opened.
    pub(crate) fn is_done(self) -> bool {
        self == Self::Done
    }

    /// Sends the event, or checks whether the driver has processed it: it has made the buffer available
    /// again, or has set `config_read` by reading its CID.
    pub(crate) fn advance(&mut self, ring: Option<&mut Ring>, config_read: &AtomicBool, now_ms: u64) {
        match (*self, ring) {
            (Self::Pending { .. }, Some(ring)) => {
                let mut batch = Batch::new();
                let count = ring.pop(&mut batch, BUFFERS_MAX);
                if count > 0 {
                    let chain = batch.chain(0);
                    let written = chain.write_at(0, &TRANSPORT_RESET);
                    config_read.store(false, Ordering::Relaxed);
                    ring.complete(chain, u32::try_from(written).unwrap_or(0));
                    ring.rewind(&mut batch, 1);
                    *self = Self::Sent { buffers_left: count - 1 };
                }
            }
            (Self::Pending { since_ms }, None) if now_ms >= since_ms + QUEUE_TIMEOUT_MS => *self = Self::Done,
            (Self::Sent { buffers_left }, Some(ring)) => {
                let mut batch = Batch::new();
                let count = ring.pop(&mut batch, BUFFERS_MAX);
                ring.rewind(&mut batch, 0);
                if count > buffers_left || config_read.load(Ordering::Relaxed) {
                    *self = Self::Done;
                }
            }
            _ => {}
        }
    }
}
