//! A process or a connection is killed while a guest moves: a QEMU, towline, or one connection. Afterwards
//! the state of both QEMUs is compared with the guarantees (docs/move.md) and with towline's report.
//!
//! ```text
//!   seed ─► Case ─► source, destination, towline that waits at a phase ─► kill ─► go ─► Verdict
//! ```
//! Half of the cases are aimed: towline is held at a phase between the guest's stop and `cont`, or the kill
//! follows a phase or the source's stop by a moment. The others come at any time. `TOWLINE_SOAK_KILLS` is the
//! number of runs, `TOWLINE_SOAK_SEED` the first seed, and `TOWLINE_SOAK_ONLY` words that a case must
//! contain, as `Towline,lanes: 4`.

mod connections;
mod hooked;
mod judge;

use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towline_control::plan::CopyPhase;
use towline_lab::{BootSector, Builder, Qemu, Towline, Version, require_lab};

use crate::support::{Scratch, WITHIN, number, waiting};
use hooked::Orders;
use judge::{Outcome, Watch};

const RUNS: u64 = 12;
/// Runs of a case in which QEMU hangs, of which one must pass.
const HANG_ATTEMPTS: u32 = 5;
/// Approximate duration of an undisturbed run from its process's start, in milliseconds.
const RUN_MS: u64 = 1600;
/// Maximum delay of a kill after its phase, in microseconds.
const BEHIND_US: u64 = 4000;
/// Maximum delay after the guest's stop, in microseconds: covers the rest of the stream and the whole
/// switchover.
const STOPPED_US: u64 = 25_000;
/// MiB that the guest fills, and pages of it that it dirties forever: few, or half.
const FILL_MIB: u64 = 16;
const SWEEPS: [u32; 2] = [64, 2048];
/// Interval at which conditions are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time after which all buffers on the way are full.
const STUCK: Duration = Duration::from_millis(100);
/// Phases from the guest's stop until it runs at its destination.
const WINDOW: [CopyPhase; 5] =
    [CopyPhase::Switchover, CopyPhase::Loaded, CopyPhase::Release, CopyPhase::CutOver, CopyPhase::Running];

/// The process or connection that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    Towline,
    Connection,
}

/// Time of the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At this time after towline's start.
    After(Duration),
    /// While towline waits at the beginning of this phase.
    At(CopyPhase),
    /// At this time after this phase was reported; towline does not wait.
    Behind(CopyPhase, Duration),
    /// At this time after the source stopped its guest.
    Stopped(Duration),
    /// After the destination has hung for a while, starting this long after towline's start or at the stop of
    /// the source's guest: every connection is full, and all processes are blocked.
    Stuck(Option<Duration>),
}

/// One run, all of it derived from its seed.
#[derive(Debug)]
struct Case {
    victim: Victim,
    moment: Moment,
    lanes: usize,
    sweep_pages: u32,
    end_source: bool,
    /// Index of the connection, among the existing ones.
    pick: u64,
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let victims = [Victim::Source, Victim::Destination, Victim::Towline, Victim::Connection];
        let victim = victims[rng.usize(..victims.len())];
        let phase = WINDOW[rng.usize(..WINDOW.len())];
        let moment = match rng.u8(..8) {
            0 => Moment::At(phase),
            1 => Moment::Behind(phase, Duration::from_micros(rng.u64(..BEHIND_US))),
            2 => Moment::Stopped(Duration::from_micros(rng.u64(..STOPPED_US))),
            3 => Moment::Stuck(rng.bool().then(|| Duration::from_millis(rng.u64(..RUN_MS / 2)))),
            _ => Moment::After(Duration::from_millis(rng.u64(..RUN_MS))),
        };
        let lanes = if rng.bool() { 4 } else { 0 };
        let (sweep_pages, end_source) = (SWEEPS[rng.usize(..SWEEPS.len())], rng.bool());
        Self { victim, moment, lanes, sweep_pages, end_source, pick: rng.u64(..) }
    }

    fn hold(&self) -> Option<CopyPhase> {
        match self.moment {
            Moment::At(phase) => Some(phase),
            _ => None,
        }
    }
}

fn guest(case: &Case) -> Builder {
    let sweep_pages = case.sweep_pages;
    let boot_sector = BootSector {
        fill_mib: FILL_MIB,
        words_per_page: 4,
        sweep_pages,
        steps_per_tick: 0,
        ..BootSector::default()
    };
    Qemu::builder(Version::V10_0).memory_mib(32).boot_sector(boot_sector)
}

#[test]
fn no_guest_is_lost_or_runs_twice() {
    if !require_lab("no_guest_is_lost_or_runs_twice") {
        return;
    }
    let (runs, first) = (number("TOWLINE_SOAK_KILLS", RUNS), number("TOWLINE_SOAK_SEED", 1));
    let mut failures = Vec::new();
    let only = std::env::var("TOWLINE_SOAK_ONLY").unwrap_or_default();
    let cases = (first..).map(|seed| (seed, Case::of(seed)));
    let wanted = cases.filter(|(_, case)| only.split(',').all(|text| format!("{case:?}").contains(text)));
    for (seed, case) in wanted.take(usize::try_from(runs).unwrap()) {
        let begun = Instant::now();
        let outcome = run_past_hangs(&case);
        println!("{seed} {case:?}: {outcome:?} in {:.1} s", begun.elapsed().as_secs_f64());
        if let Err(fault) = outcome {
            failures.push(format!("TOWLINE_SOAK_SEED={seed} TOWLINE_SOAK_KILLS=1: {case:?}: {fault}"));
        }
    }
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

/// Runs a case, again if QEMU hung because its lanes broke while it waited for all of them (docs/copy.md).
fn run_past_hangs(case: &Case) -> Result<String, String> {
    let breaks_lanes = matches!(case.victim, Victim::Towline | Victim::Connection);
    let may_hang = breaks_lanes && case.lanes > 0;
    for _ in 1..HANG_ATTEMPTS {
        match run(case) {
            Err(fault) if may_hang && fault.starts_with(judge::SOURCE_HANGS) => println!("{case:?}: {fault}"),
            outcome => return outcome,
        }
    }
    run(case)
}

/// Runs a case; returns a summary of the guest's fate, or the fault that was found.
fn run(case: &Case) -> Result<String, String> {
    let scratch = Scratch::new();
    let source = guest(case).start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    let destination = waiting(&guest(case));
    let go = scratch.path("go");
    let orders = Orders { lanes: case.lanes, end_source: case.end_source, hold: case.hold(), go: go.clone() };
    let mut towline = orders.start(&source, &destination);
    let watch = Watch::new(&source, &destination);
    wait_moment(case, &source, &destination, &mut towline)?;
    match case.victim {
        Victim::Source => source.kill().unwrap(),
        Victim::Destination => destination.kill().unwrap(),
        Victim::Towline => towline.kill().unwrap(),
        Victim::Connection => {
            let streams = connections::streams(towline.pid());
            if !streams.is_empty() {
                connections::cut(&streams[(case.pick % streams.len() as u64) as usize]);
            }
        }
    }
    std::fs::write(&go, "").unwrap();
    signal(&destination, Signal::CONT);
    // Its end is not awaited first: the events while it exits are the point of this test.
    while case.victim != Victim::Towline && towline.runs().unwrap() {
        watch.check()?;
    }
    let phases = phases(&towline.stdout());
    let finished = match case.victim {
        Victim::Towline => None,
        _ => Some(towline.wait(WITHIN).map_err(|error| format!("{error:#}"))?),
    };
    let outcome = Outcome { victim: case.victim, held: case.hold().is_some(), phases, finished };
    judge::judge(&watch, &outcome)
}

/// Waits until it is time to kill.
fn wait_moment(case: &Case, source: &Qemu, destination: &Qemu, towline: &mut Towline) -> Result<(), String> {
    match case.moment {
        Moment::After(time) => std::thread::sleep(time),
        Moment::Stopped(time) => {
            wait_stop(source, towline)?;
            std::thread::sleep(time);
        }
        Moment::Stuck(since) => {
            match since {
                Some(time) => std::thread::sleep(time),
                None => wait_stop(source, towline)?,
            }
            signal(destination, Signal::STOP);
            std::thread::sleep(STUCK);
        }
        Moment::At(phase) | Moment::Behind(phase, _) => {
            let line = format!("phase {phase:?}.\n");
            while !towline.stdout().contains(&line) {
                assert_running(towline)?;
                std::thread::sleep(POLL_INTERVAL);
            }
            if let Moment::Behind(_, time) = case.moment {
                std::thread::sleep(time);
            }
        }
    }
    Ok(())
}

/// Waits until the source reports that its guest is stopped.
fn wait_stop(source: &Qemu, towline: &mut Towline) -> Result<(), String> {
    while source.qmp().wait_event("STOP", POLL_INTERVAL).is_err() {
        assert_running(towline)?;
    }
    Ok(())
}

fn assert_running(towline: &mut Towline) -> Result<(), String> {
    if towline.runs().unwrap() {
        Ok(())
    } else {
        Err(format!("towline ended on its own: {}{}", towline.stdout(), towline.stderr()))
    }
}

/// Sends a signal to a QEMU, which may have exited.
fn signal(qemu: &Qemu, signal: Signal) {
    let pid = i32::try_from(qemu.pid()).ok().and_then(Pid::from_raw).unwrap();
    if qemu.exited().unwrap().is_none() {
        kill_process(pid, signal).unwrap();
    }
}

/// Reported phases, in order.
fn phases(stdout: &str) -> Vec<String> {
    let names = stdout.lines().filter_map(|line| line.strip_prefix("phase ")?.strip_suffix('.'));
    names.map(str::to_owned).collect()
}

/// Run state that a live QEMU reports.
fn status(qemu: &Qemu) -> Option<Value> {
    qemu.qmp().execute_within("query-status", Value::Null, judge::REPLY_TIMEOUT).ok()
}
