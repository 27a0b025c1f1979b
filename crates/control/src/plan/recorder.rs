//! The record of the move of one command: written when the switchover directs it, and removed when its outcome is known and done.

use std::sync::{Mutex, MutexGuard, PoisonError};

use towline_protocol::session::MoveId;

use super::context::Run;
use super::error::Error;
use crate::journal::Directory;
use crate::moves::{self, End, Id, Ledger, Record, Stage, Wanted};
use crate::switchover::{Decision, GuestRun, Held, Outcome, Placed, RunRequest, SourceAfter, Switchover};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Recorder(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Where it is kept; `None`: nowhere.
    directory: Option<Directory>,
    ends: Option<(End, End)>,
    ledger: Option<Ledger>,
}

impl Recorder {
    /// The ends of the move are these. Without a directory nothing is recorded, and the user is told so if it would have been.
    pub(super) fn begin(&self, source: End, destination: End, machine: &Switchover, run: &Run<'_>) {
        let directory = match Directory::open() {
            Ok(directory) => {
                moves::sweep(&directory, &source);
                Some(directory)
            }
            Err(error) if machine.keeps_record() => {
                run.observer.notice(&format!(
                    "if this process is killed while the guest is handed over, no record says so, and `towline resume` cannot finish it: {error}"
                ));
                None
            }
            Err(_) => None,
        };
        *self.state() = State { directory, ends: Some((source, destination)), ledger: None };
    }

    /// Makes a decision durable.
    pub(super) fn record(&self, id: MoveId, decision: Decision, machine: &Switchover) -> Result<(), Error> {
        let mut state = self.state();
        let stage = Stage::of(decision);
        if let Some(ledger) = &mut state.ledger {
            let mut record = ledger.record().at(stage);
            record.wanted = wanted(machine);
            return Ok(ledger.write(record)?);
        }
        let Some(mut ledger) = state.ledger(id, stage, machine) else { return Ok(()) };
        let record = ledger.record().clone();
        let written = ledger.write(record);
        // One that is there, but is not known to be, is removed with the others.
        state.ledger = Some(ledger);
        Ok(written?)
    }

    /// The command has ended. Returns what the user should know.
    pub(super) fn end(
        &self,
        id: MoveId,
        outcome: Outcome,
        machine: &Switchover,
        said: &str,
    ) -> Option<String> {
        let mut state = self.state();
        let ended = match outcome {
            Outcome::Look(Held::BothPaused) => {
                if let Err(error) = state.retract() {
                    tracing::warn!(%error, "the record of the move still says that its destination runs the guest");
                }
                return state.keep(said);
            }
            Outcome::Look(held) if held.is_open() => return state.keep(said),
            Outcome::Done(placed) if leaves_a_guest(placed, machine) => state.leave(id, machine),
            _ => state.ledger.as_mut().map_or(Ok(()), Ledger::remove),
        };
        ended.err().map(|error| format!("the record of this move, which is over, is not up to date: {error}"))
    }

    /// The guest does not run at its destination, and somebody is to hear that, who may run it at its source: that it was to run is
    /// no evidence any more.
    pub(super) fn retract(&self) -> Result<(), Error> {
        Ok(self.state().retract()?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn retract(&mut self) -> Result<(), moves::Error> {
        match &mut self.ledger {
            Some(ledger) if ledger.record().stage > Stage::Acknowledge => {
                let record = ledger.record().at(Stage::Acknowledge);
                ledger.write(record)
            }
            _ => Ok(()),
        }
    }

    fn ledger(&self, id: MoveId, stage: Stage, machine: &Switchover) -> Option<Ledger> {
        let ((source, destination), directory) = (self.ends.clone()?, self.directory.clone()?);
        let record = Record::new(Id::of(id), source, destination, stage, wanted(machine));
        Some(Ledger::new(directory, record))
    }

    /// It is undecided: what was said of it is recorded too.
    fn keep(&mut self, said: &str) -> Option<String> {
        let ledger = self.ledger.as_mut()?;
        let record = ledger.record().saying(said);
        let id = record.id.clone();
        if let Err(error) = ledger.write(record) {
            tracing::warn!(%error, "what was said of the move is not recorded");
        }
        Some(format!("move {id} is undecided: `towline moves` shows it, `towline resume {id}` finishes it"))
    }

    /// The source keeps a guest that a later copy must not run on.
    fn leave(&mut self, id: MoveId, machine: &Switchover) -> Result<(), moves::Error> {
        if self.ledger.is_none() {
            self.ledger = self.ledger(id, Stage::Left, machine);
        }
        self.ledger.as_mut().map_or(Ok(()), moves::leave)
    }
}

/// What is to become of the guest, as far as that is known by now.
fn wanted(machine: &Switchover) -> Wanted {
    let request = machine.request();
    Wanted::of(machine.guest(), request.run, request.after)
}

/// Whether the source stays paused with a guest that was paused before, or that runs elsewhere now.
fn leaves_a_guest(placed: Placed, machine: &Switchover) -> bool {
    let request = machine.request();
    let is_live = machine.guest() != GuestRun::Stopped;
    let runs_there =
        matches!(placed, Placed::Running | Placed::Loaded) && (is_live || request.run == RunRequest::Run);
    let stays = request.after != SourceAfter::Quit && !machine.has_source_exited();
    machine.drives_source() && stays && (runs_there || !is_live)
}
