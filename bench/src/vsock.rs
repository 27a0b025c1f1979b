//! `cargo xtask bench vsock`: streams of a vsock backend, against vhost-device-vsock and a plain Unix socket.
//!
//! ```text
//!   application ── Unix socket ── backend ── rings in shared memory ── driver in this process (no guest is emulated)
//!   application ── Unix socket ── application                           the limit: the host's own part
//! ```
//! Every measurement has its own backend process. CPU time includes both sides: the backend, and this process with applications and
//! driver. The driver sleeps on its eventfd when idle, as a guest does.
//!
//! Limits: the driver does not copy data, so a guest's own work is not measured.

mod guest;
pub(crate) mod linux;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use towline_lab::Towline as Process;

use crate::applications::{Applications, CountedBy, Dial, Kind, Service, Traffic, WITHIN};
use crate::options::Bench;
use crate::table::{self, Bound, Column, Contender, Entry, Figures, Row, Table};
use crate::vhost::connect;
use guest::{CID, Machine, PORT};

/// Binary logarithms of the published message sizes, 32 B to 512 KiB.
const SIZES_LOG2: std::ops::RangeInclusive<u32> = 5..=19;
const SESSIONS: [usize; 2] = [1, 8];
const REQUEST_BYTES: usize = 64;
const WINDOW: Duration = Duration::from_millis(500);
/// Program of the peer.
const PEER: &str = "vhost-device-vsock";
/// Maximum length of a backend's `OK PORT`.
const REPLY_BYTES_MAX: usize = 32;
/// Sizes at which the goals change.
const SMALL: usize = 256;
const MEDIUM: usize = 4 << 10;
const LARGE: usize = 16 << 10;

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Towline,
    Peer,
    Socket,
}

type Run = Entry<Traffic, Carrier>;

const TOWLINE: Contender<Carrier> = Contender::new("towline", Carrier::Towline);
const VHOST_DEVICE: Contender<Carrier> = Contender::new(PEER, Carrier::Peer);
const SOCKET: Contender<Carrier> = Contender::new("Unix socket", Carrier::Socket);

impl Row for Traffic {
    fn name(&self) -> String {
        let what = match self.kind {
            Kind::ToGuest => "to the guest",
            Kind::FromGuest => "from the guest",
            Kind::Request => "request and response",
            Kind::Connection => "connect, request, close",
        };
        let streams = if self.sessions == 1 { "stream" } else { "streams" };
        format!("{what}, {} {streams}, {}", self.sessions, bytes(self.size))
    }
}

const STREAMS: [Column<Traffic, Carrier>; 5] = [
    Column::spread("Gbit/s", 2),
    Column::ratio("× peer", "Gbit/s", |run| run.with(VHOST_DEVICE)).with_goal(against_peer),
    Column::ratio("× Unix socket", "Gbit/s", |run| run.with(SOCKET)).with_goal(against_socket),
    Column::spread("Mbit/s per % CPU", 1),
    Column::ratio("× peer's", "Mbit/s per % CPU", |run| run.with(VHOST_DEVICE))
        .with_goal(|run| judged(run, 1.0)),
];
const REQUESTS: [Column<Traffic, Carrier>; 6] = [
    Column::spread("1/s", 0),
    Column::ratio("× peer", "1/s", |run| run.with(VHOST_DEVICE)).with_goal(|run| judged(run, 2.5)),
    Column::ratio("× Unix socket", "1/s", |run| run.with(SOCKET)),
    Column::spread("p50 µs", 0),
    Column::spread("p99 µs", 0),
    Column::spread("1/s per % CPU", 0),
];

/// The goal of one session.
fn judged(run: Run, least: f64) -> Option<Bound> {
    run.at_least(TOWLINE, least).filter(|_| run.row.sessions == 1)
}

fn against_peer(run: Run) -> Option<Bound> {
    let is_from_guest = run.row.kind == Kind::FromGuest;
    let least = match (is_from_guest, run.row.size) {
        (true, ..=MEDIUM) => 3.0,
        (true, _) => 2.5,
        (false, MEDIUM..) => 5.0,
        (false, _) => return None,
    };
    judged(run, least)
}

fn against_socket(run: Run) -> Option<Bound> {
    match run.row.size {
        LARGE.. => judged(run, 0.75),
        ..=SMALL if run.row.kind == Kind::ToGuest => judged(run, 0.95),
        _ => None,
    }
}

fn all() -> Vec<Run> {
    let sizes: Vec<usize> = SIZES_LOG2.map(|bits| 1 << bits).collect();
    let streams = Traffic::all(Kind::STREAMS, &sizes, &SESSIONS);
    let requests = Traffic::all(Kind::REQUESTS, &[REQUEST_BYTES], &SESSIONS);
    Entry::all([streams, requests].concat(), &[TOWLINE, VHOST_DEVICE, SOCKET])
}

/// Formats a size.
fn bytes(size: usize) -> String {
    if size.is_multiple_of(1024) { format!("{} KiB", size / 1024) } else { format!("{size} B") }
}

/// Measures the tables.
///
/// # Errors
/// The run was cancelled, or no row is selected.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let results = table::measure(bench, bench.chosen(all())?, |it| run(bench, it))?;
    let streams = |name, what: &str, kind| {
        let title = format!("vsock streams {what} the guest");
        results.table(name, &title, &STREAMS, |traffic| traffic.kind == kind).with_notes([
            &*format!(
                "peer: {PEER} 0.3; CPU: backend, applications and driver together; see docs/benchmarks.md"
            ),
            "Linux's receive buffers are of 4 KiB; a packet carries at most 64 KiB either way",
        ])
    };
    let title = "Requests to the guest over vsock";
    Ok(vec![
        streams("vsock-to-guest", "to", Kind::ToGuest),
        streams("vsock-from-guest", "from", Kind::FromGuest),
        results
            .table("vsock-requests", title, &REQUESTS, |traffic| !traffic.is_stream())
            .with_notes(["connections: CONNECT, its OK, request, response, close"]),
    ])
}

/// Paths of a backend's sockets: the frontend's, and that of the clients.
struct Sockets {
    vhost: PathBuf,
    uds: PathBuf,
}

impl Sockets {
    fn within(directory: &Path) -> Self {
        Self { vhost: directory.join("vhost.sock"), uds: directory.join("uds.sock") }
    }

    /// Starts the process of a contender.
    fn serve(&self, bench: &Bench, carrier: Carrier) -> Result<Process> {
        let (vhost, uds) = (self.vhost.display().to_string(), self.uds.display().to_string());
        match carrier {
            Carrier::Peer => {
                let cid = format!("--guest-cid={CID}");
                let words = [cid, format!("--socket={vhost}"), format!("--uds-path={uds}")];
                Process::start(&bench.peer(PEER)?, words)
            }
            Carrier::Towline | Carrier::Socket => {
                let cid = CID.to_string();
                let words = ["vsock", "--socket", &vhost, "--cid", &cid, "--uds", &uds];
                Process::start(&bench.options.towline, words)
            }
        }
    }

    /// Connects to a port of the guest, by Firecracker's convention.
    fn dial(&self, port: u32) -> Dial {
        let path = self.uds.clone();
        Arc::new(move || {
            let mut stream = connected(&path)?;
            // In one write: vhost-device-vsock refuses a request in several.
            stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
            // Nothing follows it, as the guest sends only after a request.
            let mut reply = String::new();
            let bounded = (&stream).take(REPLY_BYTES_MAX as u64);
            BufReader::with_capacity(REPLY_BYTES_MAX, bounded).read_line(&mut reply)?;
            ensure!(!reply.is_empty(), "the backend refused a connection to port {port}");
            ensure!(reply.starts_with("OK "), "unexpected reply {reply:?}");
            Ok(stream)
        })
    }
}

fn connected(path: &Path) -> Result<File> {
    let stream = UnixStream::connect(path).with_context(|| format!("{}", path.display()))?;
    stream.set_read_timeout(Some(WITHIN))?;
    stream.set_write_timeout(Some(WITHIN))?;
    Ok(OwnedFd::from(stream).into())
}

fn listener(path: &Path) -> Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// One run of a row.
fn run(bench: &Bench, run: Run) -> Result<Figures> {
    let (directory, traffic) = (bench.directory()?, run.row);
    let sockets = Sockets::within(directory.path());
    let mut applications = Applications::default();
    let mut backend =
        (run.contender != SOCKET).then(|| sockets.serve(bench, run.contender.kind)).transpose()?;
    let started = match &mut backend {
        Some(backend) => with_backend(&mut applications, traffic, &sockets, backend),
        None => without_backend(&mut applications, traffic, sockets.uds),
    };
    applications.measure(started, backend.as_mut(), bench, WINDOW, traffic)
}

/// Starts a guest on a backend, and the applications.
fn with_backend(
    applications: &mut Applications,
    traffic: Traffic,
    sockets: &Sockets,
    backend: &mut Process,
) -> Result<()> {
    let mut guest = Machine::start(connect(backend, &sockets.vhost)?, traffic)?;
    if traffic.kind == Kind::FromGuest {
        let path = format!("{}_{PORT}", sockets.uds.display());
        applications.serve(listener(path.as_ref())?, Service::Read, traffic.sessions);
        guest.connect(&applications.signals)?;
        applications.guest(move |signals| guest.run(signals));
        return Ok(());
    }
    applications.guest(move |signals| guest.run(signals));
    applications.connect(&sockets.dial(PORT), traffic, CountedBy::Reader)
}

/// Starts the applications of both ends, without a backend.
fn without_backend(applications: &mut Applications, traffic: Traffic, path: PathBuf) -> Result<()> {
    applications.serve(listener(&path)?, traffic.service(), traffic.sessions);
    applications.connect(&(Arc::new(move || connected(&path)) as Dial), traffic, CountedBy::Reader)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_every_contender() {
        let all = all();
        assert_eq!(all.len(), 3 * (2 * 2 * 15 + 2 * 2));
        assert_eq!(all[0].row.name(), "to the guest, 1 stream, 32 B");
        assert_eq!(
            all.last().map(|run| run.row.name()),
            Some("connect, request, close, 8 streams, 64 B".into())
        );
    }
}
