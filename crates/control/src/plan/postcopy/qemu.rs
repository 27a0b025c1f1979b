//! A QEMU whose monitor we have, which takes a guest by postcopy.

use std::path::Path;

use towline_channel::Address;
use towline_migration::Compression;
use towline_protocol::RamBlock;

use super::super::blame;
use super::super::context::Run;
use super::super::destination::{Fate, QmpDestination};
use super::super::error::{Error, Failure, look_at};
use super::super::fit::Guest;
use super::super::outcomes::{GuestState, Place};
use super::super::report::DestinationState;
use super::super::request::PostcopyOptions;
use super::end::{End, stopped};
use super::stored::Stored;

/// See the module's text.
pub(super) struct QemuEnd(QmpDestination);

impl QemuEnd {
    /// Checks what can be checked; nothing is changed.
    pub(super) fn prepare(
        path: &Path,
        stored: &Stored<'_>,
        options: PostcopyOptions,
        run: &Run<'_>,
    ) -> Result<Self, Error> {
        let mut qemu = match options.recover {
            true => QmpDestination::prepare_lost(path)?,
            false => QmpDestination::prepare_postcopy(path)?,
        };
        run.tell_repaired(qemu.qemu());
        let machine_type = &stored.guest.configuration().machine_type;
        qemu.check(&Guest::of_blocks(machine_type, stored.guest.blocks()), run)?;
        if options.recover && qemu.preempts() != options.preempt {
            let (has, option) = match qemu.preempts() {
                true => ("a preempt channel", "pass --postcopy-preempt"),
                false => ("no preempt channel", "leave --postcopy-preempt out"),
            };
            return Err(Error::Usage(format!("the guest was begun with {has}: {option}")));
        }
        Ok(Self(qemu))
    }
}

impl End for QemuEnd {
    fn is_driven(&self) -> bool {
        true
    }

    fn ran(&self) -> bool {
        self.0.ran()
    }

    fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        self.0.page_bytes(blocks)
    }

    fn listen(&mut self, options: PostcopyOptions, runs: bool) -> Result<Address, Error> {
        self.0.start_postcopy(options.preempt, runs, 0, Compression::None)
    }

    fn runs_now(&mut self) -> bool {
        self.0.runs_now().is_ok_and(|runs| runs == Some(true))
    }

    fn fate(&mut self) -> Result<Fate, Error> {
        self.0.fate()
    }

    fn wait_for_help(&mut self, _: &towline_migration::Error, _: &Run<'_>) {
        self.0.break_connection();
    }

    fn undo(&mut self, error: Error) -> (Error, Vec<String>) {
        (self.0.explain(error), self.0.undo(false))
    }

    fn give_back(&mut self) -> Vec<String> {
        self.0.undo(false)
    }

    fn given_up(&mut self, _: towline_migration::Error, text: &str, had_loaded: bool) -> Failure {
        let error = self.0.failed(text);
        self.0.leave();
        match had_loaded {
            true => look_at(error, Place::PostcopyEnded),
            false => Failure { error: Box::new(error), guest: GuestState::Safe, notes: self.0.undo(false) },
        }
    }

    fn ended(&mut self, error: Error, had_loaded: bool) -> Failure {
        self.0.leave();
        match blame::is_gone(&error) {
            true if !had_loaded => Failure::untouched(error),
            true => look_at(error, Place::PostcopyEnded),
            false => look_at(error, Place::PostcopyPaused),
        }
    }

    fn left(&mut self, error: Error) -> Failure {
        self.0.leave();
        stopped(error)
    }

    fn state(&self, runs: bool) -> DestinationState {
        if runs { DestinationState::Running } else { DestinationState::Paused }
    }

    fn finish(&mut self, runs: bool) -> Result<Vec<String>, Failure> {
        let qemu = &mut self.0;
        let finished = qemu.wait_completed().and_then(|()| if runs { qemu.check_runs() } else { Ok(()) });
        finished.and_then(|()| qemu.release()).map_err(|error| match blame::is_gone(&error) {
            true => look_at(error, Place::PostcopyEnded),
            false => look_at(error, Place::PostcopyArrived),
        })
    }
}
