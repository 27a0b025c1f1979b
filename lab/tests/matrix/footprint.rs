//! Memory of towline itself: little, and no more for a bigger guest.

use std::time::Duration;

use towline_lab::{BootSector, Builder, Qemu, Towline, Version, require_lab, wait_until};

use crate::support::{Scratch, WITHIN, boot, prove_equal, qmp, start_copy, waiting};

/// Maximum memory of a copy with four lanes.
const OWN_BYTES_MAX: u64 = 96 << 20;
/// Environment variable with the guest's memory in MiB, for `cargo xtask soak rss`.
const MEMORY_MIB_VARIABLE: &str = "TOWLINE_SOAK_RSS_MIB";
const MEMORY_MIB: u64 = 1024;
/// Maximum memory of the small guest.
const FILL_MIB_MAX: u64 = 1900;
const COPY_WITHIN: Duration = Duration::from_secs(600);

/// Waits until towline exits; returns the maximum of its private memory. A mapped file does not count.
fn own_memory_peak(mut towline: Towline) -> u64 {
    let mut peak = 0;
    wait_until("end of towline", COPY_WITHIN, || {
        peak = peak.max(towline.own_memory().unwrap_or_default());
        Ok((!towline.runs()?).then_some(()))
    })
    .unwrap();
    towline.wait_done(WITHIN).unwrap();
    peak
}

#[test]
#[ignore = "nightly"]
fn a_copy_takes_little_memory() {
    if !require_lab("a_copy_takes_little_memory") {
        return;
    }
    let asked = std::env::var(MEMORY_MIB_VARIABLE);
    let memory_mib = asked.map_or(MEMORY_MIB, |asked| asked.parse().unwrap());
    let fill_mib = (memory_mib - memory_mib / 8).min(FILL_MIB_MAX);
    let guest = BootSector { fill_mib, words_per_page: 4, ..BootSector::default() };
    let builder = || -> Builder {
        Qemu::builder(Version::V10_0).cpu("Nehalem").memory_mib(memory_mib).boot_sector(guest)
    };
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let source = boot(builder());
    let saving = own_memory_peak(start_copy(&["--multifd-channels", "4", &qmp(&source), &image]));
    let destination = waiting(builder());
    let restoring = own_memory_peak(start_copy(&[
        "--multifd-channels",
        "4",
        "--stream",
        "--verify",
        "--paused",
        &image,
        &qmp(&destination),
    ]));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "a guest of {memory_mib} MiB, {fill_mib} filled: saving takes {:.1} MiB, restoring {:.1} MiB",
        mib(saving),
        mib(restoring)
    );
    prove_equal(&source, &destination);
    for peak in [saving, restoring] {
        assert!(peak > 0, "it was never looked at");
        assert!(peak < OWN_BYTES_MAX, "{:.1} MiB", mib(peak));
    }
}
