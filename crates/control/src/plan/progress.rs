//! How a copy goes, for whoever watches it.

use std::time::Duration;

use towline_channel::Address;
use towline_migration::{LaneSends, Snapshot};

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Both ends are asked and set.
    Prepare,
    /// Somebody is waited for, or reached.
    Connect,
    /// Memory moves, while the guest runs.
    Transfer,
    /// A guest that comes in was stopped at its source: the rest of its memory and its device state follow.
    Switchover,
    /// The destination has everything; the source hears it next.
    Loaded,
    /// The guest is there and its source was told so.
    Release,
    /// The source says that it is done with the guest, or has ended: it may run at the destination.
    CutOver,
    /// The destination was told to run it, and does.
    Running,
}

/// Receives callbacks of a copy's progress. Called from the plan's thread, and within a transfer from the engine's, which waits: each
/// callback returns at once, and never blocks on a reader of what it writes.
pub trait Observer: Sync {
    /// The next phase begins.
    fn phase(&self, phase: Phase) {
        let _ = phase;
    }

    /// Called several times a second while memory moves.
    fn progress(&self, progress: &Progress) {
        let _ = progress;
    }

    /// Whoever connects there from now on is heard: the source is waited for.
    fn listening(&self, address: &Address) {
        let _ = address;
    }

    /// How each lane to the destination has sent so far; called with [`Observer::progress`].
    fn lanes(&self, lanes: &[LaneSends]) {
        let _ = lanes;
    }

    /// Something the user should know, though nothing failed.
    fn notice(&self, text: &str) {
        let _ = text;
    }
}

/// Two that hear the same.
impl<A: Observer + ?Sized, B: Observer + ?Sized> Observer for (&A, &B) {
    fn phase(&self, phase: Phase) {
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

/// How far the memory is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// What this side has counted.
    pub moved: Snapshot,
    /// Passes over the memory that the source's QEMU has begun; this and all below only if one says so.
    pub pass: Option<u64>,
    /// How fast the source sends, in bytes per second.
    pub rate: Option<u64>,
    /// How fast the source's guest writes its memory, in bytes per second.
    pub dirty_rate: Option<u64>,
    /// What is left, in bytes.
    pub remaining: Option<u64>,
    /// How far the guest is slowed down, in percent.
    pub throttle_percent: Option<u64>,
    /// How long the guest would stand still if it were stopped now.
    pub expected_downtime: Option<Duration>,
    /// What a guest that runs already waited for.
    pub faults: Option<towline_migration::postcopy::FaultCounts>,
}

impl Progress {
    /// How long what is left takes while the guest writes on; `None` if that is not known, or does not end.
    pub fn expected_time(&self) -> Option<Duration> {
        let (remaining, rate) = (self.remaining?, self.rate?);
        let gains = rate.checked_sub(self.dirty_rate.unwrap_or(0)).filter(|&gains| gains > 0)?;
        Duration::try_from_secs_f64(remaining as f64 / gains as f64).ok()
    }
}
