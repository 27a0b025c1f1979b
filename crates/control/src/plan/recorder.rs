//! The record of one command's move: written when the switchover directs it, removed when the outcome is known.

use std::sync::{Mutex, MutexGuard};

use towline_protocol::session::MoveId;

use super::context::Context;
use super::error::Error;
use crate::journal::RuntimeDirectory;
use crate::lock::lock;
use crate::moves::{self, GuestPlan, Id, MoveEnd, MoveRecord, RecordFile, Stage};
use crate::switchover::{
    Decision, GuestRunState, Placement, RunRequest, SourceAction, Switchover, SwitchoverOutcome, Unresolved,
};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Recorder(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Directory of the records; `None`: nothing is recorded.
    directory: Option<RuntimeDirectory>,
    ends: Option<(MoveEnd, MoveEnd)>,
    file: Option<RecordFile>,
}

impl Recorder {
    /// Sets the ends of the move. Without a directory nothing is recorded, and the user gets a notice if it
    /// would have been.
    pub(super) fn begin(
        &self,
        source: MoveEnd,
        destination: MoveEnd,
        machine: &Switchover,
        context: &Context<'_>,
    ) {
        let directory = match RuntimeDirectory::open() {
            Ok(directory) => {
                moves::sweep(&directory, &source);
                Some(directory)
            }
            Err(error) if machine.keeps_record() => {
                context.observer.notice(&format!(
                    "if this process is killed during the switchover, there is no record, and `towline resume` cannot finish it: {error}"
                ));
                None
            }
            Err(_) => None,
        };
        *self.state() = State { directory, ends: Some((source, destination)), file: None };
    }

    /// Makes a decision durable.
    pub(super) fn record(&self, id: MoveId, decision: Decision, machine: &Switchover) -> Result<(), Error> {
        let mut state = self.state();
        let stage = Stage::of(decision);
        if let Some(file) = &mut state.file {
            let mut record = file.record().at_stage(stage);
            record.guest_plan = guest_plan(machine);
            return Ok(file.write(record)?);
        }
        let Some(mut file) = state.file(id, stage, machine) else { return Ok(()) };
        let record = file.record().clone();
        let written = file.write(record);
        // A record that may exist is removed like any other.
        state.file = Some(file);
        Ok(written?)
    }

    /// Updates the record at the end of the command. Returns a notice for the user.
    pub(super) fn end(
        &self,
        id: MoveId,
        outcome: SwitchoverOutcome,
        machine: &Switchover,
        message: &str,
    ) -> Option<String> {
        let mut state = self.state();
        let ended = match outcome {
            SwitchoverOutcome::Unresolved(
                unresolved @ (Unresolved::BothPaused | Unresolved::UpgradeNotUndone),
            ) => {
                if let Err(error) = state.retract() {
                    tracing::warn!(%error, "the record of the move still has the guest running at its destination");
                }
                return state.keep(unresolved, message);
            }
            SwitchoverOutcome::Unresolved(unresolved) if unresolved.is_open() => {
                return state.keep(unresolved, message);
            }
            SwitchoverOutcome::Completed(placement) if leaves_paused_guest(placement, machine) => {
                state.leave(id, machine)
            }
            _ => state.file.as_mut().map_or(Ok(()), RecordFile::remove),
        };
        ended.err().map(|error| format!("the record of this finished move is not up to date: {error}"))
    }

    /// Withdraws the decision to run the guest at its destination: it does not run there, and the peer that is
    /// sent that may run it at its source.
    pub(super) fn retract(&self) -> Result<(), Error> {
        Ok(self.state().retract()?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    fn retract(&mut self) -> Result<(), moves::Error> {
        match &mut self.file {
            Some(file) if file.record().stage > Stage::Acknowledge => {
                let record = file.record().at_stage(Stage::Acknowledge);
                file.write(record)
            }
            _ => Ok(()),
        }
    }

    fn file(&self, id: MoveId, stage: Stage, machine: &Switchover) -> Option<RecordFile> {
        let ((source, destination), directory) = (self.ends.clone()?, self.directory.clone()?);
        let record = MoveRecord::new(Id::of(id), source, destination, stage, guest_plan(machine));
        Some(RecordFile::new(directory, record))
    }

    /// Keeps the record of an undecided move, with the command's message.
    fn keep(&mut self, unresolved: Unresolved, message: &str) -> Option<String> {
        let file = self.file.as_mut()?;
        let record = file.record().with_message(message);
        let notice = moves::notice(&record, unresolved);
        if let Err(error) = file.write(record) {
            tracing::warn!(%error, "the outcome of the move is not recorded");
        }
        Some(notice)
    }

    /// Records that the source keeps a guest which a later copy must not resume.
    fn leave(&mut self, id: MoveId, machine: &Switchover) -> Result<(), moves::Error> {
        if self.file.is_none() {
            self.file = self.file(id, Stage::Left, machine);
        }
        self.file.as_mut().map_or(Ok(()), moves::record_left_source)
    }
}

/// The request for the guest, and its run state as far as it is known.
fn guest_plan(machine: &Switchover) -> GuestPlan {
    let request = machine.request();
    GuestPlan::of(machine.guest(), request)
}

/// Returns true if the source stays paused with a guest that was paused before, or that runs elsewhere now.
fn leaves_paused_guest(placement: Placement, machine: &Switchover) -> bool {
    let request = machine.request();
    let is_live = machine.guest() != GuestRunState::Stopped;
    let runs_there = matches!(placement, Placement::Running | Placement::Loaded)
        && (is_live || request.run == RunRequest::Run);
    let stays = request.after != SourceAction::Quit && !machine.has_source_exited();
    machine.drives_source() && stays && (runs_there || !is_live)
}
