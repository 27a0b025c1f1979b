//! Images of a guest that runs on and writes disks: its memory, and its disks of the same instant.

use std::fs::{self, File};

use serde_json::{Value, json};
use towline_lab::expect::qmp;
use towline_lab::{Finished, Qemu, Version, require_lab, wait_until};

use crate::forks::{disk, disk_written, with_disk};
use crate::support::{Saved, WITHIN};

impl Saved {
    /// Stores a guest of this test in `name`, while it runs on.
    fn store(&self, guest: &str, name: &str, options: &[&str]) -> Finished {
        let source = format!("qmp:{}", self.directory(guest).join("qmp.sock").display());
        let image = self.path(name).display().to_string();
        let words = ["copy", &source, &image].into_iter().chain(options.iter().copied());
        self.towline(words.map(str::to_owned)).wait(WITHIN).unwrap()
    }

    /// Runs this image of a guest with this disk.
    fn run_with_disk(&self, image: &str, name: &str, disk: &str, options: &[&str]) -> Finished {
        let file = format!("drive.disk0.file={}", self.path(disk).display());
        let words = ["--name", name, "--detach", "--set", &file, "--set", "drive.disk0.format=qcow2"];
        let words: Vec<_> = words.into_iter().chain(options.iter().copied()).collect();
        self.run_image(&self.path(image).display().to_string(), &words).wait(WITHIN).unwrap()
    }

    /// Names of files beside the image that are overlays.
    fn overlays(&self) -> Vec<String> {
        let names = fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".qcow2"));
        names.sort();
        names
    }
}

fn assert_refused(finished: &Finished, texts: &[&str]) {
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    for text in texts {
        assert!(finished.stderr.contains(text), "{text:?}: {}", finished.stderr);
    }
}

#[test]
fn an_image_of_a_running_guest_has_its_disk_of_that_instant() {
    if !require_lab("an_image_of_a_running_guest_has_its_disk_of_that_instant") {
        return;
    }
    let saved = with_disk();
    let mut web = saved.agent("web");
    for (name, base) in [("one", "guest"), ("two", "one"), ("three", "two")] {
        // The line in memory is that on the disk.
        web.shell(&format!("echo {name} > /tmp/line; {}", disk_written(name)), WITHIN).unwrap();
        let base = saved.path(&format!("{base}.img")).display().to_string();
        let options = ["--resume", "--with-disks", "--base", &base, "--log", "info"];
        let stored = saved.store("web", &format!("{name}.img"), &options);
        assert!(stored.status.success() && stored.stderr.contains("guest taken"), "{}", stored.stderr);
        assert!(stored.stderr.contains("the guest continues in overlay"), "{}", stored.stderr);
    }
    assert_eq!(saved.overlays(), ["disk.1.qcow2", "disk.2.qcow2", "disk.3.qcow2"]);
    web.shell(&disk_written("four"), WITHIN).unwrap();
    // Its own writes would destroy the disk of the guest, whether that runs or not.
    let refused = saved.run_with_disk("two.img", "two", "disk.1.qcow2", &[]);
    assert_refused(&refused, &["is a backing file of the disk with which the guest", "--overlay"]);
    for (name, disk_file) in [("two", "disk.1.qcow2"), ("three", "disk.2.qcow2")] {
        let run = saved.run_with_disk(&format!("{name}.img"), name, disk_file, &["--overlay", "--share"]);
        assert!(run.status.success(), "{}", run.stderr);
        let mut guest = saved.agent(name);
        assert_eq!(disk(&mut guest), name);
        assert_eq!(guest.shell("cat /tmp/line", WITHIN).unwrap().trim(), name);
        saved.assert_is_saved_guest(&mut guest);
        guest.shell(&disk_written("clone"), WITHIN).unwrap();
    }
    assert_eq!(disk(&mut web), "four");
    ["web", "two", "three"].iter().for_each(|name| saved.quit(name));
    let is_gone = || Ok(saved.guests().is_empty().then_some(()));
    wait_until("the end of the guests", WITHIN, is_gone).unwrap();
    // Not even QEMU has written to it when it ended.
    let run = saved.run_with_disk("three.img", "again", "disk.2.qcow2", &["--overlay"]);
    assert!(run.status.success(), "{}", run.stderr);
    saved.quit("again");
    let modified = File::options().write(true).open(saved.path("disk.1.qcow2")).unwrap();
    modified.set_modified(std::time::SystemTime::now()).unwrap();
    let refused = saved.run_with_disk("two.img", "changed", "disk.1.qcow2", &["--overlay"]);
    assert_refused(&refused, &["disk.1.qcow2) was changed since image", "--set drive.disk0.file"]);
    saved.assert_intact();
}

#[test]
fn a_guest_that_writes_a_disk_is_not_stored_without_it_by_mistake() {
    if !require_lab("a_guest_that_writes_a_disk_is_not_stored_without_it_by_mistake") {
        return;
    }
    let saved = with_disk();
    saved.agent("web").shell(&disk_written("one"), WITHIN).unwrap();
    for how in ["--resume", "--live"] {
        let refused = saved.store("web", "next.img", &[how]);
        assert_refused(&refused, &["writes to drive", "disk.raw", "--with-disks", "--memory-only"]);
        assert!(!saved.path("next.img").exists());
    }
    let stored = saved.store("web", "next.img", &["--resume", "--memory-only"]);
    assert!(stored.status.success(), "{}", stored.stderr);
    assert_eq!(saved.overlays(), [""; 0]);
    // A disk that QEMU takes no snapshot of.
    let monitor = saved.monitor("web");
    let target = json!({ "driver": "null-co", "node-name": "target", "size": 8 << 20, "read-zeroes": true });
    monitor.execute("blockdev-add", target).unwrap();
    let mirror = json!({ "job-id": "mirror", "device": "disk0", "target": "target", "sync": "full" });
    monitor.execute("blockdev-mirror", mirror).unwrap();
    drop(monitor);
    let refused = saved.store("web", "mirrored.img", &["--resume", "--with-disks"]);
    assert_refused(&refused, &["in use by block job: mirror"]);
    assert_eq!(saved.overlays(), [""; 0]);
    assert!(!saved.path("mirrored.img").exists());
    let status = saved.monitor("web").execute("query-status", Value::Null).unwrap();
    assert_eq!(status["status"], "running");
    assert_eq!(disk(&mut saved.agent("web")), "one");
    saved.quit("web");
}

/// Its memory is sent, which takes longer than one instant.
#[test]
fn disks_of_a_guest_that_runs_on_no_image_are_not_kept() {
    if !require_lab("disks_of_a_guest_that_runs_on_no_image_are_not_kept") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let disk = saved.path("own.raw");
    fs::write(&disk, vec![b'd'; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
    let guest =
        Qemu::builder(Version::V10_0).args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"]);
    let guest = guest.start().unwrap();
    let image = saved.path("own.img").display().to_string();
    let copy = |options: &[&str]| {
        let words = ["copy", &qmp(&guest), &image].map(str::to_owned).into_iter();
        saved.towline(words.chain(options.iter().map(|option| (*option).to_owned()))).wait(WITHIN).unwrap()
    };
    assert_refused(&copy(&["--resume", "--with-disks"]), &["does not run on an image", "--memory-only"]);
    assert_eq!(saved.overlays(), [""; 0]);
    guest.qmp().wait_status("running", WITHIN).unwrap();
    for how in ["--live", "--resume"] {
        let stored = copy(&[how, "--memory-only", "--overwrite"]);
        assert!(stored.status.success(), "{}", stored.stderr);
        guest.qmp().wait_status("running", WITHIN).unwrap();
    }
}
