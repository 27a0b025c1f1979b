//! A process is killed at any moment of an upgrade: the old QEMU, the new one, or towline.
//!
//! ```text
//!   seed ─► Case ─► guest, towline upgrade ─► kill ─► towline resume ─► one guest runs, or is known to be paused or lost with its QEMU
//! ```
//! `TOWLINE_UPGRADE_KILLS` is the number of runs, `TOWLINE_UPGRADE_SEED` the first seed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use towline_lab::expect::number;
use towline_lab::{Finished, require_lab};

use crate::scene::{Backing, POLL_INTERVAL, Scene, State};
use crate::support::{WITHIN, kill};

const RUNS: u64 = 10;
/// Maximum delay after the guest's stop, in microseconds.
const STOPPED_US: u64 = 30_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Old,
    New,
    Towline,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At this percentage of an undisturbed upgrade after towline's start.
    AfterPercent(u32),
    /// At this time after the old QEMU stopped its guest.
    Stopped(Duration),
}

#[derive(Debug, Clone, Copy)]
struct Case {
    victim: Victim,
    moment: Moment,
    backing: Backing,
    /// True if it has a raw and a qcow2 drive.
    has_drives: bool,
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let victims = [Victim::Old, Victim::New, Victim::Towline];
        let victim = victims[rng.usize(..victims.len())];
        let moment = match rng.u8(..3) {
            0 => Moment::AfterPercent(rng.u32(..100)),
            _ => Moment::Stopped(Duration::from_micros(rng.u64(..STOPPED_US))),
        };
        let backing = if rng.u8(..3) == 0 { Backing::Memfd } else { Backing::File };
        Self { victim, moment, backing, has_drives: rng.bool() }
    }
}

#[test]
fn a_kill_at_any_moment_leaves_one_guest() {
    if !require_lab("a_kill_at_any_moment_leaves_one_guest") {
        return;
    }
    let (runs, first) = (number("TOWLINE_UPGRADE_KILLS", RUNS), number("TOWLINE_UPGRADE_SEED", 1));
    let undisturbed =
        BTreeMap::from([Backing::File, Backing::Memfd].map(|backing| (backing, undisturbed(backing))));
    println!("an undisturbed upgrade takes {undisturbed:.1?}");
    let (mut failures, mut ends) = (Vec::new(), BTreeMap::<String, u64>::new());
    for seed in first..first + runs {
        let case = Case::of(seed);
        let begun = Instant::now();
        let outcome = run(&case, undisturbed[&case.backing]);
        println!("{seed} {case:?}: {outcome:?} in {:.1} s", begun.elapsed().as_secs_f64());
        let end = outcome.as_ref().map_or_else(|_| "FAILED".to_owned(), |found| kind(&case, found));
        *ends.entry(end).or_default() += 1;
        if let Err(fault) = outcome {
            failures.push(format!("TOWLINE_UPGRADE_SEED={seed} TOWLINE_UPGRADE_KILLS=1: {case:?}: {fault}"));
        }
    }
    ends.iter().for_each(|(end, count)| println!("{count:4} {end}"));
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

/// End of a run by its kind, for the sums.
fn kind(case: &Case, found: &str) -> String {
    let victim = match case.victim {
        Victim::Old => "the old QEMU",
        Victim::New => "the new QEMU",
        Victim::Towline => "towline",
    };
    let end = if found.starts_with("gone with its QEMU") {
        "the guest was only in that QEMU, and ended with it"
    } else if found.starts_with("paused") {
        "the guest is paused, and that is reported"
    } else if found.starts_with("old Runs") {
        "the guest runs in the old QEMU"
    } else {
        "the guest runs in the new QEMU"
    };
    format!("killed {victim}: {end}")
}

/// Duration of an upgrade of such a guest on this machine, so kills are not after its end.
fn undisturbed(backing: Backing) -> Duration {
    let scene = Scene::new(backing, true);
    let begun = Instant::now();
    towline_lab::expect::completed(&scene.upgrade().wait(WITHIN).unwrap());
    begun.elapsed()
}

fn run(case: &Case, undisturbed: Duration) -> Result<String, String> {
    let scene = Scene::new(case.backing, case.has_drives);
    let mut towline = scene.upgrade();
    match case.moment {
        Moment::AfterPercent(percent) => std::thread::sleep(undisturbed * percent / 100),
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

/// Upgrades a guest whose upgrade was aborted: after that nothing of the aborted one is left.
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
    let found = format!(
        "old {old:?}, new {new:?} (before {before:?}), exit status {code:?}{resumed}, stderr {stderr:?}"
    );
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
            scene.has_its_locks().map_err(|fault| format!("{fault}: {found}"))?;
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
        // Killed with the only QEMU that had it: the old one before the new one had everything, or the new
        // one after `cont`.
        _ if case.victim == Victim::Old
            && new != State::Paused
            && ["has ended, and the guest with it", "was not reached"]
                .iter()
                .any(|text| stderr.contains(text)) =>
        {
            Ok(format!("gone with its QEMU: {found}"))
        }
        _ if case.victim == Victim::New && code == Some(0) => Ok(format!("gone with its QEMU: {found}")),
        _ if case.victim == Victim::New
            && stderr.contains("its destination has ended: it may have run there") =>
        {
            Ok(format!("gone with its QEMU: {found}"))
        }
        (State::Paused, _) | (_, State::Paused) if code == Some(3) || !resumed.is_empty() => {
            Ok(format!("paused, and reported: {found}"))
        }
        _ => Err(format!("lost: {found}")),
    }
}
