//! Many clones of one guest at once: times, and the memory that they take together.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::expect::number;
use towline_lab::{Towline, Version, require_lab, wait_until};

use crate::support::{MEMORY_MIB, MIB, Saved, WITHIN, ram_pss_of};

/// Clones of a short run.
const CLONES: u64 = 3;
/// Clones from which on what all of them read is counted with the rest.
const MANY: u64 = 50;
/// Part of the guests' RAM that they may take together when they begin to run, in percent.
const SHARE_PERCENT_MAX: u64 = 5;
/// Memory that each guest writes.
const WRITTEN: u64 = 16 * MIB;
/// RAM that a guest may take for that, with its kernel's own pages.
const TAKEN_MAX: u64 = 17 * MIB;
/// Rate at which a guest writes it, in bytes per second.
const RATE: u64 = 64 * MIB;
/// Agents that are asked at once.
const ASKED_AT_ONCE: usize = 8;

/// The value of `events` below which 95 % of them are.
fn p95(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[(values.len() * 95).div_ceil(100) - 1]
}

fn field(events: &[Value], kind: &str, name: &str) -> Vec<u64> {
    let of_kind = events.iter().filter(|event| event["event"] == kind);
    of_kind.map(|event| event[name].as_u64().unwrap()).collect()
}

/// Calls `work` for each name, from several threads.
fn each(names: &[String], work: impl Fn(&str) + Sync) {
    std::thread::scope(|scope| {
        for part in names.chunks(names.len().div_ceil(ASKED_AT_ONCE)) {
            scope.spawn(|| part.iter().for_each(|name| work(name)));
        }
    });
}

fn events(run: &Towline) -> Vec<Value> {
    run.stdout().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn clones_share_the_memory_of_their_image() {
    if !require_lab("clones_share_the_memory_of_their_image") {
        return;
    }
    let count = number("TOWLINE_SOAK_RUN_CLONES", CLONES);
    let held = Duration::from_secs(number("TOWLINE_SOAK_RUN_SECONDS", 0));
    let saved = Saved::new(Version::V10_0);
    let settings = [saved.settings(), vec!["accel.tb-size=32".into()]].concat();
    let begun = Instant::now();
    let text = count.to_string();
    let mut run = saved.run(&["--name", "web", "--share", "--json", "--count", &text], &settings);
    let names: Vec<String> = (0..count).map(|n| format!("web-{n}")).collect();
    wait_until("guests that run", WITHIN * 5, || {
        assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
        let running = events(&run).iter().filter(|event| event["event"] == "running").count();
        Ok((running as u64 == count).then_some(()))
    })
    .unwrap();
    each(&names, |name| assert!(saved.agent(name).wait_ticking(WITHIN * 5).unwrap() > 0));
    let ticked = begun.elapsed();
    wait_until("copies that are complete", WITHIN, || {
        Ok((field(&events(&run), "completed", "total-time").len() as u64 == count).then_some(()))
    })
    .unwrap();
    let events = events(&run);
    let pss = || field(&events, "running", "pid").into_iter().map(ram_pss_of).sum::<u64>();
    let shared = pss();
    println!(
        "{count} clones of {MEMORY_MIB} MiB: {:.2} s from the command to the last tick, p95 {} ms from the command to RUNNING, p95 {} ms for \
         one restore; RAM together {} MiB, {:.2} % of theirs",
        ticked.as_secs_f64(),
        p95(field(&events, "running", "running-us")) / 1000,
        p95(field(&events, "completed", "total-time")),
        shared / MIB,
        100.0 * shared as f64 / (count * MEMORY_MIB * MIB) as f64,
    );
    each(&names, |name| {
        let mut guest = saved.agent(name);
        guest.dirty(RATE, WRITTEN).unwrap();
        let is_written = || Ok((guest.dirtied_pages()? > 0).then_some(()));
        wait_until("a guest that has written its memory", WITHIN * 5, is_written).unwrap();
        guest.stop_dirtying().unwrap();
    });
    let written = pss();
    println!("{} MiB after each wrote {} MiB", written / MIB, WRITTEN / MIB);
    // A few clones do not distribute what all of them read.
    let read_by_all = if count < MANY { saved.filled() } else { 0 };
    let shared_max = count * MEMORY_MIB * MIB * SHARE_PERCENT_MAX / 100 + read_by_all;
    assert!(shared <= shared_max, "{shared}, expected at most {shared_max}");
    assert!(written <= shared_max + count * TAKEN_MAX, "{written} after {shared}");
    saved.assert_intact();
    while begun.elapsed() < held {
        each(&names, |name| assert!(saved.agent(name).wait_ticking(WITHIN * 5).unwrap() > 0));
    }
    if count < MANY {
        each(&names, |name| saved.assert_is_saved_guest(&mut saved.agent(name)));
    }
    saved.interrupt(run);
    saved.assert_intact();
}
