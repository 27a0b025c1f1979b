//! Linux guests that run and write while they move from QEMU to QEMU, their memory following.

use serde_json::{Value, json};
use towline_lab::{Builder, LinuxGuest, Qemu, Version, require_lab};

use crate::support::{WITHIN, completed, qmp, run, start, statuses, wait_event, wait_running, waiting};

const MIB: u64 = 1 << 20;
const WRITTEN: u64 = 24 * MIB;

fn builder() -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(256).processors(2)
}

/// Starts a Linux that writes its memory; returns its counter, too.
fn writing() -> (Qemu, u64) {
    let (qemu, mut guest) = builder().boot(WITHIN).unwrap();
    guest.dirty(48 * MIB, WRITTEN).unwrap();
    let tick = guest.wait_ticking(WITHIN).unwrap();
    (qemu, tick)
}

fn prove_alive(qemu: &Qemu, tick: u64) {
    let mut guest: LinuxGuest = qemu.linux(WITHIN).unwrap();
    assert!(guest.wait_ticking(WITHIN).unwrap() > tick);
    assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
}

#[test]
fn a_guest_that_writes_moves_and_its_memory_follows() {
    if !require_lab("a_guest_that_writes_moves_and_its_memory_follows") {
        return;
    }
    let ((source, tick), destination) = (writing(), waiting(&builder()));
    // So slow and so short that no pass converges without postcopy.
    let options = "--postcopy --postcopy-preempt --max-bandwidth 24M --downtime-limit 1";
    let line = format!("move {options} --json {} {}", qmp(&source), qmp(&destination));
    let completed = completed(&run(&line));
    assert_eq!(
        (&completed["source-state"], &completed["destination-state"]),
        (&"ended".into(), &"running".into())
    );
    assert!(source.wait_exit(WITHIN).unwrap().success());
    let statuses = statuses(&destination);
    assert!(statuses.iter().any(|status| status == "postcopy-active"), "{statuses:?}");
    prove_alive(&destination, tick);
}

#[test]
fn a_broken_postcopy_between_two_qemus_is_recovered() {
    if !require_lab("a_broken_postcopy_between_two_qemus_is_recovered") {
        return;
    }
    let ((source, tick), destination) = (writing(), waiting(&builder()));
    let line = format!("copy --postcopy --max-bandwidth 48M --json {} {}", qmp(&source), qmp(&destination));
    let mut towline = start(&line);
    // A low limit, so the pages written in between take some time.
    wait_event(&mut towline, "a pass that began", |event| event["phase"] == "transfer");
    let follow_at = |rate: u64| {
        let parameters = json!({ "max-postcopy-bandwidth": rate });
        source.qmp().execute("migrate-set-parameters", parameters).unwrap();
    };
    follow_at(1 << 20);
    wait_running(&mut towline);
    destination.qmp().execute("migrate-pause", Value::Null).unwrap();
    wait_event(&mut towline, "a connection made again", |event| {
        event["text"].as_str().is_some_and(|text| text.contains("connected again"))
    });
    follow_at(0);
    let completed = completed(&towline.wait(WITHIN).unwrap());
    assert_eq!(completed["postcopy"]["recoveries"], 1);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    prove_alive(&destination, tick);
}
