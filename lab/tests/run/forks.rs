//! `towline fork`: copies of a running guest, which runs on.

pub(crate) mod faults;
mod many;
mod states;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use towline_lab::expect::number;
use towline_lab::{LinuxGuest, Towline, Version, require_lab, require_qemu};

use crate::support::{DISK, MEMORY_MIB, MIB, Recipe, Saved, WITHIN};

/// Line of shell that writes this many MiB of random bytes to a file in the guest's memory, and prints their hash.
fn written(mib: u64) -> String {
    format!("dd if=/dev/urandom of=/tmp/written bs=1M count={mib} 2>/dev/null; sha256sum /tmp/written")
}

/// A guest that runs from a saved image under the name `web`, without a towline.
fn parent(test: &str) -> Option<Saved> {
    if !require_lab(test) {
        return None;
    }
    let saved = Saved::new(Version::V10_0);
    saved.run(&["--name", "web", "--detach"], &saved.settings()).wait_done(WITHIN).unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    Some(saved)
}

impl Saved {
    /// Forks a guest of this test.
    fn fork(&self, guest: &str, options: &[&str]) -> towline_lab::Finished {
        self.start_fork(guest, options).wait(WITHIN).unwrap()
    }

    fn start_fork(&self, guest: &str, options: &[&str]) -> Towline {
        let agent = self.path("{name}.agent").display().to_string();
        let agent = format!("chardev.agent=socket,path={agent},server=on,wait=off");
        let words = ["fork", guest, "--set", &agent].map(str::to_owned);
        let words = words.into_iter().chain(options.iter().map(|word| (*word).to_owned()));
        self.towline(words)
    }
}

#[test]
fn forks_have_what_the_guest_wrote_and_go_on_from_there() {
    let Some(saved) = parent("forks_have_what_the_guest_wrote_and_go_on_from_there") else { return };
    let mut web = saved.agent("web");
    let hash = web.shell(&written(16), WITHIN).unwrap();
    let tick = web.tick().unwrap();
    let forked = saved.fork("web", &["--count", "2", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert_eq!(saved.guests(), ["web", "web-fork-0", "web-fork-1"]);
    for name in ["web-fork-0", "web-fork-1"] {
        let mut fork = saved.agent(name);
        assert!(fork.wait_ticking(WITHIN).unwrap() >= tick);
        saved.assert_is_saved_guest(&mut fork);
        assert_eq!(fork.shell("sha256sum /tmp/written", WITHIN).unwrap(), hash);
        fork.shell(&format!("echo {name} > /tmp/written"), WITHIN).unwrap();
    }
    // None sees what another one writes.
    assert_eq!(web.shell("sha256sum /tmp/written", WITHIN).unwrap(), hash);
    assert_eq!(saved.agent("web-fork-1").shell("cat /tmp/written", WITHIN).unwrap().trim(), "web-fork-1");
    // A guest that is paused by others stays so, since nothing is left to undo.
    saved.ctl(&["web", "stop"]);
    let monitor = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    saved.towline(["repair", &monitor].map(str::to_owned)).wait_done(WITHIN).unwrap();
    assert_eq!(saved.monitor("web").execute("query-status", Value::Null).unwrap()["status"], "paused");
    // A fork of a fork.
    let forked = saved.fork("web-fork-0", &["--name", "grandchild", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert_eq!(saved.agent("grandchild").shell("cat /tmp/written", WITHIN).unwrap().trim(), "web-fork-0");
    ["web", "web-fork-0", "web-fork-1", "grandchild"].iter().for_each(|name| saved.quit(name));
    saved.assert_intact();
}

/// Every byte of the guest's memory, while it is stopped; `cargo xtask soak fork` does this 200 times.
#[test]
fn a_fork_is_the_guest_byte_by_byte() {
    let Some(saved) = parent("a_fork_is_the_guest_byte_by_byte") else { return };
    let mut web = saved.agent("web");
    for round in 0..number("TOWLINE_SOAK_FORKS", 2) {
        web.shell(&written(1 + round % 32), WITHIN).unwrap();
        saved.ctl(&["web", "stop"]);
        let name = format!("then-{round}");
        let forked = saved.fork("web", &["--name", &name, "--paused", "--detach"]);
        assert!(forked.status.success(), "{}", forked.stderr);
        let status = saved.monitor("web").execute("query-status", Value::Null).unwrap();
        assert_eq!(status["status"], "paused", "it was paused before");
        assert_same_memory(&saved, &name);
        saved.quit(&name);
        saved.ctl(&["web", "cont"]);
    }
    saved.quit("web");
}

/// Every second time the guest is stored and run instead. It writes all the time, and finds pages that are torn or stale itself.
#[test]
fn a_fork_of_a_guest_that_writes_has_one_instant() {
    let Some(saved) = parent("a_fork_of_a_guest_that_writes_has_one_instant") else { return };
    let mut web = saved.agent("web");
    web.dirty(1 << 30, 8 * MIB).unwrap();
    let source = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    let next = saved.path("next.img").display().to_string();
    for round in 0..number("TOWLINE_SOAK_FORKS", 4) {
        if round % 2 == 0 {
            let forked = saved.fork("web", &["--name", "next", "--detach"]);
            assert!(forked.status.success(), "{}", forked.stderr);
        } else {
            let words = ["copy", "--resume", "--overwrite", "--base", &saved.image(), &source, &next];
            saved.towline(words.map(str::to_owned)).wait_done(WITHIN).unwrap();
            saved.run_image(&next, &["--name", "next", "--share", "--detach"]).wait_done(WITHIN).unwrap();
        }
        let mut guest = saved.agent("next");
        assert_eq!(guest.check().unwrap(), 8 * MIB / 4096, "round {round}");
        saved.assert_is_saved_guest(&mut guest);
        saved.quit("next");
        saved.wait_for_guests(&["web"]);
    }
    web.check().unwrap();
    saved.quit("web");
}

/// The memory of this fork is that of its guest; neither runs.
fn assert_same_memory(saved: &Saved, fork: &str) {
    let (there, here) = (memory(saved, fork), memory(saved, "web"));
    let wrong = there.chunks(4096).zip(here.chunks(4096)).position(|(fork, guest)| fork != guest);
    assert_eq!(wrong, None, "this page differs");
}

/// The memory of a guest that does not run.
fn memory(saved: &Saved, name: &str) -> Vec<u8> {
    let path = saved.path(&format!("{name}.memory"));
    let save = json!({ "val": 0, "size": MEMORY_MIB * MIB, "filename": path });
    saved.monitor(name).execute("pmemsave", save).unwrap();
    let content = fs::read(&path).unwrap();
    fs::remove_file(path).unwrap();
    content
}

#[test]
fn a_guest_that_cannot_be_forked_is_refused_and_runs_on() {
    let Some(saved) = parent("a_guest_that_cannot_be_forked_is_refused_and_runs_on") else { return };
    let refused = |guest: &str, options: &[&str], text: &str| {
        let forked = saved.fork(guest, options);
        assert_eq!(forked.status.code(), Some(1), "{}", forked.stderr);
        assert!(forked.stderr.contains(text), "{text:?}: {}", forked.stderr);
    };
    refused("missing", &[], "no guest of this user has this name");
    refused("web", &["--name", "web"], "web");
    // One whose memory is not the image's.
    saved.run(&["--name", "copied", "--copy", "--detach"], &saved.settings()).wait_done(WITHIN).unwrap();
    refused("copied", &[], "does not run on an image");
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    ["web", "copied"].iter().for_each(|name| saved.quit(name));
}

/// A line of shell that writes this to the disk's first sector.
pub(crate) fn disk_written(text: &str) -> String {
    format!("echo {text} | dd of=/dev/vda bs=512 conv=notrunc,fsync 2>/dev/null")
}

/// The first line of the disk, not from the guest's cache.
pub(crate) fn disk(guest: &mut LinuxGuest) -> String {
    guest.shell("echo 3 > /proc/sys/vm/drop_caches; head -n 1 /dev/vda", WITHIN).unwrap().trim().to_owned()
}

/// A guest with the name `web` and a disk.
pub(crate) fn with_disk() -> Saved {
    with_disk_of(|path| fs::write(path, vec![b'd'; MIB as usize]).unwrap())
}

/// As [`with_disk`], with what this writes to the raw disk.
pub(crate) fn with_disk_of(make: impl FnOnce(&Path)) -> Saved {
    let saved = Saved::with_drive();
    let path = saved.path("disk.raw");
    File::create(&path).unwrap().set_len(DISK).unwrap();
    make(&path);
    File::options().write(true).open(&path).unwrap().set_len(DISK).unwrap();
    let file = format!("drive.disk0.file={}", path.display());
    let settings = [saved.settings(), vec![file, "drive.disk0.format=raw".into()]].concat();
    saved.run(&["--name", "web", "--detach"], &settings).wait_done(WITHIN).unwrap();
    saved
}

#[test]
fn forks_have_the_disk_of_the_same_instant() {
    if !require_lab("forks_have_the_disk_of_the_same_instant") {
        return;
    }
    let saved = with_disk();
    let mut web = saved.agent("web");
    web.shell(&disk_written("one"), WITHIN).unwrap();
    let fork = |guest: &str, options: &[&str]| {
        let forked = saved.fork(guest, &[&["--detach"], options].concat());
        assert!(forked.status.success(), "{}", forked.stderr);
        forked.stderr + &forked.stdout
    };
    let said = fork("web", &["--name", "first", "--count", "2"]);
    assert!(said.contains("the guest continues in overlay") && said.contains("disk.1.qcow2"), "{said}");
    web.shell(&disk_written("two"), WITHIN).unwrap();
    for name in ["first-0", "first-1"] {
        let mut fork = saved.agent(name);
        assert_eq!(disk(&mut fork), "one");
        fork.shell(&disk_written(name), WITHIN).unwrap();
    }
    // Its disk is the overlay now.
    fork("web", &["--name", "second"]);
    web.shell(&disk_written("three"), WITHIN).unwrap();
    assert_eq!(disk(&mut saved.agent("second")), "two");
    fork("first-0", &["--name", "grandchild"]);
    // An agent has one client.
    drop(web);
    for (name, expected) in
        [("web", "three"), ("first-0", "first-0"), ("first-1", "first-1"), ("grandchild", "first-0")]
    {
        assert_eq!(disk(&mut saved.agent(name)), expected, "{name}");
    }
    // An image names the disk that the guest has now.
    let image = saved.path("next.img").display().to_string();
    let source = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    saved.towline(["copy", &source, &image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    let inspected =
        saved.towline(["inspect", "--json", &image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    assert!(inspected.stdout.contains("disk.2.qcow2"), "{}", inspected.stdout);
    ["web", "first-0", "first-1", "second", "grandchild"].iter().for_each(|name| saved.quit(name));
    for (name, expected) in [("disk.raw", "one"), ("disk.1.qcow2", "two"), ("disk.2.qcow2", "three")] {
        assert!(disk_begins_with(&saved, name, expected), "{name} is not {expected:?}");
    }
}

fn disk_begins_with(saved: &Saved, name: &str, expected: &str) -> bool {
    let raw = saved.path("read.raw");
    let converted =
        Command::new("qemu-img").args(["convert", "-O", "raw"]).arg(saved.path(name)).arg(&raw).status();
    assert!(converted.unwrap().success());
    fs::read(&raw).unwrap().starts_with(format!("{expected}\n").as_bytes())
}

#[test]
fn a_fork_is_in_no_network_of_its_guest() {
    if !require_lab("a_fork_is_in_no_network_of_its_guest") {
        return;
    }
    let interface = format!("twl{}", std::process::id());
    let tap = format!("tap,id=net0,ifname={interface},script=no,downscript=no");
    let arguments = ["-netdev", &tap, "-device", "virtio-net-pci,netdev=net0"].map(str::to_owned);
    let line = "ip link set eth0 up";
    let saved = Saved::of(&Recipe { arguments: &arguments, line, ..Recipe::default() });
    let settings = [saved.settings(), vec![format!("netdev.net0={tap}")]].concat();
    saved.run(&["--name", "web", "--detach"], &settings).wait_done(WITHIN).unwrap();
    let carrier = |name: &str| {
        let mut guest = saved.agent(name);
        guest.shell("cat /sys/class/net/eth0/carrier", WITHIN).unwrap().trim().to_owned()
    };
    let forked = saved.fork("web", &["--name", "alone", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert!(forked.stderr.contains("network net0 is connected to nothing"), "{}", forked.stderr);
    let another = format!("netdev.net0.ifname={interface}b");
    let forked = saved.fork("web", &["--name", "another", "--detach", "--set", &another]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert_eq!([carrier("web"), carrier("alone"), carrier("another")], ["1", "0", "1"]);
    let refused = saved.fork("web", &["--name", "same", "--same-network", "--detach"]);
    assert!(refused.stderr.contains(&interface), "the interface is the guest's: {}", refused.stderr);
    ["web", "alone", "another"].iter().for_each(|name| saved.quit(name));
}

/// Increments of a guest that runs on: it is stopped for what it wrote, and each of them runs.
#[test]
fn increments_of_a_guest_that_runs_have_what_it_wrote() {
    let Some(saved) = parent("increments_of_a_guest_that_runs_have_what_it_wrote") else { return };
    let mut web = saved.agent("web");
    let source = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    let store = |base: &str, name: &str| {
        let image = saved.path(name).display().to_string();
        let words = ["copy", "--json", "--log", "info", "--resume", "--base", base, &source, &image];
        let copied = saved.towline(words.map(str::to_owned)).wait_done(WITHIN).unwrap();
        assert!(copied.stderr.contains("guest taken"), "{}", copied.stderr);
        let event: Value = serde_json::from_str(copied.stdout.lines().last().unwrap()).unwrap();
        assert_eq!(event["source-state"], "running", "{event}");
        (image, event["increment"]["chunks-stored"].as_u64().unwrap())
    };
    let first = web.shell(&written(8), WITHIN).unwrap();
    let (monday, chunks) = store(&saved.image(), "monday.img");
    // Of 256; a whole copy would have stored all that are not zero, and then found the same.
    assert!((4..120).contains(&chunks), "{chunks} chunks");
    let tick = web.wait_ticking(WITHIN).unwrap();
    let second = web.shell(&written(4), WITHIN).unwrap();
    let (tuesday, _) = store(&monday, "tuesday.img");
    for image in [&monday, &tuesday] {
        saved.towline(["inspect", "--verify", image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    }
    for (image, name, hash) in [(&monday, "monday", &first), (&tuesday, "tuesday", &second)] {
        // Its memory is mapped, or the command is refused.
        saved.run_image(image, &["--name", name, "--share", "--detach"]).wait_done(WITHIN).unwrap();
        let mut guest = saved.agent(name);
        assert_eq!(guest.shell("sha256sum /tmp/written", WITHIN).unwrap(), *hash);
        saved.assert_is_saved_guest(&mut guest);
    }
    assert!(saved.agent("tuesday").wait_ticking(WITHIN).unwrap() >= tick);
    // A guest of an increment maps the whole image, and is forked as well.
    let forked = saved.fork("tuesday", &["--name", "fork", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    assert_eq!(saved.agent("fork").shell("sha256sum /tmp/written", WITHIN).unwrap(), second);
    ["web", "monday", "tuesday", "fork"].iter().for_each(|name| saved.quit(name));
    saved.assert_intact();
}

/// The newest QEMU in the lab is started by the dynamic linker of another Debian.
#[test]
fn a_guest_of_the_newest_qemu_that_writes_is_stored_at_one_instant() {
    let test = "a_guest_of_the_newest_qemu_that_writes_is_stored_at_one_instant";
    if !require_qemu(test, &[Version::Newest]) {
        return;
    }
    let saved = Saved::new(Version::Newest);
    let mut run = saved.run(&["--name", "web", "--share"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    let mut web = saved.agent("web");
    web.dirty(1 << 30, 8 * MIB).unwrap();
    let source = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    let next = saved.path("next.img").display().to_string();
    for round in 0..number("TOWLINE_SOAK_FORKS", 2) {
        let words =
            ["copy", "--log", "info", "--resume", "--overwrite", "--base", &saved.image(), &source, &next];
        let copied = saved.towline(words.map(str::to_owned)).wait_done(WITHIN).unwrap();
        assert!(copied.stderr.contains("guest taken"), "{}", copied.stderr);
        let mut run = saved.run_image(&next, &["--name", "next", "--share"]);
        saved.assert_runs(&mut run, "next");
        assert_eq!(saved.agent("next").check().unwrap(), 8 * MIB / 4096, "round {round}");
        saved.interrupt_one(run, "next");
    }
    web.check().unwrap();
    drop(web);
    saved.interrupt(run);
}
