//! Mishaps of every party, and what others do.

use super::super::super::{DestinationKind, GuestRunState};
use super::{Destination, Disk, Source, Step, World};

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
                self.wires[0].open = false;
            }
            Step::SourceStopped => self.guest = GuestRunState::Stopped,
            Step::SourceExits => {
                if self.is_direct() {
                    self.cut_direct();
                }
                self.source = Source::Exited;
                self.wires[0].open = false;
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

    /// A towline closes its connections. Two QEMUs that are connected to each other keep theirs.
    pub(super) fn hang_up(&mut self, index: usize) {
        if !self.is_direct() {
            self.cut(index);
            self.cut(index + 1);
        }
    }

    pub(super) fn cut(&mut self, wire: usize) {
        if self.is_direct() {
            return self.cut_direct();
        }
        self.wires[wire].open = false;
        if wire == 0 && matches!(self.source, Source::Migrating | Source::Waiting) {
            self.window |= self.may_run_by_itself();
            self.regain_guest();
        }
    }
}
