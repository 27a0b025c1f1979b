//! Standbys that stop or die while one of them takes a recorded guest over.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use serde_json::Value;
use towline_lab::counting::make_ext4;
use towline_lab::expect::number;
use towline_lab::{Towline, require_lab, signal, wait_until};

use crate::forks::with_disk_of;
use crate::record::{RECORD, wait_stored};
use crate::support::{Saved, WITHIN};

/// Longest chain of overlays, of which each takeover adds one.
const TAKEOVERS_MAX: u64 = 8;
const STANDBYS: usize = 3;
/// Milliseconds between the word that the host is off and what happens to a first standby, and from that to a second one.
const HAPPENS_MS: Range<u64> = 0..300;
/// Milliseconds for which standbys are stopped.
const LASTS_MS: Range<u64> = 100..3000;
/// Exit statuses of a record whose guest was taken over, or died.
const RECORD_ENDS: [Option<i32>; 2] = [Some(3), Some(7)];

/// A guest that is taken over time and again.
struct Chain {
    saved: Saved,
    guest: String,
    takeovers: u64,
}

impl Chain {
    fn new() -> Self {
        let saved = with_disk_of(make_ext4);
        saved.agent("web").begin_to_count();
        Self { saved, guest: "web".into(), takeovers: 0 }
    }

    /// Its host is off, and standbys stop or die meanwhile: the guest runs on, and only once.
    fn taken_over(&mut self, seed: u64) {
        let random = &mut Rng::with_seed(seed);
        let mut record = self.saved.record(&self.guest, RECORD, &["--every", "300ms"]);
        wait_stored(&mut record, 2);
        let off = self.saved.path(&format!("off-{seed}"));
        let mut standbys = self.standbys(seed, &off);
        let is_late = random.bool();
        if is_late {
            signal(record.pid(), Signal::STOP);
        }
        self.saved.kill(&self.guest);
        self.saved.wait_for_guests(&[]);
        fs::write(&off, "").unwrap();
        let happened = disturb(&mut standbys, random);
        if is_late {
            signal(record.pid(), Signal::CONT);
        }
        self.takeovers += 1;
        let is_marked = self.decide();
        println!(
            "  seed {seed}: {happened}; {} runs, {}",
            self.guest,
            if is_marked { "marked" } else { "not marked" }
        );
        self.assert_ended(standbys, is_marked);
        let record = record.wait(WITHIN).unwrap();
        let ends = if is_marked { &RECORD_ENDS[..] } else { &RECORD_ENDS[1..] };
        assert!(ends.contains(&record.status.code()), "{:?} {}", record.status, record.stderr);
        self.saved.agent(&self.guest).wait_ticking(WITHIN).unwrap();
        assert_eq!(self.saved.guests(), [self.guest.as_str()]);
    }

    /// The guest has counted through all takeovers, and the same in its memory and on its disk.
    fn end(self) {
        let count = self.saved.agent(&self.guest).assert_counted(&self.guest);
        println!("  {} after {} takeovers: it has counted to {count}", self.guest, self.takeovers);
        self.saved.quit(&self.guest);
    }

    /// Standbys, once each has asked whether the host is off.
    fn standbys(&self, seed: u64, off: &Path) -> Vec<Option<Towline>> {
        let after = self.takeovers.to_string();
        let standby = |n| {
            let asked = self.saved.path(&format!("asked-{seed}-{n}"));
            let arbiter = format!("exec:echo >> {}; test -e {}", asked.display(), off.display());
            let options = ["--arbiter", &arbiter, "--every", "50ms", "--after", &after];
            (asked, Some(self.saved.standby(&format!("web-{seed}-{n}"), &options)))
        };
        let (asked, standbys): (Vec<PathBuf>, _) = (0..STANDBYS).map(standby).unzip();
        wait_until("the standbys", WITHIN, || Ok(asked.iter().all(|file| file.exists()).then_some(())))
            .unwrap();
        standbys
    }

    /// Waits until the guest runs, as their operator who ends what dead standbys have begun. False: one that died has not marked it as running.
    fn decide(&mut self) -> bool {
        let takeover = self.saved.path(RECORD).join(format!("takeovers/{}.json", self.takeovers));
        let (guest, is_marked) = wait_until("a guest", WITHIN, || {
            let guests = self.saved.guests();
            assert!(guests.len() <= 1, "{guests:?}");
            let holder: Value =
                serde_json::from_slice(&fs::read(&takeover).unwrap_or_default()).unwrap_or_default();
            let lives = |pid: &u64| PathBuf::from(format!("/proc/{pid}")).exists();
            match (guests.into_iter().next(), holder["pid"].as_u64()) {
                (Some(guest), _) if holder["runs"] == true => return Ok(Some((guest, true))),
                (guest, Some(pid)) if !lives(&pid) => {
                    if let Some(guest) = guest {
                        if self.saved.monitor(&guest).status()? == "running" {
                            return Ok(Some((guest, false)));
                        }
                        self.saved.quit(&guest);
                        self.saved.wait_for_guests(&[]);
                    }
                    println!("  {}: process {pid} died", takeover.display());
                    fs::remove_file(&takeover)?;
                }
                _ => {}
            }
            Ok(None)
        })
        .unwrap();
        self.guest = guest;
        is_marked
    }

    /// One of the standbys that live has the guest, and the others know.
    fn assert_ended(&self, standbys: Vec<Option<Towline>>, is_marked: bool) {
        let (mut won, all_live) = (0, standbys.iter().all(Option::is_some));
        for mut standby in standbys.into_iter().flatten() {
            if !is_marked {
                assert!(standby.runs().unwrap(), "{}{}", standby.stdout(), standby.stderr());
                continue;
            }
            let ended = standby.wait(WITHIN).unwrap();
            won += usize::from(ended.status.success());
            assert!(
                ended.status.success() || ended.stderr.contains("has taken the guest over"),
                "{}{}",
                ended.stdout,
                ended.stderr
            );
        }
        assert!(won <= 1 && (won == 1 || !all_live));
    }
}

/// One or two standbys stop for a while, or die. Returns what has happened.
fn disturb(standbys: &mut [Option<Towline>], random: &mut Rng) -> String {
    let (mut happened, mut stopped) = (Vec::new(), Vec::new());
    for _ in 0..random.usize(1..=2) {
        sleep(Duration::from_millis(random.u64(HAPPENS_MS)));
        let n = random.usize(..standbys.len());
        let Some(standby) = &mut standbys[n] else { continue };
        if !standby.runs().unwrap() {
            happened.push(format!("{n} had ended"));
        } else if random.bool() {
            standby.kill().unwrap();
            standbys[n] = None;
            happened.push(format!("{n} dies"));
        } else {
            signal(standby.pid(), Signal::STOP);
            stopped.push(standby.pid());
            happened.push(format!("{n} stops"));
        }
    }
    if !stopped.is_empty() {
        sleep(Duration::from_millis(random.u64(LASTS_MS)));
    }
    for standby in standbys.iter().flatten().filter(|standby| stopped.contains(&standby.pid())) {
        signal(standby.pid(), Signal::CONT);
    }
    happened.join(", ")
}

/// `cargo xtask soak standby-disturbances` does so 100 times.
#[test]
#[ignore = "nightly"]
fn a_guest_runs_once_whatever_happens_to_its_standbys() {
    if !require_lab("a_guest_runs_once_whatever_happens_to_its_standbys") {
        return;
    }
    let first = number("TOWLINE_SOAK_SEED", 1);
    let mut chain = None;
    for seed in first..first + number("TOWLINE_SOAK_STANDBYS", 3) {
        let mut now = chain.take().unwrap_or_else(Chain::new);
        now.taken_over(seed);
        if now.takeovers < TAKEOVERS_MAX {
            chain = Some(now);
        } else {
            now.end();
        }
    }
    chain.into_iter().for_each(Chain::end);
}
