//! Each test runs itself again in a process of its own, which confines itself by the very policy and then tries.

use std::io;
use std::net::TcpListener;
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use towline_control::plan::{Destination, Options, Source};

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
    policy.confine(true);

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
    std::fs::remove_file(&socket).unwrap();
    let status = sys::tests::no_new_privileges();
    assert!(status, "no_new_privs");
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
    let mut policy = of_copy(&source, &[destination], &Options::default(), None).unwrap();
    // The test's directory is below it.
    policy.write.retain(|path| *path != std::env::temp_dir());
    let has_landlock = has_landlock();
    policy.confine(true);

    if has_landlock {
        refused("read a file", libc::EACCES, std::fs::read(directory.join("secret")));
        refused("read a file of the system", libc::EACCES, std::fs::read("/etc/passwd"));
        refused("make a file elsewhere", libc::EACCES, std::fs::write(directory.join("new"), "n"));
        refused("connect", libc::EACCES, TcpStream::connect(address));
    }
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    let denied = io::Error::from_raw_os_error(libc::EACCES);
    assert!(hint(&format!("a.img: {denied}")).unwrap().contains("--sandbox none"));
    assert_eq!(hint("a.img: no space is left"), None);
    std::fs::write(images.join("guest.img.partial"), "n").unwrap();
    std::fs::rename(images.join("guest.img.partial"), images.join("guest.img")).unwrap();
    assert_eq!(std::fs::read_to_string(images.join("guest.img")).unwrap(), "n");
    TcpListener::bind("127.0.0.1:0").unwrap();
}

#[test]
fn a_copy_that_runs_commands_is_not_confined() {
    let exec = Destination::Stream("exec:cat".parse().unwrap());
    assert!(of_copy(&Source::Image("a.img".into()), &[exec], &Options::default(), None).is_none());
}

#[test]
fn ports_and_names_are_those_of_the_ends() {
    let source = Source::Stream("tcp:127.0.0.1:4444".parse().unwrap());
    let to = |text: &str| Destination::Stream(text.parse().unwrap());
    let policy = of_copy(&source, &[to("tcp:[::1]:5555")], &Options::default(), None).unwrap();
    assert_eq!((policy.bind, policy.connect), (Ports::Only(vec![4444]), Ports::Only(vec![5555])));
    assert!(!policy.resolves);
    let policy = of_copy(&source, &[to("ws://host.example/vm")], &Options::default(), None).unwrap();
    assert!(policy.resolves && policy.read.contains(&PathBuf::from("/etc")));
    let policy =
        of_copy(&Source::Image("a.img".into()), &[Destination::Null], &Options::default(), None).unwrap();
    assert_eq!(policy.connect, Ports::Any, "lanes of a copy within this process");
    assert_eq!(directory(Path::new("a.img")), Path::new("."));
}
