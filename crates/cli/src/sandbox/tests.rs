//! Each test runs itself again in a separate process, which confines itself with the policy and then tries
//! what is forbidden.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use towline_control::plan::{CopyRequest, Destination, Source};

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

fn requested() -> SandboxArgs {
    SandboxArgs { sandbox: Some(Setting::On), applied: OnceLock::new() }
}

/// A manifest may come from anyone.
#[test]
fn a_base_that_is_no_image_widens_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().canonicalize().unwrap().join(name);
    let names = |image: &str, base: &Path| {
        let manifest = format!(r#"{{"base":{{"path":{base:?},"content":"{}"}}}}"#, "0".repeat(64));
        std::fs::write(path(&format!("{image}.manifest.json")), manifest).unwrap();
    };
    std::fs::create_dir(path("bases")).unwrap();
    for base in ["bases/secret", "bases/base.img"] {
        std::fs::write(path(base), "").unwrap();
    }
    std::fs::write(path("bases/base.img.manifest.json"), "{}").unwrap();
    names("a.img", &path("bases/secret"));
    names("b.img", &path("bases/base.img"));
    let read = |image: &str| {
        let mut policy = Policy::default();
        permit_image(&mut policy, &path(image));
        policy.read
    };
    let own = directory.path().to_owned();
    assert!(read("a.img").iter().all(|path| path == &own), "{:?}", read("a.img"));
    let of_base = ["bases/base.img.manifest.json", "bases/base.img"].map(path);
    let found = read("b.img");
    assert!(found.ends_with(&of_base), "{found:?}");
    assert!(!found.contains(&path("bases")), "{found:?}");
}

#[test]
fn unlisted_ports_cannot_be_reached() {
    use rustix::net::{AddressFamily, Protocol, SendFlags, SocketType, sendto, socket};

    if confined_in().is_none() {
        in_own_process("sandbox::tests::unlisted_ports_cannot_be_reached");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let source = Source::Stream("tcp:127.0.0.1:0".parse().unwrap());
    let to = Destination::Stream("tcp:127.0.0.1:9".parse().unwrap());
    let policy = policy_of_copy(&source, &[to], &CopyRequest::default(), None).unwrap();
    requested().confine(policy);
    let stream =
        |protocol| socket(AddressFamily::INET, SocketType::STREAM, protocol).map_err(io::Error::from);
    let tcp = stream(None).unwrap();
    // linux/socket.h.
    let fast_open = SendFlags::from_bits_retain(0x2000_0000);
    refused("MSG_FASTOPEN", libc::EPERM, sendto(&tcp, b"x", fast_open, &address).map_err(io::Error::from));
    const IPPROTO_MPTCP: u32 = 262;
    let multipath = Protocol::from_raw(IPPROTO_MPTCP.try_into().unwrap());
    refused("create an MPTCP socket", libc::EPERM, stream(Some(multipath)));
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
        let stderr = in_own_process("sandbox::tests::an_ipv6_address_with_a_scope_is_resolved");
        assert!(!stderr.contains("the sandbox"), "{stderr}");
        return;
    }
    let to = Destination::Stream("tcp:[fe80::1%lo]:5555".parse().unwrap());
    let policy =
        policy_of_copy(&Source::Image("a.img".into()), &[to], &CopyRequest::default(), None).unwrap();
    requested().confine(policy);
    let found: Vec<_> = ("fe80::1%lo", 5555).to_socket_addrs().unwrap().collect();
    assert_eq!(found.first().map(ToString::to_string).as_deref(), Some("[fe80::1%1]:5555"));
}

#[test]
fn a_seqpacket_vsock_connects() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

    let Some(directory) = confined_in() else {
        let stderr = in_own_process("sandbox::tests::a_seqpacket_vsock_connects");
        assert!(!stderr.contains("the sandbox"), "{stderr}");
        return;
    };
    let make = || socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let service = SocketAddrUnix::new(directory.join("v_80")).unwrap();
    let listener = make();
    bind(&listener, &service).unwrap();
    listen(&listener, 1).unwrap();
    let guest = format!("cid=3,socket={0}/s,uds-seqpacket={0}/v", directory.display());
    let mut policy = Policy::default();
    crate::vsock::extend_policy(&mut policy, &guest.parse().unwrap());
    let mut confinement = requested().begin(policy);
    confinement.finish();
    connect(make(), &service).unwrap();
}

#[test]
fn a_copy_reaches_its_endpoints_and_nothing_else() {
    let Some(directory) = confined_in() else {
        let stderr = in_own_process("sandbox::tests::a_copy_reaches_its_endpoints_and_nothing_else");
        assert!(!stderr.contains("the sandbox"), "{stderr}");
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let images = directory.join("images");
    std::fs::create_dir(&images).unwrap();
    let source = Source::Stream("tcp:127.0.0.1:0".parse().unwrap());
    let destination = Destination::Image(images.join("guest.img"));
    let mut policy = policy_of_copy(&source, &[destination], &CopyRequest::default(), None).unwrap();
    // The test's directory is below the temporary one.
    policy.write.retain(|path| *path != std::env::temp_dir());
    let has_landlock = has_landlock();
    let sandbox = requested();
    sandbox.confine(policy);

    if has_landlock {
        refused("read a file", libc::EACCES, std::fs::read(directory.join("secret")));
        refused("read a system file", libc::EACCES, std::fs::read("/etc/passwd"));
        refused("create a file elsewhere", libc::EACCES, std::fs::write(directory.join("new"), "n"));
        refused("connect", libc::EACCES, TcpStream::connect(address));
    }
    refused("execute", libc::EPERM, Command::new("/bin/true").spawn());
    let explain = |path: PathBuf, errno: i32| {
        let source = io::Error::from_raw_os_error(errno);
        crate::errors::notes(&towline_image::Error::Read { path, source }, Some(&sandbox))
    };
    for path in [directory.join("secret"), directory.join("new"), "a.img".into()] {
        let explanation = explain(path, libc::EACCES).concat();
        assert!(
            explanation.contains("--sandbox none") && explanation.contains("permits only"),
            "{explanation}"
        );
    }
    for (path, errno) in [
        (directory.join("secret"), libc::ENOSPC),
        (images.join("guest.img"), libc::EACCES),
        // No system call was refused.
        (directory.join("secret"), libc::EPERM),
    ] {
        assert!(explain(path.clone(), errno).is_empty(), "{}: {errno}", path.display());
    }
    std::fs::write(images.join("guest.img.partial"), "n").unwrap();
    std::fs::rename(images.join("guest.img.partial"), images.join("guest.img")).unwrap();
    assert_eq!(std::fs::read_to_string(images.join("guest.img")).unwrap(), "n");
    TcpListener::bind("127.0.0.1:0").unwrap();
}

#[test]
fn the_inspection_of_an_image_neither_connects_nor_listens_nor_changes_files() {
    use std::os::unix::net::{UnixListener, UnixStream};

    let test = "sandbox::tests::the_inspection_of_an_image_neither_connects_nor_listens_nor_changes_files";
    let Some(directory) = confined_in() else {
        in_own_process(test);
        return;
    };
    let (image, socket) = (directory.join("a.img"), directory.join("socket"));
    std::fs::write(&image, "a").unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    let args = inspect_args(&[image.as_os_str()]);
    let policy = crate::inspect::policy(&args, &Source::Image(image.clone())).unwrap();
    requested().confine(policy);
    refused("connect", libc::EPERM, UnixStream::connect(&socket));
    refused("listen", libc::EPERM, UnixListener::bind(directory.join("another")));
    refused("rename", libc::EPERM, std::fs::rename(&image, directory.join("b.img")));
    refused("remove", libc::EPERM, std::fs::remove_file(&image));
    if has_landlock() {
        refused("write", libc::EACCES, std::fs::write(&image, "b"));
        refused("a temporary file", libc::EACCES, std::fs::write(std::env::temp_dir().join("a"), "b"));
    }
    assert_eq!(std::fs::read_to_string(&image).unwrap(), "a");
}

#[test]
fn the_page_about_an_image_is_written_without_sockets() {
    let args = inspect_args(&["a.img", "b.img", "--html", "/pages/a.html"].map(std::ffi::OsStr::new));
    let policy = crate::inspect::policy(&args, &Source::Image("a.img".into())).unwrap();
    assert_eq!(policy.write, [PathBuf::from("/pages")]);
    assert!(
        !policy.connects_unix
            && policy.connect == AllowedPorts::default()
            && policy.bind == AllowedPorts::default()
    );
}

fn inspect_args(options: &[&std::ffi::OsStr]) -> crate::args::InspectArgs {
    use clap::{Args as _, FromArgMatches as _};

    let command = crate::args::InspectArgs::augment_args(clap::Command::new("inspect"));
    let matches = command.try_get_matches_from([&[std::ffi::OsStr::new("inspect")], options].concat());
    crate::args::InspectArgs::from_arg_matches(&matches.unwrap()).unwrap()
}

#[test]
fn a_card_raises_the_mtu_only_of_a_tap_that_it_created() {
    use towline_net::Taps;

    if confined_in().is_none() {
        in_own_process("sandbox::tests::a_card_raises_the_mtu_only_of_a_tap_that_it_created");
        return;
    }
    let name = format!("twl{}", std::process::id());
    let taps = match Taps::open(&name, 1) {
        Ok(taps) => taps,
        Err(error) => return println!("skipped: {error}"),
    };
    let adopted = taps.queues()[0].as_fd().try_clone_to_owned().unwrap();
    let adopted = Taps::from_fds(vec![adopted]).unwrap();
    assert!(!crate::net::policy(&adopted).sets_mtu);
    let mut confinement = requested().begin(crate::net::policy(&taps));
    confinement.finish();
    taps.set_mtu(9000).unwrap();
    assert_eq!(taps.mtu(), Some(9000));
}

#[test]
fn a_copy_with_exec_is_not_confined() {
    let exec = Destination::Stream("exec:cat".parse().unwrap());
    assert!(policy_of_copy(&Source::Image("a.img".into()), &[exec], &CopyRequest::default(), None).is_none());
}

#[test]
fn ports_and_names_are_those_of_the_endpoints() {
    let source = Source::Stream("tcp:127.0.0.1:4444".parse().unwrap());
    let to = |text: &str| Destination::Stream(text.parse().unwrap());
    let policy = policy_of_copy(&source, &[to("tcp:[::1]:5555")], &CopyRequest::default(), None).unwrap();
    assert_eq!(
        (policy.bind, policy.connect),
        (AllowedPorts::Only(vec![4444]), AllowedPorts::Only(vec![5555]))
    );
    assert!(!policy.resolves_names);
    let policy =
        policy_of_copy(&source, &[to("ws://host.example/vm")], &CopyRequest::default(), None).unwrap();
    assert!(policy.resolves_names && policy.read.contains(&PathBuf::from("/etc")));
    let policy =
        policy_of_copy(&Source::Image("a.img".into()), &[Destination::Null], &CopyRequest::default(), None)
            .unwrap();
    assert_eq!(policy.connect, AllowedPorts::Any, "lanes of a copy within this process");
}
