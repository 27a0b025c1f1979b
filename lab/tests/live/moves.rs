//! `towline move`: the guest runs on at its destination and its source exits; after any failure it stays at
//! its source.

use std::time::Instant;

use serde_json::{Value, json};
use towline_lab::{BootSector, Qemu, Version, require_lab};

use crate::support::{
    MIB, Scratch, WITHIN, assert_ended, completed, counting, linux, number, prove_alive, qmp, run, small,
    start, wait_event, waiting, writing,
};

const RATE: u64 = 20_000_000;
const RANGE: u64 = 24 * MIB;

/// Asserts that the emulator has exited normally, as after `quit`.
#[track_caller]
fn assert_quit(qemu: &Qemu) {
    let status = qemu.wait_exit(WITHIN).unwrap();
    assert!(status.success(), "{status}: {}", qemu.stderr());
}

#[test]
fn a_busy_linux_continues_at_its_destination() {
    if !require_lab("a_busy_linux_continues_at_its_destination") {
        return;
    }
    let builder = linux(256);
    let (mut source, mut guest) = writing(&builder, RATE, RANGE);
    let mut tick = guest.tick().unwrap();
    drop(guest);
    for round in 0..number("TOWLINE_SOAK_MOVES", 2) {
        let lanes = if round % 2 == 0 { 4 } else { 0 };
        let destination = waiting(&builder);
        let line = format!("move --json --multifd-channels {lanes} {} {}", qmp(&source), qmp(&destination));
        let done = completed(&run(&line));
        assert_quit(&source);
        assert_eq!(done["source-state"], "ended", "{done}");
        assert_eq!(done["destination-state"], "running", "{done}");
        assert_eq!(done["multifd-channels"], lanes, "{done}");
        let (downtime, total) = (done["downtime"].as_u64().unwrap(), done["total-time"].as_u64().unwrap());
        assert!(downtime < total, "{done}");
        tick = prove_alive(&destination, RANGE, tick);
        println!("move {round}, {lanes} lanes: {total} ms, downtime {downtime} ms");
        source = destination;
    }
}

#[test]
fn a_paused_guest_is_moved_and_stays_paused() {
    if !require_lab("a_paused_guest_is_moved_and_stays_paused") {
        return;
    }
    let (source, destination) = (counting(), waiting(&small()));
    source.qmp().execute("stop", Value::Null).unwrap();
    let counter = source.counter().unwrap();
    let finished = run(&format!("move {} {}", qmp(&source), qmp(&destination)));
    assert_ended(&finished, 0, &[]);
    assert!(finished.stdout.contains("moved qmp:"), "{}", finished.stdout);
    assert_quit(&source);
    assert_eq!(destination.qmp().status().unwrap(), "paused");
    assert_eq!(destination.counter().unwrap(), counter);
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > counter);
}

#[test]
fn into_an_image_and_to_a_qemu_that_listens() {
    if !require_lab("into_an_image_and_to_a_qemu_that_listens") {
        return;
    }
    let scratch = Scratch::new();
    let (image, source) = (scratch.text("guest.img"), counting());
    assert_ended(&run(&format!("move {} {image}", qmp(&source))), 0, &[]);
    assert_quit(&source);
    let restored = waiting(&small());
    assert_ended(&run(&format!("copy --verify {image} {}", qmp(&restored))), 0, &[]);
    restored.wait_counting(WITHIN).unwrap();

    let (listens, uri) = (waiting(&small()), format!("unix:{}", scratch.text("there.sock")));
    listens.qmp().execute("migrate-incoming", json!({ "uri": uri })).unwrap();
    assert_ended(&run(&format!("move {} {uri}", qmp(&restored))), 0, &[]);
    assert_quit(&restored);
    listens.qmp().wait_status("running", WITHIN).unwrap();
    listens.wait_counting(WITHIN).unwrap();
}

#[test]
fn a_move_that_fails_leaves_its_source_running() {
    if !require_lab("a_move_that_fails_leaves_its_source_running") {
        return;
    }
    let (scratch, source) = (Scratch::new(), counting());
    for lanes in [4, 0] {
        let destination = waiting(&small());
        let mut towline = start(&format!(
            "move --json --max-bandwidth 4M --multifd-channels {lanes} {} {}",
            qmp(&source),
            qmp(&destination)
        ));
        wait_event(&mut towline, "a MiB that moved", |event| {
            event["ram"]["transferred"].as_u64() >= Some(MIB)
        });
        destination.kill().unwrap();
        let finished = towline.wait(WITHIN).unwrap();
        assert_ended(&finished, 1, &["it ended while it loaded", "the guest: safe at its source"]);
        source.qmp().wait_status("running", WITHIN).unwrap();
        source.wait_counting(WITHIN).unwrap();
    }
    let image = scratch.text("guest.img");
    std::fs::write(&image, "somebody's").unwrap();
    assert_ended(&run(&format!("move {} {image}", qmp(&source))), 1, &["guest.img", "--overwrite"]);
    source.wait_counting(WITHIN).unwrap();
}

#[test]
fn a_move_without_a_source_qemu_is_refused() {
    let source = "qmp:/nonexistent.qmp";
    for (arguments, texts) in [
        ("guest.img qmp:b.qmp", &["needs a qmp: endpoint; for file:guest.img use `copy`"][..]),
        ("tcp:127.0.0.1:1 qmp:b.qmp", &["for tcp:127.0.0.1:1 use `copy`"]),
        (&format!("{source} null:"), &["null: keeps nothing"]),
        (&format!("{source} a.img b.img"), &["unexpected argument 'b.img'"]),
    ] {
        assert_ended(&run(&format!("move {arguments}")), 2, texts);
    }
}

/// QEMU alone exceeds its limit with lanes: by its packets under way, in each of its windows.
#[test]
#[ignore = "nightly"]
fn a_bandwidth_limit_holds_with_any_number_of_lanes() {
    const RATE: u64 = 8 * MIB;
    if !require_lab("a_bandwidth_limit_holds_with_any_number_of_lanes") {
        return;
    }
    let boot_sector = BootSector { fill_mib: 40, sweep_pages: 1, ..BootSector::default() };
    let builder = Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(boot_sector);
    let source = builder.clone().start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    for lanes in [0, 1, 4] {
        let destination = waiting(&builder);
        let options = format!("--max-bandwidth 8M --downtime-limit 40 --multifd-channels {lanes}");
        let line = format!("copy --json --paused {options} {} {}", qmp(&source), qmp(&destination));
        let mut towline = start(&line);
        wait_event(&mut towline, "transfer", |event| event["phase"] == "transfer");
        let begun = Instant::now();
        wait_event(&mut towline, "switchover", |event| event["phase"] == "switchover");
        let took = begun.elapsed();
        let done = completed(&towline.wait(WITHIN).unwrap());
        let bytes = done["ram"]["normal-bytes"].as_u64().unwrap();
        let rate = bytes as f64 / took.as_secs_f64();
        println!("{lanes} lanes: {bytes} bytes in {took:?}, {:.2} MiB/s", rate / MIB as f64);
        source.qmp().execute("cont", Value::Null).unwrap();
        assert!((0.9..1.1).contains(&(rate / RATE as f64)), "{lanes} lanes: {rate} bytes per second");
        destination.kill().unwrap();
    }
}
