//! QEMUs that are not what they were when they began to listen: another user, another root directory.

use std::os::unix::fs::MetadataExt as _;

use serde_json::Value;
use towline_lab::{Builder, Version, require_qemu, skip};

use crate::support::{Fixture, assert_ended, assert_runs, qmp, small_guest_of};

const VERSIONS: [Version; 3] = [Version::V7_2, Version::V10_0, Version::Newest];

/// Options by which root's QEMU gives something up, as each version has them.
fn given_up(version: Version, name: &str, value: &str) -> [String; 2] {
    match (version, name) {
        (Version::V7_2, "user") => ["-runas".into(), value.into()],
        (Version::V7_2, _) => [format!("-{name}"), value.into()],
        _ => ["-run-with".into(), format!("{name}={value}")],
    }
}

/// Saves the guest, restores it, and moves it on.
fn saves_restores_and_moves(fixture: &Fixture, version: Version, name: &str, value: &str, text: &str) {
    let builder: Builder = small_guest_of(version).args(given_up(version, name, value));
    let waiting = || builder.clone().incoming_defer().start().unwrap();
    let source = builder.clone().start().unwrap();
    assert_runs(&source);
    let image = fixture.name(&format!("{version:?}-{name}.img"));
    let saved = fixture.run(&format!("copy --multifd-channels 2 {} {image}", qmp(&source)));
    assert_ended(&saved, 0, &[text]);
    source.kill().unwrap();
    let (first, second) = (waiting(), waiting());
    assert_ended(&fixture.run(&format!("copy --stream --run {image} {}", qmp(&first))), 0, &[]);
    assert_runs(&first);
    assert_ended(&fixture.run(&format!("move {} {}", qmp(&first), qmp(&second))), 0, &[text]);
    assert_runs(&second);
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// As LXD and Incus start it. The socket's peer is root, as which QEMU listened.
#[test]
fn a_guest_of_a_qemu_that_became_another_user_is_saved_and_moved() {
    let name = "a_guest_of_a_qemu_that_became_another_user_is_saved_and_moved";
    if !require_qemu(name, &VERSIONS) {
        return;
    }
    if !is_root() {
        return skip(name, "only root can start a QEMU that becomes another user");
    }
    let fixture = Fixture::new();
    fixture.admit_all_users();
    for version in VERSIONS {
        saves_restores_and_moves(&fixture, version, "user", "daemon", "");
    }
}

/// Such a QEMU finds no socket of towline's by its path.
#[test]
fn a_guest_of_a_qemu_with_another_root_directory_is_saved_and_moved() {
    let name = "a_guest_of_a_qemu_with_another_root_directory_is_saved_and_moved";
    if !require_qemu(name, &VERSIONS) {
        return;
    }
    if !is_root() {
        return skip(name, "only root can start a QEMU that changes its root directory");
    }
    let fixture = Fixture::new();
    let root = tempfile::tempdir().unwrap();
    for version in VERSIONS {
        let notice = "no lanes: QEMU on";
        saves_restores_and_moves(&fixture, version, "chroot", root.path().to_str().unwrap(), notice);
    }
    let builder = small_guest_of(Version::V10_0);
    let chroot = given_up(Version::V10_0, "chroot", root.path().to_str().unwrap());
    let source = builder.clone().args(chroot).start().unwrap();
    let destination = builder.incoming_defer().start().unwrap();
    assert_runs(&source);
    let line = format!("move --postcopy {} {}", qmp(&source), qmp(&destination));
    assert_ended(&fixture.run(&line), 1, &["another root directory (chroot)", "without postcopy"]);
    source.qmp().execute("query-status", Value::Null).unwrap();
    assert_runs(&source);
}
