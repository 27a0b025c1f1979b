//! A runtime directory that other users can write to is not used: the copy runs without a journal and reports
//! that, `repair` fails.

use std::process::Command;

use towline_lab::expect::{assert_ended, qmp};
use towline_lab::{BootSector, Qemu, Version, require_lab};

use crate::support::{Fixture, WITHIN, user};

/// Shell script: runs towline with its own `/run`, prepared by a command; only root may mount.
const PREPARE: &str = "mount -t tmpfs -o mode=755 tmpfs /run && cd /run && ";

#[test]
fn hostile_directories_are_refused() {
    if !require_lab("hostile_directories_are_refused") {
        return;
    }
    let can_mount = Command::new("unshare").args(["--mount", "true"]).status();
    if user() != 0 || !can_mount.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED hostile_directories_are_refused: only root may mount a /run");
        return;
    }
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 16, ..BootSector::default() };
    let source = Qemu::builder(Version::V10_0).memory_mib(16).boot_sector(boot_sector).start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    let fixture = Fixture::new();
    let elsewhere = fixture.name("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let link = format!("ln -s {elsewhere} towline");
    let inner = format!("mkdir towline && ln -s {elsewhere} towline/journal");
    for (prepare, reason) in [
        (link.as_str(), "it is a symbolic link or no directory"),
        (inner.as_str(), "it is a symbolic link or no directory"),
        ("mkdir -m 777 towline", "its mode is 0777, expected 0755"),
        ("mkdir -p towline/journal && chmod 707 towline/journal", "its mode is 0707, expected 0700"),
        ("mkdir towline && chown 12345 towline", "its owner is user 12345, expected 0"),
        (
            "mkdir -p towline/journal && chmod 700 towline/journal && chown 12345 towline/journal",
            "its owner is user 12345, expected 0",
        ),
    ] {
        let script = format!("{PREPARE}{prepare} && exec \"$@\"");
        let by = ["unshare", "--mount", "sh", "-c", &script, "sh"];
        let copy = format!("copy --resume --overwrite {} {}", qmp(&source), fixture.name("guest.img"));
        let finished = fixture.start(&by, &copy).wait(WITHIN).unwrap();
        assert_ended(&finished, 0, &["are not restored", "is not safe for journals", reason]);
        let finished = fixture.start(&by, &format!("repair {}", qmp(&source))).wait(WITHIN).unwrap();
        assert_ended(&finished, 1, &["is not safe for journals", reason]);
        assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0, "{prepare}");
    }
}
