//! Background snapshots: an image of one instant of a running guest.

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{BootSector, Builder, MemoryBackend, Qemu, Towline, require_lab, skip, wait_until};

use crate::support::{
    Fixture, WITHIN, assert_ended, assert_runs, assert_safe, counting, guest, qmp, set, signal, waiting,
};

/// Returns true if this host's QEMU can write-protect its guest's memory; if not, prints the skip of `name`
/// with QEMU's reason.
fn can_watch(name: &str) -> bool {
    if !require_lab(name) {
        return false;
    }
    let qemu = guest().paused().start().unwrap();
    let on = json!({ "capabilities": [{ "capability": "background-snapshot", "state": true }] });
    match qemu.qmp().execute("migrate-set-capabilities", on) {
        Ok(_) => true,
        Err(error) => {
            skip(name, &format!("QEMU cannot take background snapshots here: {error:#}"));
            false
        }
    }
}

/// A guest whose memory takes a while to be stored.
fn builder() -> Builder {
    guest().memory_mib(448).boot_sector(BootSector {
        fill_mib: 384,
        steps_per_tick: 0,
        ..BootSector::default()
    })
}

/// Waits until QEMU has seen that its migration failed.
pub(crate) fn wait_migration_failed(qemu: &Qemu) {
    wait_until("the end of a failed migration", WITHIN, || {
        let migration = qemu.qmp().execute("query-migrate", Value::Null)?;
        Ok(["failed", "cancelled"].iter().any(|status| migration["status"] == *status).then_some(()))
    })
    .unwrap();
}

/// Starts a copy and stops its process (SIGSTOP) while memory is sent.
fn stopped_half_way(fixture: &Fixture, line: &str) -> Towline {
    let mut towline = fixture.towline(line);
    wait_until("a transfer", WITHIN, || {
        assert!(towline.runs()?, "towline ended: {}{}", towline.stdout(), towline.stderr());
        Ok(towline.stdout().contains("\"transfer\"").then_some(()))
    })
    .unwrap();
    signal(towline.pid(), Signal::STOP);
    towline
}

fn restored(fixture: &Fixture, image: &str) -> Qemu {
    let destination = waiting(&builder());
    let line = format!("copy --verify --paused {} {}", fixture.name(image), qmp(&destination));
    assert_ended(&fixture.run(&line), 0, &[]);
    destination
}

#[test]
fn a_guest_runs_on_while_its_instant_is_stored() {
    if !can_watch("a_guest_runs_on_while_its_instant_is_stored") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(builder());
    let before = source.counter().unwrap();
    let line = format!("copy --json --live {} {}", qmp(&source), fixture.name("guest.img"));
    let mut towline = fixture.towline(&line);
    // Counter values while memory was stored.
    let mut seen = Vec::new();
    wait_until("end of towline", 3 * WITHIN, || {
        let counter = source.counter()?;
        let runs = towline.runs()?;
        if runs && towline.stdout().contains("\"transfer\"") {
            seen.push(counter);
        }
        Ok((!runs).then_some(()))
    })
    .unwrap();
    seen.dedup();
    assert!(seen.len() > 2, "the guest did not run: {seen:?}");
    let during = seen[seen.len() - 1];
    let finished = towline.wait(WITHIN).unwrap();
    assert_ended(&finished, 0, &[]);
    let done: Value = serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&done["source-state"], &done["destination-state"]), (&"running".into(), &"stored".into()));
    assert_runs(&source);
    assert!(source.counter().unwrap() > during);
    let destination = restored(&fixture, "guest.img");
    // One instant: the sweep is in order, no page belongs to a later round, and the counter is one from
    // before the guest was resumed.
    destination.check_filled().unwrap();
    let counter = destination.counter().unwrap();
    assert!(counter >= before && counter <= during, "{before} … {counter} … {during}");
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > counter);
    // The source's settings are restored, and it can be stored again.
    let states = source.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    let state = |name: &str| {
        let state = states.as_array().unwrap().iter().find(|state| state["capability"] == name).unwrap();
        state["state"].clone()
    };
    assert_eq!(state("background-snapshot"), false);
    let line = format!(
        "copy --live --base {} {} {}",
        fixture.name("guest.img"),
        qmp(&source),
        fixture.name("next.img")
    );
    assert_ended(&fixture.run(&line), 0, &[]);
    restored(&fixture, "next.img").check_filled().unwrap();
    assert_runs(&source);
}

#[test]
#[ignore = "nightly"]
fn the_instant_of_a_paused_guest_is_its_memory() {
    if !can_watch("the_instant_of_a_paused_guest_is_its_memory") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(builder());
    source.qmp().execute("stop", Value::Null).unwrap();
    let line = format!("copy --live {} {}", qmp(&source), fixture.name("guest.img"));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_eq!(source.qmp().status().unwrap(), "paused");
    assert_eq!(restored(&fixture, "guest.img").memory_hash().unwrap(), source.memory_hash().unwrap());
    source.qmp().execute("cont", Value::Null).unwrap();
    assert_runs(&source);
}

/// Pages of a shared memfd are write-protected in QEMU's own mapping, by which its guest writes.
#[test]
#[ignore = "nightly"]
fn an_instant_of_a_shared_memfd_is_whole() {
    if !can_watch("an_instant_of_a_shared_memfd_is_whole") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(builder().memory_backend(MemoryBackend::Memfd { prealloc: false }));
    let before = source.counter().unwrap();
    assert_ended(
        &fixture.run(&format!("copy --live {} {}", qmp(&source), fixture.name("guest.img"))),
        0,
        &[],
    );
    let after = source.counter().unwrap();
    assert_runs(&source);
    let destination = restored(&fixture, "guest.img");
    // The sweep is in order: no page belongs to a later round.
    destination.check_filled().unwrap();
    let stored = destination.counter().unwrap();
    assert!(before <= stored && stored < after, "{before} … {stored} … {after}");
}

#[test]
fn a_snapshot_that_fails_leaves_the_guest_and_no_file() {
    if !can_watch("a_snapshot_that_fails_leaves_the_guest_and_no_file") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(builder());
    let line = format!("copy --json --live --overwrite {} {}", qmp(&source), fixture.name("guest.img"));
    // The cancellation may come after everything was stored; then it is tried again.
    let cancelled = (0..5).find_map(|_| {
        let towline = stopped_half_way(&fixture, &line);
        signal(towline.pid(), Signal::INT);
        signal(towline.pid(), Signal::CONT);
        let finished = towline.wait(WITHIN).unwrap();
        assert_runs(&source);
        if finished.status.success() {
            for end in ["", ".manifest.json"] {
                std::fs::remove_file(fixture.name(&format!("guest.img{end}"))).unwrap();
            }
            return None;
        }
        Some(finished)
    });
    assert_safe(&cancelled.expect("one is cancelled in time"), &["cancelled"]);
    fixture.assert_holds(&[]);
    let mut towline = stopped_half_way(&fixture, &line);
    towline.kill().unwrap();
    wait_migration_failed(&source);
    assert!(!fixture.path("guest.img").exists());
    assert_runs(&source);
    // The killed towline's settings in QEMU stay, as no towline has restored them.
    set(&source, &["-background-snapshot"], json!({}));
    let line = format!("copy --resume {} {}", qmp(&source), fixture.name("guest.img"));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_runs(&source);
}

#[test]
fn options_that_exclude_a_background_snapshot_are_usage_errors() {
    if !require_lab("options_that_exclude_a_background_snapshot_are_usage_errors") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(builder());
    let (from, image) = (qmp(&source), fixture.name("guest.img"));
    for (options, text) in [
        ("--live --multifd-channels 4", "background-snapshot has a single channel"),
        ("--live --max-bandwidth 4M", "QEMU sends a background snapshot as fast as it is taken"),
        ("--live --throttle", "every page is sent once"),
    ] {
        assert_ended(&fixture.run(&format!("copy {options} {from} {image}")), 2, &[text]);
    }
    let destination = waiting(&builder());
    let line = format!("copy --live {from} {}", qmp(&destination));
    assert_ended(&fixture.run(&line), 2, &["--live takes an image of a guest that runs on"]);
    assert_runs(&source);
    fixture.assert_holds(&[]);
}
