//! What a copy came to.

use std::time::Duration;

use towline_image::{Increment, Uploaded};
use towline_migration::postcopy::FaultCounts;
use towline_migration::{Compression, LaneSends, Snapshot, ZeroCopySend, synthetic};

/// What was done.
#[derive(Debug, Clone)]
pub struct Report {
    /// What moved.
    pub moved: Snapshot,
    /// From the first question to the guest's being safe.
    pub total_time: Duration,
    /// How long the guest stood still, as the source's QEMU has it, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Lanes used.
    pub multifd_channels: usize,
    /// How they were compressed.
    pub compression: Compression,
    /// What was asked of lanes to the destination.
    pub zero_copy_send: ZeroCopySend,
    /// How each lane to the destination sent its pages; none if there is no stream to it.
    pub lane_sends: Vec<LaneSends>,
    /// QEMU loaded the image itself.
    pub loaded_by_qemu: bool,
    /// The source's guest now.
    pub source: SourceState,
    /// The destination's guest now.
    pub destination: DestinationState,
    /// What was sent to an object store.
    pub uploaded: Option<Uploaded>,
    /// What arrived in memory of this process.
    pub memory: Option<synthetic::Outcome>,
    /// How much an incremental image holds itself.
    pub increment: Option<Increment>,
    /// How its memory followed a guest that ran at once.
    pub postcopy: Option<PostcopyReport>,
}

impl Report {
    /// How many bytes of pages went as one byte over compressed lanes, their headers counted; `None` if nothing did.
    pub fn compression_ratio(&self) -> Option<f64> {
        let moved = &self.moved;
        let is_compressed = self.compression != Compression::None && moved.multifd_bytes > 0;
        is_compressed.then(|| moved.normal_bytes as f64 / moved.multifd_bytes as f64)
    }
}

/// The guest at its source after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// Runs on (`--resume`).
    Running,
    /// Paused in QEMU's `postmigrate`.
    Paused,
    /// Its QEMU has ended.
    Ended,
    /// Not ours to say: a stream, or an image as it was.
    Unchanged,
}

/// The guest at its destination after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DestinationState {
    /// Runs.
    Running,
    /// Loaded, paused.
    Paused,
    /// Stored.
    Stored,
    /// Loaded by somebody else, who decides.
    Loaded,
    /// Received into memory, looked through, and dropped with it.
    Received,
    /// Counted and dropped.
    Dropped,
}

/// How a guest's memory followed it.
#[derive(Debug, Clone, Copy, Default)]
pub struct PostcopyReport {
    /// What it waited for.
    pub faults: FaultCounts,
    /// Pages that the working set of earlier restores named.
    pub working_set_pages: u64,
    /// From the first question to a guest that was seen to run; `None`: nobody could look.
    pub running_after: Option<Duration>,
    /// Connections that were lost and made again.
    pub recoveries: u64,
}
