//! Many upgrades in a row of a guest that writes to its memory: the guest's downtime, and the bytes that are
//! moved.
//!
//! `TOWLINE_UPGRADES` is the number of upgrades, `TOWLINE_UPGRADE_MIB` the sizes of the guest's memory
//! (`512,1024`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use towline_lab::downtime::{self, Times};
use towline_lab::expect::{completed, number};
use towline_lab::{Qemu, Qmp, Version, require_lab, wait_until};

use crate::scene::{Backing, Scene};
use crate::support::{Guest, MIB, WITHIN, named_file};

const UPGRADES: u64 = 5;
const MEMORY_MIB: u64 = 256;
/// Bytes that the guest writes per second, and the length of the range that it writes.
const DIRTY_RATE: u64 = 64 * MIB;
const DIRTY_BYTES: u64 = 32 * MIB;

/// Downtime, in milliseconds, from which on the log of an upgrade is printed.
const OUTLIER_MS: f64 = 200.0;

/// Upgrades of one guest, one after the other.
pub(crate) struct Series<'a> {
    guest: &'a Guest,
    /// Monitor of the QEMU that has the guest; `None`: the first one's.
    monitor: Option<Qmp>,
    /// From STOP at the old QEMU to RESUME at the new one.
    pub(crate) downtime: Times,
    /// As the commands reported it.
    pub(crate) reported: Times,
    /// Of the whole command.
    pub(crate) whole: Times,
    /// Bytes that one upgrade moved at most.
    pub(crate) sent_max: u64,
}

impl<'a> Series<'a> {
    pub(crate) fn of(guest: &'a Guest) -> Self {
        guest.first.qmp().take_events();
        let (downtime, reported, whole) = (Times::default(), Times::default(), Times::default());
        Self { guest, monitor: None, downtime, reported, whole, sent_max: 0 }
    }

    /// Upgrades the guest to this program.
    pub(crate) fn upgrade(&mut self, program: &str, options: &[&str]) {
        let (guest, begun) = (self.guest, Instant::now());
        let mut towline = guest.upgrade(&[&["--qemu", program], options].concat(), &[]);
        let staged = wait_until("the new QEMU's monitor", WITHIN, || {
            let runs = towline.runs()?;
            let path = staged_monitor(guest.first.directory());
            let monitor = path.and_then(|path| Qmp::connect(&path, WITHIN).ok());
            assert!(monitor.is_some() || runs, "it ended: {}", towline.stderr());
            Ok(monitor)
        });
        let finished = towline.wait(WITHIN).unwrap();
        let event = completed(&finished);
        let new = staged.unwrap();
        self.whole.push(begun.elapsed().as_secs_f64() * 1e3);
        let time = downtime::milliseconds(self.monitor.as_ref().unwrap_or(guest.first.qmp()), &new);
        if time > OUTLIER_MS {
            // With TOWLINE_LOG=debug it has the times of each step.
            println!("{time:.1} ms: {}", finished.stderr);
        }
        self.downtime.push(time);
        self.reported.push(event["downtime"].as_f64().unwrap());
        self.sent_max = self.sent_max.max(event["ram"]["transferred"].as_u64().unwrap());
        self.monitor = Some(new);
    }
}

impl fmt::Display for Series<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { downtime, reported, whole, sent_max, .. } = self;
        write!(
            f,
            "STOP to RESUME {downtime}; reported {reported}; whole command {whole}; at most {sent_max} bytes moved"
        )
    }
}

/// The monitor of the new QEMU, which has a staging name until the old one has ended.
fn staged_monitor(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_staged = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".lab.qmp.towline-"))
    };
    entries.into_iter().find(is_staged)
}

/// Sizes of guests in MiB.
pub(crate) fn sizes() -> Vec<u64> {
    let Ok(text) = std::env::var("TOWLINE_UPGRADE_MIB") else { return vec![MEMORY_MIB] };
    let size = |size: &str| size.parse().unwrap_or_else(|_| panic!("TOWLINE_UPGRADE_MIB={text}"));
    text.split(',').map(size).collect()
}

#[test]
#[ignore = "nightly"]
fn upgrades_in_a_row_under_a_load_lose_nothing() {
    if !require_lab("upgrades_in_a_row_under_a_load_lose_nothing") {
        return;
    }
    let upgrades = usize::try_from(number("TOWLINE_UPGRADES", UPGRADES)).unwrap();
    for mib in sizes() {
        let guest = Guest::boot(|place| {
            let version = Version::V10_0;
            let builder = Qemu::builder(version).cpu("Nehalem").linux().processors(2);
            named_file(builder, version.machine(), place, mib)
        });
        guest.linux().dirty(DIRTY_RATE, DIRTY_BYTES).unwrap();
        let program = crate::support::program(Version::V10_0);
        let mut series = Series::of(&guest);
        (0..upgrades).for_each(|_| series.upgrade(&program, &[]));
        let mut linux = guest.linux();
        assert!(linux.stop_dirtying().unwrap() > 0);
        linux.check().unwrap();
        assert_eq!(linux.hash().unwrap(), guest.hash);
        println!("{upgrades} upgrades of {mib} MiB under {} MiB/s: {series}", DIRTY_RATE / MIB);
        assert!(series.sent_max <= MIB, "{} bytes were moved", series.sent_max);
    }
}

/// One virtual processor, which never stops to make random bytes and to write them into new pages.
#[test]
#[ignore = "nightly"]
fn upgrades_in_a_row_of_a_guest_that_writes_files_keep_its_memory() {
    if !require_lab("upgrades_in_a_row_of_a_guest_that_writes_files_keep_its_memory") {
        return;
    }
    let upgrades = usize::try_from(number("TOWLINE_UPGRADES", UPGRADES)).unwrap();
    let guest = Guest::boot(|place| {
        let version = Version::V10_0;
        named_file(Qemu::builder(version).cpu("Nehalem").linux(), version.machine(), place, 512)
    });
    let writes = "(while :; do head -c 4194304 /dev/urandom > /tmp/written; done) > /dev/null 2>&1 &";
    guest.linux().shell(writes, WITHIN).unwrap();
    let program = crate::support::program(Version::V10_0);
    let mut series = Series::of(&guest);
    (0..upgrades).for_each(|_| series.upgrade(&program, &[]));
    assert_eq!(guest.linux().hash().unwrap(), guest.hash);
    println!("{upgrades} upgrades of 512 MiB whose guest writes files: {series}");
    assert!(series.sent_max <= MIB, "{} bytes were moved", series.sent_max);
}

/// Each guest is another one, since its memory has a name after its first upgrade. Returns the bytes that one
/// upgrade moved at most.
fn upgrade_guests_in_memfds(backing: Backing) -> u64 {
    let upgrades = number("TOWLINE_UPGRADES", 2);
    let (mut gaps, mut sent_max) = (Times::default(), 0);
    for _ in 0..upgrades {
        let scene = Scene::new(backing, false);
        let gap = scene.watch();
        let event = completed(&scene.upgrade().wait(WITHIN).unwrap());
        gaps.push(gap.end().as_secs_f64() * 1e3);
        sent_max = sent_max.max(event["ram"]["transferred"].as_u64().unwrap());
        scene.has_its_monitor().unwrap();
    }
    println!(
        "{upgrades} guests, {backing:?}, longest interval of their counter: {gaps}; at most {sent_max} bytes moved"
    );
    sent_max
}

#[test]
fn guests_in_memfds_of_7_2_have_a_short_downtime() {
    if require_lab("guests_in_memfds_of_7_2_have_a_short_downtime") {
        let sent_max = upgrade_guests_in_memfds(Backing::MemfdOf7);
        assert!(sent_max <= MIB, "{sent_max} bytes were moved");
    }
}

/// QEMU 10.0 sends the pages of a memfd in any case.
#[test]
fn guests_in_memfds_of_10_0_continue() {
    if require_lab("guests_in_memfds_of_10_0_continue") {
        let sent_max = upgrade_guests_in_memfds(Backing::Memfd);
        assert!(sent_max > MIB, "{sent_max} bytes were moved");
    }
}
