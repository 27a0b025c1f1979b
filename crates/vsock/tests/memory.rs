//! Memory of a guest's connections. The test has a separate process, so no other memory is measured.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use towline_frontend::vsock::{VsockEvent, VsockGuest};
use towline_vsock::ConnectionLimits;
use towline_vsock::packet::SocketType;

use common::{Served, TIMEOUT, poll_until};

/// Number of simultaneous connections of one guest.
const CONNECTIONS: u32 = 10_000;
/// Memory of an idle connection that `docs/vsock.md` states, including the driver's part.
const CONNECTION_BYTES_MAX: u64 = 2048;
/// Number of connections whose program never reads.
const SILENT: u32 = 64;
/// Maximum number of requested connections that are not established yet.
const AHEAD: u32 = 64;
/// Descriptors beside one for each connection.
const OTHERS: u64 = 200;
/// Environment variable: path where a second process of this program listens, as the host's end of all
/// connections.
const HOST: &str = "TOWLINE_VSOCK_HOST";

/// Returns the private memory of this process in bytes.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The host's end in a separate process, because one process may not have descriptors for both. It ends with
/// its standard input.
#[test]
fn the_host_side_of_another_test() {
    let Some(path) = std::env::var_os(HOST) else { return };
    let listener = UnixListener::bind(path).unwrap();
    let streams: Vec<_> = (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect();
    let end = std::io::stdin().read(&mut [0]).unwrap();
    assert_eq!((streams.len(), end), (CONNECTIONS as usize, 0));
}

/// The second process. It ends on drop.
struct HostSide(Child);

impl HostSide {
    fn new(path: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_host_side_of_another_test"]).env(HOST, path);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(path).is_err() {
            assert!(Instant::now() < deadline, "no process listens on {}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }
}

impl Drop for HostSide {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if std::thread::panicking() {
            // It may still wait for connections.
            let _ = self.0.kill();
        }
        let status = self.0.wait().unwrap();
        assert!(status.success() || std::thread::panicking(), "{status}");
    }
}

/// Establishes all connections, at most as many at a time as fit into the listener's backlog.
fn connect_all(guest: &mut VsockGuest) {
    let deadline = Instant::now() + TIMEOUT;
    let mut connected = 0;
    for port in 0..CONNECTIONS {
        guest.request((port, 5000));
        let wanted = if port + 1 == CONNECTIONS { CONNECTIONS } else { (port + 1).saturating_sub(AHEAD) };
        loop {
            guest
                .poll(|_, event| match event {
                    VsockEvent::Connected(_) => connected += 1,
                    event => panic!("{event:?} after {connected} connections"),
                })
                .unwrap();
            if connected >= wanted {
                break;
            }
            assert!(Instant::now() < deadline, "{connected} of {CONNECTIONS} connections were made");
            guest.wait(false, Duration::from_millis(20)).unwrap();
        }
    }
}

/// Sends to programs that never read, until no connection accepts more.
fn fill(guest: &mut VsockGuest) {
    let packet = [0x5a; 16 << 10];
    let mut idle = 0;
    while idle < 20 {
        let mut sent = false;
        for port in 0..SILENT {
            sent |= guest.can_send() && guest.send((port, 5000), &packet, 0);
        }
        guest.poll(|_, _| ()).unwrap();
        idle = if sent { 0 } else { idle + 1 };
        if !sent {
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
}

#[test]
fn ten_thousand_connections_use_the_stated_memory() {
    towline_vsock::raise_descriptor_limit();
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if most < u64::from(CONNECTIONS) + OTHERS {
        let reason = format!("the limit is {most} descriptors, and each connection needs one");
        let _ = writeln!(std::io::stderr(), "SKIPPED ten_thousand_connections: {reason}");
        return;
    }
    let limits = ConnectionLimits::default();
    let served = Served::new(limits);
    let (_frontend, mut guest) = served.guest();
    let _host = HostSide::new(&served.path("v_5000"));
    let before = private_bytes();
    connect_all(&mut guest);
    let report = served.device.report();
    assert_eq!((report.statistics.connections, report.buffered_bytes), (CONNECTIONS.into(), 0));
    assert_eq!(report.statistics.table.refused_by_limit, 0);
    let grown = private_bytes().saturating_sub(before);
    let most = u64::from(CONNECTIONS) * CONNECTION_BYTES_MAX;
    assert!(grown <= most, "{CONNECTIONS} connections use {grown} bytes, at most {most} are stated");
    // Payload for programs that never read comes in addition, and is at most what is counted as buffered.
    fill(&mut guest);
    let buffered = served.device.report().buffered_bytes as u64;
    assert!(buffered > 0 && buffered <= limits.memory, "{buffered} bytes are buffered");
    let grown = private_bytes().saturating_sub(before);
    let most = most + 2 * buffered;
    assert!(
        grown <= most,
        "with {buffered} bytes buffered they use {grown} bytes, at most {most} are stated"
    );
    let report = served.device.report();
    assert_eq!(report.statistics.connections, u64::from(CONNECTIONS));
}

/// Each window is reserved: without memory for another one, a connection is refused.
#[test]
fn connections_without_memory_for_a_window_are_refused() {
    let memory = 8 * ConnectionLimits::cost(16 << 10, SocketType::Stream);
    let served = Served::new(ConnectionLimits { memory, ..ConnectionLimits::default() });
    let (_frontend, mut guest) = served.guest();
    let _listener = UnixListener::bind(served.path("v_5000")).unwrap();
    let mut outcomes = Vec::new();
    for port in 0..9 {
        guest.request((port, 5000));
        outcomes.push(poll_until(&mut guest, |_, event| match event {
            VsockEvent::Connected(_) => Some(true),
            VsockEvent::Reset(_) => Some(false),
            _ => None,
        }));
    }
    assert_eq!(outcomes, [[true; 8].as_slice(), &[false]].concat());
    assert_eq!(served.device.report().statistics.table.refused_by_limit, 1);
}
