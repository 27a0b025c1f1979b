//! Processes that are killed: the QEMU at either end, and towline itself.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{Qemu, Towline, require_lab, wait_until};

use crate::support::{
    Fixture, SLOW, UNCERTAIN, WITHIN, assert_ended, assert_runs, assert_runs_nothing, assert_safe,
    assert_waits, counting, guest, qmp, save, signal, small_guest, wait_soon, wait_transferred, waiting,
};

/// Starts a slow relay or restore to a waiting QEMU, and waits until a MiB was sent.
fn under_way(fixture: &Fixture, from: &str, options: &str, destination: &Qemu) -> Towline {
    let mut towline = fixture.towline(&format!("copy --json {SLOW} {options} {from} {}", qmp(destination)));
    wait_transferred(&mut towline, 1 << 20);
    towline
}

#[test]
fn a_destination_that_dies_under_way_leaves_the_guest_at_its_source() {
    if !require_lab("a_destination_that_dies_under_way_leaves_the_guest_at_its_source") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    save(&fixture, guest(), "guest.img");
    for (from, options) in [
        (qmp(&source), "--multifd-channels 4"),
        (qmp(&source), "--multifd-channels 0"),
        (fixture.name("guest.img"), "--stream"),
        (fixture.name("guest.img"), "--stream --multifd-channels 0"),
    ] {
        let destination = waiting(&guest());
        let towline = under_way(&fixture, &from, options, &destination);
        let since = Instant::now();
        destination.kill().unwrap();
        let finished = wait_soon(towline, since);
        let socket = destination.qmp_path().display().to_string();
        let texts =
            ["QEMU on ", &socket, "could not load the guest: it ended while it loaded; its own log says why"];
        assert_safe(&finished, &texts);
        assert_runs(&source);
        // Dead before towline starts.
        let finished = fixture.run(&format!("copy {options} {from} {}", qmp(&destination)));
        assert_safe(
            &finished,
            &["no process listens on QMP socket ", &socket, "the QEMU that made it has ended"],
        );
        assert_runs(&source);
    }
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

/// A destination that hangs makes the copy wait; when it is killed, the copy fails.
#[test]
fn a_destination_that_hangs_and_dies_leaves_the_guest_at_its_source() {
    if !require_lab("a_destination_that_hangs_and_dies_leaves_the_guest_at_its_source") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    save(&fixture, guest(), "guest.img");
    for (from, options) in
        [(qmp(&source), "--multifd-channels 2"), (fixture.name("guest.img"), "--stream --multifd-channels 0")]
    {
        let destination = waiting(&guest());
        let towline = under_way(&fixture, &from, options, &destination);
        signal(destination.pid(), Signal::STOP);
        std::thread::sleep(Duration::from_millis(700));
        let since = Instant::now();
        destination.kill().unwrap();
        let finished = wait_soon(towline, since);
        assert_safe(&finished, &["QEMU on ", "could not load the guest: it ended while it loaded"]);
        assert_runs(&source);
    }
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

/// At any moment of a whole copy, its END and its release among them: exactly one guest exists, and it runs.
#[test]
fn a_destination_that_dies_at_any_moment_costs_no_guest() {
    if !require_lab("a_destination_that_dies_at_any_moment_costs_no_guest") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(small_guest()));
    let copy = |destination: &Qemu| fixture.towline(&format!("copy {} {}", qmp(&source), qmp(destination)));
    let destination = waiting(&small_guest());
    let begun = Instant::now();
    assert_ended(&copy(&destination).wait(WITHIN).unwrap(), 0, &[]);
    let took = begun.elapsed();
    source.qmp().execute("cont", Value::Null).unwrap();
    for step in 1..=12 {
        let destination = waiting(&small_guest());
        let towline = copy(&destination);
        std::thread::sleep(took * step / 12);
        let since = Instant::now();
        destination.kill().unwrap();
        let finished = wait_soon(towline, since);
        match finished.status.code() {
            Some(0) => {
                source.qmp().wait_status("postmigrate", WITHIN).unwrap();
                source.qmp().execute("cont", Value::Null).unwrap();
            }
            Some(UNCERTAIN) => {
                assert_ended(&finished, UNCERTAIN, &["may have run there"]);
                source.qmp().execute("cont", Value::Null).unwrap();
            }
            _ => assert_safe(&finished, &[]),
        }
        assert_runs(&source);
    }
    fixture.assert_holds(&[]);
}

/// The same for a restore: the image is unchanged.
#[test]
fn a_destination_that_dies_at_any_moment_costs_no_image() {
    if !require_lab("a_destination_that_dies_at_any_moment_costs_no_image") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, small_guest(), "guest.img");
    let image = fixture.name("guest.img");
    for options in ["--stream", "--multifd-channels 2"] {
        let copy =
            |destination: &Qemu| fixture.towline(&format!("copy {options} {image} {}", qmp(destination)));
        let destination = waiting(&small_guest());
        let begun = Instant::now();
        assert_ended(&copy(&destination).wait(WITHIN).unwrap(), 0, &[]);
        let took = begun.elapsed();
        for step in 1..=6 {
            let destination = waiting(&small_guest());
            let towline = copy(&destination);
            std::thread::sleep(took * step / 6);
            let since = Instant::now();
            destination.kill().unwrap();
            let finished = wait_soon(towline, since);
            match finished.status.code() {
                Some(0) => {}
                Some(UNCERTAIN) => {
                    assert_ended(
                        &finished,
                        UNCERTAIN,
                        &[
                            "in its image, which is as it was; its destination has ended: it may have run there",
                        ],
                    );
                }
                _ => assert_safe(&finished, &[]),
            }
        }
    }
    assert_ended(&fixture.run(&format!("inspect --verify {image}")), 0, &[]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

#[test]
fn a_source_that_dies_under_way_loses_its_guest_which_is_reported() {
    if !require_lab("a_source_that_dies_under_way_loses_its_guest_which_is_reported") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "old.img");
    let before = std::fs::read(fixture.path("old.img")).unwrap();
    let waits = waiting(&guest());
    for to in [fixture.name("new.img"), format!("--overwrite {}", fixture.name("old.img")), qmp(&waits)] {
        let source = counting(guest());
        let mut towline = fixture.towline(&format!("copy --json {SLOW} {} {to}", qmp(&source)));
        wait_transferred(&mut towline, 1 << 20);
        let since = Instant::now();
        source.kill().unwrap();
        let finished = wait_soon(towline, since);
        let socket = source.qmp_path().display().to_string();
        let texts = [
            "the guest: ",
            &format!("its source, QEMU on {socket}, has ended, and the guest with it"),
            "its destination has nothing that can run",
        ];
        assert_ended(&finished, UNCERTAIN, &texts);
    }
    assert_waits(&waits);
    assert!(
        std::fs::read(fixture.path("old.img")).unwrap() == before,
        "a failed overwrite leaves the old image"
    );
    fixture.assert_holds(&["old.img", "old.img.manifest.json"]);
}

/// At any moment of a whole copy: towline's report of the guest is true.
#[test]
fn a_source_that_dies_at_any_moment_is_reported_correctly() {
    if !require_lab("a_source_that_dies_at_any_moment_is_reported_correctly") {
        return;
    }
    let fixture = Fixture::new();
    let copy = |source: &Qemu, destination: &Qemu| {
        fixture.towline(&format!("copy {} {}", qmp(source), qmp(destination)))
    };
    let (source, destination) = (counting(small_guest()), waiting(&small_guest()));
    let begun = Instant::now();
    assert_ended(&copy(&source, &destination).wait(WITHIN).unwrap(), 0, &[]);
    let took = begun.elapsed();
    for step in 1..=8 {
        let (source, destination) = (counting(small_guest()), waiting(&small_guest()));
        let towline = copy(&source, &destination);
        std::thread::sleep(took * step / 8);
        let since = Instant::now();
        source.kill().unwrap();
        let finished = wait_soon(towline, since);
        match finished.status.code() {
            Some(0) => assert_runs(&destination),
            Some(UNCERTAIN) => {
                assert_ended(&finished, UNCERTAIN, &["has ended, and the guest with it"]);
                assert_runs_nothing(&destination);
            }
            _ => {
                assert_safe(&finished, &["the guest: not touched; its QEMU was not reached"]);
                assert_runs_nothing(&destination);
            }
        }
    }
    fixture.assert_holds(&[]);
}

#[test]
fn a_killed_towline_leaves_the_source_running() {
    if !require_lab("a_killed_towline_leaves_the_source_running") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let destination = waiting(&guest());
    for to in [fixture.name("guest.img"), qmp(&destination)] {
        // Without lanes: a QEMU that loses several at once may hang, and no towline is left to prevent that.
        let line = format!("copy --json --multifd-channels 0 {SLOW} {} {to}", qmp(&source));
        let mut towline = fixture.towline(&line);
        wait_transferred(&mut towline, 1 << 20);
        towline.kill().unwrap();
        source.qmp().wait_migration("failed", WITHIN).unwrap();
        assert_runs(&source);
    }
    assert_eq!(fixture.files("work"), [".guest.img.partial"]);
    // Its memory is incomplete, so it never leaves this state.
    wait_until("a failed load", WITHIN, || {
        let answer = destination.qmp().execute("query-migrate", Value::Null)?;
        Ok((answer["status"] == "failed").then_some(()))
    })
    .unwrap();
    assert_waits(&destination);
    // The next copy reuses the files that were left, and restores the settings that towline could not.
    let finished = fixture.run(&format!("copy --resume {} {}", qmp(&source), fixture.name("guest.img")));
    assert_ended(&finished, 0, &[]);
    assert_ended(&fixture.run(&format!("inspect --verify {}", fixture.name("guest.img"))), 0, &[]);
    assert_runs(&source);
    assert_eq!(fixture.files("work"), ["guest.img", "guest.img.manifest.json"]);
}
