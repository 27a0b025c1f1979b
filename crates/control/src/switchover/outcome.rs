//! How a switchover ends. What each end means to a person and to a shell is in `plan::outcomes`.

/// The guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Placement {
    /// It runs there, or sleeps there (`suspended`).
    Running,
    /// Loaded, paused.
    Paused,
    /// Loaded by a QEMU that decides by itself.
    Loaded,
    /// Stored, or received into memory.
    Stored,
}

/// The end of a switchover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// The guest is at its destination: exit code 0.
    Completed(Placement),
    /// The guest is at its source, as it was: exit code 1.
    Safe,
    /// Somebody has to look: exit code 3.
    Unresolved(Unresolved),
}

/// Where the guest is when it is neither safe at its source nor known to be in order at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Unresolved {
    /// A `qmp:` destination holds it, paused; its source, also driven, did not say whether it is done.
    DestinationHolds,
    /// A `qmp:` destination holds it, paused; the source is driven by somebody else, and its last message did not arrive.
    Undecided,
    /// A destination that runs by itself may run it. The source is stopped, or cannot run it.
    DestinationMayRun,
    /// A destination that runs by itself may run it, and the source has it back.
    BothMayRun,
    /// Somebody ran it at its source after that was complete; the destination holds it, paused.
    SourceRunByOthers,
    /// Paused at both ends: the destination refused to run it.
    BothPaused,
    /// The destination was to run it, and has stopped it since.
    StoppedAgain,
    /// The destination was lost when it was to run it. The source holds it, paused.
    DestinationLost,
    /// It is not known whether the destination runs it. The source holds it, paused.
    DestinationUnknown,
    /// The source's QEMU has exited; the destination holds it, paused, and refused to run it.
    DestinationOnly,
    /// The source's QEMU has exited; the destination holds it, and does not answer.
    DestinationAlone,
    /// Both QEMUs have exited.
    BothExited,
    /// The source's QEMU has exited, and no other has the whole guest.
    SourceExited,
    /// The source's QEMU exited after it had its guest back: what the destination holds is older.
    SourceExitedSince,
    /// The source does not answer, or could not be put in order.
    SourceUnknown,
    /// At its destination; the source could not be ended.
    SourceNotEnded,
    /// Stored; the source's guest is still paused.
    SourceNotResumed,
    /// Stored; the source's QEMU exited before its guest ran on.
    StoredOnly,
    /// The other towline waits for an outcome that could not be sent.
    PeerWaits,
    /// The other towline was sent the outcome, and did not say what it did.
    PeerUnknown,
    /// The other towline holds the guest, paused, and could not run it.
    PeerDidNotRun,
}

impl Unresolved {
    /// Whether a guest can still come to run, or a QEMU is left to be put in order.
    pub(crate) fn is_open(self) -> bool {
        !matches!(self, Self::BothExited | Self::SourceExited | Self::SourceExitedSince | Self::StoredOnly)
    }
}
