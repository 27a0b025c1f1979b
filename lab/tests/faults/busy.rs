//! A QEMU that is busy, not broken.

use std::time::Duration;

use towline_lab::{BootSector, Qemu, Version, require_lab};

use crate::support::{Fixture, WITHIN, qmp, save, signal, waiting};

/// A QEMU that loads an image itself does not answer until the load is done: a large guest, or a slow disk, is no
/// failure.
#[test]
fn a_slow_load_at_the_destination_is_no_failure() {
    if !require_lab("a_slow_load_at_the_destination_is_no_failure") {
        return;
    }
    let fixture = Fixture::new();
    let boot_sector = BootSector { fill_mib: 512, words_per_page: 1, ..BootSector::default() };
    let large = Qemu::builder(Version::V10_0).memory_mib(640).boot_sector(boot_sector);
    save(&fixture, large.clone(), "guest.img");
    let destination = waiting(&large);
    let resident = || -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", destination.pid())).unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    };
    let before = resident();
    let mut towline = fixture.towline(&format!("copy {} {}", fixture.name("guest.img"), qmp(&destination)));
    // Pages: the load has begun, and is far from its end.
    while resident() < before + 8192 {
        assert!(towline.runs().unwrap(), "{}", towline.stderr());
    }
    signal(destination.pid(), "-STOP");
    // Longer than the timeout of any other command.
    std::thread::sleep(Duration::from_secs(11));
    assert!(towline.runs().unwrap(), "{}", towline.stderr());
    signal(destination.pid(), "-CONT");
    towline.wait_done(WITHIN).unwrap();
    destination.wait_counting(WITHIN).unwrap();
}
