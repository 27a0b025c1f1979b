//! Ends of a switchover. `plan::outcomes` has their sentences and exit statuses.

use schemars::JsonSchema;
use serde::Serialize;
pub(crate) use towline_protocol::session::Placement;

/// End of a switchover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SwitchoverOutcome {
    /// The guest is at its destination: exit status 0.
    Completed(Placement),
    /// The guest is at its source, as it was: exit status 1.
    Safe,
    /// An operator must look at the guest: exit status 3.
    Unresolved(GuestState),
}

/// A guest at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AtSource {
    /// It runs there, or is as it was.
    HasIt,
    /// It is held there, paused (postmigrate).
    Paused,
    /// The source has ended, or has no guest.
    Ended,
    /// It is not known whether the source has it.
    Unknown,
}

/// A guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AtDestination {
    /// Nothing that can run is there.
    None,
    /// The whole guest is there, and does not run.
    Holds,
    /// The destination has everything, and may run it.
    MayRun,
    /// It runs there.
    Runs,
    /// The destination has ended.
    Ended,
    /// It is not known whether it runs there.
    Unknown,
}

/// Next step of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ToDo {
    /// Nothing: the guest is where it was.
    Nothing,
    /// Wait: an end does not reply yet.
    Wait,
    /// See whether it runs at the destination; only if it does not, run it at the source.
    LookAtDestination,
    /// See whether it runs at the source; only if it does not, run it at the destination.
    LookAtSource,
    /// Run it at either end, but at one only.
    RunOne,
    /// Run it at the destination.
    RunDestination,
    /// Run it at the source.
    RunSource,
    /// Run it at the source, unless it has run at the destination.
    RunSourceUnlessItRan,
    /// Run it at the destination, unless it has run on at the source.
    RunDestinationUnlessItRanOn,
    /// Use the destination: the source's state is older, and must not be resumed.
    KeepDestination,
    /// End the source, whose state is older: the guest is in order at the destination.
    EndSource,
    /// Act by the monitor of the destination, where it has stopped by itself.
    ActAtDestination,
    /// It may run twice: end one of the two.
    EndOne,
    /// It is lost: start it again.
    StartAgain,
    /// Run it by its record, or remove the record before it is run at the source.
    ForgetRecord,
    /// Restore its image.
    Restore,
    /// End the destination, and restore another copy of the image.
    RestoreAnother,
    /// Kill the destination's QEMU, and restore the image.
    KillAndRestore,
    /// Send the rest of its memory from the image (`--recover`).
    Recover,
    /// Make the image whole again, and send the rest of its memory from it.
    RecoverRepaired,
    /// Connect both QEMUs again by their monitors.
    Reconnect,
    /// Attach its vsock at the destination.
    AttachVsock,
}

/// Where a guest is after a failure, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct GuestState {
    /// The guest at its source.
    pub source: AtSource,
    /// The guest at its destination.
    pub destination: AtDestination,
    /// Next step.
    pub to_do: ToDo,
}

impl From<Placement> for AtDestination {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::Running => Self::Runs,
            Placement::Loaded => Self::MayRun,
            Placement::Paused | Placement::Stored => Self::Holds,
        }
    }
}

impl GuestState {
    /// Stored; the source's guest is still paused.
    pub(super) const NOT_RESUMED: Self = Self::new(AtSource::Paused, AtDestination::Holds, ToDo::RunSource);
    /// Stored; the source's QEMU exited before its guest was resumed.
    pub(super) const STORED_ONLY: Self = Self::new(AtSource::Ended, AtDestination::Holds, ToDo::Restore);
    /// The image could not be completed, and the source's QEMU has exited.
    pub(super) const UNPUBLISHED: Self = Self::new(AtSource::Ended, AtDestination::Unknown, ToDo::Restore);

    /// Restored without a part of its memory, which the image has.
    pub(crate) const LACKS_MEMORY: Self = Self::new(AtSource::HasIt, AtDestination::Runs, ToDo::Recover);
    /// Restored without a part of its memory; the image cannot be read to its end.
    pub(crate) const UNREADABLE: Self =
        Self::new(AtSource::Unknown, AtDestination::Runs, ToDo::RecoverRepaired);
    /// Restored without a part of its memory; QEMU's main loop waits for that too, so no other process can send
    /// it.
    pub(crate) const BLOCKED: Self = Self::new(AtSource::HasIt, AtDestination::Runs, ToDo::KillAndRestore);
    /// Restored from an image that was truncated meanwhile: a part of its memory may be zeros.
    pub(crate) const TRUNCATED: Self =
        Self::new(AtSource::Unknown, AtDestination::Runs, ToDo::RestoreAnother);
    /// Its devices were sent, and its destination cannot be queried.
    pub(crate) const UNSEEN: Self =
        Self::new(AtSource::HasIt, AtDestination::Unknown, ToDo::LookAtDestination);
    /// Restored with all of its memory; its run state is not known.
    pub(crate) const ARRIVED: Self =
        Self::new(AtSource::HasIt, AtDestination::MayRun, ToDo::LookAtDestination);
    /// It ran at its destination, whose QEMU has ended; the image is unchanged.
    pub(crate) const RAN_AND_ENDED: Self =
        Self::new(AtSource::HasIt, AtDestination::Ended, ToDo::RunSourceUnlessItRan);

    /// At its destination; the source could not be ended.
    pub(crate) fn not_ended(placement: Placement) -> Self {
        Self::new(AtSource::Paused, placement.into(), ToDo::EndSource)
    }

    /// The source does not reply or could not be restored.
    pub(crate) const fn source_unknown(destination: AtDestination) -> Self {
        Self::new(AtSource::Unknown, destination, ToDo::RunSource)
    }

    pub(crate) const fn new(source: AtSource, destination: AtDestination, to_do: ToDo) -> Self {
        Self { source, destination, to_do }
    }

    /// The guest at a source of this name.
    pub(crate) fn at_source(self, source: &str) -> String {
        match self.source {
            AtSource::HasIt => format!("running at {source}"),
            AtSource::Paused => format!("paused at {source} (postmigrate)"),
            AtSource::Ended if self.to_do == ToDo::StartAgain && self.destination != AtDestination::Runs => {
                format!("{source} has ended, and the guest with it")
            }
            AtSource::Ended => format!("{source} has ended"),
            AtSource::Unknown => format!("it is not known whether {source} still has it"),
        }
    }

    /// The guest at a destination of this name.
    pub(crate) fn at_destination(self, destination: &str) -> String {
        match (self.destination, self.to_do) {
            (AtDestination::None, _) => format!("{destination} has nothing that can run"),
            (AtDestination::Holds, ToDo::Restore) => "stored, and nowhere else".into(),
            (AtDestination::Holds, _) => format!("whole at {destination}, where it does not run"),
            (AtDestination::MayRun, _) => format!("{destination} was sent everything, and may run it"),
            (AtDestination::Runs, _) => format!("running at {destination}"),
            (AtDestination::Ended, _) => format!("{destination} has ended"),
            (AtDestination::Unknown, ToDo::Restore) => "its image could not be completed".into(),
            (AtDestination::Unknown, _) => format!("it is not known whether it runs at {destination}"),
        }
    }

    /// Returns true if a guest can still come to run, or a QEMU is left to be restored.
    pub(crate) fn is_open(self) -> bool {
        self.source != AtSource::Ended || !matches!(self.to_do, ToDo::StartAgain | ToDo::Restore)
    }
}

#[cfg(test)]
mod tests;
