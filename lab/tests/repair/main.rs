//! A towline that is killed in the middle of a copy: its changes to the QEMU are undone by the next one, or
//! by `repair`.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod directories;
mod leftovers;
mod support;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::{Settings, assert_ended, events, qmp, settings};
use towline_lab::{BootSector, Builder, Qemu, Version, require_lab};

use support::{Fixture, WITHIN, killed_copy};

/// A guest that counts, and is large enough that its copy takes seconds.
fn guest(version: Version) -> Builder {
    Qemu::builder(version).memory_mib(64).boot_sector(BootSector::default())
}

fn counting(builder: Builder) -> Qemu {
    let qemu = builder.start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

/// Asserts that all settings differ from QEMU's defaults, as the killed copies here change them.
fn assert_changed(before: &Settings, now: &Settings) {
    for name in ["max-bandwidth", "downtime-limit", "multifd-channels"] {
        assert_ne!(before[name], now[name], "{name} was not changed");
    }
    for name in ["events", "multifd", "return-path"] {
        assert_eq!((&before[name], &now[name]), (&json!(false), &json!(true)), "{name}");
    }
}

#[test]
fn the_next_copy_restores_the_settings_that_a_killed_one_left() {
    if !require_lab("the_next_copy_restores_the_settings_that_a_killed_one_left") {
        return;
    }
    for version in [Version::V7_2, Version::V10_0] {
        let (fixture, source) = (Fixture::new(), counting(guest(version)));
        let before = settings(&source);
        let killed = killed_copy(&fixture, &source);
        assert_changed(&before, &settings(&source));
        assert!(fixture.is_journaled(&source));

        let finished = fixture.run(&format!("copy --resume {} {}", qmp(&source), fixture.name("next.img")));
        let by = format!("was left changed by a towline process that has exited (pid {killed})");
        assert_ended(&finished, 0, &[&by, "repaired: "]);
        assert_eq!(settings(&source), before);
        assert!(!fixture.is_journaled(&source));
        source.wait_counting(WITHIN).unwrap();
    }
}

/// A reader of the events is notified as well.
#[test]
fn settings_restored_by_the_next_copy_are_an_event() {
    if !require_lab("settings_restored_by_the_next_copy_are_an_event") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest(Version::V10_0)));
    let killed = killed_copy(&fixture, &source);
    let finished =
        fixture.run(&format!("copy --json --resume {} {}", qmp(&source), fixture.name("next.img")));
    assert_ended(&finished, 0, &[]);
    let by = format!("was left changed by a towline process that has exited (pid {killed})");
    let notices: Vec<_> =
        events(&finished.stdout).into_iter().filter(|event| event["event"] == "notice").collect();
    assert!(notices.iter().any(|event| event["text"].as_str().unwrap().contains(&by)), "{notices:?}");
}

#[test]
fn repair_restores_the_settings_that_a_killed_copy_left() {
    if !require_lab("repair_restores_the_settings_that_a_killed_copy_left") {
        return;
    }
    for version in [Version::V7_2, Version::V10_0] {
        let (fixture, source) = (Fixture::new(), counting(guest(version)));
        let before = settings(&source);
        let killed = killed_copy(&fixture, &source);
        // Settings that another client has changed since are left alone.
        source.qmp().execute("migrate-set-parameters", json!({ "downtime-limit": 1234 })).unwrap();

        let finished = fixture.run(&format!("repair --json {}", qmp(&source)));
        assert_ended(&finished, 0, &[]);
        let event: Value = serde_json::from_str(finished.stdout.trim()).unwrap();
        assert_eq!((&event["event"], &event["owner-pid"]), (&json!("repaired"), &json!(killed)));
        let done: Vec<_> = event["done"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        for text in ["downtime-limit 1234 stays: it was changed since", "events off", "multifd-channels 2"] {
            assert!(done.contains(&text), "{text:?} is not in {done:?}");
        }
        assert_eq!(event["left"], json!([]));
        let mut expected = before;
        expected.insert("downtime-limit".into(), json!(1234));
        assert_eq!(settings(&source), expected);
        assert!(!fixture.is_journaled(&source));

        let finished = fixture.run(&format!("repair {}", qmp(&source)));
        assert_ended(&finished, 0, &[]);
        assert!(finished.stdout.ends_with("nothing to repair\n"), "{}", finished.stdout);
    }
}

/// The destination of a relay, which has a part of a guest, and its temporary directory.
#[test]
fn a_destination_is_repaired_too() {
    if !require_lab("a_destination_is_repaired_too") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest(Version::V10_0)));
    let destination = guest(Version::V10_0).incoming_defer().start().unwrap();
    let (before, waits) = (settings(&source), settings(&destination));
    let mut towline = fixture.copy_slowly(&source, &qmp(&destination));
    towline.kill().unwrap();
    assert_ne!(fixture.temporary(), [""; 0], "directories of the killed towline");
    for (qemu, expected) in [(&source, before), (&destination, waits)] {
        let finished = fixture.run(&format!("repair {}", qmp(qemu)));
        assert_ended(&finished, 0, &[]);
        assert!(finished.stdout.contains("  repaired      "), "{}", finished.stdout);
        assert_eq!(settings(qemu), expected);
    }
    source.wait_counting(WITHIN).unwrap();
}

#[test]
fn a_qemu_that_another_towline_works_on_is_refused() {
    if !require_lab("a_qemu_that_another_towline_works_on_is_refused") {
        return;
    }
    let directory = towline_lab::expect::Scratch::new();
    let second = directory.text("second");
    let monitor = ["-qmp".to_owned(), format!("unix:{second},server=on,wait=off")];
    let (fixture, source) = (Fixture::new(), counting(guest(Version::V10_0).args(monitor)));
    let before = settings(&source);
    let first = fixture.copy_slowly(&source, &fixture.name("first.img"));
    let set = settings(&source);
    let text = format!("another towline (process {}) works on QEMU at {second}", first.pid());
    for arguments in [
        format!("copy --resume qmp:{second} {}", fixture.name("second.img")),
        format!("move qmp:{second} {}", fixture.name("second.img")),
        format!("repair qmp:{second}"),
    ] {
        let finished = fixture.run(&arguments);
        assert_ended(&finished, 1, &[&text]);
        assert_eq!(settings(&source), set, "{arguments}");
    }
    // A dry run changes nothing.
    assert_ended(&fixture.run(&format!("inspect qmp:{second}")), 0, &[]);

    support::signal(first.pid(), Signal::INT);
    assert_ended(&first.wait(WITHIN).unwrap(), 1, &[]);
    assert_eq!(settings(&source), before);
    assert_ended(&fixture.run(&format!("copy --resume qmp:{second} {}", fixture.name("second.img"))), 0, &[]);
}
