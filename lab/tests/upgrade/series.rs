//! Many upgrades in a row of a guest that writes to its memory: the guest's standstill, and the bytes that are moved.
//!
//! `TOWLINE_UPGRADES` is the number of upgrades, `TOWLINE_UPGRADE_MIB` the sizes of the guest's memory (`512,1024`).

use std::path::{Path, PathBuf};
use std::time::Instant;

use towline_lab::expect::{completed, number};
use towline_lab::standstill::{self, Times};
use towline_lab::{Qemu, Qmp, Version, require_lab, wait_until};

use crate::support::{Guest, MIB, WITHIN, named_file};

const UPGRADES: u64 = 5;
const MEMORY_MIB: u64 = 256;
/// Bytes that the guest writes per second, and the length of the range that it writes.
const DIRTY_RATE: u64 = 64 * MIB;
const DIRTY_BYTES: u64 = 32 * MIB;

/// Standstill, in milliseconds, from which on the log of an upgrade is printed.
const OUTLIER_MS: f64 = 200.0;

/// Upgrades of one guest.
pub(crate) struct Series {
    /// From STOP at the old QEMU to RESUME at the new one.
    pub(crate) standstill: Times,
    /// Of the whole command.
    pub(crate) whole: Times,
    /// Bytes that one upgrade moved at most.
    pub(crate) sent_max: u64,
}

impl Series {
    /// Upgrades the guest to these programs, one after the other.
    pub(crate) fn run(guest: &Guest, programs: impl Iterator<Item = String>, options: &[&str]) -> Self {
        let (mut standstill, mut whole, mut sent_max) = (Times::default(), Times::default(), 0);
        guest.first.qmp().take_events();
        let mut monitor: Option<Qmp> = None;
        for program in programs {
            let begun = Instant::now();
            let mut towline = guest.upgrade(&[&["--qemu", &program], options].concat(), &[]);
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
            whole.push(begun.elapsed().as_secs_f64() * 1e3);
            let time = standstill::milliseconds(monitor.as_ref().unwrap_or(guest.first.qmp()), &new);
            if time > OUTLIER_MS {
                // With TOWLINE_LOG=debug it has the times of each step.
                println!("{time:.1} ms: {}", finished.stderr);
            }
            standstill.push(time);
            sent_max = sent_max.max(event["ram"]["transferred"].as_u64().unwrap());
            monitor = Some(new);
        }
        Self { standstill, whole, sent_max }
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
        let series = Series::run(&guest, std::iter::repeat_n(program, upgrades), &[]);
        let mut linux = guest.linux();
        assert!(linux.stop_dirtying().unwrap() > 0);
        linux.check().unwrap();
        assert_eq!(linux.hash().unwrap(), guest.hash);
        println!(
            "{upgrades} upgrades of {mib} MiB under {} MiB/s: STOP to RESUME {}; whole command {}; at most {} bytes moved",
            DIRTY_RATE / MIB,
            series.standstill,
            series.whole,
            series.sent_max
        );
        assert!(series.sent_max <= MIB, "{} bytes were moved", series.sent_max);
    }
}
