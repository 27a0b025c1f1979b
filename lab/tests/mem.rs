//! `mem:` on the command line: a synthetic guest over every kind of endpoint, verified page by page, and real
//! guests into memory.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::expect::wait_transferred;
use towline_lab::{BootSector, Qemu, Towline, Version, require_lab, towline};

const WITHIN: Duration = Duration::from_secs(60);
const PAGES: u64 = 64 << 8;
/// Dirty tracking by the kernel where it has it; other machines run the same guest without a load. It writes less than a slow disk
/// takes.
const BUSY: &str = "mem:64M,dirty=4M,threads=2,seed=5";

fn copy(arguments: &[&str]) -> Towline {
    towline([&["copy", "--json"], arguments].concat()).unwrap()
}

fn completed(stdout: &str) -> Value {
    let events = stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.into_iter().find(|event| event["event"] == "completed").unwrap()
}

fn copied(arguments: &[&str]) -> Value {
    completed(&copy(arguments).wait_done(WITHIN).unwrap().stdout)
}

fn verified(completed: &Value) {
    assert_eq!(completed["memory"]["verified-pages"], PAGES, "{completed}");
    assert_eq!(completed["ram"]["total"], PAGES * 4096, "{completed}");
}

#[test]
fn a_synthetic_guest_is_verified_within_one_process() {
    for options in [
        &["--multifd-channels", "0"][..],
        &["--multifd-channels", "2"],
        &["--multifd-channels", "2", "--compression", "zstd"],
        &["--max-bandwidth", "200M"],
    ] {
        let completed = copied(&[&[BUSY, "mem:"], options].concat());
        verified(&completed);
        assert!(completed["memory"]["pages-written-by-load"].as_u64() > Some(0), "{completed}");
    }
    verified(&copied(&["mem:64M,backing=memfd", "mem:64M"]));
}

#[test]
fn a_synthetic_guest_goes_from_a_process_to_another() {
    for (options, room) in [(&["--multifd-channels", "3"][..], "mem:64M"), (&[], "mem:")] {
        let mut receiver = copy(&[&["tcp:127.0.0.1:0", room], options].concat());
        let address = receiver.listens_at(WITHIN).unwrap();
        let sent = copied(&[&[BUSY, address.as_str()], options].concat());
        assert_eq!(sent["destination-state"], "loaded");
        verified(&completed(&receiver.wait_done(WITHIN).unwrap().stdout));
    }
}

#[test]
fn a_synthetic_guest_survives_an_image() {
    let directory = TempDir::with_prefix("towline-lab-").unwrap();
    let image = directory.path().join("guest.img").to_str().unwrap().to_owned();
    copied(&[BUSY, &image]);
    verified(&copied(&["--verify", &image, "mem:"]));
    verified(&copied(&["--multifd-channels", "0", &image, "mem:64M"]));
}

/// An image that is truncated while it is sent is an error, whether the kernel reads its pages (lanes over
/// TCP) or towline itself (between two halves of one process, or hashed first).
#[test]
fn an_image_that_is_cut_short_under_way_is_an_error() {
    let directory = TempDir::with_prefix("towline-lab-").unwrap();
    let image = directory.path().join("guest.img").to_str().unwrap().to_owned();
    for options in [
        &["--multifd-channels", "0"][..],
        &["--multifd-channels", "2"],
        &["--multifd-channels", "0", "--verify"],
        &["--multifd-channels", "2", "--compression", "zstd"],
    ] {
        copied(&["--overwrite", "mem:64M", &image]);
        let mut towline = copy(&[&["--max-bandwidth", "8M", &image, "mem:"], options].concat());
        wait_transferred(&mut towline, 4 << 20, WITHIN);
        std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
        let finished = towline.wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{options:?}: {} {}", finished.status, finished.stderr);
        let text = format!("{image}: not all of it could be read: the file has 2097152 bytes, expected ");
        assert!(finished.stderr.contains(&text), "{options:?}: {}", finished.stderr);
    }
}

#[test]
fn memory_of_another_size_is_refused_on_both_sides() {
    let mut receiver = copy(&["tcp:127.0.0.1:0", "mem:32M"]);
    let address = receiver.listens_at(WITHIN).unwrap();
    let sender = copy(&["mem:64M", &address]).wait(WITHIN).unwrap();
    assert_eq!(sender.status.code(), Some(1), "{}", sender.stderr);
    assert!(sender.stderr.contains("gone: a synthetic guest ends with its process"), "{}", sender.stderr);
    let receiver = receiver.wait(WITHIN).unwrap();
    assert_eq!(receiver.status.code(), Some(1), "{}", receiver.stderr);
    assert!(receiver.stderr.contains("67108864 bytes of memory"), "{}", receiver.stderr);
}

#[test]
fn invalid_mem_options_are_refused_before_anything_is_created() {
    for (arguments, reason) in [
        (["mem:64M", "qmp:/nowhere"], "no QEMU can load it"),
        (["mem:64M", "null:"], "mem: receives a synthetic guest"),
        (["mem:", "mem:"], "mem: as SOURCE needs a size"),
        (["mem:64M", "mem:64M,dirty=1M"], "dirty is for a SOURCE"),
        (["mem:64M,speed=1", "mem:"], "expected dirty=BYTES"),
    ] {
        let refused = copy(&arguments).wait(WITHIN).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(reason), "{arguments:?}: {}", refused.stderr);
    }
}

#[test]
fn a_real_guests_memory_has_the_same_hash_in_memory() {
    let test = "a_real_guests_memory_has_the_same_hash_in_memory";
    if !require_lab(test) {
        return;
    }
    let guest = BootSector { words_per_page: 512, sweep_pages: 0, ..BootSector::default() };
    let qemu = Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(guest).start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu.qmp().execute("stop", Value::Null).unwrap();
    let source = format!("qmp:{}", qemu.qmp_path().display());
    let hash = |completed: &Value| {
        let blocks = completed["memory"]["blocks"].as_array().unwrap().clone();
        blocks.into_iter().find(|block| block["name"] == "pc.ram").unwrap()
    };
    let first = copied(&["--resume", &source, "mem:"]);
    assert_eq!(first["memory"]["verified-pages"], Value::Null);
    let first = hash(&first);
    assert_eq!(first["length"], 64 << 20);
    qemu.qmp().wait_status("postmigrate", WITHIN).unwrap();
    qemu.qmp().execute("cont", json!({})).unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu.qmp().execute("stop", Value::Null).unwrap();
    let second = hash(&copied(&["--multifd-channels", "0", &source, "mem:"]));
    assert_ne!(first["blake3"], second["blake3"], "the guest has counted between");
}
