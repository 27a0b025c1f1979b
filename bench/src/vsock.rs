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

pub mod ablation;
pub mod crowd;
mod guest;
mod host;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, ensure};
use tempfile::TempDir;
use towline_channel::Cancel;
use towline_frontend::vsock::PAYLOAD_BYTES_MAX;

use crate::rounds::{self, Contender, Outcome};
use crate::table::Table;
use crate::vhost::backend::Backend;
use crate::vhost::latency::Latencies;
use crate::vhost::{Signals, Window, window};
use ablation::Variant;
use guest::Machine;
use host::{Host, Target};

/// CID of the guest.
const CID: u64 = 3;
/// Binary logarithms of the published message sizes, 32 B to 512 KiB.
const SIZES_LOG2: std::ops::RangeInclusive<u32> = 5..=19;
/// Program of the peer.
pub const PEER: &str = "vhost-device-vsock";

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Message sizes of streams, in bytes.
    pub sizes: Vec<usize>,
    /// Numbers of concurrent streams.
    pub connections: Vec<usize>,
    /// Size of a request and its response in bytes.
    pub request_bytes: usize,
    /// Length of each window.
    pub window: Duration,
    /// Number of runs of each row.
    pub runs: usize,
    /// Parts of the names of the groups to measure; empty: all.
    pub rows: Vec<String>,
    /// Binary under test.
    pub towline: PathBuf,
    /// Value of towline's `--sandbox`; `None`: its default.
    pub sandbox: Option<&'static str>,
    /// vhost-device-vsock, if available.
    pub peer: Option<PathBuf>,
    /// This program, which hosts the device of `vsock-ablation`.
    pub own: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the parameters of the published tables: 32 B to 512 KiB, 1 and 8 streams, windows of half a second.
    pub fn of(towline: &Path, peer: Option<PathBuf>, runs: usize, cancel: Cancel) -> Self {
        Self {
            sizes: SIZES_LOG2.map(|bits| 1 << bits).collect(),
            connections: vec![1, 8],
            request_bytes: 64,
            window: Duration::from_millis(500),
            runs,
            rows: Vec::new(),
            towline: towline.into(),
            sandbox: None,
            peer,
            own: PathBuf::new(),
            cancel,
        }
    }
}

/// Direction of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToGuest,
    FromGuest,
}

/// Work of the applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Stream { size: usize, connections: usize, direction: Direction },
    Request { size: usize, connections: usize, reconnects: bool },
}

/// The guest's receive buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Buffers {
    /// 4 KiB, as in Linux.
    Linux,
    /// 64 KiB.
    Large,
}

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Towline,
    Peer,
    Socket,
    /// The device in a process of this program.
    Tuned(Variant),
}

/// A row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    work: Work,
    /// Also set for the socket's rows, which are shown beside each.
    buffers: Buffers,
    carrier: Carrier,
}

/// Result of a run of a row.
#[derive(Debug, Clone, Copy)]
struct Figure {
    window: Window,
    p50_us: f64,
    p99_us: f64,
}

/// Measures the tables; takes a quarter of an hour with [`Parameters::of`] and five runs.
///
/// # Errors
/// The run was cancelled. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let entries = entries(parameters);
    let contenders: Vec<Contender> = entries.iter().map(Entry::contender).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        run(parameters, entries[index])
    })?;
    Ok(tables::Run { parameters, entries, outcomes }.tables())
}

/// Measures one stream of 64 KiB messages from the guest through towline.
///
/// # Errors
/// The backend fails, or the run was cancelled.
pub(crate) fn one_stream(parameters: &Parameters) -> Result<Window> {
    let work = Work::Stream { size: 64 << 10, connections: 1, direction: Direction::FromGuest };
    let entry = Entry { work, buffers: Buffers::Linux, carrier: Carrier::Towline };
    run(parameters, entry).map(|figure| figure.window)
}

/// Results of a row.
type Figures = Outcome<Figure>;

fn entries(parameters: &Parameters) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut add = |work, buffers| {
        let carriers = [Carrier::Towline, Carrier::Peer, Carrier::Socket];
        entries.extend(carriers.map(|carrier| Entry { work, buffers, carrier }));
    };
    let all = [Direction::ToGuest, Direction::FromGuest];
    for direction in all {
        for &connections in &parameters.connections {
            for buffers in [Buffers::Linux, Buffers::Large] {
                // Receive buffers do not affect streams from the guest.
                if direction == Direction::FromGuest && buffers == Buffers::Large {
                    continue;
                }
                for &size in &parameters.sizes {
                    add(Work::Stream { size, connections, direction }, buffers);
                }
            }
        }
    }
    for reconnects in [false, true] {
        for &connections in &parameters.connections {
            add(Work::Request { size: parameters.request_bytes, connections, reconnects }, Buffers::Linux);
        }
    }
    let wanted = |entry: &Entry| {
        let group = entry.contender().group;
        parameters.rows.is_empty() || parameters.rows.iter().any(|part| group.contains(part.as_str()))
    };
    entries.retain(wanted);
    entries
}

fn run(parameters: &Parameters, entry: Entry) -> Result<Figure> {
    let directory = TempDir::with_prefix("towline-bench-")?;
    let signals = Arc::new(Signals::default());
    if entry.carrier == Carrier::Socket {
        let target = Target::Socket(directory.path().join("limit.sock"));
        let mut host = Host::default();
        let measured = host::without_backend(&mut host, &signals, &target, entry.work)
            .and_then(|()| window(&signals, None, parameters.window, &parameters.cancel));
        return figure(measured, host.end(&signals));
    }
    let (socket, uds) = (directory.path().join("vhost.sock"), directory.path().join("uds.sock"));
    let mut backend = backend(parameters, entry.carrier, (&socket, &uds), directory.path())?;
    let frontend = backend.connect(&socket)?;
    let mut machine = match Machine::start(frontend, CID, entry.buffers, entry.work, &signals) {
        Ok(machine) => machine.with_payload_max(entry.carrier.payload_bytes_max()),
        Err(error) => return Err(backend.check().err().unwrap_or(error)),
    };
    let target = Target::Vsock(uds);
    let mut host = Host::default();
    let measured = (|| {
        if let Work::Stream { connections, direction: Direction::FromGuest, .. } = entry.work {
            host.read(&signals, &target.listener(), connections)?;
            machine.connect()?;
        }
        let thread = machine.spawn();
        let begun = match entry.work {
            Work::Stream { size, connections, direction: Direction::ToGuest } => {
                host.write(&signals, &target, (size, connections))
            }
            Work::Stream { .. } => Ok(()),
            Work::Request { size, connections, reconnects } => {
                host.request(&signals, &target, (size, connections, reconnects))
            }
        };
        let window =
            begun.and_then(|()| window(&signals, Some(&mut backend), parameters.window, &parameters.cancel));
        // The applications end before the guest that responds to them.
        Ok((window, thread))
    })();
    let (window, thread) = match measured {
        Ok((window, thread)) => (window, Some(thread)),
        Err(error) => (Err(error), None),
    };
    let latencies = host.end(&signals);
    signals.power_off.store(true, Ordering::Relaxed);
    let ended = thread.map_or(Ok(()), |thread| thread.join().expect("the thread does not panic"));
    let figure = figure(window, latencies)?;
    ended?;
    Ok(figure)
}

fn figure(window: Result<Window>, latencies: Result<Latencies>) -> Result<Figure> {
    let (window, mut latencies) = (window?, latencies?);
    Ok(Figure { window, p50_us: latencies.quantile(0.5), p99_us: latencies.quantile(0.99) })
}

fn backend(
    parameters: &Parameters,
    carrier: Carrier,
    (socket, uds): (&Path, &Path),
    directory: &Path,
) -> Result<Backend> {
    let (socket, uds, cid) = (socket.display().to_string(), uds.display().to_string(), CID.to_string());
    if carrier == Carrier::Towline {
        let arguments = ["vsock", "--socket", &socket, "--cid", &cid, "--uds", &uds];
        let sandbox = parameters.sandbox.map(|setting| ["--sandbox", setting]);
        let arguments = arguments.into_iter().chain(sandbox.into_iter().flatten());
        return Backend::start(directory, &parameters.towline, arguments);
    }
    if let Carrier::Tuned(variant) = carrier {
        return Backend::start(directory, &parameters.own, ablation::arguments(variant, &socket, &uds));
    }
    let peer = parameters.peer.as_ref();
    ensure!(peer.is_some(), "{PEER} is missing; run `cargo xtask peers`");
    let arguments = [format!("--guest-cid={cid}"), format!("--socket={socket}"), format!("--uds-path={uds}")];
    Backend::start(directory, peer.expect("checked above"), arguments)
}

impl Entry {
    fn contender(&self) -> Contender {
        let buffers = match self.buffers {
            Buffers::Linux => "4 KiB",
            Buffers::Large => "64 KiB",
        };
        let streams = |connections: usize| match connections {
            1 => "1 stream".to_owned(),
            many => format!("{many} streams"),
        };
        let (group, what) = match self.work {
            Work::Stream { size, connections, direction: Direction::ToGuest } => {
                (format!("to the guest, {}, buffers of {buffers}", streams(connections)), bytes(size))
            }
            Work::Stream { size, connections, direction: Direction::FromGuest } => {
                (format!("from the guest, {}", streams(connections)), bytes(size))
            }
            Work::Request { size, connections, reconnects: false } => {
                (format!("request and response, {}", streams(connections)), bytes(size))
            }
            Work::Request { size, connections, reconnects: true } => {
                (format!("connect, request, close, {}", streams(connections)), bytes(size))
            }
        };
        Contender { group: format!("{group}, {what}"), label: self.carrier.name().to_owned() }
    }
}

impl Carrier {
    fn name(self) -> &'static str {
        match self {
            Self::Towline => "towline",
            Self::Peer => PEER,
            Self::Socket => "Unix socket",
            Self::Tuned(variant) => variant.name(),
        }
    }

    /// Returns the maximum payload of the guest's packets in bytes.
    fn payload_bytes_max(self) -> usize {
        match self {
            Self::Tuned(Variant::SmallPackets) => ablation::SMALL_PACKET_BYTES as usize,
            _ => PAYLOAD_BYTES_MAX,
        }
    }
}

/// Formats a size.
fn bytes(size: usize) -> String {
    if size.is_multiple_of(1024) { format!("{} KiB", size / 1024) } else { format!("{size} B") }
}
