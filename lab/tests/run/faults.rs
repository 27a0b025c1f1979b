//! Mistakes of a user, an image or a QEMU: each is refused with the option that changes it, and nothing is
//! left.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use towline_lab::{Finished, Version, require_lab};

use crate::support::{MIB, Recipe, Saved, WITHIN};

fn assert_failed(saved: &Saved, finished: &Finished, text: &str) {
    assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains(text), "{}", finished.stderr);
    assert_eq!(saved.guests(), Vec::<String>::new());
    assert!(!saved.directory("web").exists());
}

/// A QEMU that is started with another command line than towline's.
fn wrapper(saved: &Saved, script: &str) -> String {
    let path = saved.path("qemu");
    fs::write(&path, format!("#!/bin/bash\n{script}\nexec {} \"${{words[@]}}\"\n", saved.binary())).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_qemu_that_does_not_start_is_reported_with_its_message() {
    if !require_lab("a_qemu_that_does_not_start_is_reported_with_its_message") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let unknown = saved.run_with_more(&["--name", "web"], &["-device", "no-such-device"]);
    assert_failed(
        &saved,
        &unknown.wait(WITHIN).unwrap(),
        "'no-such-device' is not a valid device model name",
    );
    let unknown = saved.run_with_more(&["--name", "web"], &["-no-such-option"]).wait(WITHIN).unwrap();
    // The user's arguments are read before a QEMU is started.
    assert_failed(&saved, &unknown, "no-such-option");
    assert!(!unknown.stderr.contains("ended at its start"), "{}", unknown.stderr);
    let script = "[ \"$1\" = --version ] || { echo 'out of order' >&2; exit 3; }; words=(\"$@\")";
    let binary = wrapper(&saved, script);
    let dies = saved.run_image(&saved.image(), &["--name", "web", "--qemu", &binary]).wait(WITHIN).unwrap();
    assert_failed(&saved, &dies, "ended at its start (exit status: 3): out of order");
    let missing = saved.run_image(&saved.image(), &["--name", "web", "--qemu", "/nowhere/qemu"]);
    assert_failed(&saved, &missing.wait(WITHIN).unwrap(), "name another with --qemu");
    saved.assert_intact();
}

/// A QEMU whose memory is not what its command line said.
#[test]
fn memory_whose_mapping_differs_is_sent_or_refused() {
    if !require_lab("memory_whose_mapping_differs_is_sent_or_refused") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let script = "words=(); for word; do words+=(\"${word/offset=1048576/offset=1052672}\"); done";
    let binary = wrapper(&saved, script);
    let options = ["--name", "web", "--qemu", &binary];
    let refused = saved.run_image(&saved.image(), &[&options[..], &["--share"]].concat());
    let text = "from byte 1052672 on, expected 1048576";
    assert_failed(&saved, &refused.wait(WITHIN).unwrap(), text);
    let mut sent = saved.run_image(&saved.image(), &options);
    saved.assert_runs(&mut sent, "web");
    assert!(
        sent.stderr().contains("is sent, not mapped") && sent.stderr().contains(text),
        "{}",
        sent.stderr()
    );
    saved.interrupt(sent);
    saved.assert_intact();
}

#[test]
fn an_image_that_is_replaced_or_cut_short_is_refused() {
    if !require_lab("an_image_that_is_replaced_or_cut_short_is_refused") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let lock = fs::File::open(saved.image()).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let busy = saved.run(&["--name", "web"], &saved.settings()).wait(WITHIN).unwrap();
    assert_failed(&saved, &busy, "is being replaced by another towline; try again");
    drop(lock);
    let mut run = saved.run(&["--name", "web"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    let busy = saved.towline(["copy", "--overwrite", "mem:8M", &saved.image()].map(str::to_owned));
    let busy = busy.wait(WITHIN).unwrap();
    assert_eq!(busy.status.code(), Some(1), "guests run from it: {}", busy.stderr);
    assert!(busy.stderr.contains("guest.img"), "{}", busy.stderr);
    saved.interrupt(run);
    saved.assert_intact();
    let file = fs::File::options().write(true).open(saved.image()).unwrap();
    file.set_len(64 * MIB).unwrap();
    let short = saved.run(&["--name", "web"], &saved.settings()).wait(WITHIN).unwrap();
    assert_failed(&saved, &short, "guest.img");
}

#[test]
#[ignore = "nightly"]
fn memory_of_several_numa_nodes_is_mapped() {
    if !require_lab("memory_of_several_numa_nodes_is_mapped") {
        return;
    }
    let words = "-object memory-backend-ram,id=m0,size=256M -object memory-backend-ram,id=m1,size=256M \
                 -numa node,memdev=m0,cpus=0 -numa node,memdev=m1,cpus=1";
    let arguments: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    let saved = Saved::of(&Recipe { arguments: &arguments, ..Recipe::default() });
    let mut run = saved.run(&["--name", "web", "--share"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    assert_eq!(run.stdout().matches("memory-backend-file,id=m").count(), 2, "{}", run.stdout());
    assert!(saved.ram_pss("web") < 200 * MIB);
    saved.interrupt(run);
    saved.assert_intact();
}
