//! What a guest's connections cost this process. Alone in its process, so that nobody else's memory is measured.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use towline_frontend::vsock::{Event, Guest};
use towline_vsock::Limits;
use towline_vsock::packet::Kind;

use common::{Served, WITHIN, until};

/// Of one guest, at a time.
const CONNECTIONS: u32 = 10_000;
/// What `docs/vsock.md` says of a connection for which nothing waits, the driver's part of it included.
const CONNECTION_BYTES_MAX: u64 = 2048;
/// Connections whose host side never reads.
const SILENT: u32 = 64;
/// Connections that are asked for and not made yet.
const AHEAD: u32 = 64;
/// Descriptors beside one for each connection.
const OTHERS: u64 = 200;
/// Where a second process of this program listens, as the host's side of all connections.
const HOST: &str = "TOWLINE_VSOCK_HOST";

/// Private memory of this process, in bytes.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The host's side, in a process of its own: so many descriptors are not to be had in one everywhere. SeqFlags with its standard
/// input.
#[test]
fn the_host_side_of_another_test() {
    let Some(path) = std::env::var_os(HOST) else { return };
    let listener = UnixListener::bind(path).unwrap();
    let streams: Vec<_> = (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect();
    let end = std::io::stdin().read(&mut [0]).unwrap();
    assert_eq!((streams.len(), end), (CONNECTIONS as usize, 0));
}

/// SeqFlags when it is dropped.
struct HostSide(Child);

impl HostSide {
    fn new(path: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_host_side_of_another_test"]).env(HOST, path);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + WITHIN;
        while UnixStream::connect(path).is_err() {
            assert!(Instant::now() < deadline, "nobody listens at {}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }
}

impl Drop for HostSide {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if std::thread::panicking() {
            // It may wait for connections that do not come.
            let _ = self.0.kill();
        }
        let status = self.0.wait().unwrap();
        assert!(status.success() || std::thread::panicking(), "{status}");
    }
}

/// No more at a time than fit into the listener's queue.
fn connect_all(guest: &mut Guest) {
    let deadline = Instant::now() + WITHIN;
    let mut connected = 0;
    for port in 0..CONNECTIONS {
        guest.request((port, 5000));
        let wanted = if port + 1 == CONNECTIONS { CONNECTIONS } else { (port + 1).saturating_sub(AHEAD) };
        loop {
            guest
                .poll(|_, event| match event {
                    Event::Connected(_) => connected += 1,
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

/// Sends into connections that nobody reads until none takes more.
fn fill(guest: &mut Guest) {
    let piece = [0x5a; 16 << 10];
    let mut idle = 0;
    while idle < 20 {
        let mut sent = false;
        for port in 0..SILENT {
            sent |= guest.has_room() && guest.send((port, 5000), &piece, 0);
        }
        guest.poll(|_, _| ()).unwrap();
        idle = if sent { 0 } else { idle + 1 };
        if !sent {
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
}

#[test]
fn ten_thousand_connections_take_the_memory_that_was_stated() {
    towline_vsock::raise_descriptor_limit();
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if most < u64::from(CONNECTIONS) + OTHERS {
        let reason = format!("a process may have {most} descriptors, and each connection takes one");
        let _ = writeln!(std::io::stderr(), "SKIPPED ten_thousand_connections: {reason}");
        return;
    }
    let limits = Limits::default();
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
    assert!(grown <= most, "{CONNECTIONS} connections took {grown} bytes, at most {most} are stated");
    // What waits for those who never read is in addition, and no more than is counted as kept.
    fill(&mut guest);
    let kept = served.device.report().buffered_bytes as u64;
    assert!(kept > 0 && kept <= limits.memory, "{kept} bytes are kept");
    let grown = private_bytes().saturating_sub(before);
    let most = most + 2 * kept;
    assert!(grown <= most, "with {kept} bytes kept they took {grown} bytes, at most {most} are stated");
    let report = served.device.report();
    assert_eq!(report.statistics.connections, u64::from(CONNECTIONS));
}

/// Windows are promises of memory: when there is none left to promise, a connection is refused.
#[test]
fn what_cannot_be_promised_is_refused() {
    let memory = 8 * Limits::cost(16 << 10, Kind::Stream);
    let served = Served::new(Limits { memory, ..Limits::default() });
    let (_frontend, mut guest) = served.guest();
    let _listener = UnixListener::bind(served.path("v_5000")).unwrap();
    let mut outcomes = Vec::new();
    for port in 0..9 {
        guest.request((port, 5000));
        outcomes.push(until(&mut guest, |_, event| match event {
            Event::Connected(_) => Some(true),
            Event::Reset(_) => Some(false),
            _ => None,
        }));
    }
    assert_eq!(outcomes, [[true; 8].as_slice(), &[false]].concat());
    assert_eq!(served.device.report().statistics.table.refused_by_limit, 1);
}
