//! Changes of a killed towline in a stock QEMU are undone by its journal.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

#[path = "../../qmp/tests/common/mod.rs"]
mod common;

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use common::{Binary, TestQemu, binaries, skipped, until};
use serde_json::{Map, json};
use towline_control::journal::{self, RuntimeDirectory, UndoRecord};
use towline_control::qemu::{AppliedSettings, Error, MigrationSettings, Qemu, RepairReport};
use towline_qmp::Options;
use towline_qmp::commands::{Capability, Migrate, MigrationParameters, MigrationStatus};

/// The QEMUs, if this user has a directory for journals.
fn with_journals(test: &str) -> Vec<Binary> {
    match RuntimeDirectory::open() {
        Ok(_) => binaries(test),
        Err(error) => {
            skipped(test, &error.to_string());
            Vec::new()
        }
    }
}

fn connect(process: &TestQemu) -> Qemu {
    // Its monitor accepts connections once a client was connected.
    drop(process.client());
    Qemu::connect(process.path("qmp"), &Options::default()).unwrap()
}

fn repair(process: &TestQemu) -> Option<RepairReport> {
    Qemu::repair(process.path("qmp"), &Options::default()).unwrap()
}

fn wanted() -> MigrationSettings {
    MigrationSettings {
        capabilities: [(Capability::EVENTS, true), (Capability::MULTIFD, true)].into(),
        parameters: MigrationParameters { multifd_channels: Some(5), ..MigrationParameters::default() },
    }
}

/// As after a kill: what a dropped `AppliedSettings` has changed stays, and stays in the journal.
fn leave_changed(mut qemu: Qemu) -> MigrationParameters {
    let before = qemu.facts().parameters.clone();
    let mut settings = AppliedSettings::apply(&mut qemu, &wanted()).unwrap();
    let more = MigrationParameters { max_bandwidth: Some(4711), ..MigrationParameters::default() };
    settings.change(&mut qemu, more).unwrap();
    drop(settings);
    assert_eq!(qemu.refresh().unwrap().parameters.max_bandwidth, Some(4711));
    before
}

#[test]
fn settings_are_restored_for_known_and_unknown_processes() {
    let test = "settings_are_restored_for_known_and_unknown_processes";
    for binary in with_journals(test) {
        // Without vCPUs the process is not known, and the journal is named by the socket.
        for args in [["-machine", "q35"], ["-machine", "none"]] {
            let process = TestQemu::start(&binary, &args);
            let before = leave_changed(connect(&process));
            let repaired = repair(&process).unwrap();
            assert_eq!(repaired.left, [""; 0]);
            assert_eq!(repaired.owner, i32::try_from(std::process::id()).unwrap());
            for text in ["events off", "multifd off", "multifd-channels 2"] {
                assert!(repaired.done.iter().any(|done| done == text), "{text} is not in {repaired:?}");
            }
            let qemu = connect(&process);
            assert!(qemu.repaired().is_none());
            assert_eq!(qemu.facts().parameters, before);
            assert!(!qemu.facts().capabilities[&Capability::EVENTS]);
        }
    }
}

#[test]
fn restored_settings_leave_no_record() {
    for binary in with_journals("restored_settings_leave_no_record") {
        let process = TestQemu::q35(&binary, &[]);
        let mut qemu = connect(&process);
        let settings = AppliedSettings::apply(&mut qemu, &wanted()).unwrap();
        qemu.record(&UndoRecord::migration("unix:a")).unwrap();
        settings.restore(&mut qemu).unwrap();
        drop(qemu);
        assert_eq!(repair(&process), None);
    }
}

#[test]
fn second_towline_is_refused() {
    for binary in with_journals("second_towline_is_refused") {
        let process = TestQemu::q35(&binary, &["-qmp", "unix:{dir}/second,server=on,wait=off"]);
        let first = connect(&process);
        let path = process.path("second");
        let connected = Qemu::connect(&path, &Options::default()).unwrap_err();
        let repaired = Qemu::repair(&path, &Options::default()).unwrap_err();
        for error in [connected, repaired] {
            assert!(
                matches!(&error, Error::Journal(journal::Error::InUse { pid: Some(pid), .. })
                    if *pid == i32::try_from(std::process::id()).unwrap()),
                "{error}"
            );
        }
        assert!(Qemu::inspect(process.path("second"), &Options::default()).is_ok());
        drop(first);
        assert!(Qemu::connect(process.path("second"), &Options::default()).is_ok());
    }
}

/// A monitor lets in the next one when the one before leaves it.
#[test]
fn towlines_that_take_turns_at_one_monitor_are_not_refused() {
    for binary in with_journals("towlines_that_take_turns_at_one_monitor_are_not_refused") {
        let process = TestQemu::q35(&binary, &[]);
        drop(process.client());
        let path = process.path("qmp");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope
                    .spawn(|| (0..25).for_each(|_| drop(Qemu::connect(&path, &Options::default()).unwrap())));
            }
        });
    }
}

#[test]
fn unplugged_devices_are_plugged_again() {
    for binary in with_journals("unplugged_devices_are_plugged_again") {
        let process = TestQemu::q35(&binary, &["-device", "pcie-root-port,id=rp1,chassis=1,addr=6"]);
        let device = |id: &str, driver: &str| UndoRecord::Device {
            path: format!("/machine/peripheral/{id}"),
            add: Map::from_iter(
                [("driver", driver), ("id", id), ("bus", "rp1")]
                    .map(|(key, value)| (key.to_owned(), json!(value))),
            ),
        };
        let qemu = connect(&process);
        qemu.record(&device("rng9", "virtio-rng-pci")).unwrap();
        qemu.record(&device("rp1", "pcie-root-port")).unwrap();
        qemu.record(&device("odd0", "no-such-device")).unwrap();
        drop(qemu);
        let repaired = repair(&process).unwrap();
        assert_eq!(repaired.done, ["device rp1 is plugged in", "device rng9 plugged again"]);
        assert!(repaired.left[0].starts_with("device odd0 is unplugged: "), "{repaired:?}");
        let again = repair(&process).unwrap();
        assert_eq!((again.done.len(), &again.left), (0, &repaired.left), "what failed is kept");
        let peripheral = Map::from_iter([("path".to_owned(), json!("/machine/peripheral"))]);
        let listed = connect(&process).client().execute_raw("qom-list", Some(peripheral)).unwrap();
        assert!(listed.as_array().unwrap().iter().any(|entry| entry["name"] == "rng9"), "{listed}");
    }
}

/// The migration that a killed towline started goes to a socket that is not read any more.
#[test]
fn own_migration_is_cancelled_and_others_are_not() {
    for binary in with_journals("own_migration_is_cancelled_and_others_are_not") {
        for begun_by in [Begun::Us, Begun::Others, Begun::OthersLater] {
            let process = TestQemu::q35(&binary, &[]);
            let mut qemu = connect(&process);
            let settings = AppliedSettings::apply(&mut qemu, &wanted_without_lanes()).unwrap();
            let path = process.path("stream");
            let listener = UnixListener::bind(&path).unwrap();
            let command = Migrate::to_uri(format!("unix:{}", path.display()));
            if begun_by == Begun::OthersLater {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                let now_ms = u64::try_from(now.tv_sec * 1000 + now.tv_nsec / 1_000_000).unwrap();
                let UndoRecord::Migration { to, begun_ms, .. } = UndoRecord::migration("unix:a") else {
                    unreachable!()
                };
                qemu.record(&UndoRecord::Migration { to, begun_ms, seen_ms: Some(now_ms) }).unwrap();
            }
            match begun_by {
                Begun::Us => qemu.migrate(&command).unwrap(),
                Begun::Others | Begun::OthersLater => _ = qemu.client().execute(&command).unwrap(),
            }
            let (_stream, _) = listener.accept().unwrap();
            until("a migration that was under way when it was asked for", || {
                let asked = Instant::now();
                // A towline watches its own migration only.
                let found = match begun_by {
                    Begun::Us => qemu.watch_migration(None).unwrap()?,
                    Begun::Others | Begun::OthersLater => qemu.migration().unwrap(),
                };
                let age = Duration::from_millis(u64::try_from(found.total_time?).unwrap());
                let was_under_way = age > asked.elapsed() + Duration::from_millis(2);
                (found.status == Some(MigrationStatus::ACTIVE) && was_under_way).then_some(())
            });
            drop(settings);
            drop(qemu);
            let repaired = repair(&process).unwrap();
            let status = connect_without_repair(&process).migration().unwrap().status.unwrap();
            if begun_by == Begun::Us {
                assert_eq!(
                    (repaired.left.len(), status),
                    (0, MigrationStatus::CANCELLED),
                    "{:?}",
                    repaired.left
                );
            } else {
                assert_eq!(status, MigrationStatus::ACTIVE);
                let left = repaired.left.last().unwrap();
                let expected = "events, max-bandwidth: its migration has not ended within";
                assert!(left.starts_with(expected), "{repaired:?}");
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Begun {
    Us,
    Others,
    /// Right after ours, which was in progress a moment ago.
    OthersLater,
}

fn wanted_without_lanes() -> MigrationSettings {
    MigrationSettings {
        capabilities: [(Capability::EVENTS, true)].into(),
        // Slow enough that its memory of zeroes is not sent before.
        parameters: MigrationParameters { max_bandwidth: Some(4096), ..MigrationParameters::default() },
    }
}

fn connect_without_repair(process: &TestQemu) -> Qemu {
    Qemu::inspect(process.path("qmp"), &Options::default()).unwrap()
}

/// After `quit` no journal is left.
#[test]
fn journal_is_removed_with_its_qemu() {
    for binary in with_journals("journal_is_removed_with_its_qemu") {
        let process = TestQemu::q35(&binary, &[]);
        let mut qemu = connect(&process);
        AppliedSettings::apply(&mut qemu, &wanted()).unwrap().leave_applied();
        let names = || {
            let entries = std::fs::read_dir(RuntimeDirectory::open().unwrap().path()).unwrap();
            let prefix = format!("qemu-{}-", process.child.id());
            entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).count()
        };
        assert_eq!(names(), 1);
        qemu.quit().unwrap();
        drop(qemu);
        assert_eq!(names(), 0);
    }
}
