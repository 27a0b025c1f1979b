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

use super::events::{Decision, DestinationStatus, FinalRunState, MemorySharing, SourceStatus};
use super::fault::{FaultSwitch, SwitchoverBug};
use super::outcome::{AtDestination, AtSource, GuestState, Placement, ToDo};

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
    /// Report of the other host, if its end is the destination.
    pub(super) reported: Option<OtherEnd>,
    pub(super) fault: FaultSwitch,
}

/// State of the end on the other host, by the word of an operator or a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OtherEnd {
    /// It does not run the guest and never will: a source has sent it and is paused; a destination has not run it and was discarded.
    Done,
    /// It has the guest, or runs it.
    HasIt,
    /// That host is off: nothing runs there.
    Fenced,
}

/// Next action for an interrupted move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ResumeAction {
    /// Query again: an operation is in progress, or a QEMU does not reply.
    Wait(GuestState),
    /// Start it at its destination; record that first.
    RunDestination,
    /// Start it at its source, as an operator chose, or because the other host is known not to have run it.
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
    NeedsChoice(GuestState),
}

/// Reason for which a choice is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// The evidence about both ends.
    Evidence(GuestState),
    /// This end does not hold it.
    NotOnThisHost,
    /// No other end is known to hold it.
    OnlyCopy,
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
        Self { decision, run_state, memory, source: None, destination: None, reported: None, fault }
    }

    /// The move with the state of the end that is not here.
    pub(crate) fn with_other_end(self, other: OtherEnd) -> Self {
        match (self.source, self.destination, other) {
            (None, Some(_), OtherEnd::Done) => Self { source: Some(SourceStatus::Completed), ..self },
            (None, Some(_), OtherEnd::HasIt) => Self { source: Some(SourceStatus::HasGuest), ..self },
            (None, Some(_), OtherEnd::Fenced) => Self { source: Some(SourceStatus::Exited), ..self },
            (Some(_), None, OtherEnd::HasIt) => {
                Self { destination: Some(DestinationStatus::Running), ..self }
            }
            (Some(_), None, other) => {
                Self { destination: Some(DestinationStatus::Exited), reported: Some(other), ..self }
            }
            _ => self,
        }
    }

    /// Returns true if the destination has not run the guest and never will, by its host's word. That its host is off does not show that:
    /// it may have been told that the source is done.
    fn is_known_not_to_have_run(&self) -> bool {
        let is_fenced = self.reported == Some(OtherEnd::Fenced);
        self.reported == Some(OtherEnd::Done) || is_fenced && self.fault.has(SwitchoverBug::FencedHasNotRun)
    }

    /// Derives the next action from the evidence.
    pub(crate) fn next_action(&self) -> ResumeAction {
        match (self.source(), self.destination) {
            // The move is over except for its source, which must not run without a request.
            (Some(SourceStatus::HasGuest), destination) if self.decision == Decision::Left => {
                match destination {
                    Some(DestinationStatus::Running) => self.needs_choice(ToDo::EndOne),
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

    /// State of its source. One that has resumed its guest has it, like one that has never sent it.
    fn source(&self) -> Option<SourceStatus> {
        let has_resumed = self.source == Some(SourceStatus::CompletedThenResumed);
        if has_resumed { Some(SourceStatus::HasGuest) } else { self.source }
    }

    fn needs_choice(&self, to_do: ToDo) -> ResumeAction {
        ResumeAction::NeedsChoice(self.guest_state(to_do))
    }

    fn wait(&self) -> ResumeAction {
        ResumeAction::Wait(self.guest_state(ToDo::Wait))
    }

    fn refuse<T>(&self, to_do: ToDo) -> Result<T, Refusal> {
        Err(Refusal::Evidence(self.guest_state(to_do)))
    }

    /// The guest by the evidence about both ends, and what to do.
    fn guest_state(&self, to_do: ToDo) -> GuestState {
        let source = match self.source() {
            Some(SourceStatus::HasGuest) => AtSource::HasIt,
            Some(SourceStatus::Completed | SourceStatus::CompletedByOthers) => AtSource::Paused,
            Some(SourceStatus::Exited) => AtSource::Ended,
            _ => AtSource::Unknown,
        };
        let destination = match self.destination {
            Some(DestinationStatus::Running | DestinationStatus::LacksMemory(FinalRunState::Running)) => {
                AtDestination::Runs
            }
            Some(DestinationStatus::Loaded | DestinationStatus::Stopped) => AtDestination::Holds,
            Some(DestinationStatus::Exited | DestinationStatus::Failed) => AtDestination::Ended,
            Some(_) => AtDestination::Unknown,
            // It was not sent the outcome.
            None if self.decision == Decision::Acknowledge => AtDestination::Holds,
            None => AtDestination::MayRun,
        };
        GuestState::new(source, destination, to_do)
    }

    fn with_both(&self, source: SourceStatus, destination: DestinationStatus) -> ResumeAction {
        match (source, destination) {
            (
                SourceStatus::HasGuest,
                DestinationStatus::Running | DestinationStatus::LacksMemory(FinalRunState::Running),
            ) => self.needs_choice(ToDo::EndOne),
            (SourceStatus::HasGuest, DestinationStatus::Unknown) => self.wait(),
            (SourceStatus::HasGuest, _) => ResumeAction::AtSource,
            (SourceStatus::Completed | SourceStatus::Exited, DestinationStatus::Running) => {
                ResumeAction::AtDestination(Placement::Running)
            }
            (SourceStatus::Completed, DestinationStatus::Loaded) => self.start_or_finish(),
            (SourceStatus::Exited, DestinationStatus::Loaded) if self.is_source_done() => {
                self.start_or_finish()
            }
            (SourceStatus::Exited, DestinationStatus::Loaded) => {
                self.needs_choice(ToDo::RunDestinationUnlessItRanOn)
            }
            (
                SourceStatus::Completed | SourceStatus::CompletedByOthers | SourceStatus::Exited,
                DestinationStatus::Stopped,
            ) => self.needs_choice(ToDo::ActAtDestination),
            (SourceStatus::Exited, DestinationStatus::LacksMemory(_))
                if !self.fault.has(SwitchoverBug::ResumesWithoutMemory) =>
            {
                self.needs_choice(ToDo::StartAgain)
            }
            (SourceStatus::Exited, DestinationStatus::LacksMemory(_)) => self.start_or_finish(),
            (_, destination) if is_loading(destination) => self.wait(),
            (
                SourceStatus::Completed | SourceStatus::CompletedByOthers,
                DestinationStatus::Exited | DestinationStatus::Failed,
            ) if self.is_memory_changed() => self.needs_choice(ToDo::StartAgain),
            (SourceStatus::Completed, DestinationStatus::Exited) if self.is_known_not_to_have_run() => {
                ResumeAction::RunSource
            }
            (SourceStatus::Completed, DestinationStatus::Exited | DestinationStatus::Failed) => {
                self.needs_choice(ToDo::RunSourceUnlessItRan)
            }
            (SourceStatus::CompletedByOthers, _) => self.needs_choice(ToDo::RunDestinationUnlessItRanOn),
            (SourceStatus::Exited, DestinationStatus::Exited | DestinationStatus::Failed) => {
                ResumeAction::Gone
            }
            _ => self.wait(),
        }
    }

    fn at_source(&self, source: SourceStatus) -> ResumeAction {
        // Until the source is acknowledged its destination waits; after that it was sent the outcome, or runs
        // the guest by itself.
        let waits = self.decision == Decision::Acknowledge;
        match source {
            SourceStatus::HasGuest if waits => ResumeAction::AtSource,
            SourceStatus::HasGuest => self.needs_choice(ToDo::EndOne),
            SourceStatus::Completed if waits => self.needs_choice(ToDo::RunOne),
            SourceStatus::Completed => self.needs_choice(ToDo::LookAtDestination),
            SourceStatus::CompletedByOthers => self.needs_choice(ToDo::RunDestinationUnlessItRanOn),
            SourceStatus::Exited => ResumeAction::Gone,
            _ => self.wait(),
        }
    }

    fn at_destination(&self, destination: DestinationStatus) -> ResumeAction {
        let is_source_done = self.is_source_done();
        match destination {
            DestinationStatus::Running => ResumeAction::AtDestination(Placement::Running),
            DestinationStatus::Loaded if is_source_done => self.start_or_finish(),
            DestinationStatus::Loaded => self.needs_choice(ToDo::LookAtSource),
            DestinationStatus::Stopped => self.needs_choice(ToDo::ActAtDestination),
            DestinationStatus::Exited | DestinationStatus::Failed => ResumeAction::Gone,
            _ => self.wait(),
        }
    }

    /// Returns true if the record proves that only the destination was to run the guest. [`Decision::Complete`] proves that its source
    /// was done then; an operator who saw that the guest does not run at its destination may have run it there since.
    fn is_source_done(&self) -> bool {
        self.decision >= Decision::Run || self.fault.has(SwitchoverBug::ResumesWithoutEvidence)
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
        (self.decision == Decision::Run || ran_since) && self.source() != Some(SourceStatus::HasGuest)
    }

    /// Returns true if a guest that shares its memory may have run at its destination: the source's state is of another memory.
    fn is_memory_changed(&self) -> bool {
        self.memory == MemorySharing::Shared && self.may_have_run()
    }

    /// Applies an operator's choice.
    ///
    /// # Errors
    /// The evidence against it.
    pub(crate) fn apply(&self, choice: Choice) -> Result<ResumeAction, Refusal> {
        match choice {
            Choice::Run(Side::Source) => self.run_source(),
            Choice::Run(Side::Destination) => self.run_destination(),
            Choice::Discard(Side::Source) => self.discard_source(),
            Choice::Discard(Side::Destination) => self.discard_destination(),
        }
    }

    fn run_source(&self) -> Result<ResumeAction, Refusal> {
        match (self.source(), self.destination) {
            (None | Some(SourceStatus::Exited), _) => Err(Refusal::NotOnThisHost),
            (Some(source), _) if is_under_way(source) => self.refuse(ToDo::Wait),
            (_, Some(DestinationStatus::Running | DestinationStatus::LacksMemory(_))) => {
                self.refuse(ToDo::KeepDestination)
            }
            (_, Some(DestinationStatus::Stopped)) => self.refuse(ToDo::ActAtDestination),
            (_, Some(DestinationStatus::Loaded)) if self.may_have_run() => self.refuse(ToDo::KeepDestination),
            (_, Some(DestinationStatus::Unknown)) => self.refuse(ToDo::Wait),
            (Some(SourceStatus::Completed | SourceStatus::CompletedByOthers), _)
                if self.is_memory_changed() =>
            {
                self.refuse(ToDo::StartAgain)
            }
            (Some(SourceStatus::Completed | SourceStatus::CompletedByOthers), _) => {
                Ok(ResumeAction::RunSource)
            }
            (Some(SourceStatus::HasGuest), _) => Ok(ResumeAction::AtSource),
            _ => self.refuse(ToDo::Wait),
        }
    }

    fn run_destination(&self) -> Result<ResumeAction, Refusal> {
        match (self.source(), self.destination) {
            (_, None | Some(DestinationStatus::Exited | DestinationStatus::Failed)) => {
                Err(Refusal::NotOnThisHost)
            }
            (Some(SourceStatus::Exited), Some(DestinationStatus::LacksMemory(_))) => {
                self.refuse(ToDo::StartAgain)
            }
            (_, Some(destination)) if is_loading(destination) => self.refuse(ToDo::Wait),
            (Some(SourceStatus::HasGuest), _) => self.refuse(ToDo::Nothing),
            (Some(source), _) if is_under_way(source) => self.refuse(ToDo::Wait),
            (_, Some(DestinationStatus::Running)) => Ok(ResumeAction::AtDestination(Placement::Running)),
            (_, Some(DestinationStatus::Stopped)) => self.refuse(ToDo::ActAtDestination),
            (_, Some(DestinationStatus::Loaded)) => Ok(ResumeAction::RunDestination),
            _ => self.refuse(ToDo::Wait),
        }
    }

    fn discard_source(&self) -> Result<ResumeAction, Refusal> {
        match (self.source(), self.destination) {
            (None, _) => Err(Refusal::NotOnThisHost),
            (Some(SourceStatus::Exited), _) => Ok(ResumeAction::Gone),
            (Some(SourceStatus::HasGuest), _) => self.refuse(ToDo::Nothing),
            (Some(source), _) if is_under_way(source) => self.refuse(ToDo::Wait),
            (_, Some(DestinationStatus::Unknown | DestinationStatus::LacksMemory(_))) => {
                self.refuse(ToDo::Wait)
            }
            // Nothing can run from it any more.
            (_, Some(DestinationStatus::Exited | DestinationStatus::Failed)) if self.is_memory_changed() => {
                Ok(ResumeAction::Quit(Side::Source))
            }
            (_, Some(DestinationStatus::Exited | DestinationStatus::Failed | DestinationStatus::Loading)) => {
                Err(Refusal::OnlyCopy)
            }
            (Some(SourceStatus::Completed), _)
            | (Some(SourceStatus::CompletedByOthers), Some(DestinationStatus::Running)) => {
                Ok(ResumeAction::Quit(Side::Source))
            }
            (Some(SourceStatus::CompletedByOthers), _) => self.refuse(ToDo::RunDestinationUnlessItRanOn),
            _ => self.refuse(ToDo::Wait),
        }
    }

    fn discard_destination(&self) -> Result<ResumeAction, Refusal> {
        match (self.source(), self.destination) {
            (_, None) => Err(Refusal::NotOnThisHost),
            (_, Some(DestinationStatus::Exited)) => Ok(ResumeAction::Gone),
            (Some(SourceStatus::Exited), Some(DestinationStatus::LacksMemory(_))) => {
                Ok(ResumeAction::Quit(Side::Destination))
            }
            (_, Some(DestinationStatus::Running | DestinationStatus::LacksMemory(_))) => {
                self.refuse(ToDo::KeepDestination)
            }
            (_, Some(DestinationStatus::Stopped)) => self.refuse(ToDo::ActAtDestination),
            (_, Some(DestinationStatus::Loaded)) if self.may_have_run() => self.refuse(ToDo::KeepDestination),
            (_, Some(DestinationStatus::Unknown)) => self.refuse(ToDo::Wait),
            (Some(SourceStatus::Exited), Some(DestinationStatus::Loaded)) => Err(Refusal::OnlyCopy),
            (Some(SourceStatus::Unknown), Some(DestinationStatus::Loaded)) => self.refuse(ToDo::Wait),
            (_, Some(_)) => Ok(ResumeAction::Quit(Side::Destination)),
        }
    }
}

fn is_under_way(source: SourceStatus) -> bool {
    !matches!(
        source,
        SourceStatus::Completed
            | SourceStatus::CompletedByOthers
            | SourceStatus::HasGuest
            | SourceStatus::Exited
    )
}

/// Returns true if the guest is not settled there, or cannot be queried.
fn is_loading(destination: DestinationStatus) -> bool {
    matches!(
        destination,
        DestinationStatus::Unknown
            | DestinationStatus::Blocked
            | DestinationStatus::Loading
            | DestinationStatus::LacksMemory(_)
    )
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
