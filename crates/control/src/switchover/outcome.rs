//! Ends of a switchover. `plan::outcomes` has their texts and exit statuses.

pub(crate) use towline_protocol::session::Placement;

/// End of a switchover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SwitchoverOutcome {
    /// The guest is at its destination: exit status 0.
    Completed(Placement),
    /// The guest is at its source, as it was: exit status 1.
    Safe,
    /// An operator must look at the guest: exit status 3.
    Unresolved(Unresolved),
}

/// Location of a guest that is neither safe at its source nor known to be in order at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Unresolved {
    /// A `qmp:` destination holds it, paused; its source, also driven, did not report its completion.
    DestinationHolds,
    /// A `qmp:` destination holds it, paused; another party drives the source, whose last message did not
    /// arrive.
    Undecided,
    /// A destination that runs the guest by itself may run it. The source is stopped, or cannot run it.
    DestinationMayRun,
    /// A destination that runs the guest by itself may run it, and the source has it back.
    BothMayRun,
    /// Another party resumed it at its source after that had completed; the destination holds it, paused.
    SourceRunByOthers,
    /// Paused at both ends: the destination refused to run it.
    BothPaused,
    /// As `BothPaused`, and the record, which cannot be changed, still has it running at its destination.
    NotRetracted,
    /// The destination ran it and stopped it again.
    StoppedAgain,
    /// The destination was lost while it was starting the guest. The source holds it, paused.
    DestinationLost,
    /// It is not known whether the destination runs it. The source holds it, paused.
    DestinationUnknown,
    /// The new QEMU of an upgrade exited when it was to run the guest, or after: the old one's state, paused, may be of
    /// another memory.
    UpgradedLost,
    /// The new QEMU of an upgrade ran the guest and stopped it again; the old one's state is of another memory.
    UpgradedStopped,
    /// It is not known whether the new QEMU of an upgrade runs the guest; the old one's state, paused, may be of another
    /// memory.
    UpgradedUnknown,
    /// The new QEMU of an upgrade did not run it, and the old one could not be made to run it again.
    UpgradeNotUndone,
    /// The source's QEMU has exited; the destination holds it, paused, and refused to run it.
    DestinationOnly,
    /// The source's QEMU has exited; the destination holds it and does not reply.
    DestinationAlone,
    /// Both QEMUs have exited.
    BothExited,
    /// The source's QEMU has exited, and no other QEMU has the whole guest.
    SourceExited,
    /// The source's QEMU exited after it had its guest back: the destination's state is older.
    SourceExitedSince,
    /// The source does not reply or could not be restored.
    SourceUnknown,
    /// At its destination; the source could not be ended.
    SourceNotEnded,
    /// Stored; the source's guest is still paused.
    SourceNotResumed,
    /// Stored; the source's QEMU exited before its guest was resumed.
    StoredOnly,
    /// The image could not be completed, and the source's QEMU has exited.
    Unpublished,
    /// The other towline waits for an outcome that could not be sent.
    PeerWaits,
    /// The other towline was sent the outcome and has not reported.
    PeerUnknown,
    /// The other towline holds the guest, paused, and could not start it.
    PeerDidNotRun,
}

impl Unresolved {
    /// Returns true if a guest can still come to run, or a QEMU is left to be restored.
    pub(crate) fn is_open(self) -> bool {
        !matches!(
            self,
            Self::BothExited
                | Self::SourceExited
                | Self::SourceExitedSince
                | Self::StoredOnly
                | Self::Unpublished
        )
    }
}
