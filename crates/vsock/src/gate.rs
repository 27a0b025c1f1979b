//! After a guest has come from elsewhere: its driver is told that all connections are gone, and until it has seen that,
//! none is made. A driver closes what it has when it sees the event, also what was made a moment before.

use std::sync::atomic::{AtomicBool, Ordering};

use towline_vhost_user::{Batch, Ring};

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the only event there is.
const TRANSPORT_RESET: [u8; 4] = 0u32.to_le_bytes();
/// Buffers for events that are looked at; Linux posts eight.
const BUFFERS: usize = 64;
/// How long a frontend may take to start the event queue. QEMU keeps it to itself, and tells the guest itself.
const QUEUE_WITHIN_MS: u64 = 2_000;

/// Whether connections can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Gate {
    /// They can.
    #[default]
    Open,
    /// The driver has to be told first, if the event queue is ours; since then.
    Tell(u64),
    /// It was told; so many buffers it had left then.
    Told(usize),
}

impl Gate {
    /// Looks whether something has changed. `config_read`: the driver has read its context again.
    pub(crate) fn pass(&mut self, ring: Option<&mut Ring>, config_read: &AtomicBool, now_ms: u64) {
        match (*self, ring) {
            (Self::Tell(_), Some(ring)) => {
                let mut batch = Batch::new();
                let count = ring.pop(&mut batch, BUFFERS);
                if count > 0 {
                    let chain = batch.chain(0);
                    let written = chain.write_at(0, &TRANSPORT_RESET);
                    config_read.store(false, Ordering::Relaxed);
                    ring.complete(chain, u32::try_from(written).unwrap_or(0));
                    ring.rewind(&mut batch, 1);
                    *self = Self::Told(count - 1);
                }
            }
            (Self::Tell(since), None) if now_ms >= since + QUEUE_WITHIN_MS => *self = Self::Open,
            (Self::Told(left), Some(ring)) => {
                let mut batch = Batch::new();
                let count = ring.pop(&mut batch, BUFFERS);
                ring.rewind(&mut batch, 0);
                // It has taken the event, and given its buffer back.
                if count > left || config_read.load(Ordering::Relaxed) {
                    *self = Self::Open;
                }
            }
            _ => {}
        }
    }
}
