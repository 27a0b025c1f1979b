//! Connections that break while the guest runs and its memory is under way: every page still arrives, and
//! each once.

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use libc::{SIGABRT, SIGSEGV};
use serde_json::{Value, json};
use towline_lab::{Qemu, Towline, Version, require_lab, wait_until};

use crate::support::{
    Scratch, WITHIN, assert_ended, completed, number, prove_alive, qmp, run, set_postcopy, small, start,
    store, wait_event, wait_running, waiting,
};

/// Signals of a QEMU that has crashed: no other process sends them.
const CRASHES: [i32; 2] = [SIGABRT, SIGSEGV];

/// Breaks the destination's connections as a network would (its own `migrate-pause`). False if it had
/// everything already.
fn cut(destination: &Qemu) -> bool {
    let cut = destination.qmp().execute("migrate-pause", Value::Null);
    if cut.is_err() {
        // Between two connections, or after the last page.
        return false;
    }
    true
}

fn remaining(towline: &Towline) -> Option<u64> {
    let events = crate::support::events(&towline.stdout());
    events.iter().rev().find(|event| event["event"] == "progress")?["remaining"].as_u64()
}

/// Runs one restore with up to `cuts` cuts at random moments. Returns their number.
fn restore_with_cuts(image: &str, count: u64, options: &str, cuts: u64, random: &mut fastrand::Rng) -> u64 {
    let destination = waiting(&small(Version::V10_0));
    let line = format!("copy --postcopy {options} --max-bandwidth 6M --json {image} {}", qmp(&destination));
    let mut towline = start(&line);
    wait_running(&mut towline);
    let mut made = 0;
    for _ in 0..cuts {
        std::thread::sleep(Duration::from_micros(random.u64(0..400_000)));
        if !towline.runs().unwrap() || remaining(&towline) == Some(0) {
            break;
        }
        made += u64::from(cut(&destination));
    }
    let finished = towline.wait(WITHIN).unwrap();
    if let Some(status) = destination.exited().unwrap() {
        // Its own `migrate-pause` may do that: docs/testing.md.
        assert_ended(&finished, 3, &["its destination has ended"]);
        let wrote = destination.stderr();
        assert!(status.signal().is_some_and(|signal| CRASHES.contains(&signal)), "{status}: {wrote}");
        println!("{status} of the destination's QEMU after {made} cuts: {wrote}");
        return 0;
    }
    let completed = completed(&finished);
    let recoveries = completed["postcopy"]["recoveries"].as_u64().unwrap();
    assert!(recoveries <= made, "{recoveries} recoveries of {made} cuts: {}", finished.stderr);
    prove_alive(&destination, count);
    made
}

#[test]
fn a_postcopy_cut_at_random_moments_is_recovered() {
    if !require_lab("a_postcopy_cut_at_random_moments_is_recovered") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let count = store(&small(Version::V10_0), &image);
    let seed = number("TOWLINE_SOAK_SEED", 1);
    let (wanted, mut random) = (number("TOWLINE_SOAK_CUTS", 6), fastrand::Rng::with_seed(seed));
    let mut made = 0;
    for (restore, options) in (0..).zip(["", "--postcopy-preempt"].iter().cycle()) {
        if made >= wanted {
            break;
        }
        assert!(restore < 4 * wanted, "only {made} cuts in {restore} restores");
        let cuts = (wanted - made).min(3 + 2 * (restore % 3));
        made += restore_with_cuts(&image, count, options, cuts, &mut random);
        println!("{made} of {wanted} cuts, seed {seed}");
    }
}

#[test]
fn another_towline_resumes_after_one_was_killed() {
    if !require_lab("another_towline_resumes_after_one_was_killed") {
        return;
    }
    let scratch = Scratch::new();
    let (builder, image) = (small(Version::V10_0), scratch.text("guest.img"));
    let count = store(&builder, &image);
    let destination = waiting(&builder);
    let mut towline =
        start(&format!("copy --postcopy --max-bandwidth 1M --json {image} {}", qmp(&destination)));
    wait_running(&mut towline);
    towline.kill().unwrap();
    destination.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    let finished = run(&format!("copy --postcopy --recover --json {image} {}", qmp(&destination)));
    assert_eq!(completed(&finished)["destination-state"], "running");
    prove_alive(&destination, count);
    // There is no migration left to resume.
    let finished = run(&format!("copy --postcopy --recover {image} {}", qmp(&destination)));
    assert_ended(&finished, 1, &["expected `postcopy-paused`", "in its image"]);
}

#[test]
fn a_foreign_destination_is_recovered_when_it_listens_again() {
    if !require_lab("a_foreign_destination_is_recovered_when_it_listens_again") {
        return;
    }
    let scratch = Scratch::new();
    let (builder, image) = (small(Version::V10_0), scratch.text("guest.img"));
    let count = store(&builder, &image);
    let destination = waiting(&builder);
    set_postcopy(&destination);
    let address = format!("unix:{}", scratch.text("destination.sock"));
    destination.qmp().execute("migrate-incoming", json!({ "uri": address })).unwrap();
    let mut towline = start(&format!("copy --postcopy --max-bandwidth 2M --json {image} {address}"));
    destination.qmp().wait_status("running", WITHIN).unwrap();
    destination.qmp().wait_migration("postcopy-active", WITHIN).unwrap();
    // The socket that it still listens on is unreachable.
    std::fs::remove_file(scratch.path("destination.sock")).unwrap();
    destination.qmp().execute("migrate-pause", Value::Null).unwrap();
    destination.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    wait_event(&mut towline, "a notice with the remedy", |event| {
        event["text"].as_str().is_some_and(|text| text.contains("send it `migrate-recover`"))
    });
    destination.qmp().execute("migrate-recover", json!({ "uri": address })).unwrap();
    let completed = completed(&towline.wait(WITHIN).unwrap());
    assert_eq!(completed["postcopy"]["recoveries"], 1);
    wait_until("a guest that runs", WITHIN, || Ok((destination.qmp().status()? == "running").then_some(())))
        .unwrap();
    prove_alive(&destination, count);
}
