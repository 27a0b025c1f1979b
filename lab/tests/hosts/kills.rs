//! A process of a move to another host is killed, or the link between the hosts is cut, at a random moment. Afterwards the guest runs on
//! one host, or `resume` runs it on one: never two, none lost, and its disk is the one that it knows, moved with it or not.
//!
//! `TOWLINE_SOAK_HOST_KILLS` is the number of runs, `TOWLINE_SOAK_SEED` the first seed.

use std::thread::sleep;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::Value;
use towline_lab::expect::{assert_ended, completed, events, number, qmp};
use towline_lab::{Qmp, Towline, child, kill, running_qemu, wait_removed, wait_until};

use crate::disks::DISK_THERE;
use crate::support::{Hosts, WITHIN, WRITER, WRITTEN, assert_disk};

const RUNS: u64 = 6;
/// Approximate duration of an undisturbed run from its process's start, in milliseconds.
const RUN_MS: u64 = 1200;
/// Maximum delay of a kill after its phase, in microseconds.
const BEHIND_US: u64 = 20_000;
/// Silence after which the other host is taken for lost.
const PEER_TIMEOUT: &str = "2";

/// Phases of the switchover, as the guest's towline reports them.
const PHASES: [&str; 4] = ["transfer", "switchover", "release", "cut-over"];
/// The phase before them in which disks are copied.
const DISKS: &str = "disks";

/// Time of the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At this time after towline's start.
    After(Duration),
    /// At this time after the report of this phase.
    Behind(&'static str, Duration),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Towline,
    Ssh,
    Agent,
    Link,
}

/// A run.
struct Disturbance {
    victim: Victim,
    moment: Moment,
    moves_disk: bool,
    way: &'static [&'static str],
}

/// Ways of the guest: through both towlines, or from QEMU to QEMU, encrypted or not.
const WAYS: [&[&str]; 3] = [&[], &["--via", "direct"], &["--via", "direct", "--zero-copy-send", "on"]];

/// End of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Here,
    There,
    /// By `resume`, without a choice of its user.
    Resumed,
    /// By a choice of its user.
    Chosen,
}

/// A host of the guest, by the words before a towline on it.
struct Side<'a> {
    hosts: &'a Hosts,
    prefix: Vec<String>,
    monitor: std::path::PathBuf,
    agent: &'static str,
}

impl Side<'_> {
    /// Run state of the guest's QEMU; `None`: there is none.
    fn status(&self) -> Option<String> {
        let monitor = self.monitor.exists().then(|| Qmp::connect(&self.monitor, Duration::from_secs(2)).ok());
        monitor.flatten().and_then(|monitor| monitor.status().ok())
    }

    fn runs(&self) -> bool {
        self.status().as_deref() == Some("running")
    }

    fn towline(&self, words: &[&str]) -> Towline {
        self.hosts.towline_after(&self.prefix, words)
    }

    /// Runs `resume` for every undecided move of this host.
    fn resume(&self, options: &[&str]) {
        let listed = self.towline(&["moves", "--json"]).wait(WITHIN).unwrap();
        for event in events(&listed.stdout).iter().filter(|event| event["event"] == "move") {
            let words = [&["resume", event["id"].as_str().unwrap()], options].concat();
            self.towline(&words).wait(WITHIN).unwrap();
        }
    }

    /// The guest has its memory and its disk, and continues.
    fn assert_guest(&self) {
        let mut guest = self.hosts.agent(self.agent);
        guest.wait_ticking(WITHIN).unwrap();
        assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
        assert_disk(&mut guest);
    }

    /// Process of the guest's QEMU, unless it has ended.
    fn qemu(&self) -> Option<u32> {
        running_qemu(self.monitor.parent().unwrap())
    }

    /// Ends it. Returns true if it hung, as a destination may whose lanes are cut: each later move would be refused.
    fn end(&self) -> bool {
        let monitor = Qmp::connect(&self.monitor, Duration::from_secs(2)).ok();
        let hanging = self.qemu().filter(|_| monitor.is_none());
        if let Some(monitor) = monitor {
            let _ = monitor.execute("quit", Value::Null);
        } else if let Some(pid) = hanging {
            println!("QEMU {pid} of {} hangs, and is killed", self.monitor.display());
            kill(pid);
        }
        // Its monitor ends first.
        wait_until("the end of the guest", WITHIN, || Ok(self.qemu().is_none().then_some(()))).unwrap();
        self.resume(&["--forget"]);
        hanging.is_some()
    }
}

#[test]
fn a_kill_at_any_moment_leaves_one_guest() {
    let Some(mut hosts) = Hosts::new("a_kill_at_any_moment_leaves_one_guest") else { return };
    hosts.guest.as_mut().unwrap().shell(WRITER, WITHIN).unwrap();
    let image = hosts.place.path("web.img").display().to_string();
    completed(&hosts.towline(&["copy", "--json", &qmp(&hosts.source), &image]).wait(WITHIN).unwrap());
    hosts.source.kill().unwrap();
    let own = hosts.with_own_guests();
    let here = Side {
        prefix: own,
        monitor: hosts.place.path("towline/guests/web/qmp.sock"),
        agent: "here.web.agent",
        hosts: &hosts,
    };
    let there = Side {
        prefix: hosts.there.prefix(),
        monitor: hosts.there.path("/run/towline/guests/web/qmp.sock"),
        agent: "there.web.agent",
        hosts: &hosts,
    };
    let (runs, first) = (number("TOWLINE_SOAK_HOST_KILLS", RUNS), number("TOWLINE_SOAK_SEED", 1));
    for seed in first..first + runs {
        let mut rng = Rng::with_seed(seed);
        let victim = [Victim::Towline, Victim::Ssh, Victim::Agent, Victim::Link][rng.usize(..4)];
        let moment = if rng.bool() {
            Moment::After(Duration::from_millis(rng.u64(..RUN_MS)))
        } else {
            Moment::Behind(PHASES[rng.usize(..PHASES.len())], Duration::from_micros(rng.u64(..BEHIND_US)))
        };
        let moves_disk = rng.bool();
        let moment = match moment {
            Moment::Behind(_, time) if moves_disk && rng.u8(..4) == 0 => Moment::Behind(DISKS, time),
            moment => moment,
        };
        let way = WAYS[rng.usize(..WAYS.len())];
        let begun = Instant::now();
        let start = ["run", &image, "--name", "web", "--detach"];
        assert_ended(&hosts.with_guests(&here.prefix, &start, "here."), 0, &[]);
        let exit = disturbed(&hosts, &here, &Disturbance { victim, moment, moves_disk, way });
        let end = judged(&here, &there);
        println!(
            "{seed} {victim:?} {moment:?} {way:?}{}: exit {exit:?}, {end:?} in {:.1} s",
            if moves_disk { " with its disk" } else { "" },
            begun.elapsed().as_secs_f64()
        );
        let is_there = there.status().is_some();
        here.end();
        // The next agent would remove the disk of one that hangs.
        let is_there = there.end() || is_there;
        let disk = hosts.there.path(DISK_THERE);
        if is_there {
            let _ = std::fs::remove_file(disk);
        } else {
            wait_removed(&disk, WITHIN).unwrap();
        }
    }
}

/// Moves the guest, and kills the victim at this moment. Returns the exit status.
fn disturbed(hosts: &Hosts, here: &Side<'_>, what: &Disturbance) -> Option<i32> {
    let Disturbance { victim, moment, moves_disk, way } = *what;
    let (source, client) = (format!("qmp:{}", here.monitor.display()), hosts.there.client());
    let words =
        ["move", &source, "ssh:other/web", "--ssh", &client, "--peer-timeout", PEER_TIMEOUT, "--json"];
    let set = format!("drive.disk0.file={DISK_THERE}");
    let with_disk: &[&str] = if moves_disk { &["--with-disks", "--set", &set] } else { &[] };
    let words = [&words[..], way, with_disk].concat();
    let mut moving = hosts.start_with_guests(&here.prefix, &words, "there.");
    match moment {
        Moment::After(time) => sleep(time),
        Moment::Behind(phase, time) => {
            let phase = format!("\"phase\":\"{phase}\"");
            let is_there = || {
                let has_ended = !moving.runs()?;
                Ok((has_ended || moving.stdout().contains(&phase)).then_some(()))
            };
            wait_until("a phase of the move", WITHIN, is_there).unwrap();
            sleep(time);
        }
    }
    let pid = moving.pid();
    match victim {
        Victim::Towline => kill(pid),
        Victim::Ssh => child(pid, "ssh").into_iter().for_each(kill),
        Victim::Agent => hosts.there.agent().into_iter().for_each(kill),
        Victim::Link => hosts.cut(),
    }
    let finished = moving.wait(WITHIN).unwrap();
    if victim == Victim::Link {
        hosts.mend();
    }
    wait_until("the end of the agent", WITHIN, || Ok(hosts.there.agent().is_none().then_some(()))).unwrap();
    finished.status.code()
}

/// Where the guest is in the end.
fn judged(here: &Side<'_>, there: &Side<'_>) -> End {
    let one = |running: End| {
        assert!(!(here.runs() && there.runs()), "two guests run");
        match (here.runs(), there.runs()) {
            (true, false) => here.assert_guest(),
            (false, true) => there.assert_guest(),
            _ => return None,
        }
        Some(if running == End::Here && there.runs() { End::There } else { running })
    };
    // A source whose towline was killed resumes its guest by itself.
    let settled = || Ok((here.runs() || there.runs()).then_some(()));
    let _ = wait_until("a guest that runs", Duration::from_secs(3), settled);
    if let Some(end) = one(End::Here) {
        return end;
    }
    // Of a towline that was killed while its migration waited.
    let monitor = format!("qmp:{}", here.monitor.display());
    here.towline(&["repair", &monitor]).wait(WITHIN).unwrap();
    for side in [here, there, here] {
        side.resume(&[]);
    }
    if let Some(end) = one(End::Resumed) {
        return end;
    }
    // As a script that sees both hosts.
    if here.status().as_deref() == Some("postmigrate") {
        there.resume(&["--other-end", "done"]);
        here.resume(&["--other-end", "has-it"]);
    } else {
        there.resume(&["--run-here"]);
        here.resume(&["--discard"]);
    }
    if let Some(end) = one(End::Chosen) {
        return end;
    }
    panic!("no guest: {:?} here, {:?} there", here.status(), there.status());
}
