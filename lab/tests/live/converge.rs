//! A guest that writes faster than it can be sent: towline reports that with figures and the guest runs on,
//! or it is throttled.

use serde_json::Value;
use towline_lab::{Qemu, require_lab};

use crate::support::{MIB, assert_ended, completed, events, linux, prove_alive, qmp, run, waiting, writing};

const RATE: u64 = 60_000_000;
/// A pass over it takes longer than the allowed downtime.
const RANGE: u64 = 16 * MIB;
/// Without lanes, with which QEMU exceeds its bandwidth limit by up to a packet each.
const SLOW: &str = "--multifd-channels 0 --max-bandwidth 24M";
const DOWNTIME_MS: u64 = 100;
/// In the 10 ms of each second that QEMU's strongest throttle leaves it, the guest writes up to 3 MB: 120 ms at this rate. Not throttled, it
/// writes the whole range, which takes 700 ms.
const DOWNTIME_THROTTLED_MS: u64 = 200;

fn auto_converge(qemu: &Qemu) -> bool {
    let capabilities = qemu.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    let mut capabilities = capabilities.as_array().unwrap().iter();
    capabilities.find(|known| known["capability"] == "auto-converge").unwrap()["state"] == true
}

#[test]
fn a_guest_that_writes_too_fast_gets_a_verdict_and_runs_on() {
    if !require_lab("a_guest_that_writes_too_fast_gets_a_verdict_and_runs_on") {
        return;
    }
    let builder = linux(256);
    let (source, mut guest) = writing(&builder, RATE, RANGE);
    let tick = guest.tick().unwrap();
    drop(guest);
    let destination = waiting(&builder);
    let finished = run(&format!(
        "move --json {SLOW} --downtime-limit {DOWNTIME_MS} {} {}",
        qmp(&source),
        qmp(&destination)
    ));
    let texts = [
        "the guest writes ",
        " MiB/s of pages while ",
        " MiB/s get through",
        "would be stopped for ",
        " ms, with 100 ms allowed",
        "--downtime-limit or --max-bandwidth, or slow the guest down with --throttle",
        "the guest: safe at its source",
    ];
    assert_ended(&finished, 1, &texts);
    prove_alive(&source, RANGE, tick);
    let progress: Vec<_> =
        events(&finished.stdout).into_iter().filter(|event| event["event"] == "progress").collect();
    let last = progress.last().unwrap();
    assert!(last["pass"].as_u64() > Some(5), "{last}");
    for name in ["bytes-rate", "dirty-bytes-rate", "remaining", "expected-downtime"] {
        assert!(
            progress.iter().any(|event| event[name].as_u64() > Some(0)),
            "{name} is never reported: {last}"
        );
    }
}

#[test]
#[ignore = "nightly"]
fn throttle_slows_a_guest_down_until_it_converges() {
    if !require_lab("throttle_slows_a_guest_down_until_it_converges") {
        return;
    }
    let builder = linux(256);
    let (source, mut guest) = writing(&builder, RATE, RANGE);
    let tick = guest.tick().unwrap();
    drop(guest);
    let destination = waiting(&builder);
    let finished = run(&format!(
        "copy --json --throttle {SLOW} --downtime-limit {DOWNTIME_THROTTLED_MS} {} {}",
        qmp(&source),
        qmp(&destination)
    ));
    completed(&finished);
    let slowed =
        events(&finished.stdout).iter().filter_map(|event| event["cpu-throttle-percentage"].as_u64()).max();
    assert!(slowed > Some(0), "{slowed:?}");
    assert!(!auto_converge(&source), "it is put back");
    prove_alive(&destination, RANGE, tick);
}

#[test]
fn throttle_is_refused_without_a_monitor_at_the_source() {
    for source in ["guest.img", "tcp:127.0.0.1:1"] {
        let finished = run(&format!("copy --throttle {source} qmp:b.qmp"));
        assert_ended(&finished, 2, &["--throttle is for a qmp: source"]);
    }
}

/// A move of a guest that does not converge; returns what is reported.
fn moved_all_the_same(how: &str) -> Option<String> {
    if !require_lab("a move of a guest that does not converge") {
        return None;
    }
    let builder = linux(256);
    let (source, mut guest) = writing(&builder, RATE, RANGE);
    let tick = guest.tick().unwrap();
    drop(guest);
    let destination = waiting(&builder);
    let (from, to) = (qmp(&source), qmp(&destination));
    let finished = run(&format!(
        "move --json --if-not-converging {how} {SLOW} --downtime-limit {DOWNTIME_THROTTLED_MS} {from} {to}"
    ));
    completed(&finished);
    prove_alive(&destination, RANGE, tick);
    Some(finished.stdout)
}

#[test]
fn a_guest_that_does_not_converge_is_throttled_if_that_is_permitted() {
    let Some(reported) = moved_all_the_same("throttle") else { return };
    let found = events(&reported);
    let begun = found.iter().position(|event| event.to_string().contains("it is throttled from now on"));
    let (before, after) = found.split_at(begun.expect("a notice"));
    let slowed = |events: &[Value]| {
        events.iter().filter_map(|event| event["cpu-throttle-percentage"].as_u64()).max().unwrap_or(0)
    };
    assert!(slowed(before) <= 1 && slowed(after) >= 10, "{} {}", slowed(before), slowed(after));
}

#[test]
fn a_guest_that_does_not_converge_is_switched_to_postcopy_if_that_is_permitted() {
    let Some(reported) = moved_all_the_same("postcopy") else { return };
    assert!(reported.contains("it is switched to postcopy"), "{reported}");
    assert!(events(&reported).iter().any(|event| event["phase"] == "running"), "{reported}");
}
