//! A stock QEMU with `zero-copy-send` on, inside the guest: its pages leave by the guest's virtio card.
//!
//! ```text
//!   guest   qemu -S ── migrate ── virtio-net ── tap ──► separate network   towline copy tcp:… IMAGE
//!           qemu -S ── migrate ── loopback (the kernel copies) ──► towline copy tcp:… IMAGE
//!           qemu -S ── towline move --via direct ── virtio-net ── tap ──► separate network   sshd, qemu -incoming
//! ```
//! This QEMU is emulated by an emulated processor, so its own guest does not run: its pages are sent, as zero
//! pages are sent as ordinary ones.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use towline_lab::expect::{Scratch, qmp};
use towline_lab::{LinuxGuest, Qemu, SshHost, Sshd, Version, require_lab, towline_binary, wait_until};

use super::{LANES, Receiver, WITHIN, guest, network};

const MEBIBYTES: u64 = 96;
const FIRMWARE: [&str; 2] = ["/usr/share/seabios/bios-256k.bin", "/usr/share/qemu/kvmvapic.bin"];
const MONITOR: &str = "/tmp/monitor";
/// Its memory, but for the firmware's, which QEMU writes.
const CONTENT_MIB: u64 = MEBIBYTES - 1;

/// Starts a QEMU in the guest, whose processor waits.
fn start_qemu(guest: &mut LinuxGuest, machine: &str) {
    // The firmware is beside the programs.
    let machine =
        format!("-nodefaults -no-user-config -display none -machine {machine} -m {MEBIBYTES}M -L /bin -S");
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
    let Some(network) = network(name) else { return };
    let (qemu, towline) = (Version::V10_0.command(), towline_binary().unwrap());
    let programs = [Path::new(qemu.get_program()), towline.as_path()];
    let programs: Vec<&Path> = programs.into_iter().chain(FIRMWARE.map(Path::new)).collect();
    let (_qemu, mut guest) = guest(&network, &programs);
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image").display().to_string();
    let receiver = Receiver::start(&network, &image);
    start_qemu(&mut guest, "q35");
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
    start_qemu(&mut guest, "q35");
    let migration = migrate(&mut guest, "tcp:127.0.0.1:4444");
    assert!(number(&migration, "dirty-sync-missed-zero-copy") > 0, "{migration}");
}

/// Writes the files that the client of this host needs into the guest.
fn add_client(guest: &mut LinuxGuest, host: &SshHost) {
    guest.shell("echo root:x:0:0::/tmp:/bin/sh > /etc/passwd", WITHIN).unwrap();
    for file in host.client_files() {
        let text = fs::read_to_string(&file).unwrap().replace('\n', "\\n");
        let (directory, file) = (file.parent().unwrap().display(), file.display());
        guest.shell(&format!("umask 077; mkdir -p {directory}; printf '{text}' > {file}"), WITHIN).unwrap();
    }
}

#[test]
fn a_stock_source_moves_to_another_host_over_a_virtio_card_without_a_copy() {
    let name = "a_stock_source_moves_to_another_host_over_a_virtio_card_without_a_copy";
    if !require_lab(name) {
        return;
    }
    let Some(sshd) = Sshd::find(name) else { return };
    let Some(network) = network(name) else { return };
    let host = SshHost::new(&sshd, network, "10.0.2.2").unwrap();
    let (emulator, towline) = (Version::V10_0.command(), towline_binary().unwrap());
    let programs = [Path::new(emulator.get_program()), towline.as_path(), Path::new("/usr/bin/ssh")];
    let programs: Vec<&Path> = programs.into_iter().chain(FIRMWARE.map(Path::new)).collect();
    let (_qemu, mut guest) = guest(host.network(), &programs);
    add_client(&mut guest, &host);
    guest.shell(&format!("dd if=/dev/urandom of=/tmp/ram bs=1M count={MEBIBYTES}"), WITHIN).unwrap();
    let backend =
        format!("-object memory-backend-file,id=pc.ram,size={MEBIBYTES}M,mem-path=/tmp/ram,share=off");
    let machine = format!(
        "{},memory-backend=pc.ram -cpu max -serial null -serial null {backend}",
        Version::V10_0.machine()
    );
    start_qemu(&mut guest, &machine);
    let waiting = Qemu::builder(Version::V10_0).memory_mib(MEBIBYTES).within(host.network()).incoming_defer();
    let waiting = waiting.start().unwrap();
    let line = format!(
        "HOME=/tmp towline move qmp:{MONITOR} ssh:other/{} --via direct --zero-copy-send on --ssh '{}' 2>&1",
        qmp(&waiting),
        host.client()
    );
    let said = guest.shell(&line, WITHIN).unwrap();
    assert!(said.contains("in which the kernel copied all the same: 0"), "{said}");
    let place = Scratch::new();
    let there = place.text("memory");
    let memory = json!({ "val": 1 << 20, "size": CONTENT_MIB << 20, "filename": there });
    waiting.qmp().execute("pmemsave", memory).unwrap();
    let sum = format!("tail -c {} /tmp/ram | sha256sum", CONTENT_MIB << 20);
    let here = guest.shell(&sum, WITHIN).unwrap();
    let found = std::process::Command::new("sha256sum").arg(there).output().unwrap().stdout;
    assert_eq!(here[..64], String::from_utf8(found).unwrap()[..64]);
}
