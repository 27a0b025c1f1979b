//! Progress of a copy, for an observer, and the report of a completed one.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use towline_channel::Address;
use towline_image::{Increment, Uploaded};
use towline_migration::postcopy::FaultCounts;
use towline_migration::{Compression, LaneSends, Snapshot, ZeroCopySend};

use crate::switchover::AtSource;

/// Phase of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CopyPhase {
    /// Both ends are queried and configured.
    Prepare,
    /// Disks are copied while the guest runs, before its memory.
    Disks,
    /// Disks are compared with their copies while the guest runs.
    CompareDisks,
    /// Waiting for a peer, or connecting to one.
    Connect,
    /// Memory is transferred while the guest runs.
    Transfer,
    /// An incoming guest was stopped at its source: the rest of its memory and its device state follow.
    Switchover,
    /// The destination has everything; the source is acknowledged next.
    Loaded,
    /// The guest is at its destination and its source was acknowledged.
    Release,
    /// The source has completed or exited: the guest may run at the destination.
    CutOver,
    /// The guest runs at the destination.
    Running,
    /// The guest is durable on this host, where its source may run it on, and is being uploaded to a store.
    Upload,
}

impl CopyPhase {
    /// The identifier of the phase.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Disks => "disks",
            Self::CompareDisks => "compare-disks",
            Self::Connect => "connect",
            Self::Transfer => "transfer",
            Self::Switchover => "switchover",
            Self::Loaded => "loaded",
            Self::Release => "release",
            Self::CutOver => "cut-over",
            Self::Running => "running",
            Self::Upload => "upload",
        }
    }
}

/// Receives the progress of a copy. Called from the plan's thread and, during the transfer, from the
/// engine's, which waits: each callback returns at once and never blocks on a reader of its output.
pub trait Observer: Sync {
    /// The next phase starts.
    fn phase(&self, _phase: CopyPhase) {}

    /// Called several times a second while memory is transferred.
    fn progress(&self, _progress: &Progress) {}

    /// The address accepts connections of a source from now on.
    fn listening(&self, _address: &Address) {}

    /// Statistics of each lane to the destination so far; called together with [`Observer::progress`].
    fn lanes(&self, _lanes: &[LaneSends]) {}

    /// The two hosts of the copy: the source's and the destination's.
    fn hosts(&self, _hosts: &[HostFacts; 2]) {}

    /// A notice for the user; nothing failed.
    fn notice(&self, _text: &str) {}
}

/// Keeps nothing.
impl Observer for () {}

/// Forwards to both observers.
impl<A: Observer + ?Sized, B: Observer + ?Sized> Observer for (&A, &B) {
    fn phase(&self, phase: CopyPhase) {
        self.0.phase(phase);
        self.1.phase(phase);
    }

    fn progress(&self, progress: &Progress) {
        self.0.progress(progress);
        self.1.progress(progress);
    }

    fn listening(&self, address: &Address) {
        self.0.listening(address);
        self.1.listening(address);
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        self.0.lanes(lanes);
        self.1.lanes(lanes);
    }

    fn hosts(&self, hosts: &[HostFacts; 2]) {
        self.0.hosts(hosts);
        self.1.hosts(hosts);
    }

    fn notice(&self, text: &str) {
        self.0.notice(text);
        self.1.notice(text);
    }
}

/// A host of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HostFacts {
    /// Name that it has for itself.
    pub name: String,
    /// Version of its Linux.
    pub kernel: String,
    /// Version of the QEMU; `None` for an image.
    pub qemu: Option<String>,
}

/// Progress of the memory transfer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Counters of this side.
    pub moved: Snapshot,
    /// Passes over the memory that the source's QEMU has started; this and all below only if a QEMU reports
    /// it.
    pub pass: Option<u64>,
    /// Rate at which the source sends, in bytes per second.
    pub rate: Option<u64>,
    /// Rate at which the source's guest writes its memory, in bytes per second.
    pub dirty_rate: Option<u64>,
    /// Remaining bytes.
    pub remaining: Option<u64>,
    /// Throttle of the guest, in percent.
    pub throttle_percent: Option<u64>,
    /// Downtime if the guest were stopped now.
    pub expected_downtime: Option<Duration>,
    /// Maximum downtime.
    pub downtime_limit: Option<Duration>,
    /// Disks that are copied; nothing else is known of a copy that has them.
    pub disks: Option<DiskProgress>,
    /// Faults of a guest that already runs.
    pub faults: Option<towline_migration::postcopy::FaultCounts>,
}

/// Progress of a guest's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DiskProgress {
    /// Bytes that the destination has, or that were compared.
    pub copied: u64,
    /// Bytes to copy or compare, which grow while the guest writes.
    pub total: u64,
}

/// Disks that are the same at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ComparedDisks {
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that were compared while the guest was stopped: written since.
    pub again_bytes: u64,
    /// Time that this took, in milliseconds.
    pub pause_ms: u64,
}

/// Report of a completed copy.
#[derive(Debug, Clone)]
pub struct CopyReport {
    /// Counters of the transfer.
    pub moved: Snapshot,
    /// Time from the first query until the guest was safe.
    pub total_time: Duration,
    /// Downtime in milliseconds, as the source's QEMU reports it.
    pub downtime_ms: Option<u64>,
    /// Number of lanes.
    pub multifd_channels: usize,
    /// Compression of the lanes.
    pub compression: Compression,
    /// Requested zero-copy sends on lanes to the destination.
    pub zero_copy_send: ZeroCopySend,
    /// Statistics of each lane to the destination; empty without a stream to it.
    pub lane_sends: Vec<LaneSends>,
    /// QEMU loaded the image itself.
    pub loaded_by_qemu: bool,
    /// State of the guest at the source.
    pub source: SourceState,
    /// State of the guest at the destination.
    pub destination: DestinationState,
    /// Upload to an object store.
    pub uploaded: Option<Uploaded>,
    /// Share of an incremental image that it holds itself.
    pub increment: Option<Increment>,
    /// Disks that were compared with their copies.
    pub compared_disks: Option<ComparedDisks>,
    /// Statistics of postcopy.
    pub postcopy: Option<PostcopyReport>,
}

impl CopyReport {
    /// Bytes of pages for each byte on compressed lanes, including headers; `None` without compressed bytes.
    pub fn compression_ratio(&self) -> Option<f64> {
        let moved = &self.moved;
        let is_compressed = self.compression != Compression::None && moved.multifd_bytes > 0;
        is_compressed.then(|| moved.normal_bytes as f64 / moved.multifd_bytes as f64)
    }
}

/// State of the guest at its source after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SourceState {
    /// It runs (`--resume`).
    Running,
    /// It is paused (`postmigrate`).
    #[serde(rename = "postmigrate")]
    Paused,
    /// Its QEMU was ended.
    Ended,
    /// Unchanged: an image, a guest of this process, or a guest that was stored while it did not run.
    Unchanged,
    /// It was received as a stream, whose sender decides whether it keeps the guest.
    #[serde(rename = "unknown")]
    UpToSender,
}

impl From<SourceState> for AtSource {
    fn from(state: SourceState) -> Self {
        match state {
            SourceState::Running | SourceState::Unchanged => Self::HasIt,
            SourceState::Paused => Self::Paused,
            SourceState::Ended => Self::Ended,
            SourceState::UpToSender => Self::Unknown,
        }
    }
}

/// State of the guest at its destination after a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationState {
    /// It runs.
    Running,
    /// It is loaded and paused.
    Paused,
    /// It is stored.
    Stored,
    /// It is loaded, as acknowledged on the return path; another party decides whether it runs.
    Loaded,
    /// It was sent without a return path, so that nothing acknowledges that it was loaded.
    Sent,
    /// It was received by a sink of this process, with which it ends.
    Received,
    /// It was counted and discarded.
    #[serde(rename = "discarded")]
    Dropped,
}

/// Statistics of a postcopy.
#[derive(Debug, Clone, Copy, Default)]
pub struct PostcopyReport {
    /// Faults of the guest.
    pub faults: FaultCounts,
    /// Pages in the working set of earlier restores.
    pub working_set_pages: u64,
    /// Time from the first query until the guest was seen to run; `None` if it could not be queried.
    pub running_after: Option<Duration>,
    /// Number of connections that were recovered.
    pub recoveries: u64,
}
