//! Ideas of the design that a measurement can turn off one by one, to show what each of them contributes. The device has no
//! options for them.

use crate::packet::PAYLOAD_BYTES_MAX;

/// Maximum number of the guest's buffers that are popped together.
pub(crate) const RECEIVE_BATCH: usize = 256;

/// Design decisions that can be turned off, see the module. The default has all of them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ablation {
    /// Handling of small packets that a socket does not take.
    pub merging: Merging,
    /// Rate of credit updates to the guest.
    pub credit_updates: CreditUpdates,
    /// Maximum number of the guest's buffers that one receive from a socket fills; with 1 no data is split over several.
    pub buffers_per_receive: usize,
    /// Maximum payload of a packet to the guest in bytes.
    pub payload_bytes_max: u32,
}

/// Handling of small packets that a socket does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merging {
    /// They are copied into common chunks.
    Chunks,
    /// Each has memory of its own.
    None,
}

/// Rate of credit updates to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreditUpdates {
    /// When half of the window is used and a quarter is free again.
    WhenNeeded,
    /// Whenever space has become free.
    Always,
}

impl Default for Ablation {
    fn default() -> Self {
        Self {
            merging: Merging::Chunks,
            credit_updates: CreditUpdates::WhenNeeded,
            buffers_per_receive: RECEIVE_BATCH,
            payload_bytes_max: PAYLOAD_BYTES_MAX,
        }
    }
}
