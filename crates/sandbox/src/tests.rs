//! Each test runs itself again in a separate process, which confines itself with the policy and then tries
//! what is forbidden.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use super::policy::parent_directory;
use super::*;

/// Set in the confined process, to the directory of its files.
const CONFINED: &str = "TOWLINE_TEST_CONFINED";

/// Runs the test of this name in a separate process, with a new directory. Returns its standard error.
fn in_own_process(test: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("secret"), "s").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CONFINED, directory.path());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}\n{stderr}", String::from_utf8_lossy(&output.stdout));
    stderr
}

fn confined_in() -> Option<PathBuf> {
    std::env::var_os(CONFINED).map(PathBuf::from)
}

#[track_caller]
fn refused<T>(what: &str, expected: i32, outcome: io::Result<T>) {
    let found = outcome.err().and_then(|error| error.raw_os_error());
    assert_eq!(found, Some(expected), "{what}");
}

fn confined(policy: &Policy) -> PendingSandbox {
    policy.begin(Mode::Requested)
}

#[test]
fn a_device_opens_connects_and_executes_nothing() {
    let Some(directory) = confined_in() else {
        let stderr = in_own_process("tests::a_device_opens_connects_and_executes_nothing");
        for call in ["connect", "socket", "bind", "ptrace"] {
            let wanted = format!("the sandbox refused the system call {call} (");
            assert_eq!(stderr.matches(&wanted).count(), 1, "{call} in\n{stderr}");
        }
        return;
    };
    let secret = directory.join("secret");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let socket = directory.join("socket");
    let unix = UnixListener::bind(&socket).unwrap();
    let mut policy = Policy::default();
    policy.removes(&socket);
    let mut confinement = confined(&policy);
    confinement.finish();

    refused("read a file", libc::EACCES, std::fs::read(&secret));
    refused("create a file", libc::EACCES, std::fs::write(directory.join("new"), "n"));
    refused("read a directory", libc::EACCES, std::fs::read_dir("/"));
    refused("create a TCP socket", libc::EPERM, TcpStream::connect(address));
    refused("connect to a Unix socket", libc::EPERM, UnixStream::connect(&socket));
    refused("connect again, reported once", libc::EPERM, UnixStream::connect(&socket));
    refused("listen", libc::EPERM, UnixListener::bind(directory.join("another")));
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    refused("trace", libc::EPERM, sys::tests::trace_me());
    // What a device continues to do.
    std::thread::spawn(|| vec![1u8; 4 << 20]).join().unwrap();
    unix.set_nonblocking(true).unwrap();
    assert_eq!(unix.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(confinement);
    assert!(!socket.exists(), "its own socket is removed");
    let status = sys::tests::has_no_new_privileges();
    assert!(status, "no_new_privs");
}

#[test]
fn a_device_removes_its_sockets_and_no_other_file() {
    let Some(directory) = confined_in() else {
        in_own_process("tests::a_device_removes_its_sockets_and_no_other_file");
        return;
    };
    let below = directory.join("below");
    std::fs::create_dir(&below).unwrap();
    let others = [directory.join("secret"), directory.join("other.sock"), below.join("file")];
    others.iter().for_each(|path| std::fs::write(path, "o").unwrap());
    let [early, late] = ["early", "late"].map(|name| directory.join(name));
    let mut policy = Policy::default();
    policy.removes(&early);
    policy.listens_unix(&late);
    let _early = UnixListener::bind(&early).unwrap();
    let mut confinement = confined(&policy);
    let _late = UnixListener::bind(&late).unwrap();
    confinement.finish();
    for path in &others {
        refused("remove another file", libc::EACCES, std::fs::remove_file(path));
    }
    refused("remove a directory", libc::EPERM, std::fs::remove_dir(&below));
    drop(confinement);
    assert!(!early.exists() && !late.exists(), "its sockets are removed");
    assert!(others.iter().all(|path| path.exists()));
}

#[test]
fn other_processes_cannot_be_addressed() {
    if confined_in().is_none() {
        in_own_process("tests::other_processes_cannot_be_addressed");
        return;
    }
    let mut confinement = confined(&Policy::default());
    confinement.finish();
    let other = std::os::unix::process::parent_id().cast_signed();
    let ours = std::process::id().cast_signed();
    let (process, user) = (libc::PRIO_PROCESS.cast_signed(), libc::PRIO_USER.cast_signed());
    let (cpu, stdin) = (libc::RLIMIT_CPU.cast_signed(), libc::STDIN_FILENO);
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    for (what, number, arguments) in [
        ("limits", libc::SYS_prlimit64, [other, cpu, 0, 0]),
        ("processors", libc::SYS_sched_setaffinity, [other, 0, 0, 0]),
        ("its scheduler", libc::SYS_sched_setscheduler, [other, 0, 0, 0]),
        ("its time slice", libc::SYS_sched_setattr, [other, 0, 0, 0]),
        ("its priority", libc::SYS_setpriority, [process, other, 0, 0]),
        ("a user's priority", libc::SYS_setpriority, [user, 0, 0, 0]),
        ("signals by a descriptor", libc::SYS_fcntl, [stdin, libc::F_SETOWN, other, 0]),
        ("signals by a descriptor", libc::SYS_fcntl, [stdin, F_SETOWN_EX, 0, 0]),
        ("another signal", libc::SYS_fcntl, [stdin, F_SETSIG, libc::SIGKILL, 0]),
        ("a signal", libc::SYS_kill, [other, 0, 0, 0]),
        ("a pair of datagram sockets", libc::SYS_socketpair, [libc::AF_UNIX, libc::SOCK_DGRAM, 0, 0]),
    ] {
        refused(what, libc::EPERM, sys::tests::call(number, arguments));
    }
    for own in [0, ours] {
        sys::tests::call(libc::SYS_prlimit64, [own, cpu, 0, 0]).unwrap();
        sys::tests::call(libc::SYS_setpriority, [process, own, 0, 0]).unwrap();
        // The call is permitted, and fails on the null pointer.
        let set = sys::tests::call(libc::SYS_sched_setaffinity, [own, 8, 0, 0]);
        refused("processors of null", libc::EFAULT, set);
        let set = sys::tests::call(libc::SYS_sched_setattr, [own, 0, 0, 0]);
        refused("a time slice of null", libc::EINVAL, set);
    }
    UnixStream::pair().unwrap();
}

/// As root, which may do all of it without a sandbox.
#[test]
fn a_copy_changes_no_owner_permissions_or_times_and_starts_no_process() {
    let Some(directory) = confined_in() else {
        let stderr =
            in_own_process("tests::a_copy_changes_no_owner_permissions_or_times_and_starts_no_process");
        for call in ["fchmod", "fchown", "fchmodat", "fchownat", "utimensat", "fork"] {
            let wanted = format!("the sandbox refused the system call {call} (");
            assert!(stderr.contains(&wanted), "{call} in\n{stderr}");
        }
        return;
    };
    let (readable, own) = (directory.join("secret"), directory.join("own"));
    std::fs::create_dir(&own).unwrap();
    let policy = Policy {
        opens: true,
        connects_unix: true,
        read: vec![directory.clone()],
        write: vec![own.clone()],
        ..Policy::default()
    };
    policy.confine(Mode::Requested);
    let file = std::fs::File::open(&readable).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    const CWD: i32 = libc::AT_FDCWD;
    for (number, arguments) in [
        (libc::SYS_fchmod, [fd, 0o666, 0, 0]),
        (libc::SYS_fchown, [fd, -1, -1, 0]),
        (libc::SYS_fchmodat, [CWD, 0, 0o666, 0]),
        (libc::SYS_fchownat, [fd, 0, -1, -1]),
        (libc::SYS_utimensat, [fd, 0, 0, 0]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, [0, 0o666, 0, 0]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chown, [0, -1, -1, 0]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_fork, [0, 0, 0, 0]),
        (libc::SYS_clone, [libc::SIGCHLD, 0, 0, 0]),
    ] {
        refused(&format!("call {number}"), libc::EPERM, sys::tests::call(number, arguments));
    }
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    // What a copy continues to do.
    std::thread::spawn(|| ()).join().unwrap();
    std::fs::create_dir(own.join("a")).unwrap();
    std::fs::rename(own.join("a"), own.join("b")).unwrap();
    std::fs::remove_dir(own.join("b")).unwrap();
    sys::tests::call(libc::SYS_setfsuid, [0, 0, 0, 0]).unwrap();
}

/// The report is lost, and the call fails without blocking its thread.
#[test]
fn a_refused_call_does_not_block_on_standard_error() {
    use std::io::Write as _;
    use std::time::{Duration, Instant};

    if confined_in().is_some() {
        let mut confinement = confined(&Policy::default());
        confinement.finish();
        refused("create a TCP socket", libc::EPERM, TcpStream::connect("127.0.0.1:9"));
        return;
    }
    let (_reader, mut full) = io::pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&full, 4096).unwrap();
    full.write_all(&vec![b'.'; size]).unwrap();
    let test = "tests::a_refused_call_does_not_block_on_standard_error";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CONFINED, "/");
    let mut child = command.stdout(std::process::Stdio::null()).stderr(full).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() >= until => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

#[test]
fn the_directory_of_a_bare_name_is_the_current_one() {
    assert_eq!(parent_directory(Path::new("a.img")), Path::new("."));
    assert_eq!(parent_directory(Path::new("/a/b.img")), Path::new("/a"));
}
