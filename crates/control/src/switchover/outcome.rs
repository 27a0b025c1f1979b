//! How a command ends: what to tell a person, and which exit code it means.

/// The guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Placed {
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
    Done(Placed),
    /// The guest is at its source, as it was: exit code 1.
    Safe,
    /// Somebody has to look: exit code 3.
    Look(Held),
}

/// Where the guest is when it is neither safe at its source nor known to be in order at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Held {
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

impl Held {
    /// As [`Self::text`], of a guest whose source is an image, which stays as it was.
    pub(crate) fn text_of_image(self) -> &'static str {
        match self {
            Self::DestinationMayRun => {
                "at its destination, which was sent everything and may run it: look there; the image is as it was"
            }
            Self::BothPaused => {
                "paused at the destination, which has loaded it: run it there (`cont`), or end it; the image is as it was"
            }
            Self::StoppedAgain => {
                "at its destination, where it was run and stopped again: look there; the image is as it was"
            }
            Self::DestinationLost => {
                "in its image; its destination was lost when it was to run it, so it may have run there; the image is as it was"
            }
            Self::DestinationUnknown => {
                "in its image; whether it runs at its destination is not known: look there"
            }
            held => held.text(),
        }
    }

    /// Where the guest is, and what to do: one sentence each, to follow "the guest is".
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::DestinationHolds => {
                "whole at its destination, paused; its source did not say whether it is done: look at the source, and run the guest at one of them only (`cont`)"
            }
            Self::Undecided => {
                "whole at its destination, paused; whether its source is done with it is not known: run it here (`cont`) only if it does not run there"
            }
            Self::DestinationMayRun => {
                "at its destination, which was sent everything and may run it; its source, if it still has it, holds it paused (postmigrate): look at the destination, and run it on at the source (`cont`) only if it does not run there"
            }
            Self::BothMayRun => {
                "running at its source, whose migration was cancelled there when the destination had everything: look at the destination, which may run it too, and end one of them"
            }
            Self::SourceRunByOthers => {
                "running at its source, where it was run by somebody else after the copy was complete; the destination holds a copy of it, paused: run only one of them"
            }
            Self::BothPaused => "paused at both ends: run it on where you want it (`cont`), not at both",
            Self::StoppedAgain => {
                "at its destination, where it was run and stopped again; its source still holds it as it was before that, paused (postmigrate): run only one of them"
            }
            Self::DestinationLost => {
                "paused at its source (postmigrate); the destination was lost when it was to run it, so it may have run there: if not, run it on at the source (`cont`)"
            }
            Self::DestinationUnknown => {
                "paused at its source (postmigrate); whether it runs at the destination is not known: look there, and run only one of them (`cont`)"
            }
            Self::DestinationOnly => {
                "paused at the destination, whole (`cont` runs it on); its source has ended"
            }
            Self::DestinationAlone => {
                "at its destination, which does not answer any more: look whether it runs there; its source has ended"
            }
            Self::BothExited => "lost: both QEMUs have ended",
            Self::SourceExited => {
                "lost: its source's QEMU has ended, and the guest with it; the destination has only a part of it, which does not run"
            }
            Self::SourceExitedSince => {
                "lost: its source's QEMU has ended, and the guest with it, after it ran on there; what the destination may hold of it is older"
            }
            Self::SourceUnknown => {
                "at its source, if that still lives: the guest runs on there as soon as QEMU sees that the copy failed (if not: `cont`)"
            }
            Self::SourceNotEnded => {
                "at its destination; its source could not be ended and holds it paused (postmigrate): end it (`quit`), and do not run it there"
            }
            Self::SourceNotResumed => "stored; at its source it is still paused: run it on (`cont`)",
            Self::StoredOnly => "stored, and nowhere else: its source's QEMU has ended",
            Self::PeerWaits => {
                "paused at both ends: the outcome could not be sent to the destination's towline"
            }
            Self::PeerUnknown => {
                "paused at its source (postmigrate); the destination's towline was to run it, and did not say that it did: look there, and run only one of them"
            }
            Self::PeerDidNotRun => {
                "paused at both ends: the destination's towline could not run it; run it on where you want it (`cont`), not at both"
            }
        }
    }
}

impl Held {
    /// Whether a guest can still come to run, or a QEMU is left to be put in order.
    pub(crate) fn is_open(self) -> bool {
        !matches!(self, Self::BothExited | Self::SourceExited | Self::SourceExitedSince | Self::StoredOnly)
    }
}
