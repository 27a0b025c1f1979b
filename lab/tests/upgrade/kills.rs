//! A process is killed at any moment of an upgrade: the old QEMU, the new one, or towline.
//!
//! ```text
//!   seed ─► Case ─► guest, towline upgrade ─► kill ─► towline resume ─► one guest runs, or is known to be paused or lost with its QEMU
//! ```
//! `TOWLINE_UPGRADE_KILLS` is the number of runs, `TOWLINE_UPGRADE_SEED` the first seed.

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::{Value, json};
use towline_lab::expect::{events, number};
use towline_lab::{
    BootSector, Finished, Qemu, Qmp, Towline, Version, require_lab, towline_binary, wait_until,
};

use crate::support::{WITHIN, directory, kill, named_file};

const RUNS: u64 = 10;
/// Approximate duration of an undisturbed upgrade, in milliseconds.
const RUN_MS: u64 = 700;
/// Maximum delay after the guest's stop, in microseconds.
const STOPPED_US: u64 = 30_000;
const POLL_INTERVAL: Duration = Duration::from_micros(500);
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);
const MEMORY_MIB: u64 = 32;
/// Guest-physical address of the small guest's counter, which is its place in the file of the memory.
const COUNTER_ADDRESS: u64 = 0x11_0008;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Old,
    New,
    Towline,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// This long after towline's start.
    After(Duration),
    /// This long after the old QEMU stopped its guest.
    Stopped(Duration),
}

#[derive(Debug)]
struct Case {
    victim: Victim,
    moment: Moment,
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let victims = [Victim::Old, Victim::New, Victim::Towline];
        let victim = victims[rng.usize(..victims.len())];
        let moment = match rng.u8(..3) {
            0 => Moment::After(Duration::from_millis(rng.u64(..RUN_MS))),
            _ => Moment::Stopped(Duration::from_micros(rng.u64(..STOPPED_US))),
        };
        Self { victim, moment }
    }
}

/// State of the guest in a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Gone,
    Runs,
    Paused,
    Waits,
    Busy,
}

/// The guest of one run.
struct Scene {
    place: tempfile::TempDir,
    old: Qemu,
}

impl Scene {
    fn new() -> Self {
        let place = directory();
        let boot_sector =
            BootSector { fill_mib: 16, words_per_page: 4, sweep_pages: 256, seed: 1, uses_popcnt: false };
        let builder = Qemu::builder(Version::V10_0).boot_sector(boot_sector);
        let builder = named_file(builder, Version::V10_0.machine(), place.path(), MEMORY_MIB);
        let old = builder.start().unwrap();
        old.wait_counting(WITHIN).unwrap();
        let scene = Self { place, old };
        assert!(scene.is_counting(), "the counter is not where it is looked for");
        scene
    }

    fn towline(&self, words: &[&str]) -> Towline {
        let directory = format!("XDG_RUNTIME_DIR={}", self.place.path().display());
        let program = towline_binary().unwrap().display().to_string();
        let words = [directory, program].into_iter().chain(words.iter().map(|word| (*word).to_owned()));
        Towline::start("/usr/bin/env".as_ref(), words).unwrap()
    }

    fn upgrade(&self) -> Towline {
        let old = format!("qmp:{}", self.old.qmp_path().display());
        let program = crate::support::program(Version::V10_0);
        self.towline(&["upgrade", "--json", "--qemu", &program, &old])
    }

    /// The guest's counter, whichever QEMU runs it.
    fn counter(&self) -> u64 {
        let file = std::fs::File::open(self.place.path().join("ram")).unwrap();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, COUNTER_ADDRESS).unwrap();
        u64::from_le_bytes(word)
    }

    fn is_counting(&self) -> bool {
        let before = self.counter();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if self.counter() != before {
                return true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        false
    }

    /// New QEMUs: process and monitor.
    fn new_qemus(&self) -> Vec<(u32, std::path::PathBuf)> {
        let guests = self.place.path().join("towline/guests");
        let Ok(entries) = std::fs::read_dir(guests) else { return Vec::new() };
        let state = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(path.join("state.json")).ok()?;
            let state: Value = serde_json::from_str(&text).ok()?;
            let pid = u32::try_from(state["pid"].as_u64()?).ok()?;
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()).then_some(())?;
            Some((pid, path.join("qmp.sock")))
        };
        entries.filter_map(|entry| state(entry.ok()?.path())).collect()
    }

    /// Processes that have the guest's memory open, in whatever state.
    fn processes_with_memory(&self) -> Vec<String> {
        let ram = self.place.path().join("ram").display().to_string();
        let maps = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let processes = std::fs::read_dir("/proc").unwrap();
        let names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let pids = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        pids.filter(|pid| maps(pid).contains(&ram)).collect()
    }

    /// Checks that the guest's QEMU has the monitor under the name that it always has.
    fn has_its_monitor(&self) -> Result<(), String> {
        let path = self.old.qmp_path();
        let status = Qmp::connect(&path, REPLY_TIMEOUT).and_then(|qmp| qmp.status());
        match status {
            Ok(status) if status == "running" => Ok(()),
            other => Err(format!("{}: {other:?}", path.display())),
        }
    }

    fn state_of_old(&self) -> State {
        if self.old.exited().unwrap().is_some() {
            return State::Gone;
        }
        match self.old.qmp().execute_within("query-status", json!(null), REPLY_TIMEOUT) {
            Ok(status) => state(&status),
            Err(_) if self.old.exited().unwrap().is_some() => State::Gone,
            Err(_) => State::Busy,
        }
    }

    /// State of the guest in the new QEMU, whose monitor is free once towline has ended.
    fn state_of_new(&self) -> State {
        let Some((pid, monitor)) = self.new_qemus().pop() else { return State::Gone };
        let asked = Qmp::connect(&monitor, REPLY_TIMEOUT)
            .and_then(|qmp| qmp.execute_within("query-status", json!(null), REPLY_TIMEOUT));
        match asked {
            Ok(status) => state(&status),
            Err(_) if std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()) => {
                State::Busy
            }
            Err(_) => State::Gone,
        }
    }

    /// Waits until neither changes by itself any more.
    fn settled(&self) -> (State, State) {
        let settled = wait_until("QEMUs that do not change", WITHIN, || {
            let states = (self.state_of_old(), self.state_of_new());
            Ok((states.0 != State::Busy && states.1 != State::Busy).then_some(states))
        });
        settled.unwrap()
    }

    /// Ids of undecided moves of this guest.
    fn moves(&self) -> Vec<String> {
        let finished = self.towline(&["moves", "--json"]).wait(WITHIN).unwrap();
        let place = self.place.path().display().to_string();
        let own = |event: &Value| event["event"] == "move" && event.to_string().contains(&place);
        let moves = events(&finished.stdout).into_iter().filter(own);
        moves.map(|event| event["id"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for (pid, _) in self.new_qemus() {
            kill(pid);
        }
    }
}

fn state(status: &Value) -> State {
    match status["status"].as_str() {
        Some("running") => State::Runs,
        Some("paused" | "postmigrate") => State::Paused,
        Some("inmigrate" | "prelaunch") => State::Waits,
        _ => State::Busy,
    }
}

#[test]
fn a_kill_at_any_moment_leaves_one_guest() {
    if !require_lab("a_kill_at_any_moment_leaves_one_guest") {
        return;
    }
    let (runs, first) = (number("TOWLINE_UPGRADE_KILLS", RUNS), number("TOWLINE_UPGRADE_SEED", 1));
    let mut failures = Vec::new();
    for seed in first..first + runs {
        let case = Case::of(seed);
        let begun = Instant::now();
        let outcome = run(&case);
        println!("{seed} {case:?}: {outcome:?} in {:.1} s", begun.elapsed().as_secs_f64());
        if let Err(fault) = outcome {
            failures.push(format!("TOWLINE_UPGRADE_SEED={seed} TOWLINE_UPGRADE_KILLS=1: {case:?}: {fault}"));
        }
    }
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

fn run(case: &Case) -> Result<String, String> {
    let scene = Scene::new();
    let mut towline = scene.upgrade();
    match case.moment {
        Moment::After(time) => std::thread::sleep(time),
        Moment::Stopped(time) => {
            while scene.old.qmp().wait_event("STOP", POLL_INTERVAL).is_err() && towline.runs().unwrap() {}
            std::thread::sleep(time);
        }
    }
    let new = scene.new_qemus().first().map(|(pid, _)| *pid);
    match case.victim {
        Victim::Old => scene.old.kill().unwrap(),
        Victim::New => new.into_iter().for_each(kill),
        Victim::Towline => towline.kill().unwrap(),
    }
    let finished = match case.victim {
        Victim::Towline => None,
        _ => Some(towline.wait(WITHIN).map_err(|error| format!("{error:#}"))?),
    };
    judge(&scene, case, finished.as_ref())
}

/// Upgrades a guest whose upgrade was given up: nothing of that is left then, whatever it had done.
fn upgrade_again(scene: &Scene) -> Result<(), String> {
    let finished = scene.upgrade().wait(WITHIN).map_err(|error| format!("{error:#}"))?;
    let found = scene.processes_with_memory();
    if finished.status.code() != Some(0) || found.len() != 1 {
        return Err(format!(
            "the next upgrade: {:?}, the memory is open in {found:?}: {}",
            finished.status, finished.stderr
        ));
    }
    scene.has_its_monitor()
}

fn judge(scene: &Scene, case: &Case, finished: Option<&Finished>) -> Result<String, String> {
    let before = scene.settled();
    if before == (State::Runs, State::Runs) {
        return Err("two guests run".into());
    }
    let mut resumed = String::new();
    for id in scene.moves() {
        let finished = scene.towline(&["resume", &id]).wait(WITHIN).unwrap();
        resumed += &format!(", resume {:?}: {}{}", finished.status.code(), finished.stdout, finished.stderr);
    }
    let (old, new) = scene.settled();
    let code = finished.and_then(|finished| finished.status.code());
    let stderr = finished.map_or("", |finished| finished.stderr.trim());
    let found =
        format!("old {old:?}, new {new:?} (before {before:?}), exit {code:?}{resumed}, stderr {stderr:?}");
    match (old, new) {
        (State::Runs, State::Runs) => Err(format!("two guests run: {found}")),
        (State::Runs, _) | (_, State::Runs) => {
            let is_reported = match (code, new) {
                (None, _) | (Some(0), State::Runs) => true,
                (Some(1), _) => old == State::Runs,
                // Reported as undecided, and finished since.
                (Some(3), _) => !resumed.is_empty() || stderr.contains("its source"),
                _ => false,
            };
            match (scene.is_counting(), is_reported) {
                (true, true) if new == State::Runs && (code == Some(0) || !resumed.is_empty()) => {
                    scene.has_its_monitor().map(|()| found)
                }
                (true, true) if case.victim == Victim::Towline && resumed.is_empty() => {
                    upgrade_again(scene).map(|()| found)
                }
                (true, true) => Ok(found),
                (false, _) => Err(format!("the guest runs and does not count: {found}")),
                (true, false) => Err(format!("misreported: {found}")),
            }
        }
        // Killed with the only QEMU that had it: the old one before the new one had everything, or the new one after `cont`.
        _ if case.victim == Victim::Old
            && new != State::Paused
            && ["has ended, and the guest with it", "could not be reached"]
                .iter()
                .any(|text| stderr.contains(text)) =>
        {
            Ok(format!("gone with its QEMU: {found}"))
        }
        _ if case.victim == Victim::New && code == Some(0) => Ok(format!("gone with its QEMU: {found}")),
        _ if case.victim == Victim::New && stderr.contains("its new QEMU has ended and may have run it") => {
            Ok(format!("gone with its QEMU: {found}"))
        }
        (State::Paused, _) | (_, State::Paused) if code == Some(3) || !resumed.is_empty() => {
            Ok(format!("paused, and reported: {found}"))
        }
        _ => Err(format!("lost: {found}")),
    }
}
