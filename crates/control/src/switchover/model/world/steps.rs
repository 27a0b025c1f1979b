//! Steps that are possible in a world, and what they depend on.

use super::super::super::{
    DestinationKind, Directive, MemorySharing, Placement, SourceKind, SourceLink, SwitchoverOutcome,
};
use super::{
    Destination, Disk, Engine, Reply, ResumeAction, Source, Step, Towline, World, is_paused_at_both,
};
use crate::switchover::OtherEnd;
use crate::switchover::fault::SwitchoverBug;

impl World {
    /// All steps that are possible now.
    pub(in super::super::super) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut add = |possible: bool, step: Step| possible.then(|| steps.push(step));
        let relays = !self.is_direct() && !self.connects_qemus();
        self.add_qemu_steps(&mut add);
        for (index, towline) in self.towlines.iter().enumerate() {
            let Some(towline) = towline.filter(|towline| towline.alive && towline.outcome.is_none()) else {
                continue;
            };
            let (up, down) = (self.wires[index], self.wires[index + 1]);
            let streams = towline.engine == Engine::Streaming && relays;
            add(streams && up.all && up.open && down.open, Step::EngineCommits(index));
            let sent = towline.engine == Engine::Sent && relays;
            add(sent && down.shut, Step::EngineAcknowledges(index));
            let broken = !(down.open || sent && down.shut) || !(up.open || streams && up.all);
            add(
                relays && matches!(towline.engine, Engine::Streaming | Engine::Sent) && broken,
                Step::EngineFails(index),
            );
            if self.connects_qemus() {
                self.add_connected_steps(index, towline, &mut add);
            }
            if let Some(directive) = towline.todo {
                for reply in self.replies(index, directive) {
                    add(true, Step::Carry(index, reply));
                }
            }
            add(self.mishaps > 0 && !towline.cancelled, Step::Cancel(index));
            add(self.mishaps > 0, Step::Kill(index));
            let is_shared = towline.request.memory == MemorySharing::Shared;
            let restores = is_shared && towline.todo == Some(Directive::ResumeSource) && self.mishaps > 0;
            add(restores, Step::KillInRestore(index));
        }
        add(self.serves() && self.lacks_memory, Step::MemoryArrives);
        add(self.can_reconnect(), Step::Reconnect);
        add(self.can_go_on(), Step::GoOn);
        if self.is_direct() {
            self.add_direct_steps(&mut steps);
        }
        let mut add = |possible: bool, step: Step| possible.then(|| steps.push(step));
        for index in 0..self.count() {
            add(self.is_left(index) && self.record(index).is_some(), Step::Resume(index));
            for other in [OtherEnd::Done, OtherEnd::HasIt, OtherEnd::Fenced] {
                let is_said = self.is_left(index) && self.record(index).is_some();
                add(is_said && self.is_true(index, other), Step::ResumeTold(index, other));
            }
        }
        let can_record = self.mishaps > 0 && self.disk == Disk::Writable;
        for index in (0..self.count()).filter(|&index| can_record && self.is_left(index)) {
            let is_started = |_| self.case(index).next_action() == ResumeAction::RunDestination;
            if self.record(index).is_some_and(is_started) {
                for reply in [Reply::Refused, Reply::Silent, Reply::Unanswered, Reply::Crashed] {
                    add(true, Step::ResumeFails(index, reply));
                }
            }
        }
        add(self.can_take_back(), Step::TakeBack);
        let all_left = self.count() > 1 && (0..self.count()).all(|index| self.is_left(index));
        add(all_left && self.decided().is_some(), Step::ResumeBoth);
        if self.mishaps > 0 {
            self.add_mishaps(&mut steps);
        }
        steps
    }

    /// Adds what the QEMUs do by themselves.
    fn add_qemu_steps(&self, add: &mut impl FnMut(bool, Step) -> Option<()>) {
        let last = self.wires[self.last_wire()];
        let relays = !self.is_direct() && !self.connects_qemus();
        add(relays && self.source == Source::Migrating && self.wires[0].open, Step::SourceSendsTheRest);
        let loads = self.destination == Destination::Loading;
        let arrives = if self.connects_qemus() { self.will_load() } else { last.all };
        let is_precopy = !matches!(self.source, Source::Switching | Source::Following);
        add(loads && arrives && is_precopy, Step::DestinationLoads);
        add(loads && self.will_load() && self.mishaps > 0, Step::DestinationFails);
        let acknowledged = self.source == Source::Waiting && self.wires[0].shut && self.wires[0].open;
        let is_there = !self.connects_qemus() || self.destination == Destination::Loaded;
        add(acknowledged && is_there, Step::SourceIsAcknowledged);
        if self.may_switch() {
            add(acknowledged && loads, Step::SourceSwitches);
            self.add_following_steps(add);
        }
    }

    /// Adds what others do, and what fails by itself.
    fn add_mishaps(&self, steps: &mut Vec<Step>) {
        let mut add = |possible: bool, step: Step| possible.then(|| steps.push(step));
        let wires = match (self.is_direct(), self.connects_qemus()) {
            (true, _) => 0,
            (_, true) => 1,
            _ => self.count(),
        };
        for wire in 0..=wires {
            add(self.wires[wire].open && !(wire == 0 && self.source == Source::Stored), Step::Cut(wire));
        }
        let migrates = matches!(self.source, Source::Migrating | Source::Waiting);
        add(migrates, Step::SourceCancelled);
        let waits = self.connects_qemus() && self.source == Source::Waiting && !self.wires[0].shut;
        add(waits, Step::SourceContinued);
        add(self.source == Source::Migrating && self.guest.is_live(), Step::SourceStopped);
        add(!matches!(self.source, Source::Exited | Source::Stored), Step::SourceExits);
        add(self.source == Source::Completed, Step::SourceRunAgain);
        // While its towline watches it, its migration is that of the move.
        let is_left = self.is_over() && matches!(self.source, Source::HasGuest | Source::RunAgain);
        add(is_left && self.runs_at_source(), Step::SourceMovedOn);
        let is_held = self.last_kind() == DestinationKind::Qemu;
        let may_loop = is_held && self.destination == Destination::Loading && !self.cont_while_loading;
        add(may_loop, Step::ContWhileLoading);
        add(is_held && self.destination == Destination::Loaded, Step::DestinationRunByOperator);
        let runs = self.destination == Destination::Running && self.is_over();
        add(is_held && runs, Step::DestinationPausedByOperator);
        // Later only a towline that resumes the move would write.
        let writes = self.disk == Disk::Writable && !self.is_over();
        add(writes, Step::DiskFails(Disk::Full));
        add(writes, Step::DiskFails(Disk::ReadOnly));
        let has_record = self.towlines.iter().flatten().any(|towline| towline.record.is_some());
        add(has_record, Step::DirectoryVanishes);
        let qemu = self.last_kind() != DestinationKind::Stored;
        add(qemu && self.destination != Destination::Exited, Step::DestinationExits);
    }

    fn replies(&self, index: usize, directive: Directive) -> Vec<Reply> {
        let mishap = self.mishaps > 0;
        match directive {
            Directive::QuerySource => {
                let waits = self.is_source_busy();
                those(&[
                    (!waits, Reply::True),
                    (waits && !self.wires[0].shut, Reply::TimedOut),
                    (mishap, Reply::TimedOut),
                ])
            }
            Directive::ProbeSourceLink => {
                those(&[(self.link() != SourceLink::Open, Reply::True), (mishap, Reply::TimedOut)])
            }
            Directive::QueryDestination => {
                let waits = self.destination == Destination::Loading;
                let comes = self.will_load();
                let is_lost = self.is_postcopy() && mishap;
                those(&[
                    (!waits, Reply::True),
                    (waits && !comes || mishap || self.misses_peer(), Reply::TimedOut),
                    (is_lost, Reply::Silent),
                ])
            }
            Directive::AwaitPeer => {
                let (up, down) = (self.wires[index], self.wires[index + 1]);
                let towline = self.towlines[index].expect("it is there");
                let (message, open) = match towline.request.source {
                    SourceKind::Towline => (up.down, up.open),
                    _ => (down.up, down.open),
                };
                let is_over = message.is_some() || !open || self.is_source_stuck(index);
                those(&[(is_over, Reply::True), (mishap, Reply::TimedOut)])
            }
            Directive::Recover if self.connects_qemus() => those(&[
                (self.cannot_reconnect(index), Reply::True),
                (mishap, Reply::Silent),
                (mishap, Reply::TimedOut),
            ]),
            Directive::StartPostcopy
            | Directive::FollowSource
            | Directive::RunEarly
            | Directive::Recover
            | Directive::ServeMemory => self.replies_in_postcopy(directive),
            Directive::RunDestination => those(&[
                (true, Reply::True),
                (mishap, Reply::Refused),
                (mishap, Reply::Silent),
                (mishap, Reply::Unanswered),
                (mishap, Reply::Crashed),
            ]),
            // A record that exists but is not known to. `World::disk` decides whether it can exist.
            Directive::Record(_) => those(&[(true, Reply::True), (mishap, Reply::Unanswered)]),
            Directive::FinalizeDestination
            | Directive::RestoreSource
            | Directive::ResumeSource
            | Directive::ResumeSourceFirst
            | Directive::QuitSource
            | Directive::CancelMigration => those(&[(true, Reply::True), (mishap, Reply::Silent)]),
            _ => vec![Reply::True],
        }
    }

    /// Returns true if a query of the source does not end the wait for it.
    pub(super) fn is_source_busy(&self) -> bool {
        match self.source {
            Source::Following => !self.may_switch(),
            source => matches!(source, Source::Migrating | Source::Waiting | Source::Switching),
        }
    }

    fn replies_in_postcopy(&self, directive: Directive) -> Vec<Reply> {
        let mishap = self.mishaps > 0;
        let is_settled = self.is_postcopy_settled(directive);
        match directive {
            Directive::StartPostcopy => those(&[
                (true, Reply::True),
                (mishap, Reply::Refused),
                (mishap, Reply::Silent),
                (mishap, Reply::Unanswered),
            ]),
            Directive::FollowSource => those(&[(true, Reply::True), (mishap, Reply::TimedOut)]),
            Directive::Recover => {
                those(&[(is_settled, Reply::True), (mishap, Reply::Silent), (mishap, Reply::Unanswered)])
            }
            Directive::ServeMemory => those(&[
                (is_settled, Reply::True),
                (mishap && !self.wires[1].open, Reply::Unanswered),
                (mishap, Reply::Refused),
            ]),
            _ => those(&[(true, Reply::True), (mishap, Reply::Silent), (mishap, Reply::Unanswered)]),
        }
    }

    /// Returns true if a towline has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.towlines.iter().flatten().any(|towline| towline.outcome.is_some())
    }

    /// Returns true if a towline has reported that the guest does not run at its destination, so that it may be run at its source.
    pub(super) fn is_reported_paused(&self) -> bool {
        let is_paused = |end| matches!(end, SwitchoverOutcome::Unresolved(state) if is_paused_at_both(state));
        self.towlines.iter().flatten().any(|towline| towline.outcome.is_some_and(is_paused))
    }

    /// Returns true if every towline has ended.
    pub(in super::super::super) fn is_over(&self) -> bool {
        let over = |towline: &Towline| !towline.alive || towline.outcome.is_some();
        self.towlines.iter().flatten().all(over)
    }

    /// Returns true if the guest runs at its source.
    pub(in super::super::super) fn runs_at_source(&self) -> bool {
        match self.source {
            Source::Migrating | Source::HasGuest => self.guest.is_live(),
            Source::RunAgain => true,
            Source::Switching
            | Source::Following
            | Source::FollowingPaused
            | Source::Waiting
            | Source::Completed
            | Source::MovedOn
            | Source::Exited
            | Source::Stored => false,
        }
    }

    /// The guest's placement, if this towline has reported that it is at its destination.
    pub(in super::super::super) fn placed(&self, index: usize) -> Option<Placement> {
        match self.towlines[index]?.outcome? {
            SwitchoverOutcome::Completed(placed) => Some(placed),
            _ => None,
        }
    }

    /// The connection to the destination ends with it.
    pub(super) fn lose_destination(&mut self) {
        if self.is_direct() {
            return self.cut_direct();
        }
        if self.connects_qemus() {
            return self.cut(0);
        }
        let last = self.last_wire();
        self.wires[last].open = false;
    }

    pub(super) fn load(&mut self) {
        let last = self.last_wire();
        if self.is_postcopy() {
            return self.load_postcopy();
        }
        self.wires[last].shut = self.wires[last].open;
        self.has_run_there |= self.last_kind() == DestinationKind::Stream && self.carried.is_live();
        self.destination = match self.last_kind() {
            // Others are published before the source is acknowledged.
            DestinationKind::Stored if self.towlines[0].is_some_and(|first| first.publishes_last()) => {
                Destination::Loaded
            }
            DestinationKind::Stored => Destination::Stored,
            DestinationKind::Stream if self.carried.is_live() => Destination::Running,
            DestinationKind::Qemu
                if self.cont_while_loading && self.has_fault(SwitchoverBug::RunsAfterLoading) =>
            {
                Destination::Running
            }
            _ => Destination::Loaded,
        };
        self.locks = self.has_fault(SwitchoverBug::LocksWhenLoaded);
    }
}

/// Returns the replies that are possible.
fn those(possible: &[(bool, Reply)]) -> Vec<Reply> {
    possible.iter().filter(|(is_possible, _)| *is_possible).map(|&(_, reply)| reply).collect()
}
