//! Many upgrades in a row of a guest that writes to its memory: the guest's standstill, and the bytes that are moved.
//!
//! `TOWLINE_UPGRADES` is the number of upgrades, `TOWLINE_UPGRADE_MIB` the size of the guest's memory, and
//! `TOWLINE_UPGRADE_QEMU` a program other than 10.0 for every second one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::expect::{completed, number};
use towline_lab::{Qemu, Qmp, Version, require_lab, wait_until};

use crate::support::{Guest, MIB, WITHIN, named_file};

const UPGRADES: u64 = 5;
const MEMORY_MIB: u64 = 256;
/// Bytes that the guest writes per second, and the length of the range that it writes.
const DIRTY_RATE: u64 = 64 * MIB;
const DIRTY_BYTES: u64 = 32 * MIB;

/// The monitor of the new QEMU, which has a staging name until the old one has ended.
fn staged_monitor(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_staged = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".lab.qmp.towline-"))
    };
    entries.into_iter().find(is_staged)
}

fn milliseconds(event: &Value) -> f64 {
    let part = |name: &str| event["timestamp"][name].as_f64().unwrap();
    part("seconds") * 1e3 + part("microseconds") / 1e3
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

#[test]
fn upgrades_in_a_row_under_a_load_lose_nothing() {
    if !require_lab("upgrades_in_a_row_under_a_load_lose_nothing") {
        return;
    }
    let (upgrades, mib) = (number("TOWLINE_UPGRADES", UPGRADES), number("TOWLINE_UPGRADE_MIB", MEMORY_MIB));
    let guest = Guest::boot(|place| {
        let version = Version::V10_0;
        let builder = Qemu::builder(version).cpu("Nehalem").linux().processors(2);
        named_file(builder, version.machine(), place, mib)
    });
    guest.linux().dirty(DIRTY_RATE, DIRTY_BYTES).unwrap();
    guest.first.qmp().take_events();
    let mut monitor: Option<Qmp> = None;
    let (mut times, mut sent, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..upgrades {
        let begun = Instant::now();
        let towline = guest.upgrade(&["--qemu", &crate::support::program(Version::V10_0)], &[]);
        let staged = wait_until("the new QEMU's monitor", WITHIN, || {
            let path = staged_monitor(guest.first.directory());
            Ok(path.and_then(|path| Qmp::connect(&path, WITHIN).ok()))
        });
        let new = staged.unwrap();
        let event = completed(&towline.wait(WITHIN).unwrap());
        whole.push(begun.elapsed().as_secs_f64() * 1e3);
        let old = monitor.as_ref().unwrap_or(guest.first.qmp());
        let stopped = old.wait_event("STOP", Duration::from_secs(5)).unwrap();
        let resumed = new.wait_event("RESUME", Duration::from_secs(5)).unwrap();
        times.push(milliseconds(&resumed) - milliseconds(&stopped));
        sent.push(event["ram"]["transferred"].as_u64().unwrap());
        monitor = Some(new);
    }
    let mut linux = guest.linux();
    assert!(linux.stop_dirtying().unwrap() > 0);
    linux.check().unwrap();
    assert_eq!(linux.hash().unwrap(), guest.hash);
    times.sort_by(f64::total_cmp);
    whole.sort_by(f64::total_cmp);
    let most = sent.iter().max().unwrap();
    println!(
        "{upgrades} upgrades of {mib} MiB under {} MiB/s: STOP to RESUME p50 {:.1} ms, p99 {:.1} ms, {:.1} to {:.1} ms; whole \
         command p50 {:.0} ms; at most {most} bytes moved",
        DIRTY_RATE / MIB,
        percentile(&times, 50),
        percentile(&times, 99),
        times[0],
        times[times.len() - 1],
        percentile(&whole, 50),
    );
    assert!(*most <= MIB, "{most} bytes were moved");
}
