//! Chaos: a copy of any kind, with a fault of any kind at any moment; afterwards towline's report of the
//! guest is compared with the QEMUs.
//!
//! ```text
//!   seed ─► Case ─► Fixture: QEMUs, towlines, links ─► fault ─► end ─► Verdict ─► one line of the journal
//! ```
//! `TOWLINE_CHAOS_RUNS` is the number of runs, `TOWLINE_CHAOS_SEED` the first seed, `TOWLINE_CHAOS_ONLY`
//! words that a case must contain (as `Towlines,Kill`), `TOWLINE_CHAOS_JOBS` the number of parallel runs.
//! With `TOWLINE_CHAOS_JOURNAL` every finished seed gets a line in that file, and those that passed are not
//! run again.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod case;
mod guests;
mod judge;
mod monitor;
mod scene;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Instant;

use towline_lab::expect::number;
use towline_lab::require_lab;

use case::Case;

const RUNS: u64 = 25;
const JOBS: u64 = 4;
/// Repetitions of a case that hit the excluded moment.
const REPETITIONS: usize = 5;

#[test]
fn no_fault_costs_a_guest_or_runs_two() {
    if !require_lab("no_fault_costs_a_guest_or_runs_two") {
        return;
    }
    let runs = usize::try_from(number("TOWLINE_CHAOS_RUNS", RUNS)).unwrap();
    let journal = std::env::var("TOWLINE_CHAOS_JOURNAL").ok();
    let only = std::env::var("TOWLINE_CHAOS_ONLY").unwrap_or_default();
    let passed = journal.as_deref().map(passed).unwrap_or_default();
    let cases = (number("TOWLINE_CHAOS_SEED", 1)..).map(|seed| (seed, Case::of(seed)));
    let wanted = cases.filter(|(_, case)| only.split(',').all(|text| format!("{case:?}").contains(text)));
    let left: Vec<_> = wanted.take(runs).filter(|(seed, _)| !passed.contains(seed)).collect();
    let (queue, failures) = (Mutex::new(left.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..number("TOWLINE_CHAOS_JOBS", JOBS) {
            scope.spawn(|| {
                while let Some((seed, case)) = next(&queue) {
                    let begun = Instant::now();
                    let outcome = play_confirmed(&case);
                    let word = if outcome.is_ok() { "passed" } else { "FAILED" };
                    let text = outcome.as_ref().unwrap_or_else(|fault| fault).replace('\n', " | ");
                    let line =
                        format!("{seed} {word} {:.1} s {case:?}: {text}", begun.elapsed().as_secs_f64());
                    println!("{line}");
                    if let Some(journal) = &journal {
                        let mut file = OpenOptions::new().create(true).append(true).open(journal).unwrap();
                        writeln!(file, "{line}").unwrap();
                    }
                    if outcome.is_err() {
                        failures.lock().unwrap().push(line);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

fn next(queue: &Mutex<std::vec::IntoIter<(u64, Case)>>) -> Option<(u64, Case)> {
    queue.lock().unwrap().next()
}

/// Runs one case. One that hit the excluded moment of a stock source must miss it in most of its repetitions:
/// the moment lasts as long as QEMU takes from reading the acknowledgement to `completed`, which is a few
/// milliseconds on a busy machine, and a case cancels at the same time after the same phase each time. Any
/// other fault in a repetition counts.
fn play_confirmed(case: &Case) -> Result<String, String> {
    let is_excluded =
        |fault: &String| judge::may_hit_excluded_moment(case) && fault.starts_with(judge::TWO_GUESTS);
    match play(case) {
        Err(fault) if is_excluded(&fault) => {
            let mut hits = Vec::new();
            for _ in 0..REPETITIONS {
                match play(case) {
                    Err(fault) if is_excluded(&fault) => hits.push(fault),
                    outcome => drop(outcome?),
                }
            }
            if hits.len() * 2 > REPETITIONS {
                return Err(format!("{} of {REPETITIONS} repetitions: {fault}", hits.len()));
            }
            Ok(format!("hit the excluded moment once and in {} of {REPETITIONS} repetitions", hits.len()))
        }
        outcome => outcome,
    }
}

/// Runs one case; a panic of a helper fails this case alone.
fn play(case: &Case) -> Result<String, String> {
    catch_unwind(AssertUnwindSafe(|| scene::play(case))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default())
    })
}

/// Seeds that passed according to the journal.
fn passed(journal: &str) -> BTreeSet<u64> {
    let text = std::fs::read_to_string(journal).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once(" passed ")?.0.parse().ok()).collect()
}
