//! Finishes an interrupted move by its records and the state of the QEMUs at hand.
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
use super::events::{DestinationStatus, SourceStatus};
use super::fault::{Fault, FaultSwitch};
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
    /// The guest is to run at its destination.
    pub(crate) runs: bool,
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
    /// No QEMU at hand has it any more.
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
    /// The source does not reply or is still migrating.
    SourceUnknown,
    /// The destination does not reply or is still loading.
    DestinationUnknown,
    /// The destination has exited and may have run it.
    DestinationLost,
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
    pub(crate) fn new(decision: Decision, runs: bool) -> Self {
        Self { decision, runs, source: None, destination: None, fault: FaultSwitch::default() }
    }

    /// Derives the next action from the evidence.
    pub(crate) fn next_action(&self) -> ResumeAction {
        match (self.source, self.destination) {
            (Some(source), Some(destination)) => self.with_both(source, destination),
            (Some(source), None) => self.at_source(source),
            (None, Some(destination)) => self.at_destination(destination),
            (None, None) => ResumeAction::Gone,
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
            (SourceStatus::Completed, DestinationStatus::Loaded) => self.placed_or_run(),
            (SourceStatus::Exited, DestinationStatus::Loaded) if self.is_source_done() => {
                self.placed_or_run()
            }
            (SourceStatus::Exited, DestinationStatus::Loaded) => {
                ResumeAction::NeedsChoice(ResumeBlocker::SourceLost)
            }
            (SourceStatus::Completed | SourceStatus::Exited, DestinationStatus::Stopped) => {
                ResumeAction::NeedsChoice(ResumeBlocker::DestinationStopped)
            }
            (_, DestinationStatus::Unknown | DestinationStatus::Loading) => {
                ResumeAction::Wait(ResumeBlocker::DestinationUnknown)
            }
            (SourceStatus::Completed, DestinationStatus::Exited | DestinationStatus::Failed) => {
                ResumeAction::NeedsChoice(ResumeBlocker::DestinationLost)
            }
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
            SourceStatus::Exited => ResumeAction::Gone,
            SourceStatus::Migrating | SourceStatus::Unknown => {
                ResumeAction::Wait(ResumeBlocker::SourceUnknown)
            }
        }
    }

    fn at_destination(&self, destination: DestinationStatus) -> ResumeAction {
        let is_ours = self.is_source_done();
        match destination {
            DestinationStatus::Running => ResumeAction::AtDestination(Placement::Running),
            DestinationStatus::Loaded if is_ours => self.placed_or_run(),
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
        self.decision >= Decision::Complete || self.fault.has(Fault::ResumesWithoutEvidence)
    }

    fn placed_or_run(&self) -> ResumeAction {
        if self.runs { ResumeAction::RunDestination } else { ResumeAction::AtDestination(Placement::Paused) }
    }

    /// Returns true if the guest was to be started at the destination: its state there may be newer than the
    /// source's.
    fn may_have_run(&self) -> bool {
        self.decision == Decision::Run
            && !matches!(self.source, Some(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed))
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
            (Some(SourceStatus::Completed), _) => Ok(ResumeAction::RunSource),
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
            (_, Some(DestinationStatus::Exited | DestinationStatus::Failed | DestinationStatus::Loading)) => {
                Err(ResumeBlocker::OnlyCopy)
            }
            (Some(SourceStatus::Completed), _) => Ok(ResumeAction::Quit(Side::Source)),
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
mod tests {
    use super::*;

    const SOURCES: [SourceStatus; 6] = [
        SourceStatus::Migrating,
        SourceStatus::Completed,
        SourceStatus::CompletedThenResumed,
        SourceStatus::HasGuest,
        SourceStatus::Exited,
        SourceStatus::Unknown,
    ];
    const DESTINATIONS: [DestinationStatus; 7] = [
        DestinationStatus::Stopped,
        DestinationStatus::Loading,
        DestinationStatus::Loaded,
        DestinationStatus::Running,
        DestinationStatus::Failed,
        DestinationStatus::Exited,
        DestinationStatus::Unknown,
    ];
    const DECISIONS: [Decision; 4] =
        [Decision::Commit, Decision::Acknowledge, Decision::Complete, Decision::Run];

    fn cases() -> Vec<InterruptedMove> {
        let mut cases = Vec::new();
        for decision in DECISIONS {
            for source in SOURCES.map(Some).into_iter().chain([None]) {
                for destination in DESTINATIONS.map(Some).into_iter().chain([None]) {
                    for runs in [true, false] {
                        cases.push(InterruptedMove {
                            source,
                            destination,
                            ..InterruptedMove::new(decision, runs)
                        });
                    }
                }
            }
        }
        cases
    }

    /// Neither evidence nor a choice starts a guest that runs, or is about to run, at the other end.
    #[test]
    fn guest_seen_at_the_other_end_is_never_started() {
        let choices = [Choice::Run(Side::Source), Choice::Run(Side::Destination)];
        for case in cases() {
            let finishes =
                choices.iter().filter_map(|&choice| case.apply(choice).ok()).chain([case.next_action()]);
            for finish in finishes {
                let other = match finish {
                    ResumeAction::RunDestination => {
                        !matches!(case.source, None | Some(SourceStatus::Completed | SourceStatus::Exited))
                    }
                    ResumeAction::RunSource => {
                        matches!(
                            case.destination,
                            Some(DestinationStatus::Running | DestinationStatus::Unknown)
                        )
                    }
                    _ => false,
                };
                assert!(!other, "{finish:?} of {case:?}");
            }
        }
    }

    #[test]
    fn no_choice_ends_a_running_guest_or_the_only_copy() {
        for case in cases() {
            if case.apply(Choice::Discard(Side::Source)) == Ok(ResumeAction::Quit(Side::Source)) {
                assert_eq!(case.source, Some(SourceStatus::Completed), "{case:?}");
                let holds = [
                    None,
                    Some(DestinationStatus::Loaded),
                    Some(DestinationStatus::Running),
                    Some(DestinationStatus::Stopped),
                ];
                assert!(holds.contains(&case.destination), "{case:?}");
            }
            if case.apply(Choice::Discard(Side::Destination)) == Ok(ResumeAction::Quit(Side::Destination)) {
                assert_ne!(case.destination, Some(DestinationStatus::Running), "{case:?}");
                let is_only = case.source == Some(SourceStatus::Exited)
                    && case.destination == Some(DestinationStatus::Loaded);
                assert!(!is_only, "{case:?}");
            }
        }
    }

    #[test]
    fn guest_that_may_have_run_at_a_lost_destination_needs_a_choice() {
        for case in cases() {
            assert_ne!(case.next_action(), ResumeAction::RunSource, "{case:?}");
        }
        let exited = InterruptedMove {
            source: Some(SourceStatus::Exited),
            destination: Some(DestinationStatus::Loaded),
            ..InterruptedMove::new(Decision::Acknowledge, true)
        };
        assert_eq!(exited.next_action(), ResumeAction::NeedsChoice(ResumeBlocker::SourceLost));
        assert_eq!(exited.apply(Choice::Run(Side::Destination)), Ok(ResumeAction::RunDestination));
        let lost = InterruptedMove {
            source: Some(SourceStatus::Completed),
            destination: Some(DestinationStatus::Exited),
            ..InterruptedMove::new(Decision::Acknowledge, true)
        };
        assert_eq!(lost.next_action(), ResumeAction::NeedsChoice(ResumeBlocker::DestinationLost));
        assert_eq!(lost.apply(Choice::Run(Side::Source)), Ok(ResumeAction::RunSource));
        assert_eq!(lost.apply(Choice::Discard(Side::Source)), Err(ResumeBlocker::OnlyCopy));
    }
}
