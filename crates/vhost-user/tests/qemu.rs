//! Stock QEMUs with devices of ours: a Linux guest uses them, loses them and gets them back, and is migrated with one.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use towline_lab::{LinuxGuest, MemoryBackend, Qemu, Version, require_lab, towline, wait_until};

const BOOT_WITHIN: Duration = Duration::from_secs(120);
const WITHIN: Duration = Duration::from_secs(120);
const VERSIONS: [Version; 2] = [Version::V10_0, Version::V7_2];
const DISK_MIB: u64 = 4;

/// An example that runs; killed when dropped.
struct Process {
    child: Child,
}

impl Process {
    /// Starts it and waits until it listens at `socket`.
    fn start(example: &str, socket: &Path, arguments: &[&str]) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new(program(example));
        command.arg(socket).args(arguments).stdin(Stdio::null()).env("RUST_LOG", "warn");
        let child = Self { child: command.spawn().unwrap() };
        wait_until("the device's socket", WITHIN, || Ok(socket.exists().then_some(()))).unwrap();
        child
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An example as cargo builds it beside the tests.
fn program(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(example);
    assert!(
        program.is_file(),
        "{} is missing; `cargo build -p towline-vhost-user --examples` makes it",
        program.display()
    );
    program
}

fn with_device(version: Version, socket: &Path, device: &str) -> towline_lab::Builder {
    // QEMU's vhost-user-rng cannot wait for its backend, so it cannot be told to come back either.
    let reconnect = if device.contains("rng") { "" } else { ",reconnect=1" };
    let chardev = format!("socket,id=dev,path={}{reconnect}", socket.display());
    Qemu::builder(version).memory_backend(MemoryBackend::Memfd { prealloc: false }).linux().args([
        "-chardev".to_owned(),
        chardev,
        "-device".to_owned(),
        format!("{device},chardev=dev"),
    ])
}

fn disk(version: Version, socket: &Path) -> towline_lab::Builder {
    with_device(version, socket, "vhost-user-blk-pci,num-queues=1")
}

/// SHA-256 of the disk's content, by a program that is not ours.
fn disk_hash() -> String {
    let mut content = Command::new(program("disk"));
    let mut content = content.args(["-", &DISK_MIB.to_string()]).stdout(Stdio::piped()).spawn().unwrap();
    let hash = Command::new("sha256sum").stdin(content.stdout.take().unwrap()).output().unwrap();
    assert!(content.wait().unwrap().success());
    String::from_utf8(hash.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

/// How often the guest's loop has read the whole disk; every time it must have been right.
fn rounds(guest: &mut LinuxGuest, hash: &str) -> usize {
    // The loop makes it when it is through for the first time.
    let sums = shell(guest, "touch /tmp/sums; cat /tmp/sums");
    for line in sums.lines() {
        assert!(line.starts_with(hash), "read wrongly: {line}, expected {hash}");
    }
    sums.lines().count()
}

fn wait_rounds(guest: &mut LinuxGuest, hash: &str, more: usize) {
    let wanted = rounds(guest, hash) + more;
    wait_until("more rounds of reading", WITHIN, || Ok((rounds(guest, hash) >= wanted).then_some(())))
        .unwrap();
}

/// Reads the disk round and round, past what is in memory already.
const READ_ON: &str = "(while :; do echo 1 > /proc/sys/vm/drop_caches; sha256sum /dev/vda >> /tmp/sums; done) \
                       > /tmp/reader 2>&1 & echo";

#[test]
fn a_guest_takes_entropy() {
    if !require_lab("a_guest_takes_entropy") {
        return;
    }
    for version in VERSIONS {
        let scratch = TempDir::with_prefix("towline-lab-").unwrap();
        let socket = scratch.path().join("rng.sock");
        let _device = Process::start("rng", &socket, &[]);
        let qemu = with_device(version, &socket, "vhost-user-rng-pci").start().unwrap();
        let mut guest = qemu.linux(BOOT_WITHIN).unwrap();
        let current = shell(&mut guest, "cat /sys/class/misc/hw_random/rng_current");
        assert!(current.starts_with("virtio_rng"), "{current}");
        let line = "head -c 262144 /dev/hwrng > /tmp/random; wc -c < /tmp/random; sha256sum < /tmp/random";
        let (first, second) = (shell(&mut guest, line), shell(&mut guest, line));
        assert!(first.starts_with("262144\n"), "{version:?}: {first}");
        assert!(second.starts_with("262144\n"), "{version:?}: {second}");
        assert_ne!(first, second);
    }
}

#[test]
fn a_disk_survives_the_death_of_its_process() {
    if !require_lab("a_disk_survives_the_death_of_its_process") {
        return;
    }
    let (hash, size) = (disk_hash(), DISK_MIB.to_string());
    for version in VERSIONS {
        let scratch = TempDir::with_prefix("towline-lab-").unwrap();
        let socket = scratch.path().join("disk.sock");
        let mut device = Process::start("disk", &socket, &[&size]);
        let qemu = disk(version, &socket).start().unwrap();
        let mut guest = qemu.linux(BOOT_WITHIN).unwrap();
        shell(&mut guest, READ_ON);
        wait_rounds(&mut guest, &hash, 2);
        for _ in 0..3 {
            drop(device);
            device = Process::start("disk", &socket, &[&size]);
            wait_rounds(&mut guest, &hash, 2);
        }
        drop(device);
    }
}

#[test]
fn a_guest_is_migrated_with_its_disk() {
    if !require_lab("a_guest_is_migrated_with_its_disk") {
        return;
    }
    let (hash, size) = (disk_hash(), DISK_MIB.to_string());
    for version in VERSIONS {
        let scratch = TempDir::with_prefix("towline-lab-").unwrap();
        let sockets = ["here", "there", "back"].map(|name| scratch.path().join(name));
        let mut device = Process::start("disk", &sockets[0], &[&size]);
        let mut source = disk(version, &sockets[0]).start().unwrap();
        let mut guest = source.linux(BOOT_WITHIN).unwrap();
        shell(&mut guest, READ_ON);
        wait_rounds(&mut guest, &hash, 2);
        drop(guest);
        // And once more from there: what was switched off is switched on again.
        for socket in &sockets[1..] {
            let next = Process::start("disk", socket, &[&size]);
            let destination = disk(version, socket).incoming_defer().start().unwrap();
            let qmp = |qemu: &Qemu| format!("qmp:{}", qemu.qmp_path().display());
            let copy = towline(["copy", "--json", &qmp(&source), &qmp(&destination)]).unwrap();
            copy.wait_done(WITHIN).unwrap();
            let mut guest = destination.linux(WITHIN).unwrap();
            wait_rounds(&mut guest, &hash, 2);
            assert!(!shell(&mut guest, "dmesg").contains("I/O error"));
            (source, device) = (destination, next);
        }
        drop((source, device));
    }
}
