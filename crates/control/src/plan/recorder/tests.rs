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
    let source = RecordedSource { end: end("/run/a.qmp"), vcpus, devices: Vec::new() };
    let ends = Some(RecordedEnds { source, destination: end("/run/b.qmp") });
    let directory = Some(RuntimeDirectory::below(place.path()).unwrap());
    Recorder(Mutex::new(State { directory, ends, file: None }))
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
    let (recorder, machine) = (recorder(&place), machine(GuestRunState::Running, SourceAction::Quit));
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
            let (recorder, machine) = (recorder(&place), machine(GuestRunState::Running, SourceAction::Quit));
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
        let (first, recorder) = (recorder(&place), recorder(&place));
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
        (unresolved(AtSource::Ended, AtDestination::Ended, ToDo::StartAgain), SourceAction::KeepPaused, None),
        (
            unresolved(paused, AtDestination::Unknown, ToDo::LookAtDestination),
            SourceAction::Quit,
            Some("run"),
        ),
        (unresolved(paused, AtDestination::Holds, ToDo::ForgetRecord), SourceAction::Quit, Some("run")),
    ];
    for (outcome, after, expected) in cases {
        let place = TempDir::new().unwrap();
        let (recorder, machine) = (recorder(&place), machine(GuestRunState::Running, after));
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
    for (guest, expected) in
        [(GuestRunState::Running, true), (GuestRunState::Suspended, false), (GuestRunState::Stopped, false)]
    {
        let place = TempDir::new().unwrap();
        let (recorder, machine) = (recorder(&place), machine(guest, SourceAction::Quit));
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
