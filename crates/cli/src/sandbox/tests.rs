//! Each test runs itself again in a process of its own, which confines itself by the very policy and then tries.

use std::io;
use std::net::TcpListener;
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use towline_control::plan::{Destination, Request, Source};

use super::*;

/// Says to a test that it is the confined process, and where its files are.
const CONFINED: &str = "TOWLINE_TEST_CONFINED";

/// Runs the test of this name in a process of its own, in an empty directory; what it says on standard error.
fn in_own_process(test: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("secret"), "s").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CONFINED, directory.path());
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}\n{told}", String::from_utf8_lossy(&output.stdout));
    told
}

fn confined_in() -> Option<PathBuf> {
    std::env::var_os(CONFINED).map(PathBuf::from)
}

#[track_caller]
fn refused<T>(what: &str, expected: i32, outcome: io::Result<T>) {
    let found = outcome.err().and_then(|error| error.raw_os_error());
    assert_eq!(found, Some(expected), "{what}");
}

fn has_landlock() -> bool {
    use landlock::{ABI, Access as _, AccessFs, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _};
    let known = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1));
    let has = known.is_ok();
    if !has {
        println!("skipped in part: this kernel has no landlock");
    }
    has
}

#[test]
fn a_device_opens_connects_and_executes_nothing() {
    let Some(directory) = confined_in() else {
        let told = in_own_process("sandbox::tests::a_device_opens_connects_and_executes_nothing");
        for call in ["connect", "socket", "bind", "ptrace"] {
            let wanted = format!("the sandbox refused the system call {call} (");
            assert_eq!(told.matches(&wanted).count(), 1, "{call} in\n{told}");
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
    refused("make a file", libc::EACCES, std::fs::write(directory.join("new"), "n"));
    refused("read a directory", libc::EACCES, std::fs::read_dir("/"));
    refused("a socket of TCP", libc::EPERM, TcpStream::connect(address));
    refused("connect to a Unix socket", libc::EPERM, UnixStream::connect(&socket));
    refused("connect once more, told once", libc::EPERM, UnixStream::connect(&socket));
    refused("listen", libc::EPERM, UnixListener::bind(directory.join("another")));
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    refused("look into a process", libc::EPERM, sys::tests::trace_me());
    // What a device goes on doing.
    std::thread::spawn(|| vec![1u8; 4 << 20]).join().unwrap();
    unix.set_nonblocking(true).unwrap();
    assert_eq!(unix.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(confinement);
    assert!(!socket.exists(), "its own socket goes with it");
    let status = sys::tests::no_new_privileges();
    assert!(status, "no_new_privs");
}

/// With `--sandbox on`.
fn confined(policy: &Policy) -> Confinement {
    SandboxArgs { sandbox: Some(Setting::On) }.begin(policy)
}

#[test]
fn a_device_removes_its_sockets_and_no_other_file() {
    let Some(directory) = confined_in() else {
        in_own_process("sandbox::tests::a_device_removes_its_sockets_and_no_other_file");
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
        refused("remove another's file", libc::EACCES, std::fs::remove_file(path));
    }
    refused("remove a directory", libc::EPERM, std::fs::remove_dir(&below));
    drop(confinement);
    assert!(!early.exists() && !late.exists(), "sockets that stay");
    assert!(others.iter().all(|path| path.exists()));
}

#[test]
fn no_process_is_reached_by_its_number() {
    if confined_in().is_none() {
        in_own_process("sandbox::tests::no_process_is_reached_by_its_number");
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
        ("its priority", libc::SYS_setpriority, [process, other, 0, 0]),
        ("a user's priority", libc::SYS_setpriority, [user, 0, 0, 0]),
        ("signals by a descriptor", libc::SYS_fcntl, [stdin, libc::F_SETOWN, other, 0]),
        ("signals by a descriptor", libc::SYS_fcntl, [stdin, F_SETOWN_EX, 0, 0]),
        ("another signal", libc::SYS_fcntl, [stdin, F_SETSIG, libc::SIGKILL, 0]),
        ("a signal", libc::SYS_kill, [other, 0, 0, 0]),
        ("a pair of datagrams", libc::SYS_socketpair, [libc::AF_UNIX, libc::SOCK_DGRAM, 0, 0]),
    ] {
        refused(what, libc::EPERM, sys::tests::call(number, arguments));
    }
    for own in [0, ours] {
        sys::tests::call(libc::SYS_prlimit64, [own, cpu, 0, 0]).unwrap();
        sys::tests::call(libc::SYS_setpriority, [process, own, 0, 0]).unwrap();
        // The kernel looks at it, and at null.
        let set = sys::tests::call(libc::SYS_sched_setaffinity, [own, 8, 0, 0]);
        refused("processors of null", libc::EFAULT, set);
    }
    UnixStream::pair().unwrap();
}

#[test]
fn ports_cannot_be_reached_past_their_rules() {
    use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType, sendto, socket};

    if confined_in().is_none() {
        in_own_process("sandbox::tests::ports_cannot_be_reached_past_their_rules");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let source = Source::Stream("tcp:127.0.0.1:0".parse().unwrap());
    let to = Destination::Stream("tcp:127.0.0.1:9".parse().unwrap());
    let policy = of_copy(&source, &[to], &Request::default(), None).unwrap();
    SandboxArgs { sandbox: Some(Setting::On) }.confine(&policy);
    let stream =
        |protocol| socket(AddressFamily::INET, SocketType::STREAM, protocol).map_err(io::Error::from);
    let tcp = stream(None).unwrap();
    // linux/socket.h.
    let fast_open = SendFlags::from_bits_retain(0x2000_0000);
    refused("MSG_FASTOPEN", libc::EPERM, sendto(&tcp, b"x", fast_open, &address).map_err(io::Error::from));
    const IPPROTO_MPTCP: u32 = 262;
    let multipath = Protocol::from_raw(IPPROTO_MPTCP.try_into().unwrap());
    refused("a socket of MPTCP", libc::EPERM, stream(Some(multipath)));
    stream(Some(rustix::net::ipproto::TCP)).unwrap();
    if has_landlock() {
        refused("connect", libc::EACCES, TcpStream::connect(address));
    }
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn an_ipv6_address_with_a_scope_is_resolved() {
    use std::net::ToSocketAddrs as _;

    if confined_in().is_none() {
        let told = in_own_process("sandbox::tests::an_ipv6_address_with_a_scope_is_resolved");
        assert!(!told.contains("the sandbox"), "{told}");
        return;
    }
    let to = Destination::Stream("tcp:[fe80::1%lo]:5555".parse().unwrap());
    let policy = of_copy(&Source::Image("a.img".into()), &[to], &Request::default(), None).unwrap();
    SandboxArgs { sandbox: Some(Setting::On) }.confine(&policy);
    let found: Vec<_> = ("fe80::1%lo", 5555).to_socket_addrs().unwrap().collect();
    assert_eq!(found.first().map(ToString::to_string).as_deref(), Some("[fe80::1%1]:5555"));
}

#[test]
fn a_vsock_of_messages_alone_connects() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

    let Some(directory) = confined_in() else {
        let told = in_own_process("sandbox::tests::a_vsock_of_messages_alone_connects");
        assert!(!told.contains("the sandbox"), "{told}");
        return;
    };
    let make = || socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let service = SocketAddrUnix::new(directory.join("v_80")).unwrap();
    let listener = make();
    bind(&listener, &service).unwrap();
    listen(&listener, 1).unwrap();
    let guest = format!("cid=3,socket={0}/s,uds-seqpacket={0}/v", directory.display());
    let mut policy = Policy::default();
    crate::vsock::allow(&mut policy, &guest.parse().unwrap());
    let mut confinement = confined(&policy);
    confinement.finish();
    connect(make(), &service).unwrap();
}

#[test]
fn a_copy_has_its_ends_and_nothing_else() {
    let Some(directory) = confined_in() else {
        let told = in_own_process("sandbox::tests::a_copy_has_its_ends_and_nothing_else");
        assert!(!told.contains("the sandbox"), "{told}");
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let images = directory.join("images");
    std::fs::create_dir(&images).unwrap();
    let source = Source::Stream("tcp:127.0.0.1:0".parse().unwrap());
    let destination = Destination::Image(images.join("guest.img"));
    let mut policy = of_copy(&source, &[destination], &Request::default(), None).unwrap();
    // The test's directory is below it.
    policy.write.retain(|path| *path != std::env::temp_dir());
    let has_landlock = has_landlock();
    SandboxArgs { sandbox: Some(Setting::On) }.confine(&policy);

    if has_landlock {
        refused("read a file", libc::EACCES, std::fs::read(directory.join("secret")));
        refused("read a file of the system", libc::EACCES, std::fs::read("/etc/passwd"));
        refused("make a file elsewhere", libc::EACCES, std::fs::write(directory.join("new"), "n"));
        refused("connect", libc::EACCES, TcpStream::connect(address));
    }
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    let denied = io::Error::from_raw_os_error(libc::EACCES);
    let outside = directory.join("secret");
    let blamed = hint(&format!("{}: {denied}", outside.display())).unwrap();
    assert!(blamed.contains("--sandbox none") && blamed.contains("secret"), "{blamed}");
    let elsewhere = hint(&format!("{}: {denied}", directory.join("new").display())).unwrap();
    assert!(elsewhere.contains("--sandbox none"), "{elsewhere}");
    for error in [
        format!("a.img: {denied}"),
        format!("{}: no space is left", outside.display()),
        format!("{}: {denied}", images.join("guest.img").display()),
        // QEMU has rights of its own.
        format!("QEMU on /run/a.qmp refuses migrate: {}: {denied}", outside.display()),
        // No call was refused.
        format!("chown: {}", io::Error::from_raw_os_error(libc::EPERM)),
    ] {
        assert_eq!(hint(&error), None, "{error}");
    }
    std::fs::write(images.join("guest.img.partial"), "n").unwrap();
    std::fs::rename(images.join("guest.img.partial"), images.join("guest.img")).unwrap();
    assert_eq!(std::fs::read_to_string(images.join("guest.img")).unwrap(), "n");
    TcpListener::bind("127.0.0.1:0").unwrap();
}

/// The line about it is lost; the call, on whatever thread it is, goes on.
#[test]
fn a_refused_call_waits_for_no_reader_of_standard_error() {
    use std::io::Write as _;
    use std::time::{Duration, Instant};

    if confined_in().is_some() {
        let mut confinement = confined(&Policy::default());
        confinement.finish();
        refused("a socket of TCP", libc::EPERM, TcpStream::connect("127.0.0.1:9"));
        return;
    }
    let (_reader, mut full) = io::pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&full, 4096).unwrap();
    full.write_all(&vec![b'.'; size]).unwrap();
    let test = "sandbox::tests::a_refused_call_waits_for_no_reader_of_standard_error";
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
fn a_copy_that_runs_commands_is_not_confined() {
    let exec = Destination::Stream("exec:cat".parse().unwrap());
    assert!(of_copy(&Source::Image("a.img".into()), &[exec], &Request::default(), None).is_none());
}

#[test]
fn ports_and_names_are_those_of_the_ends() {
    let source = Source::Stream("tcp:127.0.0.1:4444".parse().unwrap());
    let to = |text: &str| Destination::Stream(text.parse().unwrap());
    let policy = of_copy(&source, &[to("tcp:[::1]:5555")], &Request::default(), None).unwrap();
    assert_eq!((policy.bind, policy.connect), (Ports::Only(vec![4444]), Ports::Only(vec![5555])));
    assert!(!policy.resolves);
    let policy = of_copy(&source, &[to("ws://host.example/vm")], &Request::default(), None).unwrap();
    assert!(policy.resolves && policy.read.contains(&PathBuf::from("/etc")));
    let policy =
        of_copy(&Source::Image("a.img".into()), &[Destination::Null], &Request::default(), None).unwrap();
    assert_eq!(policy.connect, Ports::Any, "lanes of a copy within this process");
    assert_eq!(directory(Path::new("a.img")), Path::new("."));
}
