//! Disks of clones: an overlay for each.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use serde_json::Value;
use towline_lab::{LinuxGuest, require_lab, wait_until};

use crate::support::{MIB, Recipe, Saved, WITHIN};

fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

/// Description of a file by `qemu-img`.
fn described(path: &str) -> Value {
    let output = Command::new("qemu-img").args(["info", "-U", "--output=json", path]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn each_clone_writes_to_an_overlay_of_its_disk() {
    if !require_lab("each_clone_writes_to_an_overlay_of_its_disk") {
        return;
    }
    let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let disk = place.path().join("disk.raw");
    fs::write(&disk, vec![b'd'; (8 * MIB) as usize]).unwrap();
    let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
    let arguments = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned);
    let saved = Saved::in_place(place, &Recipe { arguments: &arguments, ..Recipe::default() });
    let before = fs::read(&disk).unwrap();
    let file = format!("drive.disk0.file={}", disk.display());
    let settings = [saved.settings(), vec![file, "drive.disk0.format=raw".into()]].concat();

    let refused = saved.run(&["--name", "web", "--count", "2"], &settings).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "clones of one disk: {}", refused.stdout);
    let nowhere = ["--name", "web", "--overlay", "--overlay-dir", "/nowhere"];
    let refused = saved.run(&nowhere, &settings).wait(WITHIN).unwrap();
    assert!(refused.stderr.contains("choose another with --overlay-dir"), "{}", refused.stderr);

    let mut run = saved.run(&["--name", "web", "--count", "2", "--overlay"], &settings);
    for name in ["web-0", "web-1"] {
        saved.assert_runs(&mut run, name);
        let mut guest = saved.agent(name);
        assert_eq!(shell(&mut guest, "dd if=/dev/vda bs=4 count=1 2>/dev/null"), "dddd");
        shell(&mut guest, &format!("echo {name} | dd of=/dev/vda bs=512 conv=notrunc,fsync 2>/dev/null"));
    }
    for name in ["web-0", "web-1"] {
        // Not from the guest's cache.
        let mut guest = saved.agent(name);
        shell(&mut guest, "echo 3 > /proc/sys/vm/drop_caches");
        assert_eq!(shell(&mut guest, "dd if=/dev/vda bs=5 count=1 2>/dev/null"), name);
        let overlay = saved.path(&format!("{name}.disk0.qcow2")).display().to_string();
        let described = described(&overlay);
        assert_eq!(described["format"], "qcow2");
        assert_eq!(described["full-backing-filename"], disk.display().to_string());
        assert_eq!(described["backing-filename-format"], "raw");
    }
    saved.interrupt(run);
    assert!(fs::read(&disk).unwrap() == before, "the disk was written");
    // They are the disks of guests that may have been saved.
    assert!(saved.path("web-0.disk0.qcow2").is_file());
    let exists = saved.run(&["--name", "web-0", "--overlay"], &settings).wait(WITHIN).unwrap();
    assert!(exists.stderr.contains("web-0.disk0.qcow2 exists already"), "{}", exists.stderr);
    saved.assert_intact();
}

#[test]
fn overlays_of_guests_that_do_not_start_are_removed() {
    if !require_lab("overlays_of_guests_that_do_not_start_are_removed") {
        return;
    }
    let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let disk = place.path().join("disk.raw");
    fs::write(&disk, vec![0; MIB as usize]).unwrap();
    let saved = Saved::in_place(place, &Recipe::default());
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let option = ["-drive", &drive, "-device", "no-such-device"];
    let failed = saved.run_with_more(&["--name", "web", "--overlay"], &option).wait(WITHIN).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", failed.stderr);
    // QEMU itself refused it, so the overlay had been made.
    assert!(failed.stderr.contains("ended at its start"), "{}", failed.stderr);
    let left = fs::read_dir(saved.path("")).unwrap().flatten();
    let left: Vec<_> = left.filter(|entry| entry.file_name().to_string_lossy().ends_with(".qcow2")).collect();
    assert!(left.is_empty(), "{left:?}");
    let missing = saved.path("missing.raw").display().to_string();
    let drive = format!("file={missing},format=raw,if=virtio");
    let failed = saved.run_with_more(&["--name", "web", "--overlay"], &["-drive", &drive]);
    let failed = failed.wait(WITHIN).unwrap();
    assert!(failed.stderr.contains("missing.raw") && failed.stderr.contains("overlay"), "{}", failed.stderr);
}

/// While the first run makes its overlay, another one of the same name is refused and leaves it.
#[test]
fn two_runs_of_one_name_have_one_overlay() {
    if !require_lab("two_runs_of_one_name_have_one_overlay") {
        return;
    }
    let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let disk = place.path().join("disk.raw");
    fs::write(&disk, vec![b'd'; (8 * MIB) as usize]).unwrap();
    let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
    let arguments = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned);
    let saved = Saved::in_place(place, &Recipe { arguments: &arguments, ..Recipe::default() });
    let file = format!("drive.disk0.file={}", disk.display());
    let settings = [saved.settings(), vec![file, "drive.disk0.format=raw".into()]].concat();

    // A qemu-img that waits, beside a QEMU.
    let tools = saved.path("tools");
    fs::create_dir(&tools).unwrap();
    let (making, go) = (saved.path("making"), saved.path("go"));
    let program = |name: &str, script: String| {
        let path = tools.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    };
    let qemu = program("qemu", format!("exec {} \"$@\"", saved.binary()));
    let wait = format!("while ! [ -e {} ]; do sleep 0.05; done", go.display());
    program("qemu-img", format!("touch {}; {wait}; exec qemu-img \"$@\"", making.display()));
    let start = |more: &[&str]| {
        let image = saved.image();
        let before = ["run", &image, "--qemu", &qemu, "--name", "web", "--overlay"];
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let words = before.into_iter().chain(more.iter().copied()).chain(settings);
        saved.towline(words.map(str::to_owned).collect::<Vec<_>>())
    };
    let mut first = start(&[]);
    wait_until("a run that makes its overlay", WITHIN, || {
        assert!(first.runs()?, "towline has ended: {}", first.stderr());
        Ok(making.exists().then_some(()))
    })
    .unwrap();
    let second = start(&[]).wait(WITHIN).unwrap();
    assert_eq!(second.status.code(), Some(1), "{}", second.stderr);
    // In another directory only the name is the same.
    let elsewhere = tools.display().to_string();
    let third = start(&["--overlay-dir", &elsewhere]).wait(WITHIN).unwrap();
    assert!(third.stderr.contains("name web is taken by"), "{}", third.stderr);
    assert!(!tools.join("web.disk0.qcow2").exists());
    fs::write(&go, "").unwrap();
    saved.assert_runs(&mut first, "web");
    let overlay = saved.path("web.disk0.qcow2");
    assert_eq!(fs::metadata(&overlay).unwrap().permissions().mode() & 0o777, 0o600);
    let line = "echo web | dd of=/dev/vda bs=512 conv=notrunc,fsync 2>/dev/null";
    shell(&mut saved.agent("web"), line);
    saved.interrupt(first);
    assert!(described(&overlay.display().to_string())["actual-size"].as_u64().unwrap() > 0);
    let out = saved.path("first-sector");
    let ends = [format!("if={}", overlay.display()), format!("of={}", out.display())];
    let words = ["dd", "-f", "qcow2", "-O", "raw", "bs=512", "count=1"];
    let output = Command::new("qemu-img").args(words).args(ends).output();
    assert!(output.unwrap().status.success());
    assert!(fs::read(&out).unwrap().starts_with(b"web\n"), "the overlay has what the guest wrote");
}
