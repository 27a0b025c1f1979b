//! How a move that was interrupted is finished: by what was recorded of it, and a look at the ends that are at hand.
//!
//! ```text
//!   record, or those of both ends ─┐
//!   the source's QEMU ─────────────┼─► Case ─► Finish: run it there · it is there · it is at its source · somebody has to choose
//!   the destination's QEMU ────────┘             └─ Choice of an operator, refused where what is seen speaks against it
//! ```
//! As the machine above: no I/O, no clock. A guest is run only where both ends are known not to run it: the other one is seen, or the
//! record says that it had ended its part before this end was to run the guest. A source that has exited is no evidence that it was done: it may
//! have failed to send, run on, and exited later. A guest that may have run at a destination that is lost, or that has run since it was sent, is
//! not run from the older state without a choice: its disks are newer than its memory there.

use super::decision::Decision;
use super::events::{DestinationView, SourceView};
use super::fault::{Fault, Switch};
use super::outcome::Placed;

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Source,
    Destination,
}

/// What is known of a move that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Case {
    /// The last that was recorded, at either end.
    pub(crate) decision: Decision,
    /// Whether the guest is to run at its destination.
    pub(crate) runs: bool,
    /// What its source is seen to do; `None`: it cannot be looked at from here.
    pub(crate) source: Option<SourceView>,
    /// The same of its destination.
    pub(crate) destination: Option<DestinationView>,
    pub(super) fault: Switch,
}

/// What to do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Finish {
    /// Look again: something is still under way, or does not answer.
    Wait(Doubt),
    /// Run it at its destination; that is recorded first.
    RunDestination,
    /// Run it at its source, as an operator chose.
    RunSource,
    /// End the QEMU of this end, as an operator chose.
    Quit(End),
    /// It is at its destination, and its source is to be put in order as was asked for.
    AtDestination(Placed),
    /// It is at its source; what its destination holds is not to be run.
    AtSource,
    /// No QEMU at hand has it any more.
    Gone,
    /// Somebody has to choose.
    Ask(Doubt),
}

/// Why it cannot be finished without somebody's choice, or a choice cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Doubt {
    /// The destination is on another host, and waits for a decision.
    DestinationWaits,
    /// The destination is on another host, and may run it.
    DestinationMayRun,
    /// The source is on another host, and it is not known whether it is done with the guest.
    SourceElsewhere,
    /// The source has exited, and it is not known whether it was done with the guest before.
    SourceLost,
    /// The source does not answer, or still sends.
    SourceUnknown,
    /// The destination does not answer, or still loads.
    DestinationUnknown,
    /// The destination has exited, and may have run it.
    DestinationLost,
    /// It stopped by itself at the destination, or is not in a state from which it is run.
    DestinationStopped,
    /// It is at the source, and may run at the destination too, which is on another host.
    BothMayRun,
    /// It runs at both ends.
    RunsTwice,
    /// It runs, or would run, at the source.
    SourceHasIt,
    /// It is at the destination.
    DestinationHasIt,
    /// This end does not hold it.
    NotHere,
    /// No other end is known to hold it.
    OnlyHere,
}

/// What an operator has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Choice {
    /// Run the guest at this end.
    Run(End),
    /// End this end's QEMU: the guest is at the other.
    Discard(End),
}

impl Case {
    /// With nothing seen yet.
    pub(crate) fn new(decision: Decision, runs: bool) -> Self {
        Self { decision, runs, source: None, destination: None, fault: Switch::default() }
    }

    /// What to do, by what is known.
    pub(crate) fn finish(&self) -> Finish {
        match (self.source, self.destination) {
            (Some(source), Some(destination)) => self.with_both(source, destination),
            (Some(source), None) => self.at_source(source),
            (None, Some(destination)) => self.at_destination(destination),
            (None, None) => Finish::Gone,
        }
    }

    fn with_both(&self, source: SourceView, destination: DestinationView) -> Finish {
        match (source, destination) {
            (SourceView::HasGuest | SourceView::CompletedAndRun, DestinationView::Running) => {
                Finish::Ask(Doubt::RunsTwice)
            }
            (SourceView::HasGuest | SourceView::CompletedAndRun, DestinationView::Unknown) => {
                Finish::Wait(Doubt::DestinationUnknown)
            }
            (SourceView::HasGuest | SourceView::CompletedAndRun, _) => Finish::AtSource,
            (SourceView::Completed | SourceView::Exited, DestinationView::Running) => {
                Finish::AtDestination(Placed::Running)
            }
            (SourceView::Completed, DestinationView::Loaded) => self.placed_or_run(),
            (SourceView::Exited, DestinationView::Loaded) if self.is_source_done() => self.placed_or_run(),
            (SourceView::Exited, DestinationView::Loaded) => Finish::Ask(Doubt::SourceLost),
            (SourceView::Completed | SourceView::Exited, DestinationView::Stopped) => {
                Finish::Ask(Doubt::DestinationStopped)
            }
            (_, DestinationView::Unknown | DestinationView::Loading) => {
                Finish::Wait(Doubt::DestinationUnknown)
            }
            (SourceView::Completed, DestinationView::Exited | DestinationView::Failed) => {
                Finish::Ask(Doubt::DestinationLost)
            }
            (SourceView::Exited, DestinationView::Exited | DestinationView::Failed) => Finish::Gone,
            (SourceView::Migrating | SourceView::Unknown, _) => Finish::Wait(Doubt::SourceUnknown),
        }
    }

    fn at_source(&self, source: SourceView) -> Finish {
        // Up to the acknowledgement a destination waits; behind it, it was told, or runs by itself.
        let waits = self.decision == Decision::Acknowledge;
        match source {
            SourceView::HasGuest | SourceView::CompletedAndRun if waits => Finish::AtSource,
            SourceView::HasGuest | SourceView::CompletedAndRun => Finish::Ask(Doubt::BothMayRun),
            SourceView::Completed if waits => Finish::Ask(Doubt::DestinationWaits),
            SourceView::Completed => Finish::Ask(Doubt::DestinationMayRun),
            SourceView::Exited => Finish::Gone,
            SourceView::Migrating | SourceView::Unknown => Finish::Wait(Doubt::SourceUnknown),
        }
    }

    fn at_destination(&self, destination: DestinationView) -> Finish {
        let is_ours = self.is_source_done();
        match destination {
            DestinationView::Running => Finish::AtDestination(Placed::Running),
            DestinationView::Loaded if is_ours => self.placed_or_run(),
            DestinationView::Loaded => Finish::Ask(Doubt::SourceElsewhere),
            DestinationView::Stopped => Finish::Ask(Doubt::DestinationStopped),
            DestinationView::Exited | DestinationView::Failed => Finish::Gone,
            DestinationView::Loading | DestinationView::Unknown => Finish::Wait(Doubt::DestinationUnknown),
        }
    }

    /// Recorded only when the source was known to be done with the guest.
    fn is_source_done(&self) -> bool {
        self.decision >= Decision::Complete || self.fault.has(Fault::ResumesWithoutEvidence)
    }

    fn placed_or_run(&self) -> Finish {
        if self.runs { Finish::RunDestination } else { Finish::AtDestination(Placed::Paused) }
    }

    /// The guest was to be run at the destination: what that holds may be newer than what the source does.
    fn may_have_run(&self) -> bool {
        self.decision == Decision::Run
            && !matches!(self.source, Some(SourceView::HasGuest | SourceView::CompletedAndRun))
    }

    /// What an operator's choice comes to; or what speaks against it.
    pub(crate) fn chosen(&self, choice: Choice) -> Result<Finish, Doubt> {
        match choice {
            Choice::Run(End::Source) => self.run_source(),
            Choice::Run(End::Destination) => self.run_destination(),
            Choice::Discard(End::Source) => self.discard_source(),
            Choice::Discard(End::Destination) => self.discard_destination(),
        }
    }

    fn run_source(&self) -> Result<Finish, Doubt> {
        match (self.source, self.destination) {
            (None | Some(SourceView::Exited), _) => Err(Doubt::NotHere),
            (Some(SourceView::Unknown | SourceView::Migrating), _) => Err(Doubt::SourceUnknown),
            (_, Some(DestinationView::Running)) => Err(Doubt::DestinationHasIt),
            (_, Some(DestinationView::Stopped)) => Err(Doubt::DestinationStopped),
            (_, Some(DestinationView::Loaded)) if self.may_have_run() => Err(Doubt::DestinationHasIt),
            (_, Some(DestinationView::Unknown)) => Err(Doubt::DestinationUnknown),
            (Some(SourceView::Completed), _) => Ok(Finish::RunSource),
            (Some(SourceView::HasGuest | SourceView::CompletedAndRun), _) => Ok(Finish::AtSource),
        }
    }

    fn run_destination(&self) -> Result<Finish, Doubt> {
        match (self.source, self.destination) {
            (_, None | Some(DestinationView::Exited | DestinationView::Failed)) => Err(Doubt::NotHere),
            (_, Some(DestinationView::Unknown | DestinationView::Loading)) => Err(Doubt::DestinationUnknown),
            (Some(SourceView::HasGuest | SourceView::CompletedAndRun), _) => Err(Doubt::SourceHasIt),
            (Some(SourceView::Unknown | SourceView::Migrating), _) => Err(Doubt::SourceUnknown),
            (_, Some(DestinationView::Running)) => Ok(Finish::AtDestination(Placed::Running)),
            (_, Some(DestinationView::Stopped)) => Err(Doubt::DestinationStopped),
            (_, Some(DestinationView::Loaded)) => Ok(Finish::RunDestination),
        }
    }

    fn discard_source(&self) -> Result<Finish, Doubt> {
        match (self.source, self.destination) {
            (None, _) => Err(Doubt::NotHere),
            (Some(SourceView::Exited), _) => Ok(Finish::Gone),
            (Some(SourceView::HasGuest | SourceView::CompletedAndRun), _) => Err(Doubt::SourceHasIt),
            (Some(SourceView::Unknown | SourceView::Migrating), _) => Err(Doubt::SourceUnknown),
            (_, Some(DestinationView::Unknown)) => Err(Doubt::DestinationUnknown),
            (_, Some(DestinationView::Exited | DestinationView::Failed | DestinationView::Loading)) => {
                Err(Doubt::OnlyHere)
            }
            (Some(SourceView::Completed), _) => Ok(Finish::Quit(End::Source)),
        }
    }

    fn discard_destination(&self) -> Result<Finish, Doubt> {
        match (self.source, self.destination) {
            (_, None) => Err(Doubt::NotHere),
            (_, Some(DestinationView::Exited)) => Ok(Finish::Gone),
            (_, Some(DestinationView::Running)) => Err(Doubt::DestinationHasIt),
            (_, Some(DestinationView::Stopped)) => Err(Doubt::DestinationStopped),
            (_, Some(DestinationView::Loaded)) if self.may_have_run() => Err(Doubt::DestinationHasIt),
            (_, Some(DestinationView::Unknown)) => Err(Doubt::DestinationUnknown),
            (Some(SourceView::Exited), Some(DestinationView::Loaded)) => Err(Doubt::OnlyHere),
            (Some(SourceView::Unknown), Some(DestinationView::Loaded)) => Err(Doubt::SourceUnknown),
            (_, Some(_)) => Ok(Finish::Quit(End::Destination)),
        }
    }
}

#[cfg(test)]
impl Case {
    /// As the model has it, with a fault put back.
    pub(super) fn with_fault(self, fault: Switch) -> Self {
        Self { fault, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: [SourceView; 6] = [
        SourceView::Migrating,
        SourceView::Completed,
        SourceView::CompletedAndRun,
        SourceView::HasGuest,
        SourceView::Exited,
        SourceView::Unknown,
    ];
    const DESTINATIONS: [DestinationView; 7] = [
        DestinationView::Stopped,
        DestinationView::Loading,
        DestinationView::Loaded,
        DestinationView::Running,
        DestinationView::Failed,
        DestinationView::Exited,
        DestinationView::Unknown,
    ];
    const DECISIONS: [Decision; 4] =
        [Decision::Commit, Decision::Acknowledge, Decision::Complete, Decision::Run];

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for decision in DECISIONS {
            for source in SOURCES.map(Some).into_iter().chain([None]) {
                for destination in DESTINATIONS.map(Some).into_iter().chain([None]) {
                    for runs in [true, false] {
                        cases.push(Case { source, destination, ..Case::new(decision, runs) });
                    }
                }
            }
        }
        cases
    }

    /// Neither what is known nor a choice runs a guest that is seen to run, or to be about to, at the other end.
    #[test]
    fn nothing_runs_a_guest_that_is_seen_at_the_other_end() {
        let choices = [Choice::Run(End::Source), Choice::Run(End::Destination)];
        for case in cases() {
            let finishes =
                choices.iter().filter_map(|&choice| case.chosen(choice).ok()).chain([case.finish()]);
            for finish in finishes {
                let other = match finish {
                    Finish::RunDestination => {
                        !matches!(case.source, None | Some(SourceView::Completed | SourceView::Exited))
                    }
                    Finish::RunSource => {
                        matches!(case.destination, Some(DestinationView::Running | DestinationView::Unknown))
                    }
                    _ => false,
                };
                assert!(!other, "{finish:?} of {case:?}");
            }
        }
    }

    #[test]
    fn no_choice_ends_a_guest_that_runs_or_the_only_copy() {
        for case in cases() {
            if case.chosen(Choice::Discard(End::Source)) == Ok(Finish::Quit(End::Source)) {
                assert_eq!(case.source, Some(SourceView::Completed), "{case:?}");
                let holds = [
                    None,
                    Some(DestinationView::Loaded),
                    Some(DestinationView::Running),
                    Some(DestinationView::Stopped),
                ];
                assert!(holds.contains(&case.destination), "{case:?}");
            }
            if case.chosen(Choice::Discard(End::Destination)) == Ok(Finish::Quit(End::Destination)) {
                assert_ne!(case.destination, Some(DestinationView::Running), "{case:?}");
                let is_only = case.source == Some(SourceView::Exited)
                    && case.destination == Some(DestinationView::Loaded);
                assert!(!is_only, "{case:?}");
            }
        }
    }

    #[test]
    fn a_guest_that_may_have_run_at_a_lost_destination_is_not_run_at_its_source_unasked() {
        for case in cases() {
            assert_ne!(case.finish(), Finish::RunSource, "{case:?}");
        }
        let exited = Case {
            source: Some(SourceView::Exited),
            destination: Some(DestinationView::Loaded),
            ..Case::new(Decision::Acknowledge, true)
        };
        assert_eq!(exited.finish(), Finish::Ask(Doubt::SourceLost));
        assert_eq!(exited.chosen(Choice::Run(End::Destination)), Ok(Finish::RunDestination));
        let lost = Case {
            source: Some(SourceView::Completed),
            destination: Some(DestinationView::Exited),
            ..Case::new(Decision::Acknowledge, true)
        };
        assert_eq!(lost.finish(), Finish::Ask(Doubt::DestinationLost));
        assert_eq!(lost.chosen(Choice::Run(End::Source)), Ok(Finish::RunSource));
        assert_eq!(lost.chosen(Choice::Discard(End::Source)), Err(Doubt::OnlyHere));
    }
}
