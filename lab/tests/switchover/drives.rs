//! Guests with a drive: QEMU's locks on it are the source's until the destination runs the guest.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use towline_lab::{Builder, Flow, Qemu, Towline, Version, require_lab, skip, towline_binary, wait_until};

use crate::records::{Killed, cut_between, has_hosts};
use crate::support::{
    SHUT, Scratch, WITHIN, assert_ended, assert_runs_only_in, counting, end, qmp, small, waiting,
};

/// Versions of the source and of the destination, which both have the machine type.
const PAIRS: [(Version, Version); 3] =
    [(Version::V10_0, Version::V7_2), (Version::V7_2, Version::V7_2), (Version::V7_2, Version::V10_0)];

/// A small guest with a drive of this format.
fn with_drive(version: Version, format: &str, place: &Scratch) -> Builder {
    let path = place.text("drive");
    if !Path::new(&path).exists() {
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format, &path, "16M"]).status();
        assert!(made.unwrap().success());
    }
    small(version).machine(Version::V7_2.machine()).cpu("Nehalem").args([
        "-drive".to_owned(),
        format!("file={path},format={format},if=none,id=drive"),
        "-device".to_owned(),
        "virtio-blk-pci,drive=drive".to_owned(),
    ])
}

/// Asserts that a QEMU has the drive, and that it is this one: no other is left.
#[track_caller]
fn assert_has_drive(qemu: &Qemu, other: Qemu, format: &str, place: &Scratch) {
    drop(other);
    let path = place.text("drive");
    let found = Command::new("qemu-io").args(["-f", format, "-c", "quit", &path]).output().unwrap();
    let text = String::from_utf8_lossy(&found.stderr) + String::from_utf8_lossy(&found.stdout);
    assert!(!found.status.success() && text.contains("lock"), "the drive is not locked: {text}");
    qemu.wait_counting(WITHIN).unwrap();
}

/// Starts a move with a `/run` that is full.
fn move_with_full_run(source: &Qemu, destination: &Qemu, options: &str) -> Towline {
    // Journals that cannot be written are disabled.
    let script = "mount -t tmpfs -o size=64k,mode=755 tmpfs /run && mkdir -p /run/towline && mkdir -m 700 /run/towline/journal \
        && ! dd if=/dev/zero of=/run/filler bs=4k 2>/dev/null; exec \"$@\"";
    let binary = towline_binary().unwrap().display().to_string();
    let (from, to) = (qmp(source), qmp(destination));
    let by = ["--mount", "sh", "-c", script, "sh", &binary, "move", "--json", "--multifd-channels", "0"];
    let line = by.into_iter().chain(options.split_whitespace()).chain([from.as_str(), &to]);
    Towline::start(Path::new("/usr/bin/unshare"), line).unwrap()
}

/// Returns true if a full `/run` can be mounted; if not, prints the skip of `name`.
fn has_full_run(name: &str) -> bool {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        skip(name, "only root may mount a file system that is full");
        return false;
    }
    has_hosts(name)
}

/// The destination has loaded the guest, and the decision cannot be recorded.
#[test]
fn a_source_gets_its_guest_back_with_its_drive_after_a_move_that_is_not_recorded() {
    if !has_full_run("a_source_gets_its_guest_back_with_its_drive_after_a_move_that_is_not_recorded") {
        return;
    }
    for ((from, to), format) in PAIRS.into_iter().zip(["qcow2", "raw", "qcow2"]) {
        let place = Scratch::new();
        let source = counting(&with_drive(from, format, &place));
        let destination = waiting(&with_drive(to, format, &place));
        let finished = end(move_with_full_run(&source, &destination, ""));
        assert_ended(&finished, 1, &["No space left", "safe at its source"]);
        assert_runs_only_in(&source, &destination);
        assert_has_drive(&source, destination, format, &place);
    }
}

/// The destination's acknowledgement does not arrive.
#[test]
fn a_source_gets_its_guest_back_with_its_drive_after_a_cut() {
    if !has_hosts("a_source_gets_its_guest_back_with_its_drive_after_a_cut") {
        return;
    }
    for (from, to) in PAIRS {
        let place = Scratch::new();
        let builders = [from, to].map(|version| with_drive(version, "qcow2", &place));
        let cut = cut_between("move", &builders, Flow::ToSource, SHUT, Killed::Nobody);
        assert_runs_only_in(&cut.source, &cut.destination);
        assert_has_drive(&cut.source, cut.destination, "qcow2", &place);
    }
}

/// Another party resumes it there while it is loaded; then the move fails.
#[test]
fn cont_at_a_loading_destination_does_not_run_the_guest() {
    if !has_full_run("cont_at_a_loading_destination_does_not_run_the_guest") {
        return;
    }
    for version in [Version::V7_2, Version::V10_0] {
        let builder = small(version).cpu("Nehalem");
        let (source, destination) = (counting(&builder), waiting(&builder));
        let towline = move_with_full_run(&source, &destination, "--max-bandwidth 2M");
        wait_until("a loading destination", WITHIN, || {
            let migration = destination.qmp().execute("query-migrate", Value::Null)?;
            Ok((migration["status"] == "active").then_some(()))
        })
        .unwrap();
        destination.qmp().execute("cont", Value::Null).unwrap();
        assert_ended(&end(towline), 1, &["No space left", "safe at its source"]);
        assert_runs_only_in(&source, &destination);
        assert_eq!(destination.qmp().status().unwrap(), "paused");
    }
}

/// QEMU 7.2 aborts if the drives of such a guest are inactive.
#[test]
fn a_guest_that_arrived_paused_with_a_drive_can_be_saved() {
    if !require_lab("a_guest_that_arrived_paused_with_a_drive_can_be_saved") {
        return;
    }
    for version in [Version::V7_2, Version::V10_0] {
        let place = Scratch::new();
        let source = counting(&with_drive(Version::V10_0, "qcow2", &place));
        let destination = waiting(&with_drive(version, "qcow2", &place));
        let run = |arguments: &str| end(crate::support::start(arguments));
        assert_ended(&run(&format!("move --paused {} {}", qmp(&source), qmp(&destination))), 0, &[]);
        assert!(source.wait_exit(WITHIN).unwrap().success());
        assert_eq!(destination.qmp().status().unwrap(), "paused");
        assert_ended(&run(&format!("copy {} {}", qmp(&destination), place.text("guest.img"))), 0, &[]);
        destination.qmp().execute("cont", Value::Null).unwrap();
        destination.qmp().wait_status("running", WITHIN).unwrap();
        destination.wait_counting(WITHIN).unwrap();
    }
}

/// A cancellation when the destination has loaded the guest.
#[test]
fn a_source_gets_its_guest_back_with_its_drive_after_a_cancellation() {
    if !has_hosts("a_source_gets_its_guest_back_with_its_drive_after_a_cancellation") {
        return;
    }
    for (from, to) in PAIRS {
        let place = Scratch::new();
        let builders = [from, to].map(|version| with_drive(version, "raw", &place));
        let cut = cut_between("move", &builders, Flow::ToSource, SHUT, Killed::Interrupted);
        assert_runs_only_in(&cut.source, &cut.destination);
        assert_has_drive(&cut.source, cut.destination, "raw", &place);
    }
}
