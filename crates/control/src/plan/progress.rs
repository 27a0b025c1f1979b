//! Progress of a copy, for an observer.

use std::time::Duration;

use towline_channel::Address;
use towline_migration::{LaneSends, Snapshot};

/// Phase of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPhase {
    /// Both ends are queried and configured.
    Prepare,
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

/// Receives the progress of a copy. Called from the plan's thread and, during the transfer, from the
/// engine's, which waits: each callback returns at once and never blocks on a reader of its output.
pub trait Observer: Sync {
    /// The next phase starts.
    fn phase(&self, phase: CopyPhase) {
        let _ = phase;
    }

    /// Called several times a second while memory is transferred.
    fn progress(&self, progress: &Progress) {
        let _ = progress;
    }

    /// The address accepts connections of a source from now on.
    fn listening(&self, address: &Address) {
        let _ = address;
    }

    /// Statistics of each lane to the destination so far; called together with [`Observer::progress`].
    fn lanes(&self, lanes: &[LaneSends]) {
        let _ = lanes;
    }

    /// A notice for the user; nothing failed.
    fn notice(&self, text: &str) {
        let _ = text;
    }
}

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

    fn notice(&self, text: &str) {
        self.0.notice(text);
        self.1.notice(text);
    }
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
    /// Faults of a guest that already runs.
    pub faults: Option<towline_migration::postcopy::FaultCounts>,
}
