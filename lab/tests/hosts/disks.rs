//! Disks that move with their guest.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::{assert_ended, completed, qmp, wait_event};
use towline_lab::{Qmp, Version, child, command_after, require_qemu, signal, wait_removed, wait_until};

use crate::support::{Hosts, MIB, WITHIN, WRITER, assert_disk, last, with_disk, with_disk_of};

/// Where the guest's disk is on the other host, whose files in `/run` are its own.
pub(crate) const DISK_THERE: &str = "/run/web.raw";
/// Bytes that QEMU copies at once, at least.
const PART: usize = 64 << 10;

/// Options for a guest that moves to a QEMU that is started there, with a disk of its own.
pub(crate) fn with_disks(hosts: &Hosts) -> Vec<String> {
    let set = format!("drive.disk0.file={DISK_THERE}");
    let further = ["--with-disks", "--set", &set, "--json"];
    hosts.start_options().into_iter().chain(further.map(str::to_owned)).collect()
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

#[test]
fn a_guest_moves_with_its_disk_while_it_writes() {
    let Some(mut hosts) = Hosts::new("a_guest_moves_with_its_disk_while_it_writes") else { return };
    let options = with_disks(&hosts);
    let options = words(&options);
    hosts.guest.as_mut().unwrap().shell(WRITER, WITHIN).unwrap();
    let checked = hosts.run("check", "/web", &options);
    assert_ended(&checked, 0, &[]);
    assert_eq!(last(&checked)["verdict"], "yes-with-notes", "{}", checked.stdout);
    hosts.assert_stays();
    let there = hosts.there.path(DISK_THERE);
    assert!(!there.exists(), "a check leaves nothing");
    let tick = hosts.last_tick();
    let moved = hosts.run("move", "/web", &[&options[..], &["--paused"]].concat());
    completed(&moved);
    assert!(!moved.stderr.contains("sandbox"), "{}", moved.stderr);
    assert!(moved.stdout.contains(r#""phase":"disks""#), "{}", moved.stdout);
    assert_equal(&hosts.place.path("disk.raw"), &there);
    run(&hosts.there.monitor("web", WITHIN).unwrap());
    hosts.assert_continues_there("web", tick);
    assert_disk(&mut hosts.agent_there());
}

#[test]
fn a_qcow2_disk_with_a_backing_file_is_copied_to_a_waiting_qemu() {
    let name = "a_qcow2_disk_with_a_backing_file_is_copied_to_a_waiting_qemu";
    copies_qcow2(name, Version::V10_0);
}

#[test]
#[ignore = "nightly"]
fn a_qcow2_disk_with_a_backing_file_is_copied_to_a_waiting_newest_qemu() {
    let name = "a_qcow2_disk_with_a_backing_file_is_copied_to_a_waiting_newest_qemu";
    copies_qcow2(name, Version::Newest);
}

fn copies_qcow2(name: &str, version: Version) {
    if !require_qemu(name, &[version]) {
        return;
    }
    let Some(mut hosts) = Hosts::new(name) else { return };
    // The guest of these hosts has its own.
    let base = hosts.place.path("base.raw");
    fs::copy(hosts.place.path("disk.raw"), &base).unwrap();
    let (overlay, there) = (hosts.place.path("overlay.qcow2"), hosts.place.path("there.qcow2"));
    qemu_img(&["create", "-f", "qcow2", "-F", "raw", "-b", path(&base), path(&overlay)]);
    qemu_img(&["create", "-f", "qcow2", path(&there), &(8 * MIB).to_string()]);
    let seconds = ["here.raw", "there.raw"].map(|name| hosts.place.path(name));
    for second in &seconds {
        fs::File::create(second).unwrap().set_len(MIB).unwrap();
    }
    let with_two = |disk: &Path, second: &Path| {
        let second = format!("file={},format=raw,if=none,id=disk1", second.display());
        with_disk_of(version, disk, "qcow2").args([
            "-drive",
            &second,
            "-device",
            "virtio-blk-pci,drive=disk1,id=vdb",
        ])
    };
    let (source, mut guest) = with_two(&overlay, &seconds[0]).boot(WITHIN).unwrap();
    guest.shell("dd if=/dev/urandom of=/dev/vdb bs=64k count=8 conv=fsync", WITHIN).unwrap();
    guest.shell(WRITER, WITHIN).unwrap();
    let waiting = with_two(&there, &seconds[1]).incoming_defer().start().unwrap();
    drop(guest);
    let source_of_hosts = std::mem::replace(&mut hosts.source, source);
    let limited = ["--with-disks", "--verify-disks", "--json", "--paused", "--max-bandwidth", "64M"];
    let moved = hosts.run("move", &format!("/{}", qmp(&waiting)), &limited);
    let compared = &completed(&moved)["compared-disks"];
    assert_eq!(compared["bytes"], 9 * MIB, "{}", moved.stdout);
    assert!(compared["pause-ms"].as_u64() < last(&moved)["downtime"].as_u64(), "{}", moved.stdout);
    assert!(moved.stdout.contains("compared while the guest is stopped"), "{}", moved.stdout);
    assert!(
        moved.stdout.contains("is left on this host, unchanged since the guest was stopped"),
        "{}",
        moved.stdout
    );
    assert_equal(&seconds[0], &seconds[1]);
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.source = source_of_hosts;
    run(waiting.qmp());
    assert_disk(&mut waiting.linux(WITHIN).unwrap());
    // Read by the guest: its QEMU has the file alone.
    waiting.kill().unwrap();
    assert!(!qemu_img(&["info", path(&there)]).contains("backing"));
    [overlay, there].iter().for_each(|file| fs::remove_file(file).unwrap());
}

#[test]
fn a_disk_that_cannot_be_copied_is_refused_by_name() {
    let Some(mut hosts) = Hosts::new("a_disk_that_cannot_be_copied_is_refused_by_name") else { return };
    let options = with_disks(&hosts);
    let options = words(&options);
    // A file of another guest.
    let there = hosts.there.path(DISK_THERE);
    fs::write(&there, "other").unwrap();
    assert_ended(
        &hosts.run("move", "/web", &options),
        1,
        &["other: disk disk0: /run/web.raw exists already"],
    );
    assert_eq!(fs::read(&there).unwrap(), b"other");
    hosts.assert_stays();
    fs::remove_file(&there).unwrap();
    // One of another size, and the guest's own, in a QEMU that waits.
    let small = hosts.place.path("small.raw");
    fs::write(&small, [0; 4096]).unwrap();
    for (disk, text) in [
        (small, "disk disk0 has 4096 bytes there, expected 8388608"),
        (hosts.place.path("disk.raw"), "disk.raw) is the same file there"),
    ] {
        let waiting = with_disk(&disk).incoming_defer().start().unwrap();
        assert_ended(
            &hosts.run("move", &format!("/{}", qmp(&waiting)), &["--with-disks"]),
            1,
            &["does not fit", text],
        );
        hosts.assert_stays();
    }
    // A device that is not there; an NBD server of another user, which stays.
    let missing: Vec<_> = options
        .iter()
        .map(
            |word| {
                if word.starts_with("drive.disk0") { "drive.disk0.file=/dev/towline-missing" } else { word }
            },
        )
        .collect();
    assert_ended(
        &hosts.run("move", "/web", &missing),
        1,
        &["disk disk0 (/dev/towline-missing) is missing there"],
    );
    hosts.assert_stays();
    let other = hosts.place.path("other.raw");
    fs::copy(hosts.place.path("disk.raw"), &other).unwrap();
    let waiting = with_disk(&other).incoming_defer().start().unwrap();
    let address = json!({ "type": "unix", "data": { "path": hosts.place.path("other.nbd") } });
    waiting.qmp().execute("nbd-server-start", json!({ "addr": address })).unwrap();
    let refused = hosts.run("move", &format!("/{}", qmp(&waiting)), &["--with-disks"]);
    assert_ended(&refused, 1, &["NBD server already running", "safe at its source"]);
    hosts.assert_stays();
    waiting.qmp().execute("nbd-server-stop", Value::Null).unwrap();
    waiting.kill().unwrap();
    [other, hosts.place.path("other.nbd")].iter().for_each(|file| drop(fs::remove_file(file)));
}

#[test]
fn a_disk_without_room_there_is_refused() {
    let Some(mut hosts) = Hosts::new("a_disk_without_room_there_is_refused") else { return };
    let options = with_disks(&hosts);
    let options = words(&options);
    let full = fill(&hosts);
    hosts
        .guest
        .as_mut()
        .unwrap()
        .shell("dd if=/dev/urandom of=/dev/vda bs=1M seek=1 count=6", WITHIN)
        .unwrap();
    let full = format!("drive.disk0.file={full}/web.raw");
    let options: Vec<_> = options
        .iter()
        .map(|word| if word.starts_with("drive.disk0") { full.as_str() } else { word })
        .collect();
    let text = "disk disk0 needs 8 MiB in /run/small, which has ";
    for command in ["check", "move"] {
        let refused = hosts.run(command, "/web", &options);
        assert!(refused.status.code() == Some(1) && refused.stdout.contains(text), "{}", refused.stdout);
        hosts.assert_stays();
    }
    // Another one fills it while the disk is copied.
    grow(&hosts);
    let mut moving = hosts.start("move", "/web", &[&options[..], &["--max-bandwidth", "1M"]].concat());
    wait_event(&mut moving, "disks", WITHIN, |event| event["phase"] == "disks");
    let filler = fs::File::create(hosts.there.path("/run/small/filler")).unwrap();
    while (&filler).write_all(&[1; 4096]).is_ok() {}
    let failed = moving.wait(WITHIN).unwrap();
    assert_ended(&failed, 1, &["disk disk0 cannot be copied to the other host", "safe at its source"]);
    assert_eq!(last(&failed)["reason"], "disk", "{}", failed.stdout);
    hosts.assert_stays();
}

/// One that differs before the comparison, and one in a part that the guest writes to afterwards.
#[test]
fn a_disk_that_differs_from_its_copy_keeps_its_guest() {
    let Some(mut hosts) = Hosts::new("a_disk_that_differs_from_its_copy_keeps_its_guest") else { return };
    let guest = hosts.guest.as_mut().unwrap();
    guest.shell("dd if=/dev/urandom of=/dev/vda bs=1M seek=1 count=7 conv=fsync", WITHIN).unwrap();
    let verify = ["--verify-disks", "--max-bandwidth", "4M", "--downtime-limit", "20000"].map(str::to_owned);
    let options: Vec<_> = with_disks(&hosts).into_iter().chain(verify).collect();
    // Neither is in a page that the guest writes to.
    for (phase, offset) in [("disks", MIB + 549), ("transfer", 7 * MIB + 8193)] {
        let mut moving = hosts.start("move", "/web", &words(&options));
        let is_phase = |event: &Value| match phase {
            "disks" => event["disks"]["copied"].as_u64() >= Some(MIB),
            _ => event["ram"]["transferred"].as_u64() >= Some(MIB),
        };
        wait_event(&mut moving, phase, WITHIN, is_phase);
        let here = fs::File::open(hosts.place.path("disk.raw")).unwrap();
        let there = fs::File::options().read(true).write(true).open(hosts.there.path(DISK_THERE)).unwrap();
        // Parts are copied side by side: one that is in flight would undo the change.
        wait_until("this part of the copy", WITHIN, || {
            let [mut original, mut copy] = [[0; PART]; 2];
            here.read_exact_at(&mut original, offset / PART as u64 * PART as u64)?;
            there.read_exact_at(&mut copy, offset / PART as u64 * PART as u64)?;
            Ok((original == copy).then_some(()))
        })
        .unwrap();
        let mut byte = [0];
        there.read_exact_at(&mut byte, offset).unwrap();
        there.write_all_at(&[!byte[0]], offset).unwrap();
        if phase == "transfer" {
            let write = "dd if=/dev/urandom of=/dev/vda bs=512 seek=14336 count=1 conv=fsync";
            hosts.guest.as_mut().unwrap().shell(write, WITHIN).unwrap();
        }
        let failed = moving.wait(WITHIN).unwrap();
        let text = format!("disk disk0 differs from its copy at the other host, first at byte {offset}:");
        assert_ended(&failed, 1, &[&text, "safe at its source"]);
        assert_eq!(last(&failed)["reason"], "disk", "{}", failed.stdout);
        hosts.assert_stays();
        let nodes = hosts.source.qmp().execute("query-named-block-nodes", Value::Null).unwrap();
        assert!(!nodes.to_string().contains("towline-disk"), "{nodes}");
        let exports = hosts.source.qmp().execute("query-block-exports", Value::Null).unwrap();
        assert_eq!(exports, Value::Array(Vec::new()));
    }
}

/// Phases of a move, and what ends in them.
const ENDS: [(&str, &str); 6] = [
    ("disks", "user"),
    ("disks", "towline"),
    ("disks", "link"),
    ("transfer", "agent, at once"),
    ("transfer", "towline"),
    ("transfer", "link"),
];

/// A process or the link ends while the disk is copied, and while memory is.
#[test]
fn a_move_with_disks_that_ends_leaves_the_guest_with_its_own_disk() {
    leaves_its_disk("a_move_with_disks_that_ends_leaves_the_guest_with_its_own_disk", &ENDS[2..5]);
}

#[test]
#[ignore = "nightly"]
fn a_move_with_disks_that_ends_in_each_way_leaves_the_guest_with_its_own_disk() {
    leaves_its_disk("a_move_with_disks_that_ends_in_each_way_leaves_the_guest_with_its_own_disk", &ENDS);
}

fn leaves_its_disk(name: &str, ends: &[(&str, &str)]) {
    let Some(mut hosts) = Hosts::new(name) else { return };
    let guest = hosts.guest.as_mut().unwrap();
    guest.shell("dd if=/dev/urandom of=/dev/vda bs=1M seek=4 count=4", WITHIN).unwrap();
    guest.shell(WRITER, WITHIN).unwrap();
    let slow = ["--peer-timeout", "3", "--max-bandwidth", "1M"].map(str::to_owned);
    let options: Vec<_> = with_disks(&hosts).into_iter().chain(slow).collect();
    let options = words(&options);
    for &(phase, kill) in ends {
        let mut moving = hosts.start("move", "/web", &options);
        // QEMU 10.0 may never clean up a migration whose connections break while it makes them.
        let is_phase = |event: &Value| match phase {
            "transfer" => event["ram"]["transferred"].as_u64() >= Some(MIB / 4),
            _ => event["event"] == "phase" && event["phase"] == phase,
        };
        wait_event(&mut moving, phase, WITHIN, is_phase);
        match kill {
            "user" => signal(moving.pid(), Signal::INT),
            "towline" => signal(moving.pid(), Signal::KILL),
            "link" => hosts.cut(),
            _ => signal(hosts.there.agent().unwrap(), Signal::KILL),
        }
        assert!(child(moving.pid(), "ssh").is_some() || kill == "towline");
        let finished = moving.wait(WITHIN).unwrap();
        if kill == "link" {
            // Its writes were held up for no longer than that.
            assert_disk(hosts.guest.as_mut().unwrap());
            hosts.mend();
        }
        if kill != "towline" {
            assert_ended(&finished, 1, &["safe at its source"]);
        }
        assert_disk(hosts.guest.as_mut().unwrap());
        if kill != "agent, at once" {
            // The next agent ends the QEMU that this one has left, and removes its disk.
            hosts.assert_stays();
            let removed = wait_removed(&hosts.there.path(DISK_THERE), WITHIN);
            removed.unwrap_or_else(|error| panic!("{phase}, {kill}: {error}"));
        }
    }
    // Nothing of the former moves is in the way.
    let tick = hosts.last_tick();
    completed(&hosts.run("move", "/web", &options[..options.len() - 2]));
    hosts.assert_continues_there("web", tick);
    assert_disk(&mut hosts.agent_there());
}

/// A filesystem of the other host with little room.
fn fill(hosts: &Hosts) -> String {
    let place = "/run/small";
    shell(hosts, &format!("mkdir {place} && mount -t tmpfs -o size=2M tmpfs {place}"));
    place.into()
}

/// Gives it room for the disk.
fn grow(hosts: &Hosts) {
    shell(hosts, "mount -o remount,size=9M /run/small");
}

fn shell(hosts: &Hosts, script: &str) {
    let status = command_after(&hosts.there.prefix()).args(["sh", "-c", script]).status();
    assert!(status.unwrap().success());
}

fn qemu_img(words: &[&str]) -> String {
    let output = Command::new("qemu-img").args(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(monitor: &Qmp) {
    monitor.wait_status("paused", WITHIN).unwrap();
    monitor.execute("cont", Value::Null).unwrap();
}

fn assert_equal(here: &Path, there: &Path) {
    let (here, there) = (fs::read(here).unwrap(), fs::read(there).unwrap());
    assert_eq!(here.len(), there.len());
    let differs = here.iter().zip(&there).position(|(a, b)| a != b);
    assert_eq!(differs, None, "byte at which they differ");
}

/// Attempts at the moment between the guest's stop and the end of its disk's copy.
const TRIES: usize = 40;

/// Its guest is stopped and whole; the next towline has it run on.
#[test]
#[ignore = "nightly"]
fn a_towline_that_is_killed_before_the_switchover_is_repaired() {
    for _ in 0..TRIES {
        let Some(mut hosts) = Hosts::new("a_towline_that_is_killed_before_the_switchover_is_repaired") else {
            return;
        };
        hosts.guest.as_mut().unwrap().shell(WRITER, WITHIN).unwrap();
        // On a disk that needs time for what it has to keep.
        let there = hosts.place.path("there.raw").display().to_string();
        let options = with_disks(&hosts).into_iter().map(|word| word.replace(DISK_THERE, &there));
        let options: Vec<_> = options.collect();
        let moving = hosts.start("move", "/web", &words(&options));
        let monitor = hosts.source.qmp();
        while monitor.wait_event("MIGRATION", WITHIN).unwrap()["data"]["status"] != "pre-switchover" {}
        signal(moving.pid(), Signal::KILL);
        moving.wait(WITHIN).unwrap();
        let status = monitor.execute("query-migrate", Value::Null).unwrap()["status"].clone();
        if status == "pre-switchover" {
            let repaired = hosts.towline(&["repair", &qmp(&hosts.source)]).wait(WITHIN).unwrap();
            assert_ended(&repaired, 0, &[]);
            assert!(repaired.stdout.contains("copies of its disks ended"), "{}", repaired.stdout);
            monitor.wait_status("running", WITHIN).unwrap();
            assert_eq!(monitor.execute("query-jobs", Value::Null).unwrap(), Value::Array(Vec::new()));
            return assert_disk(hosts.guest.as_mut().unwrap());
        }
        // It was quicker.
    }
    panic!("the move was quicker {TRIES} times");
}
