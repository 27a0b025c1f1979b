//! Finishes an interrupted move by its records and the state of the QEMUs on this host.
//!
//! ```text
//!   record, or those of both ends ─┐
//!   the source's QEMU ─────────────┼─► InterruptedMove ─► ResumeAction: start it · it is there · it is at its source · needs a choice
//!   the destination's QEMU ────────┘             └─ Choice of an operator, refused if the evidence is against it
//! ```
//! As the machine above it does no I/O and has no clock. A guest is started only if the other end is known not
//! to run it: that end is queried, or the record proves that it was done before this end was to start the
//! guest. An exited source is no evidence of that: it may have failed to send, resumed the guest, and exited
//! later. A guest that may have run at a lost destination, or that has run since it was sent, is not resumed
//! from its older state without a choice: its disks are newer than its memory there.

use super::decision::Decision;
use super::events::{DestinationStatus, FinalRunState, MemorySharing, SourceStatus};
use super::fault::{FaultSwitch, SwitchoverBug};
use super::outcome::Placement;

/// An end of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// Evidence about an interrupted move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct InterruptedMove {
    /// The last recorded decision, of either end.
    pub(crate) decision: Decision,
    /// Requested run state at its destination.
    pub(crate) run_state: FinalRunState,
    /// Memory of the guest at the two ends.
    pub(crate) memory: MemorySharing,
    /// State of its source; `None` if that cannot be queried from here.
    pub(crate) source: Option<SourceStatus>,
    /// State of its destination; `None` if that cannot be queried from here.
    pub(crate) destination: Option<DestinationStatus>,
    pub(super) fault: FaultSwitch,
}

/// Next action for an interrupted move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ResumeAction {
    /// Query again: an operation is in progress, or a QEMU does not reply.
    Wait(ResumeBlocker),
    /// Start it at its destination; record that first.
    RunDestination,
    /// Start it at its source, as an operator chose.
    RunSource,
    /// End the QEMU of this side, as an operator chose.
    Quit(Side),
    /// It is at its destination; finish its source as requested.
    AtDestination(Placement),
    /// It is at its source; the destination's state must not be run.
    AtSource,
    /// No QEMU on this host has it any more.
    Gone,
    /// An operator has to choose.
    NeedsChoice(ResumeBlocker),
}

/// Reason for which a move needs an operator's choice, or for which a choice is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ResumeBlocker {
    /// The destination is on another host and waits for the outcome.
    DestinationWaits,
    /// The destination is on another host and may run it.
    DestinationMayRun,
    /// The source is on another host, and it is not known whether it is done with the guest.
    SourceElsewhere,
    /// The source has exited, and it is not known whether it was done with the guest before.
    SourceLost,
    /// The source has completed a migration, and may have run the guest, and sent it elsewhere, since the record.
    SourceRanOn,
    /// The source does not reply or is still migrating.
    SourceUnknown,
    /// The destination does not reply or is still loading.
    DestinationUnknown,
    /// The destination has exited and may have run it.
    DestinationLost,
    /// The destination may have run it in the memory that both ends have, so that the source's state is of another memory.
    MemoryChanged,
    /// It stopped by itself at the destination, or is in a state that `cont` is not for.
    DestinationStopped,
    /// It is at the source, and may run at the destination too, which is on another host.
    BothMayRun,
    /// It runs at both ends.
    RunsTwice,
    /// The source has it, running or about to run.
    SourceHasGuest,
    /// The destination has it.
    DestinationHasGuest,
    /// This end does not hold it.
    NotOnThisHost,
    /// No other end is known to hold it.
    OnlyCopy,
}

impl ResumeBlocker {
    /// Its identifier.
    pub(crate) fn id(self) -> &'static str {
        match self {
            Self::DestinationWaits => "destination-waits",
            Self::DestinationMayRun => "destination-may-run",
            Self::SourceElsewhere => "source-elsewhere",
            Self::SourceLost => "source-lost",
            Self::SourceRanOn => "source-ran-on",
            Self::SourceUnknown => "source-unknown",
            Self::DestinationUnknown => "destination-unknown",
            Self::DestinationLost => "destination-lost",
            Self::MemoryChanged => "memory-changed",
            Self::DestinationStopped => "destination-stopped",
            Self::BothMayRun => "both-may-run",
            Self::RunsTwice => "runs-twice",
            Self::SourceHasGuest => "source-has-guest",
            Self::DestinationHasGuest => "destination-has-guest",
            Self::NotOnThisHost => "not-on-this-host",
            Self::OnlyCopy => "only-copy",
        }
    }
}

/// Failure to start the guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RunFailure {
    /// `cont` was refused, or could not be sent.
    Refused,
    /// `cont` was sent, and it is not known whether the guest has run.
    Unknown,
}

/// Choice of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Choice {
    /// Start the guest at this end.
    Run(Side),
    /// End this side's QEMU: the guest is at the other.
    Discard(Side),
}

impl InterruptedMove {
    /// A move with this record and no end queried yet.
    pub(crate) fn new(decision: Decision, run_state: FinalRunState) -> Self {
        let (memory, fault) = (MemorySharing::Copied, FaultSwitch::default());
        Self { decision, run_state, memory, source: None, destination: None, fault }
    }

    /// Derives the next action from the evidence.
    pub(crate) fn next_action(&self) -> ResumeAction {
        match (self.source, self.destination) {
            // The move is over except for its source, which must not run without a request.
            (Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed), destination)
                if self.decision == Decision::Left =>
            {
                match destination {
                    Some(DestinationStatus::Running) => ResumeAction::NeedsChoice(ResumeBlocker::RunsTwice),
                    _ => ResumeAction::AtSource,
                }
            }
            (Some(source), _) if self.decision == Decision::Left => self.at_source(source),
            (Some(source), Some(destination)) => self.with_both(source, destination),
            (Some(source), None) => self.at_source(source),
            (None, Some(destination)) => self.at_destination(destination),
            (None, None) => ResumeAction::Gone,
        }
    }

    /// The decision that stays recorded after the guest could not be started at its destination. If that was refused, it is the one of
    /// before: an operator may start the guest elsewhere, unless it may have run then. What may have run is never taken back.
    pub(crate) fn decision_after(&self, failure: RunFailure) -> Decision {
        match failure {
            _ if self.fault.has(SwitchoverBug::ResumeTakesRunBack) => {
                self.decision.min(Decision::Acknowledge)
            }
            RunFailure::Refused => self.decision,
            RunFailure::Unknown => Decision::Run,
        }
    }

    fn with_both(&self, source: SourceStatus, destination: DestinationStatus) -> ResumeAction {
        match (source, destination) {
            (SourceStatus::HasGuest | SourceStatus::CompletedThenResumed, DestinationStatus::Running) => {
                ResumeAction::NeedsChoice(ResumeBlocker::RunsTwice)
            }
            (SourceStatus::HasGuest | SourceStatus::CompletedThenResumed, DestinationStatus::Unknown) => {
                ResumeAction::Wait(ResumeBlocker::DestinationUnknown)
            }
            (SourceStatus::HasGuest | SourceStatus::CompletedThenResumed, _) => ResumeAction::AtSource,
            (SourceStatus::Completed | SourceStatus::Exited, DestinationStatus::Running) => {
                ResumeAction::AtDestination(Placement::Running)
            }
            (SourceStatus::Completed, DestinationStatus::Loaded) => self.start_or_finish(),
            (SourceStatus::Exited, DestinationStatus::Loaded) if self.is_source_done() => {
                self.start_or_finish()
            }
            (SourceStatus::Exited, DestinationStatus::Loaded) => {
                ResumeAction::NeedsChoice(ResumeBlocker::SourceLost)
            }
            (
                SourceStatus::Completed | SourceStatus::CompletedByOthers | SourceStatus::Exited,
                DestinationStatus::Stopped,
            ) => ResumeAction::NeedsChoice(ResumeBlocker::DestinationStopped),
            (_, DestinationStatus::Unknown | DestinationStatus::Loading) => {
                ResumeAction::Wait(ResumeBlocker::DestinationUnknown)
            }
            (
                SourceStatus::Completed | SourceStatus::CompletedByOthers,
                DestinationStatus::Exited | DestinationStatus::Failed,
            ) if self.is_memory_changed() => ResumeAction::NeedsChoice(ResumeBlocker::MemoryChanged),
            (SourceStatus::Completed, DestinationStatus::Exited | DestinationStatus::Failed) => {
                ResumeAction::NeedsChoice(ResumeBlocker::DestinationLost)
            }
            (SourceStatus::CompletedByOthers, _) => ResumeAction::NeedsChoice(ResumeBlocker::SourceRanOn),
            (SourceStatus::Exited, DestinationStatus::Exited | DestinationStatus::Failed) => {
                ResumeAction::Gone
            }
            (SourceStatus::Migrating | SourceStatus::Unknown, _) => {
                ResumeAction::Wait(ResumeBlocker::SourceUnknown)
            }
        }
    }

    fn at_source(&self, source: SourceStatus) -> ResumeAction {
        // Until the source is acknowledged its destination waits; after that it was sent the outcome, or runs
        // the guest by itself.
        let waits = self.decision == Decision::Acknowledge;
        match source {
            SourceStatus::HasGuest | SourceStatus::CompletedThenResumed if waits => ResumeAction::AtSource,
            SourceStatus::HasGuest | SourceStatus::CompletedThenResumed => {
                ResumeAction::NeedsChoice(ResumeBlocker::BothMayRun)
            }
            SourceStatus::Completed if waits => ResumeAction::NeedsChoice(ResumeBlocker::DestinationWaits),
            SourceStatus::Completed => ResumeAction::NeedsChoice(ResumeBlocker::DestinationMayRun),
            SourceStatus::CompletedByOthers => ResumeAction::NeedsChoice(ResumeBlocker::SourceRanOn),
            SourceStatus::Exited => ResumeAction::Gone,
            SourceStatus::Migrating | SourceStatus::Unknown => {
                ResumeAction::Wait(ResumeBlocker::SourceUnknown)
            }
        }
    }

    fn at_destination(&self, destination: DestinationStatus) -> ResumeAction {
        let is_source_done = self.is_source_done();
        match destination {
            DestinationStatus::Running => ResumeAction::AtDestination(Placement::Running),
            DestinationStatus::Loaded if is_source_done => self.start_or_finish(),
            DestinationStatus::Loaded => ResumeAction::NeedsChoice(ResumeBlocker::SourceElsewhere),
            DestinationStatus::Stopped => ResumeAction::NeedsChoice(ResumeBlocker::DestinationStopped),
            DestinationStatus::Exited | DestinationStatus::Failed => ResumeAction::Gone,
            DestinationStatus::Loading | DestinationStatus::Unknown => {
                ResumeAction::Wait(ResumeBlocker::DestinationUnknown)
            }
        }
    }

    /// Returns true if the record proves that the source was done with the guest.
    fn is_source_done(&self) -> bool {
        self.decision >= Decision::Complete || self.fault.has(SwitchoverBug::ResumesWithoutEvidence)
    }

    fn start_or_finish(&self) -> ResumeAction {
        match self.run_state {
            FinalRunState::Running => ResumeAction::RunDestination,
            FinalRunState::Paused => ResumeAction::AtDestination(Placement::Paused),
        }
    }

    /// Returns true if the guest was to be started at the destination: its state there may be newer than the
    /// source's.
    fn may_have_run(&self) -> bool {
        let ran_since = self.decision == Decision::Left && !self.fault.has(SwitchoverBug::LeftHasNotRun);
        (self.decision == Decision::Run || ran_since)
            && !matches!(self.source, Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed))
    }

    /// Returns true if a guest that shares its memory may have run at its destination: the source's state is of another memory.
    fn is_memory_changed(&self) -> bool {
        self.memory == MemorySharing::Shared && self.may_have_run()
    }

    /// Applies an operator's choice.
    ///
    /// # Errors
    /// The evidence against it.
    pub(crate) fn apply(&self, choice: Choice) -> Result<ResumeAction, ResumeBlocker> {
        match choice {
            Choice::Run(Side::Source) => self.run_source(),
            Choice::Run(Side::Destination) => self.run_destination(),
            Choice::Discard(Side::Source) => self.discard_source(),
            Choice::Discard(Side::Destination) => self.discard_destination(),
        }
    }

    fn run_source(&self) -> Result<ResumeAction, ResumeBlocker> {
        match (self.source, self.destination) {
            (None | Some(SourceStatus::Exited), _) => Err(ResumeBlocker::NotOnThisHost),
            (Some(SourceStatus::Unknown | SourceStatus::Migrating), _) => Err(ResumeBlocker::SourceUnknown),
            (_, Some(DestinationStatus::Running)) => Err(ResumeBlocker::DestinationHasGuest),
            (_, Some(DestinationStatus::Stopped)) => Err(ResumeBlocker::DestinationStopped),
            (_, Some(DestinationStatus::Loaded)) if self.may_have_run() => {
                Err(ResumeBlocker::DestinationHasGuest)
            }
            (_, Some(DestinationStatus::Unknown)) => Err(ResumeBlocker::DestinationUnknown),
            (Some(SourceStatus::Completed | SourceStatus::CompletedByOthers), _)
                if self.is_memory_changed() =>
            {
                Err(ResumeBlocker::MemoryChanged)
            }
            (Some(SourceStatus::Completed | SourceStatus::CompletedByOthers), _) => {
                Ok(ResumeAction::RunSource)
            }
            (Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed), _) => {
                Ok(ResumeAction::AtSource)
            }
        }
    }

    fn run_destination(&self) -> Result<ResumeAction, ResumeBlocker> {
        match (self.source, self.destination) {
            (_, None | Some(DestinationStatus::Exited | DestinationStatus::Failed)) => {
                Err(ResumeBlocker::NotOnThisHost)
            }
            (_, Some(DestinationStatus::Unknown | DestinationStatus::Loading)) => {
                Err(ResumeBlocker::DestinationUnknown)
            }
            (Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed), _) => {
                Err(ResumeBlocker::SourceHasGuest)
            }
            (Some(SourceStatus::Unknown | SourceStatus::Migrating), _) => Err(ResumeBlocker::SourceUnknown),
            (_, Some(DestinationStatus::Running)) => Ok(ResumeAction::AtDestination(Placement::Running)),
            (_, Some(DestinationStatus::Stopped)) => Err(ResumeBlocker::DestinationStopped),
            (_, Some(DestinationStatus::Loaded)) => Ok(ResumeAction::RunDestination),
        }
    }

    fn discard_source(&self) -> Result<ResumeAction, ResumeBlocker> {
        match (self.source, self.destination) {
            (None, _) => Err(ResumeBlocker::NotOnThisHost),
            (Some(SourceStatus::Exited), _) => Ok(ResumeAction::Gone),
            (Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed), _) => {
                Err(ResumeBlocker::SourceHasGuest)
            }
            (Some(SourceStatus::Unknown | SourceStatus::Migrating), _) => Err(ResumeBlocker::SourceUnknown),
            (_, Some(DestinationStatus::Unknown)) => Err(ResumeBlocker::DestinationUnknown),
            // Nothing can run from it any more.
            (_, Some(DestinationStatus::Exited | DestinationStatus::Failed)) if self.is_memory_changed() => {
                Ok(ResumeAction::Quit(Side::Source))
            }
            (_, Some(DestinationStatus::Exited | DestinationStatus::Failed | DestinationStatus::Loading)) => {
                Err(ResumeBlocker::OnlyCopy)
            }
            (Some(SourceStatus::Completed), _)
            | (Some(SourceStatus::CompletedByOthers), Some(DestinationStatus::Running)) => {
                Ok(ResumeAction::Quit(Side::Source))
            }
            (Some(SourceStatus::CompletedByOthers), _) => Err(ResumeBlocker::SourceRanOn),
        }
    }

    fn discard_destination(&self) -> Result<ResumeAction, ResumeBlocker> {
        match (self.source, self.destination) {
            (_, None) => Err(ResumeBlocker::NotOnThisHost),
            (_, Some(DestinationStatus::Exited)) => Ok(ResumeAction::Gone),
            (_, Some(DestinationStatus::Running)) => Err(ResumeBlocker::DestinationHasGuest),
            (_, Some(DestinationStatus::Stopped)) => Err(ResumeBlocker::DestinationStopped),
            (_, Some(DestinationStatus::Loaded)) if self.may_have_run() => {
                Err(ResumeBlocker::DestinationHasGuest)
            }
            (_, Some(DestinationStatus::Unknown)) => Err(ResumeBlocker::DestinationUnknown),
            (Some(SourceStatus::Exited), Some(DestinationStatus::Loaded)) => Err(ResumeBlocker::OnlyCopy),
            (Some(SourceStatus::Unknown), Some(DestinationStatus::Loaded)) => {
                Err(ResumeBlocker::SourceUnknown)
            }
            (_, Some(_)) => Ok(ResumeAction::Quit(Side::Destination)),
        }
    }
}

#[cfg(test)]
impl InterruptedMove {
    /// The move with an injected fault.
    pub(super) fn with_fault(self, fault: FaultSwitch) -> Self {
        Self { fault, ..self }
    }
}

#[cfg(test)]
mod tests;
