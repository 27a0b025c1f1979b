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
mod sys;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::applications::{Applications, Connections, CountedBy, Dial, Direction, Service, Traffic, WITHIN};
use crate::options::Bench;
use crate::table::{self, Bound, Column, Entry, Figures, Table};
use crate::vhost::backend::Backend;
use crate::vhost::{Signals, latencies, window};
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
/// Goals, as ratios.
const TO_GUEST_PEER_MIN: f64 = 5.0;
const TO_GUEST_SMALL_SOCKET_MIN: f64 = 0.95;
const FROM_GUEST_PEER_MIN: f64 = 2.5;
const FROM_GUEST_SMALL_PEER_MIN: f64 = 3.0;
const LARGE_SOCKET_MIN: f64 = 0.75;
const REQUEST_MIN: f64 = 2.5;
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    traffic: Traffic,
    carrier: Carrier,
}

impl Entry for Run {
    fn group(&self) -> String {
        let (size, sessions) = self.shape();
        let (size, streams) = (bytes(size), if sessions == 1 { "stream" } else { "streams" });
        match self.traffic {
            Traffic::Stream { direction: Direction::ToGuest, .. } => {
                format!("to the guest, {sessions} {streams}, {size}")
            }
            Traffic::Stream { .. } => format!("from the guest, {sessions} {streams}, {size}"),
            Traffic::Request { connections: Connections::Kept, .. } => {
                format!("request and response, {sessions} {streams}, {size}")
            }
            Traffic::Request { .. } => format!("connect, request, close, {sessions} {streams}, {size}"),
        }
    }

    fn label(&self) -> &'static str {
        self.carrier.name()
    }
}

impl Carrier {
    fn name(self) -> &'static str {
        match self {
            Self::Towline => "towline",
            Self::Peer => PEER,
            Self::Socket => "Unix socket",
        }
    }
}

const STREAMS: [Column<Run>; 5] = [
    Column::spread("Gbit/s", 2),
    Column::ratio("× peer", "Gbit/s", |run: Run| run.by(Carrier::Peer)).with_goal(against_peer),
    Column::ratio("× Unix socket", "Gbit/s", |run: Run| run.by(Carrier::Socket)).with_goal(against_socket),
    Column::spread("Mbit/s per % CPU", 1),
    Column::ratio("× peer's", "Mbit/s per % CPU", |run: Run| run.by(Carrier::Peer))
        .with_goal(|run| run.is_judged().then_some(Bound::Least(1.0))),
];
const REQUESTS: [Column<Run>; 6] = [
    Column::spread("1/s", 0),
    Column::ratio("× peer", "1/s", |run: Run| run.by(Carrier::Peer))
        .with_goal(|run| run.is_judged().then_some(Bound::Least(REQUEST_MIN))),
    Column::ratio("× Unix socket", "1/s", |run: Run| run.by(Carrier::Socket)),
    Column::spread("p50 µs", 0),
    Column::spread("p99 µs", 0),
    Column::spread("1/s per % CPU", 0),
];

fn against_peer(run: Run) -> Option<Bound> {
    let least = match run.traffic {
        Traffic::Stream { direction: Direction::FromGuest, size, .. } if size <= MEDIUM => {
            FROM_GUEST_SMALL_PEER_MIN
        }
        Traffic::Stream { direction: Direction::FromGuest, .. } => FROM_GUEST_PEER_MIN,
        Traffic::Stream { size, .. } if size >= MEDIUM => TO_GUEST_PEER_MIN,
        _ => return None,
    };
    run.is_judged().then_some(Bound::Least(least))
}

fn against_socket(run: Run) -> Option<Bound> {
    let least = match run.traffic {
        Traffic::Stream { size, .. } if size >= LARGE => LARGE_SOCKET_MIN,
        Traffic::Stream { direction: Direction::ToGuest, size, .. } if size <= SMALL => {
            TO_GUEST_SMALL_SOCKET_MIN
        }
        _ => return None,
    };
    run.is_judged().then_some(Bound::Least(least))
}

impl Run {
    fn all() -> impl Iterator<Item = Self> {
        let sizes: Vec<usize> = SIZES_LOG2.map(|bits| 1 << bits).collect();
        let requests = Traffic::requests(&[REQUEST_BYTES], &SESSIONS);
        let all = [Traffic::streams(&sizes, &SESSIONS), requests].concat();
        let carriers = [Carrier::Towline, Carrier::Peer, Carrier::Socket];
        all.into_iter().flat_map(move |traffic| carriers.map(|carrier| Self { traffic, carrier }))
    }

    /// Returns the size of messages, and the number of streams.
    fn shape(self) -> (usize, usize) {
        let (Traffic::Stream { size, sessions, .. } | Traffic::Request { size, sessions, .. }) = self.traffic;
        (size, sessions)
    }

    fn by(self, carrier: Carrier) -> Self {
        Self { carrier, ..self }
    }

    fn is_judged(self) -> bool {
        self.carrier == Carrier::Towline && self.shape().1 == 1
    }

    fn is_stream(self) -> bool {
        matches!(self.traffic, Traffic::Stream { .. })
    }

    fn goes(self, wanted: Direction) -> bool {
        matches!(self.traffic, Traffic::Stream { direction, .. } if direction == wanted)
    }
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
    let results = table::measure(bench, bench.chosen(Run::all())?, |run| Ends::new(bench, run)?.run())?;
    let streams = |name, what: &str, direction| {
        let title = format!("vsock streams {what} the guest");
        results.table(name, &title, &STREAMS, |run| run.goes(direction)).with_notes([
            &*format!(
                "peer: {PEER} 0.3; CPU: backend, applications and driver together; see docs/benchmarks.md"
            ),
            "Linux's receive buffers are of 4 KiB; a packet carries at most 64 KiB either way",
        ])
    };
    let title = "Requests to the guest over vsock";
    Ok(vec![
        streams("vsock-to-guest", "to", Direction::ToGuest),
        streams("vsock-from-guest", "from", Direction::FromGuest),
        results
            .table("vsock-requests", title, &REQUESTS, |run| !run.is_stream())
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
    fn serve(&self, bench: &Bench, carrier: Carrier) -> Result<Backend> {
        let (vhost, uds) = (self.vhost.display().to_string(), self.uds.display().to_string());
        let words = match carrier {
            Carrier::Peer => [
                bench.peer(PEER)?.display().to_string(),
                format!("--guest-cid={CID}"),
                format!("--socket={vhost}"),
                format!("--uds-path={uds}"),
            ]
            .to_vec(),
            Carrier::Towline | Carrier::Socket => {
                let program = bench.options.towline.display().to_string();
                let cid = CID.to_string();
                [&*program, "vsock", "--socket", &vhost, "--cid", &cid, "--uds", &uds]
                    .map(str::to_owned)
                    .to_vec()
            }
        };
        Backend::start(&words)
    }

    /// Connects to a port of the guest, by Firecracker's convention.
    fn dial(&self, port: u32) -> Dial {
        let path = self.uds.clone();
        Arc::new(move || {
            let mut stream = connected(&path)?;
            // In one write: vhost-device-vsock refuses a request in several.
            stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
            // Nothing follows it, as the guest sends only after a request.
            let (mut reply, mut len) = ([0; REPLY_BYTES_MAX], 0);
            while !reply[..len].ends_with(b"\n") {
                let count = stream.read(&mut reply[len..])?;
                ensure!(count > 0, "the backend refused a connection to port {port}");
                len += count;
            }
            let reply = String::from_utf8_lossy(&reply[..len]);
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
struct Ends<'a> {
    bench: &'a Bench,
    run: Run,
    signals: Arc<Signals>,
    guest: Option<JoinHandle<Result<()>>>,
    backend: Option<Backend>,
    directory: tempfile::TempDir,
}

impl<'a> Ends<'a> {
    fn new(bench: &'a Bench, run: Run) -> Result<Self> {
        let directory = bench.directory()?;
        Ok(Self { bench, run, signals: Arc::default(), guest: None, backend: None, directory })
    }

    fn run(mut self) -> Result<Figures> {
        let mut applications = Applications::new(&self.signals);
        let started = match self.run.carrier {
            Carrier::Socket => self.without_backend(&mut applications),
            Carrier::Towline | Carrier::Peer => self.with_backend(&mut applications),
        };
        let measured = started.and_then(|()| {
            let length = self.bench.window(WINDOW);
            window(&self.signals, self.backend.as_mut(), length, &self.bench.cancel)
        });
        // The applications end before the guest that responds to them, and that before its backend.
        let times = applications.end();
        self.signals.power_off.store(true, Ordering::Relaxed);
        let ended = self.guest.map_or(Ok(()), |guest| guest.join().expect("the thread does not panic"));
        let (window, times) = (measured?, times?);
        ended?;
        let cpu_percent = window.backend_percent + window.own_percent;
        let mut figures = latencies(times);
        if self.run.is_stream() {
            let gigabits = window.rate() * 8e-9;
            figures.extend([("Gbit/s", gigabits), ("Mbit/s per % CPU", gigabits * 1e3 / cpu_percent)]);
        } else {
            figures.extend([("1/s", window.rate()), ("1/s per % CPU", window.rate() / cpu_percent)]);
        }
        Ok(figures)
    }

    /// Starts a guest on a backend, and the applications.
    fn with_backend(&mut self, applications: &mut Applications) -> Result<()> {
        let sockets = Sockets::within(self.directory.path());
        let backend = sockets.serve(self.bench, self.run.carrier)?;
        let backend = self.backend.insert(backend);
        let frontend = backend.connect(&sockets.vhost)?;
        let traffic = self.run.traffic;
        let guest = Machine::start(frontend, traffic, &self.signals);
        let mut guest = guest.map_err(|error| backend.check().err().unwrap_or(error))?;
        if let Traffic::Stream { direction: Direction::FromGuest, sessions, .. } = traffic {
            let path = format!("{}_{PORT}", sockets.uds.display());
            applications.serve(listener(path.as_ref())?, Service::Read, sessions);
            guest.connect()?;
        }
        self.guest = Some(guest.spawn());
        if self.run.goes(Direction::FromGuest) {
            return Ok(());
        }
        self.clients(applications, &sockets.dial(PORT))
    }

    /// Starts the applications of both ends, without a backend.
    fn without_backend(&self, applications: &mut Applications) -> Result<()> {
        let path = self.directory.path().join("limit.sock");
        let (service, sessions) = match self.run.traffic {
            Traffic::Stream { sessions, .. } => (Service::Read, sessions),
            Traffic::Request { connections, sessions, .. } => (Service::Echo(connections), sessions),
        };
        applications.serve(listener(&path)?, service, sessions);
        self.clients(applications, &(Arc::new(move || connected(&path)) as Dial))
    }

    /// Starts the applications that connect.
    fn clients(&self, applications: &mut Applications, dial: &Dial) -> Result<()> {
        (0..self.run.shape().1).try_for_each(|_| match self.run.traffic {
            Traffic::Stream { size, .. } => applications.write(dial()?, size, CountedBy::Reader),
            Traffic::Request { connections, size, .. } => applications.request(dial, size, connections),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_every_contender() {
        let all: Vec<_> = Run::all().collect();
        assert_eq!(all.len(), 3 * (2 * 2 * 15 + 2 * 2));
        assert_eq!(all[0].group(), "to the guest, 1 stream, 32 B");
        assert_eq!(all.last().map(Entry::group), Some("connect, request, close, 8 streams, 64 B".into()));
    }
}
