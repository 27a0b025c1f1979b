//! The record of one command's move: written when the switchover directs it, removed when the outcome is known.

use towline_protocol::session::MoveId;

use super::context::Context;
use super::error::Error;
use crate::generations::ManagedGuest;
use crate::journal::{RuntimeDirectory, UndoRecord};
use crate::moves::{self, GuestPlan, Id, MoveEnd, MoveRecord, RecordFile, RecordedWay};
use crate::procfs::VcpuThreads;
use crate::switchover::{Decision, GuestRunState, GuestState, Switchover, SwitchoverOutcome};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// Directory of the records; `None`: nothing is recorded.
    directory: Option<RuntimeDirectory>,
    ends: Option<RecordedEnds>,
    /// The guest at its destination, if that has generations.
    managed: Option<ManagedGuest>,
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
    /// The way to its destination, of a guest that may be switched to postcopy.
    pub(super) way: Option<RecordedWay>,
}

impl RecordedSource {
    /// One that is not driven here.
    pub(super) fn elsewhere(end: MoveEnd) -> Self {
        Self { end, vcpus: VcpuThreads::default(), devices: Vec::new(), way: None }
    }
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
    ///
    /// # Errors
    /// It is not known whether the guest has generations.
    pub(super) fn begin(
        &mut self,
        ends: RecordedEnds,
        machine: &Switchover,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        self.directory = match RuntimeDirectory::open() {
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
        // Not when the guest is stopped: every guest of this user is looked at.
        self.managed = ends.destination.managed()?;
        self.ends = Some(ends);
        Ok(())
    }

    /// Goes on with the record of an earlier towline.
    pub(super) fn going_on(ends: RecordedEnds, file: RecordFile) -> Self {
        Self { ends: Some(ends), file: Some(file), ..Self::default() }
    }

    /// Makes a decision durable. A guest with generations runs at its destination only in the next one.
    pub(super) fn record(
        &mut self,
        id: MoveId,
        decision: Decision,
        machine: &Switchover,
    ) -> Result<(), Error> {
        self.write(id, decision, machine)?;
        let managed = self.managed.as_ref().filter(|_| decision == Decision::Run);
        Ok(managed.map_or(Ok(()), ManagedGuest::enter)?)
    }

    fn write(&mut self, id: MoveId, decision: Decision, machine: &Switchover) -> Result<(), moves::Error> {
        // A guest that sleeps may wake up by itself, and one that is stopped does not run after a failed migration either.
        let runs = machine.guest() == GuestRunState::Running;
        let switches = self.ends.as_ref().filter(|_| runs).and_then(|ends| ends.source.vcpus.switches());
        // One that may exist after a failure is removed like any other.
        self.file = self.file.take().or_else(|| self.file(id, decision, machine));
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut record = file.record().at_stage(decision);
        record.guest_plan = GuestPlan::of(machine.guest(), machine.request());
        record.source_vcpu_switches = switches;
        file.write(record)
    }

    /// Updates the record at the end of the command. Returns a notice for the user.
    pub(super) fn end(
        &mut self,
        id: MoveId,
        outcome: SwitchoverOutcome,
        machine: &Switchover,
        message: &str,
    ) -> Option<String> {
        let ended = match outcome {
            SwitchoverOutcome::Unresolved(guest) if guest.is_open() => return self.keep(guest, message),
            SwitchoverOutcome::Completed(placement) if machine.leaves_paused_guest(placement) => {
                self.leave(id, machine)
            }
            _ => self.file.as_mut().map_or(Ok(()), RecordFile::remove),
        };
        ended.err().map(|error| format!("the record of this finished move is not up to date: {error}"))
    }

    /// Withdraws the decision to run the guest at its destination: it does not run there, and the peer that is
    /// sent that may run it at its source.
    pub(super) fn retract(&mut self) -> Result<(), Error> {
        if let Some(file) = self.file.as_mut().filter(|file| file.record().stage > Decision::Acknowledge) {
            let written = file.write(file.record().at_stage(Decision::Acknowledge));
            // A full disk still removes it. Without a record nothing is run by it.
            if let Err(error) = written {
                file.remove().map_err(|_| error)?;
                self.file = None;
            }
        }
        Ok(self.managed.as_ref().map_or(Ok(()), ManagedGuest::withdraw)?)
    }

    fn file(&self, id: MoveId, stage: Decision, machine: &Switchover) -> Option<RecordFile> {
        let (ends, directory) = (self.ends.clone()?, self.directory.clone()?);
        let RecordedEnds { source, destination } = ends;
        let plan = GuestPlan::of(machine.guest(), machine.request());
        let mut record = MoveRecord::new(Id::of(id), source.end, destination, stage, plan);
        (record.devices, record.way) = (source.devices, source.way);
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
        self.file = self.file.take().or_else(|| self.file(id, Decision::Left, machine));
        self.file.as_mut().map_or(Ok(()), moves::record_left_source)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use serde_json::Value;
    use tempfile::TempDir;

    use super::*;
    use crate::moves::tests::{fill, in_small_file_system};
    use crate::switchover::{
        AtDestination, AtSource, DestinationKind, Directive, Input, MemorySharing, Placement, RunRequest,
        SourceAction, SourceKind, SwitchoverRequest, ToDo,
    };

    const ID: MoveId = [7; 16];
    const PAUSED_AT_BOTH: GuestState = GuestState::new(AtSource::Paused, AtDestination::Holds, ToDo::RunOne);

    fn end(name: &str) -> MoveEnd {
        MoveEnd::Qemu { socket: name.into(), pid: None, start_time: None }
    }

    /// A recorder of a move between two QEMUs, whose records are below this directory.
    pub(in super::super) fn recorder(place: &TempDir) -> Recorder {
        let vcpus = VcpuThreads::of_files(vec!["/proc/thread-self/status".into()]);
        let source = RecordedSource { end: end("/run/a.qmp"), vcpus, devices: Vec::new(), way: None };
        let ends = Some(RecordedEnds { source, destination: end("/run/b.qmp") });
        let directory = Some(RuntimeDirectory::below(place.path()).unwrap());
        Recorder { directory, ends, managed: None, file: None }
    }

    fn machine(guest: GuestRunState, after: SourceAction) -> Switchover {
        let (source, destination) = (SourceKind::Qemu, DestinationKind::Qemu);
        let (run, memory) = (RunRequest::AsItWas, MemorySharing::Copied);
        let mut machine = Switchover::new(SwitchoverRequest { source, destination, run, after, memory });
        assert_eq!(machine.handle(Input::CommitRequested(guest)), Directive::Proceed);
        machine
    }

    /// The only record, if there is one.
    fn recorded(place: &TempDir) -> Option<Value> {
        let files = fs::read_dir(place.path().join("towline/journal")).ok()?;
        let files: Vec<_> = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
        assert!(files.len() <= 1, "{files:?}");
        files.first().map(|text| serde_json::from_str(text).unwrap())
    }

    /// Its stage.
    pub(in super::super) fn stage(place: &TempDir) -> Option<String> {
        recorded(place).map(|record| record["stage"].as_str().unwrap().to_owned())
    }

    #[test]
    fn a_withdrawn_decision_is_not_in_the_record_any_more() {
        let place = TempDir::new().unwrap();
        let (mut recorder, machine) = (recorder(&place), machine(GuestRunState::Running, SourceAction::Quit));
        recorder.retract().unwrap();
        assert_eq!(stage(&place), None);
        for decision in [Decision::Acknowledge, Decision::Run] {
            recorder.record(ID, decision, &machine).unwrap();
            recorder.retract().unwrap();
            assert_eq!(stage(&place).as_deref(), Some("acknowledge"));
        }
    }

    /// A disk without room for another record: the decision must not stay, so the record goes.
    #[test]
    fn a_decision_that_cannot_be_withdrawn_on_a_full_disk_is_removed() {
        let place = TempDir::new().unwrap();
        in_small_file_system(
            "a_decision_that_cannot_be_withdrawn_on_a_full_disk_is_removed",
            place.path(),
            || {
                let (mut recorder, machine) =
                    (recorder(&place), machine(GuestRunState::Running, SourceAction::Quit));
                recorder.record(ID, Decision::Run, &machine).unwrap();
                let filler = RuntimeDirectory::below(place.path()).unwrap();
                fill(&filler);
                recorder.retract().unwrap();
                fs::remove_file(filler.path().join("filler")).unwrap();
                assert_eq!(stage(&place), None);
            },
        );
    }

    /// A directory that was removed, or mounted over: nothing that was written there would be found.
    #[test]
    fn a_decision_is_not_recorded_in_a_directory_that_is_not_there() {
        let machine = machine(GuestRunState::Running, SourceAction::Quit);
        for replaced in [false, true] {
            let place = TempDir::new().unwrap();
            let (mut first, mut recorder) = (recorder(&place), recorder(&place));
            recorder.record(ID, Decision::Acknowledge, &machine).unwrap();
            fs::rename(place.path().join("towline"), place.path().join("former")).unwrap();
            if replaced {
                RuntimeDirectory::below(place.path()).unwrap();
            } else {
                fs::remove_dir_all(place.path().join("former")).unwrap();
            }
            first.record(ID, Decision::Acknowledge, &machine).unwrap_err();
            recorder.record(ID, Decision::Run, &machine).unwrap_err();
            assert_eq!(stage(&place), None);
            // Nothing is left that has the guest running at its destination.
            recorder.retract().unwrap();
            let outcome = SwitchoverOutcome::Unresolved(PAUSED_AT_BOTH);
            recorder.end(ID, outcome, &machine, "paused at both ends");
            assert_eq!(stage(&place), None);
        }
    }

    #[test]
    fn a_record_ends_with_the_outcome() {
        let unresolved = |source, destination, to_do| {
            SwitchoverOutcome::Unresolved(GuestState::new(source, destination, to_do))
        };
        let paused = AtSource::Paused;
        let cases = [
            (SwitchoverOutcome::Safe, SourceAction::KeepPaused, None),
            (SwitchoverOutcome::Completed(Placement::Running), SourceAction::Quit, None),
            (SwitchoverOutcome::Completed(Placement::Running), SourceAction::KeepPaused, Some("left")),
            (SwitchoverOutcome::Completed(Placement::Paused), SourceAction::KeepPaused, None),
            (
                unresolved(AtSource::Ended, AtDestination::Ended, ToDo::StartAgain),
                SourceAction::KeepPaused,
                None,
            ),
            (
                unresolved(paused, AtDestination::Unknown, ToDo::LookAtDestination),
                SourceAction::Quit,
                Some("run"),
            ),
            (unresolved(paused, AtDestination::Holds, ToDo::ForgetRecord), SourceAction::Quit, Some("run")),
        ];
        for (outcome, after, expected) in cases {
            let place = TempDir::new().unwrap();
            let (mut recorder, machine) = (recorder(&place), machine(GuestRunState::Running, after));
            recorder.record(ID, Decision::Run, &machine).unwrap();
            let notice = recorder.end(ID, outcome, &machine, "the message");
            assert_eq!(stage(&place).as_deref(), expected, "{outcome:?}");
            let is_undecided = expected == Some("run");
            assert_eq!(notice.is_some(), is_undecided, "{notice:?}");
            let message = recorded(&place).map_or(Value::Null, |record| record["message"].clone());
            assert_eq!(message == "the message", is_undecided, "{outcome:?}: {message}");
        }
    }

    /// Only of a guest that ran until it was sent does a source without a run prove that it is done.
    #[test]
    fn runs_of_vcpus_are_recorded_of_a_guest_that_ran() {
        for (guest, expected) in [
            (GuestRunState::Running, true),
            (GuestRunState::Suspended, false),
            (GuestRunState::Stopped, false),
        ] {
            let place = TempDir::new().unwrap();
            let (mut recorder, machine) = (recorder(&place), machine(guest, SourceAction::Quit));
            let mut before = Some(0).filter(|_| expected);
            for decision in [Decision::Acknowledge, Decision::Run] {
                // A voluntary switch of this thread, which stands for a vCPU.
                std::thread::sleep(std::time::Duration::from_millis(1));
                recorder.record(ID, decision, &machine).unwrap();
                let now = recorded(&place).unwrap()["source-vcpu-switches"].as_u64();
                assert!(now > before || !expected, "{guest:?}: {now:?} after {before:?}");
                assert_eq!(now.is_some(), expected, "{guest:?}");
                before = now;
            }
        }
    }
}
