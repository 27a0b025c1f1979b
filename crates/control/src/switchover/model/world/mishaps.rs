//! Mishaps of every party, and what others do.

use super::super::super::{Choice, DestinationKind, GuestRunState, RunFailure, Side};
use super::{
    Decision, Destination, Disk, InterruptedMove, Placement, Reply, ResumeAction, Source, SourceKind, Step,
    World,
};
use crate::switchover::{FinalRunState, OtherEnd, SourceStatus};

/// Records that a later towline sees.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scope {
    All,
    Of(usize),
}

impl Scope {
    fn has(self, index: usize) -> bool {
        matches!(self, Self::All) || matches!(self, Self::Of(own) if own == index)
    }
}

impl World {
    pub(super) fn mishap(&mut self, step: Step) {
        self.spend();
        match step {
            Step::Cut(wire) => self.cut(wire),
            Step::DiskFails(disk) => self.disk = disk,
            Step::DirectoryVanishes => {
                self.disk = Disk::Vanished;
                self.towlines.iter_mut().flatten().for_each(|towline| towline.record = None);
            }
            Step::ContWhileLoading => self.cont_while_loading = true,
            Step::DestinationRunByOperator => {
                self.destination = Destination::Running;
                self.operator_ran = true;
                self.resumed |= self.has_ended();
            }
            Step::DestinationPausedByOperator => {
                self.destination = Destination::Loaded;
                self.resumed |= self.has_ended();
            }
            Step::SourceMovedOn => self.source = Source::MovedOn,
            Step::SourceCancelled => {
                self.window |= self.may_run_by_itself();
                if self.is_direct() {
                    return self.cancel_direct();
                }
                self.regain_guest();
                self.close_source();
            }
            Step::SourceContinued => {
                (self.wires[0].shut, self.continued) = (self.wires[0].open, true);
            }
            Step::SourceStopped => self.guest = GuestRunState::Stopped,
            Step::SourceExits => {
                if self.is_direct() {
                    self.cut_direct();
                }
                self.source = Source::Exited;
                self.close_source();
            }
            Step::SourceRunAgain => {
                self.source = Source::RunAgain;
                self.operator_ran = true;
                let is_reported = self.is_reported_paused() && !self.resumed;
                self.may_run_at_source |= is_reported && !self.has_run_there;
            }
            Step::DestinationExits => {
                self.destination = Destination::Exited;
                self.lose_destination();
            }
            Step::Cancel(index) => self.cancel(index),
            Step::Kill(index) => self.kill(index),
            Step::KillInRestore(index) => {
                self.end_for_source();
                self.kill(index);
            }
            _ => unreachable!("no mishap"),
        }
    }

    fn kill(&mut self, index: usize) {
        self.window |= self.may_run_by_itself();
        self.towline(index).alive = false;
        self.hang_up(index);
    }

    /// Returns true if a destination that runs the guest by itself has everything.
    fn may_run_by_itself(&self) -> bool {
        self.last_kind() == DestinationKind::Stream && self.wires[self.last_wire()].all
    }

    /// The source's connection ends with it.
    fn close_source(&mut self) {
        if self.connects_qemus() {
            return self.cut_connected();
        }
        self.wires[0].open = false;
    }

    /// A towline closes its connections. Two QEMUs that are connected to each other keep theirs, unless it goes through both towlines, as in
    /// a postcopy.
    pub(super) fn hang_up(&mut self, index: usize) {
        if self.may_switch() {
            self.cut(0);
        }
        if self.connects_qemus() {
            self.cut(1);
        } else if !self.is_direct() {
            self.cut(index);
            self.cut(index + 1);
        }
    }

    pub(super) fn cut(&mut self, wire: usize) {
        if self.is_direct() {
            return self.cut_direct();
        }
        if wire == 0 && self.connects_qemus() {
            return self.cut_connected();
        }
        self.wires[wire].open = false;
        if wire == 0 && matches!(self.source, Source::Migrating | Source::Waiting) {
            self.window |= self.may_run_by_itself();
            self.regain_guest();
        }
    }
}

impl World {
    /// The record of this towline on disk.
    pub(in super::super::super::model) fn record(&self, index: usize) -> Option<Decision> {
        self.towlines[index]?.record
    }

    /// The last decision that is recorded anywhere.
    pub(super) fn decided(&self) -> Option<Decision> {
        self.towlines.iter().flatten().filter_map(|towline| towline.record).max()
    }

    /// Returns true if no towline works on it any more.
    pub(in super::super::super::model) fn is_left(&self, index: usize) -> bool {
        self.towlines[index].is_some_and(|towline| !towline.alive || towline.outcome.is_some())
    }

    /// Evidence available to a towline on the host of this one.
    pub(super) fn case(&self, index: usize) -> InterruptedMove {
        let towline = self.towlines[index].expect("it is there");
        let case = InterruptedMove::new(towline.record.expect("there is one"), self.final_run_state());
        let source = (towline.request.source == SourceKind::Qemu).then(|| self.source_view());
        let case = InterruptedMove { memory: towline.request.memory, ..case };
        let is_driven = towline.request.destination == DestinationKind::Qemu;
        let destination = is_driven.then(|| self.destination_view());
        InterruptedMove { source, destination, ..case.with_fault(towline.fault) }
    }

    /// Returns true if this describes the end that the host of this towline does not see.
    pub(super) fn is_true(&self, index: usize, other: OtherEnd) -> bool {
        let case = self.case(index);
        match (case.source, case.destination, other) {
            (None, Some(_), OtherEnd::Done) => self.source_view() == SourceStatus::Completed,
            (None, Some(_), OtherEnd::HasIt) => matches!(self.source, Source::HasGuest | Source::RunAgain),
            (None, Some(_), OtherEnd::Fenced) => self.source == Source::Exited,
            (Some(_), None, OtherEnd::Done) => {
                self.destination == Destination::Exited && !self.has_run_there && !self.operator_ran
            }
            (Some(_), None, OtherEnd::HasIt) => self.destination == Destination::Running,
            (Some(_), None, OtherEnd::Fenced) => self.destination == Destination::Exited,
            _ => false,
        }
    }

    /// Evidence available at both ends together.
    pub(super) fn case_of_both(&self) -> InterruptedMove {
        let case = InterruptedMove::new(self.decided().expect("there is one"), self.final_run_state());
        InterruptedMove {
            source: Some(self.source_view()),
            destination: Some(self.destination_view()),
            ..case
        }
    }

    fn final_run_state(&self) -> FinalRunState {
        let request = self.towlines[0].expect("there is one").request.run;
        FinalRunState::requested(request, self.carried)
    }

    /// Records on the host of this towline.
    pub(super) fn scope(&self, index: usize) -> Scope {
        let case = self.case(index);
        if case.source.is_some() && case.destination.is_some() { Scope::All } else { Scope::Of(index) }
    }

    pub(super) fn resume(&mut self, scope: Scope, case: InterruptedMove) {
        let finish = case.next_action();
        self.resumed |= !matches!(finish, ResumeAction::Wait(_) | ResumeAction::NeedsChoice(_));
        match finish {
            // Recorded before it is done.
            ResumeAction::RunDestination if self.disk != Disk::Writable => {}
            ResumeAction::RunDestination if !self.enter() => {}
            ResumeAction::RunDestination => {
                self.stale |= self.may_run_at_source;
                self.ran_without_memory |= self.lacks_memory;
                for (at, towline) in self.towlines.iter_mut().flatten().enumerate() {
                    if towline.record.is_some() && scope.has(at) {
                        towline.record = Some(Decision::Run);
                    }
                }
                self.has_run_there = true;
                self.destination = Destination::Running;
            }
            ResumeAction::AtDestination(placed) => {
                let is_there = match placed {
                    Placement::Running => self.destination == Destination::Running,
                    _ => self.destination == Destination::Loaded,
                };
                assert!(is_there, "the guest is not where the action assumes it");
                self.forget(scope);
            }
            ResumeAction::AtSource => {
                assert!(
                    matches!(self.source, Source::HasGuest | Source::RunAgain),
                    "the source does not have the guest"
                );
                self.forget(scope);
            }
            ResumeAction::Gone => self.forget(scope),
            ResumeAction::RunSource if !self.leave() => {}
            ResumeAction::RunSource => {
                // What an operator has run there is newer, and no record of this end has it.
                self.stale |= self.has_run_there && !self.operator_ran;
                self.source = Source::RunAgain;
                self.forget(scope);
            }
            ResumeAction::Quit(Side::Source | Side::Destination) => {
                unreachable!("needs an operator's choice")
            }
            ResumeAction::Wait(_) | ResumeAction::NeedsChoice(_) => {}
        }
    }

    /// The guest should be started at its destination, and a mishap prevents that, or hides it.
    pub(super) fn resume_fails(&mut self, index: usize, reply: Reply) {
        self.spend();
        self.resumed = true;
        if !self.enter() {
            return;
        }
        let case = self.case(index);
        self.has_run_there |= matches!(reply, Reply::Unanswered | Reply::Crashed);
        match reply {
            Reply::Unanswered => self.destination = Destination::Running,
            Reply::Crashed => self.destination = Destination::Exited,
            _ => {}
        }
        let failure = if reply == Reply::Refused { RunFailure::Refused } else { RunFailure::Unknown };
        self.towline(index).record = Some(case.decision_after(failure));
    }

    /// Returns true if a later towline would start the guest at its source if an operator chose that.
    pub(in super::super::super::model) fn can_choose_source(&self, index: usize) -> bool {
        self.follows(index, Choice::Run(Side::Source), ResumeAction::RunSource)
    }

    /// Returns true if a later towline would end the destination's QEMU if an operator chose that.
    pub(in super::super::super::model) fn can_discard_destination(&self, index: usize) -> bool {
        self.follows(index, Choice::Discard(Side::Destination), ResumeAction::Quit(Side::Destination))
    }

    fn follows(&self, index: usize, choice: Choice, action: ResumeAction) -> bool {
        self.is_left(index) && self.record(index).is_some() && self.case(index).apply(choice) == Ok(action)
    }

    /// The move is finished for the ends that this towline sees.
    pub(super) fn forget(&mut self, scope: Scope) {
        if self.disk == Disk::ReadOnly {
            return;
        }
        for (at, towline) in self.towlines.iter_mut().enumerate() {
            if let Some(towline) = towline
                && scope.has(at)
            {
                towline.record = None;
            }
        }
    }
}
