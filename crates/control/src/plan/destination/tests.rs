use super::super::fake_qemu::{FakeQemu, in_copy};
use super::super::request::RequestedPages;
use super::*;
use crate::switchover::FinalRunState;

fn waiting() -> (FakeQemu, QmpDestination) {
    let fake = FakeQemu::start("inmigrate");
    let destination = in_copy(|context| QmpDestination::prepare(&fake.path(), context).unwrap());
    (fake, destination)
}

/// A destination that has loaded a guest in this run state.
fn loaded(status: &'static str) -> (FakeQemu, QmpDestination) {
    let (fake, mut destination) = waiting();
    destination.is_incoming_started = true;
    fake.script().status = status;
    fake.script().migration = Some("completed");
    assert!(destination.is_loaded().unwrap());
    (fake, destination)
}

/// The source must be able to run the guest from the drives until it is done.
#[test]
fn a_destination_is_stopped_and_told_to_lock_late_before_it_listens() {
    for is_postcopy in [false, true] {
        let (fake, mut destination) = waiting();
        if is_postcopy {
            destination
                .start_postcopy(RequestedPages::MainChannel, FinalRunState::Paused, 0, Compression::None)
                .unwrap();
        } else {
            destination.apply_settings(0, Compression::None, []).unwrap();
            destination.listen("unix:/nowhere".into()).unwrap();
        }
        assert!(fake.has("late-block-activate"));
        let commands = fake.commands();
        let at = |name: &str| commands.iter().position(|command| command == name);
        assert_eq!(at("migrate-incoming"), Some(commands.len() - 1), "{commands:?}");
        assert_eq!(at("stop"), Some(commands.len() - 2), "{commands:?}");
        assert_eq!(at("cont"), None);
        let _ = destination.roll_back(HeldGuest::Incomplete);
    }
}

#[test]
fn a_state_is_what_qemu_replies() {
    let (fake, mut destination) = waiting();
    let states = [
        ("inmigrate", None, DestinationStatus::Loading),
        ("inmigrate", Some("active"), DestinationStatus::Loading),
        ("inmigrate", Some("failed"), DestinationStatus::Failed),
        ("paused", Some("completed"), DestinationStatus::Loaded),
        ("prelaunch", Some("completed"), DestinationStatus::Loaded),
        ("running", Some("completed"), DestinationStatus::Running),
        ("suspended", Some("completed"), DestinationStatus::Running),
    ];
    for (status, migration, expected) in states {
        (fake.script().status, fake.script().migration) = (status, migration);
        assert_eq!(destination.query_status(), expected, "{status} {migration:?}");
    }
    // The process is not known: a lost monitor is not an exit.
    drop(fake);
    assert_eq!(destination.query_status(), DestinationStatus::Unknown);
}

#[test]
fn a_start_is_what_qemu_replies_to_cont() {
    let started = |cont| {
        let (fake, mut destination) = loaded("paused");
        fake.script().cont = cont;
        let started = destination.start_guest().map_err(|failure| failure.started);
        assert_eq!(fake.commands().last().map(String::as_str), Some("cont"));
        started
    };
    assert_eq!(started(Some("running")).unwrap(), StartResult::Live);
    assert_eq!(started(Some("suspended")).unwrap(), StartResult::Live);
    assert_eq!(started(Some("io-error")).unwrap_err(), StartResult::StoppedAgain);
    assert_eq!(started(None).unwrap_err(), StartResult::Refused);
}

/// Without a reply it may run.
#[test]
fn a_lost_monitor_before_cont_is_no_start() {
    for (start, expected) in [
        (waiting as fn() -> (FakeQemu, QmpDestination), StartResult::NotSent),
        (|| loaded("paused"), StartResult::Unknown),
    ] {
        let (fake, mut destination) = start();
        drop(fake);
        assert_eq!(destination.start_guest().unwrap_err().started, expected);
    }
}

/// QEMU before 10.0 aborts when a guest with inactive drives wakes up or is migrated on.
#[test]
fn drives_of_a_guest_that_does_not_run_are_activated_and_others_are_not() {
    let activated = ["block-export-add disk", "block-export-add file"];
    let (fake, mut destination) = loaded("paused");
    destination.restore_settings().unwrap();
    assert_eq!(fake.commands(), activated);
    let (fake, mut destination) = loaded("running");
    destination.restore_settings().unwrap();
    assert_eq!(fake.commands(), [""; 0]);
    let (fake, mut destination) = loaded("suspended");
    fake.script().cont = Some("suspended");
    destination.start_guest().unwrap();
    assert_eq!(fake.commands(), [&activated[..], &["cont"]].concat());
    let (fake, mut destination) = loaded("paused");
    destination.start_guest().unwrap();
    assert_eq!(fake.commands(), ["cont"]);
}
