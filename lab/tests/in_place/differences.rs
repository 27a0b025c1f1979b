//! Guests that arrive in a QEMU that maps an image: only what they have written since is sent.

use std::fs;

use serde_json::{Value, json};
use towline_lab::expect::{Scratch, completed, qmp};
use towline_lab::{LinuxGuest, Network, Qemu, Towline, Version, host_networks, require_lab, towline};

use crate::support::{Backend, MEMORY_MIB, MIB, Saved, WITHIN, copy, notices};

/// Bytes that the guest writes round and round.
const WRITTEN: u64 = 16 * MIB;

/// The guest in a QEMU that maps the image, which writes.
fn running(saved: &Saved) -> (Qemu, LinuxGuest) {
    let source = [saved.waiting(&saved.backend())];
    let finished = copy(&[], saved, &source);
    assert!(finished.status.success(), "{}", finished.stderr);
    let [source] = source;
    let mut linux = source.linux(WITHIN).unwrap();
    linux.dirty(WRITTEN, WRITTEN).unwrap();
    linux.wait_ticking(WITHIN).unwrap();
    (source, linux)
}

/// It runs on in this QEMU, with what it had before and what it has written since.
fn assert_continues_in(saved: &Saved, qemu: &Qemu) {
    qemu.qmp().wait_status("running", WITHIN).unwrap();
    saved.assert_runs_in(qemu);
    assert_eq!(qemu.linux(WITHIN).unwrap().check().unwrap(), WRITTEN / 4096);
}

/// Bytes of the guest's RAM that are private pages of this QEMU's mapping of the image.
fn private_bytes(qemu: &Qemu, saved: &Saved) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", qemu.pid())).unwrap();
    let (image, mut is_ram, mut kib) = (saved.path(), false, 0);
    for line in smaps.lines() {
        if let Some(anonymous) = line.strip_prefix("Anonymous:").filter(|_| is_ram) {
            kib += anonymous.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap();
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_ram = line.ends_with(image.to_str().unwrap());
        }
    }
    kib << 10
}

#[test]
fn a_move_to_a_qemu_that_maps_the_image_sends_what_was_written() {
    if !require_lab("a_move_to_a_qemu_that_maps_the_image_sends_what_was_written") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let (mut source, _) = running(&saved);
    for lanes in ["0", "4"] {
        let destination = saved.waiting(&saved.backend());
        let ends = [qmp(&source), qmp(&destination)];
        let words = ["move", "--json", "--multifd-channels", lanes, &ends[0], &ends[1]];
        let finished = towline(words).unwrap().wait(WITHIN).unwrap();
        completed(&finished);
        let notices = notices(&finished);
        assert!(notices.iter().any(|text| text.ends_with("only pages that differ are sent")), "{notices:?}");
        assert_continues_in(&saved, &destination);
        let private = private_bytes(&destination, &saved);
        println!("{lanes} lanes: {} KiB are private at the destination", private >> 10);
        assert!((WRITTEN..WRITTEN + 48 * MIB).contains(&private), "{private} bytes are private");
        source = destination;
    }
    saved.assert_intact();
}

/// Starts towline in the network of a host.
fn towline_on(host: &Network, words: &[&str]) -> Towline {
    Towline::start_after(&host.prefix(), words).unwrap()
}

/// The image is on both hosts, and only one of the two QEMUs could be asked about it.
#[test]
fn a_move_between_two_hosts_that_have_the_image_sends_what_was_written() {
    let test = "a_move_between_two_hosts_that_have_the_image_sends_what_was_written";
    if !require_lab(test) {
        return;
    }
    let Some([here, there]) = host_networks(test, ["10.0.9.1", "10.0.9.2"]) else { return };
    let saved = Saved::new(Version::V10_0);
    let (source, mut linux) = running(&saved);
    linux.stop_dirtying().unwrap();
    drop(linux);
    let private = private_bytes(&source, &saved);
    let destination = saved.waiting(&saved.backend());
    let (from, to) = (qmp(&source), qmp(&destination));
    let mut receiving = towline_on(&there, &["copy", "--json", "tcp:10.0.9.2:0", &to]);
    let address = receiving.listens_at(WITHIN).unwrap();
    let before = here.sent_bytes("link0").unwrap();
    completed(&towline_on(&here, &["move", "--json", &from, &address]).wait(WITHIN).unwrap());
    completed(&receiving.wait(WITHIN).unwrap());
    let sent = here.sent_bytes("link0").unwrap() - before;
    println!("{} KiB were sent, {} KiB were private at the source", sent >> 10, private >> 10);
    assert!(sent < private + 2 * MIB, "{sent} bytes were sent, {private} are private");
    assert_continues_in(&saved, &destination);
    saved.assert_intact();
}

/// Another image than the one that the source maps: nothing of it may stay in the guest.
#[test]
fn a_guest_that_arrives_on_another_image_is_itself() {
    if !require_lab("a_guest_that_arrives_on_another_image_is_itself") {
        return;
    }
    let (saved, other) = (Saved::new(Version::V10_0), Saved::of(Version::V10_0, 6));
    let (source, _) = running(&saved);
    let destination = other.waiting(&other.backend());
    let mut receiving = towline(["copy", "--json", "tcp:127.0.0.1:0", &qmp(&destination)]).unwrap();
    let address = receiving.listens_at(WITHIN).unwrap();
    completed(&towline(["move", "--json", &qmp(&source), &address]).unwrap().wait(WITHIN).unwrap());
    completed(&receiving.wait(WITHIN).unwrap());
    assert_continues_in(&saved, &destination);
    other.assert_intact();
}

/// QEMU takes the memory of a destination for zero until a lane has brought a page, and skips the first zero page.
#[test]
fn a_guest_that_arrives_in_old_memory_is_itself() {
    if !require_lab("a_guest_that_arrives_in_old_memory_is_itself") {
        return;
    }
    let (saved, place) = (Saved::new(Version::V10_0), Scratch::new());
    let (source, _) = running(&saved);
    for lanes in ["4", "0"] {
        let path = place.path(&format!("ram-{lanes}"));
        let old: Vec<u8> = (0..MIB).map(|byte| byte as u8 | 1).collect();
        fs::write(&path, old.repeat(usize::try_from(MEMORY_MIB).unwrap())).unwrap();
        let destination = saved.waiting(&Backend { path, offset: 0, properties: "share=on".into() });
        let ends = [qmp(&source), qmp(&destination)];
        let words = ["copy", "--json", "--paused", "--multifd-channels", lanes, &ends[0], &ends[1]];
        completed(&towline(words).unwrap().wait(WITHIN).unwrap());
        let (here, there) = (memory(&source, &place), memory(&destination, &place));
        let wrong = there.chunks(4096).zip(here.chunks(4096)).position(|(new, old)| new != old);
        assert_eq!(wrong, None, "{lanes} lanes: this page differs");
        source.qmp().execute("cont", Value::Null).unwrap();
    }
}

/// The memory of a guest that does not run.
fn memory(qemu: &Qemu, place: &Scratch) -> Vec<u8> {
    let path = place.path("memory");
    let save = json!({ "val": 0, "size": MEMORY_MIB * MIB, "filename": path });
    qemu.qmp().execute("pmemsave", save).unwrap();
    fs::read(path).unwrap()
}
