//! Stock QEMUs with the example devices: a Linux guest uses them, survives their restarts, and is migrated
//! with one.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::{LinuxGuest, MemoryBackend, Qemu, Version, require_lab, towline, wait_until};

const BOOT_WITHIN: Duration = Duration::from_secs(120);
const WITHIN: Duration = Duration::from_secs(120);
const VERSIONS: [Version; 2] = [Version::V10_0, Version::V7_2];
const DISK_MIB: u64 = 4;

/// A running example, killed when dropped.
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

/// Path of an example, which cargo builds beside the tests.
fn program(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(example);
    assert!(
        program.is_file(),
        "{} is missing; build it with `cargo build -p towline-vhost-user --examples`",
        program.display()
    );
    program
}

fn with_device(version: Version, socket: &Path, device: &str) -> towline_lab::Builder {
    // QEMU's vhost-user-rng does not wait for its backend, so it does not support reconnect either.
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

/// SHA-256 of the disk's contents, by coreutils.
fn disk_hash() -> String {
    let mut contents = Command::new(program("disk"));
    let mut contents = contents.args(["-", &DISK_MIB.to_string()]).stdout(Stdio::piped()).spawn().unwrap();
    let hash = Command::new("sha256sum").stdin(contents.stdout.take().unwrap()).output().unwrap();
    assert!(contents.wait().unwrap().success());
    String::from_utf8(hash.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

/// Number of times that the guest has read the whole disk. Every one must have been correct.
fn reads(guest: &mut LinuxGuest, hash: &str) -> usize {
    // The guest's loop creates the file after its first read.
    let sums = shell(guest, "touch /tmp/sums; cat /tmp/sums");
    for line in sums.lines() {
        assert!(line.starts_with(hash), "wrong contents: {line}, expected {hash}");
    }
    sums.lines().count()
}

fn wait_reads(guest: &mut LinuxGuest, hash: &str, more: usize) {
    let wanted = reads(guest, hash) + more;
    wait_until("more reads of the disk", WITHIN, || Ok((reads(guest, hash) >= wanted).then_some(())))
        .unwrap();
}

/// Reads the disk repeatedly, without the page cache.
const READ_LOOP: &str = "(while :; do echo 1 > /proc/sys/vm/drop_caches; sha256sum /dev/vda >> /tmp/sums; done) \
                       > /tmp/reader 2>&1 & echo";

#[test]
#[ignore = "nightly"]
fn a_guest_reads_entropy() {
    if !require_lab("a_guest_reads_entropy") {
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
        // QEMU 10.0 crashes in its own queries about this device (`x-query-virtio-status`).
        let (facts, source) = (scratch.path().join("facts"), format!("qmp:{}", qemu.qmp_path().display()));
        let checked = towline(["check", "--facts-out", facts.to_str().unwrap(), &source]).unwrap();
        checked.wait_done(WITHIN).unwrap();
        let third = shell(&mut guest, line);
        assert!(third.starts_with("262144\n") && third != second, "{version:?}: {third}");
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
        shell(&mut guest, READ_LOOP);
        wait_reads(&mut guest, &hash, 2);
        for _ in 0..3 {
            drop(device);
            device = Process::start("disk", &socket, &[&size]);
            wait_reads(&mut guest, &hash, 2);
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
        shell(&mut guest, READ_LOOP);
        wait_reads(&mut guest, &hash, 2);
        drop(guest);
        // And again from there: the log is switched off and on again.
        for socket in &sockets[1..] {
            let next = Process::start("disk", socket, &[&size]);
            let destination = disk(version, socket).incoming_defer().start().unwrap();
            let qmp = |qemu: &Qemu| format!("qmp:{}", qemu.qmp_path().display());
            if !version.tracks_emulated_writes() {
                source.qmp().execute("stop", Value::Null).unwrap();
            }
            let copy = towline(["copy", "--json", &qmp(&source), &qmp(&destination)]).unwrap();
            copy.wait_done(WITHIN).unwrap();
            if !version.tracks_emulated_writes() {
                destination.qmp().execute("cont", Value::Null).unwrap();
            }
            let mut guest = destination.linux(WITHIN).unwrap();
            wait_reads(&mut guest, &hash, 2);
            assert!(!shell(&mut guest, "dmesg").contains("I/O error"));
            (source, device) = (destination, next);
        }
        drop((source, device));
    }
}

/// Bandwidth of precopy, so low that most memory is sent on demand.
const PRECOPY_BYTES_PER_SECOND: u64 = 4 << 20;

#[test]
#[ignore = "nightly"]
fn a_guest_uses_its_disk_before_its_memory_has_arrived() {
    if !require_lab("a_guest_uses_its_disk_before_its_memory_has_arrived") {
        return;
    }
    let (hash, size) = (disk_hash(), DISK_MIB.to_string());
    for version in VERSIONS {
        let scratch = TempDir::with_prefix("towline-lab-").unwrap();
        let sockets = ["here", "there"].map(|name| scratch.path().join(name));
        let _devices = [0, 1].map(|index| Process::start("disk", &sockets[index], &[&size]));
        let source = disk(version, &sockets[0]).start().unwrap();
        let mut guest = source.linux(BOOT_WITHIN).unwrap();
        shell(&mut guest, READ_LOOP);
        wait_reads(&mut guest, &hash, 2);
        drop(guest);
        let destination = disk(version, &sockets[1]).incoming_defer().start().unwrap();
        let postcopy = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
        for qemu in [&source, &destination] {
            // The destination checks its backends for support.
            qemu.qmp().execute("migrate-set-capabilities", postcopy.clone()).unwrap();
        }
        let uri = json!({ "uri": format!("unix:{}", scratch.path().join("stream").display()) });
        destination.qmp().execute("migrate-incoming", uri.clone()).unwrap();
        let slow = json!({ "max-bandwidth": PRECOPY_BYTES_PER_SECOND });
        source.qmp().execute("migrate-set-parameters", slow).unwrap();
        source.qmp().execute("migrate", uri).unwrap();
        let status = || source.qmp().execute("query-migrate", Value::Null);
        wait_until("a migration that has begun", WITHIN, || {
            Ok((status()?["status"] == "active").then_some(()))
        })
        .unwrap();
        source.qmp().execute("migrate-start-postcopy", Value::Null).unwrap();
        let info = wait_until("a migration that has ended", WITHIN, || {
            let info = status()?;
            assert_ne!(info["status"], "failed", "{version:?}: {info}");
            Ok((info["status"] == "completed").then_some(info))
        })
        .unwrap();
        assert!(info["ram"]["postcopy-requests"].as_u64().unwrap() > 0, "{version:?}: {info}");
        let mut guest = destination.linux(WITHIN).unwrap();
        wait_reads(&mut guest, &hash, 2);
        assert!(!shell(&mut guest, "dmesg").contains("I/O error"));
    }
}

/// Passes a socket as systemd does for a service: descriptor 3 listens, with the environment for it.
const SERVICE_MANAGER: &str = "import os, socket, sys\n\
    listener = socket.socket(socket.AF_UNIX)\n\
    listener.bind(sys.argv[1])\n\
    listener.listen()\n\
    os.dup2(listener.fileno(), 3)\n\
    os.set_inheritable(3, True)\n\
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n\
    os.execv(sys.argv[2], sys.argv[2:])";

#[test]
fn a_service_managers_socket_is_served() {
    let name = "a_service_managers_socket_is_served";
    if Command::new("python3").arg("--version").output().is_err() {
        return towline_lab::skip(name, "python3, which replaces systemd here, is missing");
    }
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let socket = scratch.path().join("rng.sock");
    let mut command = Command::new("python3");
    command.args(["-c", SERVICE_MANAGER]).arg(&socket).arg(program("rng")).stdin(Stdio::null());
    let _device = Process { child: command.spawn().unwrap() };
    let mut frontend = towline_frontend::Frontend::connect(&socket, WITHIN).unwrap();
    let queues = frontend.number(towline_frontend::wire::RequestCode::GET_QUEUE_NUM).unwrap();
    assert_eq!(queues, 1);
}
