//! Many clones of one guest at once: times, and the memory that they take together.
//!
//! The counter of a guest of which there are many steps ten times a second, as an idle guest's timers do: at
//! the agent's own interval each emulated guest takes 2 % of a processor, and 100 of them all of two, so the
//! measurement would be of the guests' load. They have one processor each: one that is busy takes a timer
//! interrupt every 4 ms, and 200 such leave none of two processors of the host idle again.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::expect::number;
use towline_lab::{Towline, require_lab, wait_until};

use crate::support::{MEMORY_MIB, MIB, Recipe, Saved, WITHIN, pss_of, ram_pss_of};

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
/// Guests that write at once: each needs a processor of the host for its own.
const WRITING_AT_ONCE: usize = 2;
/// Page of a guest's memory.
const PAGE: u64 = 4096;
/// Interval at which guests that are held are asked for their counters.
const HELD_STEP: Duration = Duration::from_secs(30);
/// Interval of a guest's counter.
const INTERVAL: Duration = Duration::from_millis(100);

/// Page about the command.
const REPORT: &str = "run.html";

/// A `towline run` of several guests, all of which run.
struct Running {
    run: Towline,
    begun: Instant,
    names: Vec<String>,
}

/// The value below which 95 % of them are.
fn p95(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[(values.len() * 95).div_ceil(100) - 1]
}

/// Calls `work` for each name, from this number of threads.
fn each(names: &[String], threads: usize, work: impl Fn(&str) + Sync) {
    std::thread::scope(|scope| {
        for part in names.chunks(names.len().div_ceil(threads)) {
            scope.spawn(|| part.iter().for_each(|name| work(name)));
        }
    });
}

/// Has each guest write a part of its memory, few at a time, while the others are paused: a hundred emulated
/// guests that are busy share the host's processors, and none gets on.
fn write_in_turns(saved: &Saved, names: &[String]) {
    let command = |name: &str, command: &str| {
        saved.monitor(name).execute(command, Value::Null).unwrap();
    };
    each(names, ASKED_AT_ONCE, |name| command(name, "stop"));
    each(names, WRITING_AT_ONCE, |name| {
        command(name, "cont");
        let mut guest = saved.agent(name);
        guest.dirty(RATE, WRITTEN).unwrap();
        // All of it once, and as much again.
        let is_written = || Ok((guest.dirtied_pages()? >= WRITTEN / PAGE).then_some(()));
        wait_until("a guest that has written its memory", WITHIN, is_written).unwrap();
        guest.stop_dirtying().unwrap();
        command(name, "stop");
    });
    each(names, ASKED_AT_ONCE, |name| command(name, "cont"));
}

impl Running {
    /// Starts the guests and waits until towline says that all of them run.
    fn start(saved: &Saved, memory: &str, count: u64) -> Self {
        let settings = [saved.settings(), vec!["accel.tb-size=32".into()]].concat();
        let (begun, text) = (Instant::now(), count.to_string());
        let page = saved.path(REPORT).display().to_string();
        let options = ["--name", "web", memory, "--json", "--count", &text, "--report", &page];
        let run = saved.run(&options, &settings);
        let names = (0..count).map(|n| format!("web-{n}")).collect();
        let mut running = Self { run, begun, names };
        running.wait_for("running", WITHIN * 5);
        running
    }

    /// Waits for an event of each guest.
    fn wait_for(&mut self, event: &str, within: Duration) {
        let (run, text) = (&mut self.run, format!("\"event\":\"{event}\""));
        wait_until(&format!("{event} of each guest"), within, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            Ok((run.stdout().matches(&text).count() == self.names.len()).then_some(()))
        })
        .unwrap();
    }

    /// A field of all events of a kind.
    fn field(&self, kind: &str, name: &str) -> Vec<u64> {
        let text = self.run.stdout();
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.filter(|event| event["event"] == kind).map(|event| event[name].as_u64().unwrap()).collect()
    }

    fn pids(&self) -> Vec<u64> {
        self.field("running", "pid")
    }

    /// Prints the times and the memory of all processes.
    fn print(&self, memory: &str, last_tick: Duration) {
        println!(
            "{} clones of {MEMORY_MIB} MiB, {memory}: {:.2} s from the command to the last tick, to RUNNING p95 {} ms, p95 {} ms for one \
             restore; processes together {} MiB",
            self.names.len(),
            last_tick.as_secs_f64(),
            p95(self.field("running", "running-us")) / 1000,
            p95(self.field("completed", "total-time")),
            self.pids().into_iter().map(pss_of).sum::<u64>() / MIB,
        );
    }
}

/// The page has each guest, and the time until it ran.
fn assert_page(saved: &Saved, names: &[String]) {
    let page =
        wait_until("the page", WITHIN, || Ok(std::fs::read_to_string(saved.path(REPORT)).ok())).unwrap();
    let running = format!("{0} of {0} guests", names.len());
    for part in [running.as_str(), "Time until a guest ran", "<svg"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    for name in names {
        let (_, row) = page.split_once(&format!("<th>{name}</th><td>")).unwrap();
        let ran = row.split_once(" s</td>").unwrap().0;
        assert!(ran.parse::<f64>().is_ok_and(|seconds| seconds > 0.0), "{name}: {ran}");
    }
}

#[test]
fn clones_share_the_memory_of_their_image() {
    if !require_lab("clones_share_the_memory_of_their_image") {
        return;
    }
    let count = number("TOWLINE_SOAK_RUN_CLONES", CLONES);
    let held = Duration::from_secs(number("TOWLINE_SOAK_RUN_SECONDS", 0));
    let saved = Saved::of(&Recipe { processors: 1, interval: Some(INTERVAL), ..Recipe::default() });
    let mut running = Running::start(&saved, "--share", count);
    let pids = running.pids();
    pids.iter().for_each(|&pid| saved.wait_first_tick(pid));
    let ticked = running.begun.elapsed();
    running.wait_for("completed", WITHIN);
    assert_page(&saved, &running.names);
    let pss = || pids.iter().copied().map(ram_pss_of).sum::<u64>();
    let shared = pss();
    running.print("--share", ticked);
    let percent = 100.0 * shared as f64 / (count * MEMORY_MIB * MIB) as f64;
    println!("RAM together {} MiB, {percent:.2} % of theirs", shared / MIB);
    let names = running.names.clone();
    let begun_to_write = Instant::now();
    write_in_turns(&saved, &names);
    let written = pss();
    println!("each has written after {:.1} s", begun_to_write.elapsed().as_secs_f64());
    println!("RAM together {} MiB after each wrote {} MiB", written / MIB, WRITTEN / MIB);
    // A few clones do not distribute what all of them read.
    let read_by_all = if count < MANY { saved.filled() } else { 0 };
    let shared_max = count * MEMORY_MIB * MIB * SHARE_PERCENT_MAX / 100 + read_by_all;
    assert!(shared <= shared_max, "{shared}, expected at most {shared_max}");
    assert!(written <= shared_max + count * TAKEN_MAX, "{written} after {shared}");
    // The measure has what they wrote.
    assert!(written >= shared + count * WRITTEN, "{written} after {shared}");
    saved.assert_intact();
    while let Some(left) = held.checked_sub(running.begun.elapsed()) {
        std::thread::sleep(left.min(HELD_STEP));
        each(&names, ASKED_AT_ONCE, |name| assert!(saved.agent(name).wait_ticking(WITHIN * 5).unwrap() > 0));
    }
    if count < MANY {
        each(&names, ASKED_AT_ONCE, |name| saved.assert_is_saved_guest(&mut saved.agent(name)));
    }
    saved.interrupt(running.run);
    saved.assert_intact();
}

/// Guests whose memory is not shared, for comparison; as many as fit.
#[test]
#[ignore = "nightly"]
fn clones_with_memory_of_their_own_run() {
    if !require_lab("clones_with_memory_of_their_own_run") {
        return;
    }
    let count = number("TOWLINE_SOAK_RUN_COPIES", CLONES);
    let saved = Saved::of(&Recipe { processors: 1, interval: Some(INTERVAL), ..Recipe::default() });
    for memory in ["--postcopy", "--copy"] {
        let mut running = Running::start(&saved, memory, count);
        each(&running.names, ASKED_AT_ONCE, |name| {
            assert!(saved.agent(name).wait_ticking(WITHIN * 5).unwrap() > 0);
        });
        let ticked = running.begun.elapsed();
        running.wait_for("completed", WITHIN * 5);
        running.print(memory, ticked);
        saved.interrupt(running.run);
    }
    saved.assert_intact();
}
