//! Tests of the lab itself: both QEMUs, both guests, and a migration by stock QEMU alone.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_lab::{BootSector, Builder, LinuxGuest, MemoryBackend, Qemu, Version, require_lab, wait_until};
use twox_hash::XxHash64;

const WITHIN: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// QEMU to QEMU over a Unix socket, without towline. The destination stays paused.
fn migrate(source: &Qemu, destination: Builder) -> Qemu {
    let socket = source.directory().join("migration");
    let uri = format!("unix:{}", socket.display());
    let destination = destination.incoming(&uri).paused().start().unwrap();
    source.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 })).unwrap();
    source.qmp().execute("migrate", json!({ "uri": uri })).unwrap();
    source.qmp().wait_migration("completed", WITHIN).unwrap();
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    destination
}

fn boot_sector_counts(name: &str, version: Version) {
    if !require_lab(name) {
        return;
    }
    let guest = BootSector { fill_mib: 64, words_per_page: 1024, ..BootSector::default() };
    let started = Instant::now();
    let qemu = Qemu::builder(version).boot_sector(guest).start().unwrap();
    let monitor = started.elapsed();
    qemu.wait_counting(WITHIN).unwrap();
    println!("{version:?}: monitor after {monitor:?}, boot sector counts after {:?}", started.elapsed());
    qemu.qmp().execute("stop", Value::Null).unwrap();
    let counter = qemu.counter().unwrap();
    qemu.check_filled().unwrap();
    assert_eq!(qemu.counter().unwrap(), counter, "a stopped guest does not count");
    let behind = BootSector::FILL_ADDRESS + 64 * MIB;
    assert!(qemu.read_memory(behind, MIB).unwrap().iter().all(|byte| *byte == 0), "the rest is zero");
    qemu.qmp().wait_event("STOP", WITHIN).unwrap();
    qemu.qmp().execute("cont", Value::Null).unwrap();
    qemu.qmp().wait_event("RESUME", WITHIN).unwrap();
    assert!(qemu.wait_counting(WITHIN).unwrap() > counter);
}

#[test]
fn boot_sector_counts_on_qemu_10_0() {
    boot_sector_counts("boot_sector_counts_on_qemu_10_0", Version::V10_0);
}

#[test]
fn boot_sector_counts_on_qemu_7_2() {
    boot_sector_counts("boot_sector_counts_on_qemu_7_2", Version::V7_2);
}

fn linux_obeys(name: &str, version: Version) {
    if !require_lab(name) {
        return;
    }
    let started = Instant::now();
    let (qemu, mut guest) = Qemu::builder(version).linux().processors(2).boot(WITHIN).unwrap();
    println!("{version:?}: Linux answers after {:?}", started.elapsed());
    guest.wait_ticking(WITHIN).unwrap();
    let started = Instant::now();
    guest.fill(64 * MIB, 7).unwrap();
    let (took, started) = (started.elapsed(), Instant::now());
    let hash = guest.hash().unwrap();
    println!("{version:?}: 64 MiB filled in {took:?}, hashed in {:?}", started.elapsed());
    guest.fill(64 * MIB, 8).unwrap();
    assert_ne!(guest.hash().unwrap(), hash, "another seed is another pattern");
    guest.zero(MIB).unwrap();
    let zeros = XxHash64::oneshot(0, &vec![0; MIB as usize]);
    assert_eq!(guest.hash().unwrap(), format!("{:016x}", XxHash64::oneshot(0, &zeros.to_le_bytes())));
    dirties(&mut guest);
    let refusal = guest.request("fill 1 1", WITHIN).unwrap_err().to_string();
    assert_eq!(refusal, "the guest refused `fill 1 1`: 1 bytes, expected a multiple of 4096");
    assert_eq!(guest.shell("echo a; echo 'b\\'", WITHIN).unwrap(), "a\nb\\\n");
    let address = guest.tick_address().unwrap();
    let tick = guest.tick().unwrap();
    assert!(qemu.read_u64(address).unwrap() >= tick, "QEMU and the agent see the same counter");
}

fn dirties(guest: &mut LinuxGuest) {
    guest.dirty(16 * MIB, 8 * MIB).unwrap();
    wait_until("a second round", WITHIN, || Ok((guest.dirtied_pages()? > 2048).then_some(()))).unwrap();
    assert_eq!(guest.check().unwrap(), 2048);
    let written = guest.stop_dirtying().unwrap();
    assert_eq!(guest.dirtied_pages().unwrap(), written, "nothing is written after the end");
    assert_eq!(guest.check().unwrap(), 2048);
}

#[test]
fn the_agent_works_on_qemu_10_0() {
    linux_obeys("the_agent_works_on_qemu_10_0", Version::V10_0);
}

#[test]
fn the_agent_works_on_qemu_7_2() {
    linux_obeys("the_agent_works_on_qemu_7_2", Version::V7_2);
}

#[test]
fn boot_sector_moves_with_equal_memory() {
    if !require_lab("boot_sector_moves_with_equal_memory") {
        return;
    }
    for (backend, machine) in [
        (MemoryBackend::Default, "pc-q35-10.0"),
        (MemoryBackend::Memfd { prealloc: false }, "pc-i440fx-10.0"),
    ] {
        let builder = Qemu::builder(Version::V10_0).machine(machine).boot_sector(BootSector::default());
        let source = builder.clone().memory_backend(backend).start().unwrap();
        source.wait_counting(WITHIN).unwrap();
        let destination = migrate(&source, builder);
        assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
        let counter = source.counter().unwrap();
        assert_eq!(destination.counter().unwrap(), counter);
        assert_eq!(destination.check_filled().unwrap(), source.check_filled().unwrap());
        destination.qmp().execute("cont", Value::Null).unwrap();
        assert!(destination.wait_counting(WITHIN).unwrap() > counter);
        assert_eq!(source.ram_blocks().unwrap(), destination.ram_blocks().unwrap());
    }
}

#[test]
fn boot_sector_moves_from_7_2_to_10_0() {
    if !require_lab("boot_sector_moves_from_7_2_to_10_0") {
        return;
    }
    let builder = |version| {
        let builder = Qemu::builder(version).machine("pc-q35-7.2").cpu("Nehalem");
        builder.boot_sector(BootSector::default())
    };
    let source = builder(Version::V7_2).start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    let destination = migrate(&source, builder(Version::V10_0));
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    destination.qmp().execute("cont", Value::Null).unwrap();
    destination.wait_counting(WITHIN).unwrap();
}

#[test]
fn linux_moves_with_its_memory_and_its_agent() {
    if !require_lab("linux_moves_with_its_memory_and_its_agent") {
        return;
    }
    // A part of the memory above 4 GiB, without the gigabytes that q35 would need for that.
    let machine = "pc-q35-10.0,max-ram-below-4g=256M";
    let builder = Qemu::builder(Version::V10_0).machine(machine).linux().memory_mib(512).processors(2);
    let (source, mut guest) = builder.boot(WITHIN).unwrap();
    guest.fill(64 * MIB, 3).unwrap();
    guest.dirty(4 * MIB, 4 * MIB).unwrap();
    let (hash, tick) = (guest.hash().unwrap(), guest.tick().unwrap());
    let destination = migrate(&source, builder);
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    destination.qmp().execute("cont", Value::Null).unwrap();
    let mut guest = destination.linux(WITHIN).unwrap();
    assert!(guest.wait_ticking(WITHIN).unwrap() > tick);
    assert_eq!(guest.hash().unwrap(), hash);
    guest.check().unwrap();
    guest.stop_dirtying().unwrap();
    guest.check().unwrap();
}

#[test]
fn a_qemu_that_does_not_start_reports_the_reason() {
    if !require_lab("a_qemu_that_does_not_start_reports_the_reason") {
        return;
    }
    let error = Qemu::builder(Version::V10_0).machine("no-such-machine").start().err().unwrap();
    let error = format!("{error:#}");
    assert!(error.contains("no-such-machine"), "{error}");
    assert!(error.contains("QEMU ended with"), "{error}");
}

#[test]
fn a_dropped_qemu_leaves_no_process_and_no_files() {
    if !require_lab("a_dropped_qemu_leaves_no_process_and_no_files") {
        return;
    }
    // Started by a thread that ends, as helpers of tests do: the guest must live on.
    let start = || Qemu::builder(Version::V10_0).boot_sector(BootSector::default()).start().unwrap();
    let qemu = std::thread::spawn(start).join().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    let (pid, directory) = (qemu.pid(), qemu.directory().to_owned());
    drop(qemu);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(!directory.exists());
}
