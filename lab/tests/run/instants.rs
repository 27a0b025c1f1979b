//! Images of a guest that runs on and writes disks: its memory, and its disks of the same instant.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_lab::counting::{assert_clean, make_ext4};
use towline_lab::expect::{number, qmp};
use towline_lab::{Finished, Qemu, Version, require_lab};

use crate::forks::faults::wait_streamed;
use crate::forks::{disk, disk_written, with_disk, with_disk_of};
use crate::support::{DISK, MIB, Saved, WITHIN};

/// Interval of snapshots.
const INTERVAL: Duration = Duration::from_secs(2);
/// Snapshots that are kept.
const KEPT: usize = 20;
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
        let format = if disk.ends_with(".raw") { "raw" } else { "qcow2" };
        let format = format!("drive.disk0.format={format}");
        let words = ["--name", name, "--detach", "--set", &file, "--set", &format];
        let words: Vec<_> = words.into_iter().chain(options.iter().copied()).collect();
        self.run_image(&self.path(image).display().to_string(), &words).wait(WITHIN).unwrap()
    }

    /// Names of files beside the image that are overlays.
    pub(crate) fn overlays(&self) -> Vec<String> {
        let names = fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".qcow2"));
        names.sort();
        names
    }
}

/// Refused, for reasons that have these texts.
pub(crate) fn assert_refused(finished: &Finished, texts: &[&str]) {
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
    assert_refused(&refused, &["is a backing file of the disk that the guest", "--overlay"]);
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
    saved.wait_for_guests(&[]);
    // Not even QEMU has written to it when it ended.
    let run = saved.run_with_disk("three.img", "again", "disk.2.qcow2", &["--overlay"]);
    assert!(run.status.success(), "{}", run.stderr);
    saved.quit("again");
    let modified = File::options().write(true).open(saved.path("disk.1.qcow2")).unwrap();
    modified.set_modified(std::time::SystemTime::now()).unwrap();
    let refused = saved.run_with_disk("two.img", "changed", "disk.1.qcow2", &["--overlay"]);
    assert_refused(&refused, &["disk.1.qcow2) was changed or removed since image", "--set drive.disk0.file"]);
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
    // What cannot be stored leaves the guest its disk.
    let (exists, no_base) = (saved.image(), saved.path("missing.img").display().to_string());
    let refused = saved.store("web", "guest.img", &["--resume", "--with-disks"]);
    assert_refused(&refused, &[&exists, "exists"]);
    let refused = saved.store("web", "other.img", &["--resume", "--with-disks", "--base", &no_base]);
    assert_refused(&refused, &["missing.img"]);
    assert_eq!(saved.overlays(), [""; 0]);
    // A disk that QEMU takes no snapshot of.
    let monitor = saved.monitor("web");
    let target = json!({ "driver": "null-co", "node-name": "target", "size": DISK, "read-zeroes": true });
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

/// QEMU describes the overlay of a file that was opened by another name as JSON.
#[test]
fn a_disk_with_a_relative_name_is_kept_time_and_again() {
    if !require_lab("a_disk_with_a_relative_name_is_kept_time_and_again") {
        return;
    }
    let saved = with_disk();
    saved.quit("web");
    saved.wait_for_guests(&[]);
    let here = ["/usr/bin/env".to_owned(), "-C".to_owned(), saved.path("").display().to_string()];
    let run = |image: &str, name: &str, file: &str| {
        let image = saved.path(image).display().to_string();
        let file = format!("drive.disk0.file={file}");
        let words =
            ["run", &image, "--name", name, "--detach", "--set", &file, "--set", "drive.disk0.format=raw"];
        let words = words.map(str::to_owned).into_iter().chain(saved.set());
        saved.towline_within(&here, words).wait(WITHIN).unwrap()
    };
    let started = run("guest.img", "relative", "disk.raw");
    assert!(started.status.success(), "{}", started.stderr);
    let mut guest = saved.agent("relative");
    for name in ["one", "two"] {
        guest.shell(&disk_written(name), WITHIN).unwrap();
        let stored = saved.store("relative", &format!("{name}.img"), &["--resume", "--with-disks"]);
        assert!(stored.status.success(), "{}", stored.stderr);
    }
    assert_eq!(saved.overlays(), ["disk.1.qcow2", "disk.2.qcow2"]);
    assert!(saved.disk_of("two.img").ends_with("/disk.1.qcow2"), "{}", saved.disk_of("two.img"));
    drop(guest);
    saved.quit("relative");
    saved.wait_for_guests(&[]);
    assert_refused(&run("one.img", "one", "./disk.raw"), &["is a backing file of the disk"]);
}

/// Its memory is sent, which takes longer than one instant.
#[test]
fn disks_of_a_guest_that_runs_on_no_image_are_not_kept() {
    if !require_lab("disks_of_a_guest_that_runs_on_no_image_are_not_kept") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let guest = saved.guest_on_no_image();
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

/// `cargo xtask soak snapshots` does so for an hour. A guest that had the disk of another instant would find its file system damaged, and
/// damage it further.
#[test]
fn snapshots_of_a_guest_that_writes_each_run_on_the_disk_of_their_instant() {
    if !require_lab("snapshots_of_a_guest_that_writes_each_run_on_the_disk_of_their_instant") {
        return;
    }
    let saved = with_disk_of(make_ext4);
    let mut web = saved.agent("web");
    web.begin_to_count();
    web.dirty(4 * MIB, 64 * MIB).unwrap();
    let (base, mut kept, mut standstills) = (saved.image(), VecDeque::new(), Vec::new());
    let first = Instant::now();
    for n in 0..number("TOWLINE_SOAK_SNAPSHOTS", 4) {
        let begun = Instant::now();
        let image = format!("snapshot-{n}.img");
        let options = ["--resume", "--with-disks", "--base", &base, "--log", "info"];
        let stored = saved.store("web", &image, &options);
        let stored = if stored.stderr.contains("has a chain of") {
            let command = stored.stderr.split('`').nth(1).unwrap().strip_prefix("towline ").unwrap();
            saved.towline(command.split(' ').map(str::to_owned)).wait_done(WITHIN).unwrap();
            wait_streamed(&saved.monitor("web"));
            saved.store("web", &image, &options)
        } else {
            stored
        };
        assert!(stored.status.success(), "{}", stored.stderr);
        let (_, after) = stored.stderr.split_once("standstill_us=").unwrap();
        standstills.push(after.split(' ').next().unwrap().parse::<u64>().unwrap());
        kept.push_back(image);
        if kept.len() > KEPT {
            let oldest = kept.pop_front().unwrap();
            fs::remove_file(saved.path(&oldest)).unwrap();
            fs::remove_file(saved.path(&format!("{oldest}.manifest.json"))).unwrap();
            saved.remove_overlays_without_users(&kept);
        }
        std::thread::sleep(INTERVAL.saturating_sub(begun.elapsed()));
    }
    let elapsed = first.elapsed();
    web.check().unwrap();
    for image in &kept {
        saved.assert_runs_on_its_disk(image);
    }
    standstills.sort_unstable();
    let quantile = |percent: usize| standstills[(standstills.len() - 1) * percent / 100] as f64 / 1000.0;
    println!(
        "{} snapshots in {:.0} s: standstill p50 {:.1} ms, p99 {:.1} ms, {:.2} % of the time; {} MiB on the disk",
        standstills.len(),
        elapsed.as_secs_f64(),
        quantile(50),
        quantile(99),
        standstills.iter().sum::<u64>() as f64 / 1e4 / elapsed.as_secs_f64(),
        saved.allocated() >> 20,
    );
    saved.quit("web");
}

impl Saved {
    /// Starts a QEMU by hand, with a disk that its guest may write.
    pub(crate) fn guest_on_no_image(&self) -> Qemu {
        let disk = self.path("own.raw");
        fs::write(&disk, vec![b'd'; 1 << 20]).unwrap();
        let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
        let device = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"];
        Qemu::builder(Version::V10_0).args(device).start().unwrap()
    }

    /// The disk that an image's guest must have.
    pub(crate) fn disk_of(&self, image: &str) -> String {
        let manifest = fs::read(self.path(&format!("{image}.manifest.json"))).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        manifest["origin"]["process"]["disks"][0]["file"].as_str().unwrap().to_owned()
    }

    /// Files of a disk, by QEMU's own tool.
    fn chain_of(&self, disk: &str) -> Vec<String> {
        let info =
            Command::new("qemu-img").args(["info", "-U", "--backing-chain", "--output=json", disk]).output();
        let info: Value = serde_json::from_slice(&info.unwrap().stdout).unwrap();
        let files = info.as_array().unwrap().iter().map(|file| file["filename"].as_str().unwrap().to_owned());
        files.collect()
    }

    /// Removes overlays that neither the guest nor one of these images needs.
    fn remove_overlays_without_users(&self, images: &VecDeque<String>) {
        let drives = self.monitor("web").execute("query-block", Value::Null).unwrap();
        let present = drives.as_array().unwrap().iter().find(|drive| drive["device"] == "disk0").unwrap();
        let present = present["inserted"]["file"].as_str().unwrap().to_owned();
        let disks = images.iter().map(|image| self.disk_of(image)).chain([present]);
        let used: Vec<_> = disks.flat_map(|disk| self.chain_of(&disk)).collect();
        for name in self.overlays() {
            let path = self.path(&name);
            if !used.contains(&path.display().to_string()) {
                fs::remove_file(path).unwrap();
            }
        }
    }

    /// The guest continues with the disk that it had, whose file system is sound afterwards.
    pub(crate) fn assert_runs_on_its_disk(&self, image: &str) {
        let disk = self.disk_of(image);
        let here = self.path("").display().to_string();
        let run = self.run_with_disk(image, "then", &disk, &["--overlay", "--overlay-dir", &here, "--share"]);
        assert!(run.status.success(), "{}", run.stderr);
        let mut guest = self.agent("then");
        assert_eq!(guest.check().unwrap(), 64 * MIB / 4096, "{image}");
        guest.assert_counted(image);
        drop(guest);
        self.quit("then");
        self.wait_for_guests(&["web"]);
        let (overlay, raw) = (self.path("then.disk0.qcow2"), self.path("then.raw"));
        let converted =
            Command::new("qemu-img").args(["convert", "-U", "-O", "raw"]).arg(&overlay).arg(&raw).status();
        assert!(converted.unwrap().success());
        assert_clean(&raw);
        fs::remove_file(overlay).unwrap();
        fs::remove_file(raw).unwrap();
    }

    /// Bytes that the files beside the image have on the disk.
    fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        let files = fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
        files.map(|file| file.blocks() * 512).sum()
    }
}
