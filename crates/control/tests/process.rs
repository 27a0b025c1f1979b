//! Identification of a QEMU's process and of its exit: never of another process, and never guessed.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

#[path = "../../qmp/tests/common/mod.rs"]
mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Binary, TestQemu, WAIT, binaries, skipped, until};
use towline_control::qemu::{Process, ProcessState, Qemu};
use towline_qmp::Options;

const UUID: &str = "6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11";
/// Wait for an exit that must not be reported.
const MOMENT: Duration = Duration::from_millis(300);
/// Variable with the monitor's socket for a test that runs itself again in other namespaces.
const SOCKET: &str = "TOWLINE_PROCESS_SOCKET";

fn connect(process: &TestQemu) -> Qemu {
    Qemu::new(process.client()).unwrap()
}

fn pid(qemu: &Qemu) -> i32 {
    match qemu.process() {
        Process::Known { pid, .. } => *pid,
        Process::Unknown { reason } => panic!("not identified: {reason}"),
    }
}

fn reason(qemu: &Qemu) -> &str {
    match qemu.process() {
        Process::Known { pid, .. } => panic!("taken for process {pid}"),
        Process::Unknown { reason } => reason,
    }
}

/// Killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A proxy on `near` that connects to `far`.
fn socat(near: &Path, far: &Path) -> Option<Killed> {
    let mut command = Command::new("socat");
    command.arg(format!("UNIX-LISTEN:{}", near.display())).arg(format!("UNIX-CONNECT:{}", far.display()));
    let child = Killed(command.stdin(Stdio::null()).spawn().ok()?);
    until("socat's socket", || near.exists().then_some(()));
    Some(child)
}

#[test]
fn listening_qemu_is_identified_and_its_exit_seen() {
    for binary in binaries("listening_qemu_is_identified_and_its_exit_seen") {
        let mut process = TestQemu::q35(&binary, &["-smp", "2"]);
        let qemu = connect(&process);
        assert_eq!(pid(&qemu), i32::try_from(process.child.id()).unwrap());
        assert_eq!(qemu.process().state(), ProcessState::Running);
        assert!(!qemu.has_exited(MOMENT));
        // A zombie until it is waited for: it has exited all the same.
        process.signal("-KILL");
        assert!(qemu.has_exited(WAIT));
        process.kill();
        assert_eq!(qemu.process().state(), ProcessState::Exited, "its pid may be another's now");
    }
}

#[test]
fn exit_of_a_proxy_is_not_the_exit_of_qemu() {
    for binary in binaries("exit_of_a_proxy_is_not_the_exit_of_qemu") {
        let mut process = TestQemu::q35(&binary, &[]);
        drop(process.client());
        let near = process.path("proxy");
        let Some(proxy) = socat(&near, &process.path("qmp")) else {
            return skipped("exit_of_a_proxy_is_not_the_exit_of_qemu", "no socat on PATH");
        };
        let mut qemu = Qemu::connect(&near, &Options::default()).unwrap();
        let listener = qemu.facts().peer.unwrap().pid;
        assert_eq!(listener, i32::try_from(proxy.0.id()).unwrap(), "the kernel names the proxy");
        assert_eq!(pid(&qemu), i32::try_from(process.child.id()).unwrap());
        drop(proxy);
        assert!(qemu.status().unwrap_err().to_string().contains("lost"));
        assert!(!qemu.has_exited(MOMENT), "only the proxy has exited");
        assert!(connect(&process).status().is_ok());
        process.kill();
        assert!(qemu.has_exited(WAIT));
    }
}

#[test]
fn qemu_with_an_inherited_socket_is_identified() {
    for binary in binaries("qemu_with_an_inherited_socket_is_identified") {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("passed");
        // As a manager does: without close-on-exec, under the number in QEMU's arguments.
        let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
        rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
        let chardev = format!("socket,id=passed,fd={},server=on,wait=off", listener.as_raw_fd());
        let args = ["-chardev", &chardev, "-mon", "chardev=passed,mode=control", "-uuid", UUID];
        let mut process = TestQemu::q35(&binary, &args);
        drop(process.client());
        drop(listener);
        let qemu = Qemu::connect(&path, &Options::default()).unwrap();
        assert_eq!(pid(&qemu), i32::try_from(process.child.id()).unwrap());
        assert_eq!(qemu.process().state(), ProcessState::Running);
        process.kill();
        assert!(qemu.has_exited(WAIT));
    }
}

#[test]
fn qemu_without_vcpus_is_not_identified() {
    for binary in binaries("qemu_without_vcpus_is_not_identified") {
        let mut process = TestQemu::start(&binary, &["-machine", "none"]);
        let mut qemu = connect(&process);
        assert_eq!(reason(&qemu), "QEMU has no vCPU threads");
        process.kill();
        assert_eq!(qemu.process().state(), ProcessState::Unknown);
        assert!(!qemu.has_exited(MOMENT));
        qemu.quit().unwrap();
    }
}

/// A QEMU in a container reports its threads by their ids in the container.
#[test]
fn qemu_in_a_pid_namespace_below_ours_is_identified() {
    const TEST: &str = "qemu_in_a_pid_namespace_below_ours_is_identified";
    if !can_unshare(TEST, &["--pid", "--fork"]) {
        return;
    }
    for binary in binaries(TEST) {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("qemu");
        let text = format!(
            "#!/bin/sh\nexec unshare --pid --fork --kill-child=KILL {} \"$@\"\n",
            binary.path.display()
        );
        // A program cannot be executed while a process that another test is starting has it open for writing, as has this one.
        let write = "printf %s \"$1\" > \"$0\"; chmod 755 \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&script).arg(text).status().unwrap().success());
        let mut process = TestQemu::q35(&Binary { path: script, ..binary }, &["-smp", "2"]);
        let qemu = connect(&process);
        let found = pid(&qemu);
        assert_ne!(found, i32::try_from(process.child.id()).unwrap(), "that is unshare");
        let name = fs::read_to_string(format!("/proc/{found}/comm")).unwrap();
        // A QEMU with its own C library runs under that library's loader.
        assert!(name.starts_with("qemu-system") || name.starts_with("ld-linux"), "{name}");
        assert!(!qemu.has_exited(MOMENT));
        process.kill();
        assert!(qemu.has_exited(WAIT));
    }
}

#[test]
fn without_proc_no_exit_is_reported() {
    let lines = look_from("without_proc_no_exit_is_reported", &["--mount"], "mount -t tmpfs none /proc");
    for lines in lines {
        assert_eq!(lines[0], "/proc/self/status: No such file or directory (os error 2)");
        assert_eq!(lines[1], "ended: false");
    }
}

#[test]
fn from_another_pid_namespace_no_exit_is_reported() {
    let args = ["--pid", "--fork", "--mount-proc"];
    let lines = look_from("from_another_pid_namespace_no_exit_is_reported", &args, "true");
    for lines in lines {
        assert!(lines[0].starts_with("the listener is not QEMU"), "{lines:?}");
        assert_eq!(lines[1], "ended: false");
    }
}

/// The host's `/proc` in a container shows other processes under the container's ids.
#[test]
fn with_a_foreign_proc_no_exit_is_reported() {
    let lines = look_from("with_a_foreign_proc_no_exit_is_reported", &["--pid", "--fork"], "true");
    for lines in lines {
        assert_eq!(lines[0], "/proc is of another pid namespace than this process");
        assert_eq!(lines[1], "ended: false");
    }
}

/// Returns true if this user may create such namespaces; prints the reason if not.
fn can_unshare(test: &str, args: &[&str]) -> bool {
    let can = Command::new("unshare").args(args).arg("true").status().is_ok_and(|status| status.success());
    if !can {
        skipped(test, "this user may not make namespaces (unshare)");
    }
    can
}

/// Runs this test again in its own namespaces, after the shell command `prepare`, and has it connect to a
/// QEMU that is then killed. Returns two lines each: why QEMU's process is not known, and whether it is
/// reported as exited.
fn look_from(test: &str, args: &[&str], prepare: &str) -> Vec<Vec<String>> {
    if let Some(socket) = std::env::var_os(SOCKET) {
        looks(Path::new(&socket));
        std::process::exit(0);
    }
    if !can_unshare(test, args) {
        return Vec::new();
    }
    let looked = binaries(test).into_iter().map(|binary| {
        let mut process = TestQemu::q35(&binary, &[]);
        drop(process.client());
        let mut command = Command::new("unshare");
        command.args(args).args(["sh", "-c", &format!("{prepare} && exec \"$@\""), "sh"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture"]);
        command.env(SOCKET, process.path("qmp")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Killed(command.spawn().unwrap());
        let lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        let mut found =
            lines.map(Result::unwrap).filter_map(|line| Some(line.strip_prefix("LOOKED ")?.to_owned()));
        let unknown = found.next().unwrap();
        process.kill();
        writeln!(child.0.stdin.take().unwrap(), "killed").unwrap();
        vec![unknown, found.next().unwrap()]
    });
    looked.collect()
}

/// The part of the test in those namespaces.
fn looks(socket: &Path) {
    let qemu = Qemu::connect(socket, &Options::default()).unwrap();
    println!("\nLOOKED {}", reason(&qemu));
    let mut killed = [0; 7];
    std::io::stdin().read_exact(&mut killed).unwrap();
    println!("\nLOOKED ended: {}", qemu.has_exited(MOMENT));
}
