//! Guests that go from QEMU to QEMU.

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::expect::{assert_ended, completed, qmp, wait_event};
use towline_lab::{Qemu, signal};

use crate::disks::{DISK_THERE, with_disks};
use crate::support::{Hosts, WITHIN, WRITER, assert_disk, with_disk};

const DIRECT: [&str; 5] = ["--via", "direct", "--json", "--peer-timeout", "3"];

/// A QEMU that waits on the other host for the guest.
fn waiting(hosts: &Hosts) -> (Qemu, String) {
    let disk = hosts.place.path("disk.raw");
    let waiting = with_disk(&disk).within(hosts.there.network()).incoming_defer().start().unwrap();
    let place = format!("/{}", qmp(&waiting));
    (waiting, place)
}

/// Settings of a QEMU for migrations, and its objects.
fn settings(qemu: &Qemu) -> [Value; 3] {
    let objects = serde_json::json!({ "path": "/objects" });
    [
        ("query-migrate-capabilities", Value::Null),
        ("query-migrate-parameters", Value::Null),
        ("qom-list", objects),
    ]
    .map(|(command, arguments)| qemu.qmp().execute(command, arguments).unwrap())
}

#[test]
fn a_guest_goes_from_qemu_to_qemu_with_its_disk() {
    let Some(mut hosts) = Hosts::new("a_guest_goes_from_qemu_to_qemu_with_its_disk") else { return };
    let options = with_disks(&hosts);
    let options: Vec<&str> = options.iter().map(String::as_str).chain(["--via", "direct"]).collect();
    hosts.guest.as_mut().unwrap().shell(WRITER, WITHIN).unwrap();
    let tick = hosts.last_tick();
    let moved = hosts.run("move", "/web", &options);
    completed(&moved);
    assert!(moved.stdout.contains("from QEMU to QEMU (--via direct): with TLS"), "{}", moved.stdout);
    assert!(!moved.stderr.contains("sandbox"), "{}", moved.stderr);
    hosts.source.wait_exit(WITHIN).unwrap();
    assert!(hosts.there.path(DISK_THERE).exists());
    hosts.assert_continues_there("web", tick);
    assert_disk(&mut hosts.agent_there());
}

#[test]
fn a_guest_goes_from_qemu_to_qemu_without_copies_in_the_kernel() {
    let Some(mut hosts) = Hosts::new("a_guest_goes_from_qemu_to_qemu_without_copies_in_the_kernel") else {
        return;
    };
    let (waiting, place) = waiting(&hosts);
    let before = settings(&waiting);
    let tick = hosts.last_tick();
    let moved = hosts.run("move", &place, &["--zero-copy-send", "on", "--json", "--paused"]);
    let event = completed(&moved);
    assert!(
        event["ram"]["transferred"].as_u64() > Some(64 << 20)
            || event["transferred"].as_u64() > Some(64 << 20),
        "{event}"
    );
    let text = "(--zero-copy-send on): memory is not encrypted";
    assert!(moved.stdout.contains(text), "{}", moved.stdout);
    // It always does over a link without a device.
    let copied = moved.stdout.split_once("the kernel copied all the same: ");
    assert!(copied.is_some_and(|(_, passes)| !passes.starts_with('0')), "{}", moved.stdout);
    hosts.source.wait_exit(WITHIN).unwrap();
    assert_eq!(settings(&waiting), before);
    waiting.qmp().wait_status("paused", WITHIN).unwrap();
    waiting.qmp().execute("cont", Value::Null).unwrap();
    assert!(waiting.linux(WITHIN).unwrap().wait_ticking(WITHIN).unwrap() > tick);
}

/// Causes of the end of a move.
const ENDS: [&str; 5] = ["user", "towline", "agent", "link", "another user"];

#[test]
fn a_direct_move_that_ends_early_leaves_the_guest_where_it_is() {
    let name = "a_direct_move_that_ends_early_leaves_the_guest_where_it_is";
    ends_early(name, ENDS.iter().enumerate().map(|(index, end)| (*end, index % 2 == 0)));
}

#[test]
#[ignore = "nightly"]
fn a_direct_move_with_and_without_tls_that_ends_early_leaves_the_guest_where_it_is() {
    let name = "a_direct_move_with_and_without_tls_that_ends_early_leaves_the_guest_where_it_is";
    ends_early(name, ENDS.iter().flat_map(|end| [(*end, true), (*end, false)]));
}

/// Moves that end for these causes: with TLS, or in the clear with zero-copy sends.
fn ends_early(test: &str, moves: impl Iterator<Item = (&'static str, bool)>) {
    let Some(mut hosts) = Hosts::new(test) else { return };
    let encrypted = [&DIRECT[..], &["--max-bandwidth", "4M"]].concat();
    let clear = [&encrypted[..], &["--zero-copy-send", "on"]].concat();
    let before = settings(&hosts.source);
    for (end, is_encrypted) in moves {
        let (waiting, place) = waiting(&hosts);
        let mut moving = hosts.start("move", &place, if is_encrypted { &encrypted } else { &clear });
        // QEMU 10.0 may never clean up a migration whose connections break while it makes them.
        let is_transfer = |event: &Value| event["ram"]["transferred"].as_u64() >= Some(1 << 18);
        wait_event(&mut moving, "the transfer", WITHIN, is_transfer);
        match end {
            "user" => signal(moving.pid(), Signal::INT),
            "towline" => signal(moving.pid(), Signal::KILL),
            "agent" => signal(hosts.there.agent().unwrap(), Signal::KILL),
            "link" => hosts.cut(),
            _ => drop(hosts.source.qmp().execute("migrate_cancel", Value::Null).unwrap()),
        }
        let finished = moving.wait(WITHIN).unwrap();
        if end == "link" {
            hosts.mend();
        }
        if end != "towline" {
            assert_ended(&finished, 1, &["safe at its source"]);
        }
        if end == "towline" {
            // The agent has the QEMUs lose their connection.
            hosts.source.qmp().wait_migration("failed", WITHIN).unwrap();
            let monitor = qmp(&hosts.source);
            assert_ended(&hosts.towline(&["repair", &monitor]).wait(WITHIN).unwrap(), 0, &[]);
        }
        assert_eq!(settings(&hosts.source), before, "{end}");
        hosts.assert_stays();
        waiting.kill().unwrap();
    }
}

#[test]
fn what_only_qemu_can_send_goes_directly_by_itself() {
    let Some(mut hosts) = Hosts::new("what_only_qemu_can_send_goes_directly_by_itself") else { return };
    let start = hosts.start_options();
    let start: Vec<&str> = start.iter().map(String::as_str).collect();
    let bitmap = serde_json::json!({ "node": "disk0", "name": "backup" });
    hosts.source.qmp().execute("block-dirty-bitmap-add", bitmap).unwrap();
    let capability =
        serde_json::json!({ "capabilities": [{ "capability": "dirty-bitmaps", "state": true }] });
    hosts.source.qmp().execute("migrate-set-capabilities", capability).unwrap();
    let tick = hosts.last_tick();
    let moved = hosts.run("move", "/web", &[&start[..], &["--json"]].concat());
    completed(&moved);
    assert!(moved.stdout.contains("from QEMU to QEMU (capability dirty-bitmaps)"), "{}", moved.stdout);
    let drives = hosts.there.monitor("web", WITHIN).unwrap().execute("query-block", Value::Null).unwrap();
    assert!(drives.to_string().contains("\"backup\""), "{drives}");
    hosts.assert_continues_there("web", tick);
}
