//! The record of one command's move: written when the switchover directs it, removed when the outcome is known.

use std::sync::{Mutex, MutexGuard};

use towline_protocol::session::MoveId;

use super::context::Context;
use super::error::Error;
use crate::journal::{RuntimeDirectory, UndoRecord};
use crate::lock::lock;
use crate::moves::{self, GuestPlan, Id, MoveEnd, MoveRecord, RecordFile, Stage};
use crate::procfs::VcpuThreads;
use crate::switchover::{Decision, GuestRunState, GuestState, Switchover, SwitchoverOutcome};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Recorder(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Directory of the records; `None`: nothing is recorded.
    directory: Option<RuntimeDirectory>,
    ends: Option<RecordedEnds>,
    file: Option<RecordFile>,
}

/// The source in a record of a move.
#[derive(Clone, Debug)]
pub(super) struct RecordedSource {
    pub(super) end: MoveEnd,
    /// Threads of its vCPUs, if it is driven.
    pub(super) vcpus: VcpuThreads,
    /// Devices that were detached from it.
    pub(super) devices: Vec<UndoRecord>,
}

/// Both ends of a move.
#[derive(Clone, Debug)]
pub(super) struct RecordedEnds {
    pub(super) source: RecordedSource,
    pub(super) destination: MoveEnd,
}

impl Recorder {
    /// Sets the ends of the move. Without a directory nothing is recorded, and the user gets a notice if it
    /// would have been.
    pub(super) fn begin(&self, ends: RecordedEnds, machine: &Switchover, context: &Context<'_>) {
        let directory = match RuntimeDirectory::open() {
            Ok(directory) => {
                moves::sweep(&directory, &ends.source.end);
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
        *self.state() = State { directory, ends: Some(ends), file: None };
    }

    /// Makes a decision durable.
    pub(super) fn record(&self, id: MoveId, decision: Decision, machine: &Switchover) -> Result<(), Error> {
        let mut state = self.state();
        let stage = Stage::of(decision);
        // A guest that sleeps may wake up by itself, and one that is stopped does not run after a failed migration either.
        let runs = machine.guest() == GuestRunState::Running;
        let switches = state.ends.as_ref().filter(|_| runs).and_then(|ends| ends.source.vcpus.switches());
        if let Some(file) = &mut state.file {
            let mut record = file.record().at_stage(stage);
            record.guest_plan = guest_plan(machine);
            record.source_vcpu_switches = switches;
            return Ok(file.write(record)?);
        }
        let Some(mut file) = state.file(id, stage, machine) else { return Ok(()) };
        let mut record = file.record().clone();
        record.source_vcpu_switches = switches;
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
            SwitchoverOutcome::Unresolved(guest) if guest.is_open() => {
                return state.keep(guest, message);
            }
            SwitchoverOutcome::Completed(placement) if machine.leaves_paused_guest(placement) => {
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
        let Some(file) = self.file.as_mut().filter(|file| file.record().stage > Stage::Acknowledge) else {
            return Ok(());
        };
        let written = file.write(file.record().at_stage(Stage::Acknowledge));
        // A full disk still removes it. Without a record nothing is run by it.
        if let Err(error) = written {
            file.remove().map_err(|_| error)?;
            self.file = None;
        }
        Ok(())
    }

    fn file(&self, id: MoveId, stage: Stage, machine: &Switchover) -> Option<RecordFile> {
        let (ends, directory) = (self.ends.clone()?, self.directory.clone()?);
        let RecordedEnds { source, destination } = ends;
        let mut record = MoveRecord::new(Id::of(id), source.end, destination, stage, guest_plan(machine));
        record.devices = source.devices;
        Some(RecordFile::new(directory, record))
    }

    /// Keeps the record of an undecided move, with the command's message.
    fn keep(&mut self, guest: GuestState, message: &str) -> Option<String> {
        let file = self.file.as_mut()?;
        let record = file.record().with_message(message);
        let notice = moves::notice(&record, guest);
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

#[cfg(test)]
pub(super) mod tests;
