//! A stock QEMU with `zero-copy-send` on, inside the guest: its pages leave by the guest's virtio card.
//!
//! ```text
//!   guest   qemu -S ── migrate ── virtio-net ── tap ──► network of its own   towline copy tcp:… IMAGE
//!           qemu -S ── migrate ── loopback (the kernel copies) ──► towline copy tcp:… IMAGE
//! ```
//! This QEMU is emulated by an emulated processor, so its own guest does not run: its pages are sent, as zero
//! pages are sent as ordinary ones.

use std::path::Path;

use serde_json::Value;
use towline_lab::{LinuxGuest, Network, Version, require_lab, skip, towline_binary, wait_until};

use super::{LANES, Receiver, WITHIN, guest, network};

const MEBIBYTES: u64 = 96;
const FIRMWARE: [&str; 2] = ["/usr/share/seabios/bios-256k.bin", "/usr/share/qemu/kvmvapic.bin"];
const MONITOR: &str = "/tmp/monitor";

/// Starts a QEMU in the guest, whose processor waits.
fn start_qemu(guest: &mut LinuxGuest) {
    // The firmware is beside the programs.
    let machine =
        format!("-nodefaults -no-user-config -display none -machine q35 -m {MEBIBYTES}M -L /bin -S");
    let line = format!(
        "rm -f {MONITOR}; qemu-system-x86_64 {machine} -qmp unix:{MONITOR},server=on,wait=off > /tmp/qemu 2>&1 & echo"
    );
    guest.shell(&line, WITHIN).unwrap();
    wait_until("the monitor of the QEMU in the guest", WITHIN, || {
        let line = format!("if test -S {MONITOR}; then echo yes; else cat /tmp/qemu; fi");
        let said = guest.shell(&line, WITHIN)?;
        assert!(said.trim().is_empty() || said.trim() == "yes", "{said}");
        Ok((said.trim() == "yes").then_some(()))
    })
    .unwrap();
}

fn execute(guest: &mut LinuxGuest, command: &str) -> Value {
    let output = guest.shell(&format!("towline ctl {MONITOR} {command}"), WITHIN).unwrap();
    serde_json::from_str(&output).unwrap_or_else(|error| panic!("{command}: {error}: {output}"))
}

/// Has the QEMU migrate to this port without copies, and waits for it. Returns the result of `query-migrate`.
fn migrate(guest: &mut LinuxGuest, to: &str) -> Value {
    let on = ["multifd", "zero-copy-send", "return-path"]
        .map(|name| format!(r#"{{"capability":"{name}","state":true}}"#));
    let capabilities = format!(r#"'{{"capabilities":[{}]}}'"#, on.join(","));
    execute(guest, &format!("migrate-set-capabilities {capabilities}"));
    let parameters = format!("multifd-channels={LANES} zero-page-detection=none max-bandwidth=0");
    execute(guest, &format!("migrate-set-parameters {parameters}"));
    execute(guest, &format!("migrate uri={to}"));
    let migration = wait_until("the end of the migration", WITHIN, || {
        let migration = execute(guest, "query-migrate");
        let status = migration["status"].as_str().unwrap_or_default();
        assert!(!matches!(status, "failed" | "cancelled"), "{migration}");
        Ok((status == "completed").then_some(migration))
    })
    .unwrap();
    execute(guest, "quit");
    migration
}

fn number(migration: &Value, key: &str) -> u64 {
    migration["ram"][key].as_u64().unwrap_or_else(|| panic!("{key}: {migration}"))
}

#[test]
fn a_stock_source_sends_over_a_virtio_card_without_a_copy() {
    let name = "a_stock_source_sends_over_a_virtio_card_without_a_copy";
    if !require_lab(name) {
        return;
    }
    let network: Network = match network() {
        Ok(network) => network,
        Err(error) => return skip(name, &format!("no separate network: {error:#}")),
    };
    let (qemu, towline) = (Version::V10_0.command(), towline_binary().unwrap());
    let programs = [Path::new(qemu.get_program()), towline.as_path()];
    let programs: Vec<&Path> = programs.into_iter().chain(FIRMWARE.map(Path::new)).collect();
    let (_qemu, mut guest) = guest(&network, &programs);
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image").display().to_string();
    let receiver = Receiver::start(&network, &image);
    start_qemu(&mut guest);
    let migration = migrate(&mut guest, &format!("tcp:10.0.2.2:{}", receiver.port));
    let received = receiver.wait();
    assert!(number(&migration, "multifd-bytes") >= MEBIBYTES << 20, "{migration}");
    assert!(received["ram"]["normal"].as_u64().unwrap() >= MEBIBYTES << 8, "{received}");
    assert_eq!(number(&migration, "dirty-sync-missed-zero-copy"), 0, "{migration}");
    // The same over the loopback, to show that the count can be another one.
    let line = format!(
        "rm -f /tmp/out; towline copy --json --multifd-channels {LANES} tcp:127.0.0.1:4444 /tmp/image > /tmp/out 2>&1 & echo"
    );
    guest.shell(&line, WITHIN).unwrap();
    wait_until("towline that listens in the guest", WITHIN, || {
        let said = guest.shell("cat /tmp/out", WITHIN)?;
        Ok(said.contains("listening on tcp:127.0.0.1:4444").then_some(()))
    })
    .unwrap();
    start_qemu(&mut guest);
    let migration = migrate(&mut guest, "tcp:127.0.0.1:4444");
    assert!(number(&migration, "dirty-sync-missed-zero-copy") > 0, "{migration}");
}
