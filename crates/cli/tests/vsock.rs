//! `towline vsock` with a driver over shared memory in place of a guest.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_frontend::vsock::{Options, PortPair, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, VsockEvent, VsockGuest};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena};

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const TIMEOUT: Duration = Duration::from_secs(60);
const CID: u64 = 33;

/// A directory with the sockets of devices.
struct Sockets {
    directory: tempfile::TempDir,
}

/// Killed at the end of the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Sockets {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self, args: &[&str]) -> Process {
        let mut command = Command::new(TOWLINE);
        command.arg("vsock").args(args).current_dir(self.directory.path());
        Process(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// Connects a guest to the device at this socket.
    fn guest(&self, socket: &str, cid: u64) -> (Frontend, VsockGuest) {
        let mut frontend = Frontend::connect(&self.path(socket), TIMEOUT).unwrap();
        let features = frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap().features;
        let options = Options { cid, size: 64, receive_bytes: 4096, features, takes_at_once: true };
        let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
        (frontend, guest)
    }
}

fn until<T>(guest: &mut VsockGuest, mut found: impl FnMut(&mut VsockGuest, VsockEvent) -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut result = None;
        guest.poll(|guest, event| result = result.take().or(found(guest, event))).unwrap();
        if let Some(result) = result {
            return result;
        }
        assert!(Instant::now() < deadline, "timeout");
        guest.wait(false, Duration::from_millis(20)).unwrap();
    }
}

/// Connects to a port of the host.
fn connect(guest: &mut VsockGuest, ports: PortPair) {
    guest.request(ports);
    until(guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
}

/// A process is killed with packets in flight to a socket that is not read, while later ones were completed.
/// The used index does not show which chains are in flight; the record does.
#[test]
fn a_process_that_is_killed_completes_no_chain_twice_and_loses_none() {
    let sockets = Sockets::new();
    let args = ["--socket", "s", "--cid", "33", "--uds", "v", "--state", "record"];
    let mut process = sockets.start(&args);
    let (frontend, mut guest) = sockets.guest("s", CID);
    let (silent, quick) = (sockets.path("v_5000"), sockets.path("v_5001"));
    let (silent, quick) = (UnixListener::bind(silent).unwrap(), UnixListener::bind(quick).unwrap());
    let (stalled, busy) = ((6000, 5000), (6001, 5001));
    connect(&mut guest, stalled);
    connect(&mut guest, busy);
    let (_never_read, (mut read, _)) = (silent.accept().unwrap(), quick.accept().unwrap());
    // Until the socket is full, and the device has packets in flight.
    let mut idle = 0;
    while idle < 20 {
        let sent = guest.can_send() && guest.send_any(stalled, 20_000);
        guest.poll(|_, _| ()).unwrap();
        idle = if sent { 0 } else { idle + 1 };
        if !sent {
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
    let in_flight = guest.tx().in_flight();
    assert!(in_flight > 0, "no chain is in flight");
    let mut bytes = [0; 5];
    for _ in 0..10 {
        assert!(guest.send(busy, b"later", 0));
        guest.poll(|_, _| ()).unwrap();
        read.read_exact(&mut bytes).unwrap();
    }
    let deadline = Instant::now() + TIMEOUT;
    while guest.tx().in_flight() > in_flight {
        guest.poll(|_, _| ()).unwrap();
        assert!(
            Instant::now() < deadline,
            "{} chains are in flight, expected {in_flight}",
            guest.tx().in_flight()
        );
    }
    process.0.kill().unwrap();
    process.0.wait().unwrap();
    drop(frontend);

    let _process = sockets.start(&args);
    let mut frontend = Frontend::connect(&sockets.path("s"), TIMEOUT).unwrap();
    frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap();
    frontend.set_mem_table(Some(&Arc::clone(guest.memory()))).unwrap();
    // A frontend restores the rings of a killed backend from their used indices.
    let bases = [guest.rx().last_used_idx(), guest.tx().last_used_idx()];
    frontend.start(guest.rx(), bases[0]).unwrap();
    frontend.start(guest.tx(), bases[1]).unwrap();
    // The driver fails if a chain that is not in flight is completed. The connection is reset.
    until(&mut guest, |_, event| (event == VsockEvent::Reset(stalled)).then_some(()));
    let deadline = Instant::now() + TIMEOUT;
    while guest.tx().in_flight() > 0 {
        guest.poll(|_, _| ()).unwrap();
        assert!(
            Instant::now() < deadline,
            "{} of {in_flight} chains are not completed",
            guest.tx().in_flight()
        );
    }
    let again = (6002, 5001);
    connect(&mut guest, again);
    let (mut read, _) = quick.accept().unwrap();
    assert!(guest.send(again, b"again", 0));
    guest.poll(|_, _| ()).unwrap();
    read.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"again");
}

/// Each guest has a share of the process's descriptors. A guest with the maximum number of connections leaves
/// another one's connections and frontend working.
#[test]
fn a_guest_at_its_limit_does_not_affect_another() {
    let sockets = Sockets::new();
    // The shell lowers the limit of the process that takes its sockets.
    let script = format!(
        "ulimit -n 400; exec {TOWLINE} vsock --guest cid=33,socket=a,uds=av --guest cid=34,socket=b,uds=bv"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(sockets.directory.path());
    let _process = Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let (_hostile_frontend, mut hostile) = sockets.guest("a", 33);
    let listener = UnixListener::bind(sockets.path("av_5000")).unwrap();
    let mut streams = Vec::new();
    for port in 0..1000 {
        hostile.request((port, 5000));
        let connected = until(&mut hostile, |_, event| match event {
            VsockEvent::Connected(_) => Some(true),
            VsockEvent::Reset(_) => Some(false),
            _ => None,
        });
        if !connected {
            break;
        }
        streams.push(listener.accept().unwrap().0);
    }
    assert!((50..200).contains(&streams.len()), "{} connections", streams.len());
    // Clients on the host that send nothing.
    let silent: Vec<UnixStream> =
        (0..200).map(|_| UnixStream::connect(sockets.path("av")).unwrap()).collect();
    for _ in 0..3 {
        let (_frontend, mut guest) = sockets.guest("b", 34);
        let mut client = UnixStream::connect(sockets.path("bv")).unwrap();
        client.write_all(b"CONNECT 22\n").unwrap();
        until(&mut guest, |_, event| matches!(event, VsockEvent::Request((22, _))).then_some(()));
    }
    drop(silent);
}

#[test]
fn a_socket_that_cannot_be_made_is_named_once() {
    for command in [&["vsock", "--cid", "33"][..], &["net", "--tap", "towline-none"]] {
        let output =
            Command::new(TOWLINE).args(command).args(["--socket", "/no/directory/s"]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {text}");
        assert_eq!(text.matches("/no/directory/s").count(), 1, "{command:?}: {text}");
        assert_eq!(text.matches("/no/directory is not a directory").count(), 1, "{command:?}: {text}");
    }
}

impl Sockets {
    /// Starts `towline vsock connect` to a port of the guest at `v`.
    fn connect(&self, port: &str) -> Child {
        let mut command = Command::new(TOWLINE);
        command.args(["vsock", "connect", "v", port]).current_dir(self.directory.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// Waits for a connection to the guest, and accepts it.
fn accept_request(guest: &mut VsockGuest) -> PortPair {
    until(guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    })
}

/// The end of standard input ends one direction, and the guest's response still arrives.
#[test]
fn standard_input_and_output_are_a_connection_whose_directions_end_independently() {
    let sockets = Sockets::new();
    let _process = sockets.start(&["--socket", "s", "--cid", "33", "--uds", "v"]);
    let (_frontend, mut guest) = sockets.guest("s", CID);
    let mut client = sockets.connect("52");
    let ports = accept_request(&mut guest);
    assert_eq!(ports.0, 52);
    client.stdin.take().unwrap().write_all(b"a request").unwrap();
    let mut request = 0;
    until(&mut guest, |_, event| match event {
        VsockEvent::Data { len, .. } => {
            request += len;
            None
        }
        VsockEvent::Shutdown(_, flags) => {
            assert_eq!(flags, SHUTDOWN_SEND);
            Some(())
        }
        _ => None,
    });
    assert_eq!(request, 9);
    assert!(guest.send(ports, b"the response", 0));
    guest.shutdown(ports, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    until(&mut guest, |_, event| matches!(event, VsockEvent::Reset(_)).then_some(()));
    let output = client.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"the response"[..]));
}

/// The guest closes the connection while standard input stays open, as a terminal does.
#[test]
fn a_connection_that_the_guest_closes_ends_the_process() {
    let sockets = Sockets::new();
    let _process = sockets.start(&["--socket", "s", "--cid", "33", "--uds", "v"]);
    let (_frontend, mut guest) = sockets.guest("s", CID);
    let mut client = sockets.connect("52");
    let ports = accept_request(&mut guest);
    assert!(guest.send(ports, b"bye", 0));
    guest.shutdown(ports, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    until(&mut guest, |_, event| matches!(event, VsockEvent::Reset(_)).then_some(()));
    let _stdin = client.stdin.take();
    let mut received = String::new();
    client.stdout.take().unwrap().read_to_string(&mut received).unwrap();
    assert_eq!((received.as_str(), client.wait().unwrap().code()), ("bye", Some(0)));
}

#[test]
fn a_connection_that_cannot_be_made_reports_the_reason() {
    let sockets = Sockets::new();
    let failure = |client: Child| {
        let output = client.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let no_device = "towline: cannot connect to v: No such file or directory (os error 2); start a device with `towline \
                     vsock --uds v`\n";
    assert_eq!(failure(sockets.connect("52")), (Some(1), no_device.to_owned()));
    let _process = sockets.start(&["--socket", "s", "--cid", "33", "--uds", "v"]);
    let (_frontend, mut guest) = sockets.guest("s", CID);
    let client = sockets.connect("52");
    until(&mut guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            guest.reset(ports);
            Some(())
        }
        _ => None,
    });
    // The reset is sent.
    let client = std::thread::spawn(move || failure(client));
    while !client.is_finished() {
        guest.poll(|_, _| ()).unwrap();
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    let refused = "towline: port 52 of the guest at v refused the connection; start the guest, and a program that listens on \
                   that vsock port, or name the socket of its vsock device (`--uds`), if this is another one\n";
    assert_eq!(client.join().unwrap(), (Some(1), refused.to_owned()));
    let mut command = Command::new(TOWLINE);
    let output = command.args(["vsock", "connect", "v"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text, "towline: no port: give the guest's port behind the socket of its device\n");
}

/// In a mount namespace, so the file system ends with the process.
#[test]
fn a_record_that_does_not_fit_is_refused_at_the_start() {
    let sockets = Sockets::new();
    let script = format!(
        "mount -t tmpfs -o size=64k none . 2>/dev/null || exit 77; cd \"$PWD\"; \
         exec {TOWLINE} vsock --cid 33 --socket socket --state state"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).current_dir(sockets.directory.path());
    let output = command.output().unwrap();
    if output.status.code() != Some(1) {
        assert!(!rustix::process::geteuid().is_root(), "{output:?}");
        println!(
            "SKIPPED a_record_that_does_not_fit_is_refused_at_the_start: it needs root to mount a tmpfs"
        );
        return;
    }
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("the record of descriptors in flight state needs 802816 bytes"), "{stderr}");
}
