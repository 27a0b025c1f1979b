//! Parameters, and the rows to measure.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_channel::Cancel;

use crate::rounds::{Contender, Outcome};
use crate::vhost::Window;

/// CID of the guest.
pub(super) const CID: u64 = 3;
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
    /// This program, which is the application of the guests of `vsock-linux`.
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
pub(super) enum Direction {
    ToGuest,
    FromGuest,
}

/// Work of the applications.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Stream { size: usize, connections: usize, direction: Direction },
    Request { size: usize, connections: usize, reconnects: bool },
}

/// The guest's receive buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffers {
    /// 4 KiB, as in Linux.
    Linux,
    /// 64 KiB.
    Large,
}

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Towline,
    Peer,
    Socket,
}

/// A row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) work: Work,
    /// Also set for the socket's rows, which are shown beside each.
    pub(super) buffers: Buffers,
    pub(super) carrier: Carrier,
}

/// Result of a run of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figure {
    pub(super) window: Window,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Results of a row.
pub(super) type Figures = Outcome<Figure>;

impl Entry {
    pub(super) fn contender(&self) -> Contender {
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
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Towline => "towline",
            Self::Peer => PEER,
            Self::Socket => "Unix socket",
        }
    }
}

/// Formats a size.
pub(super) fn bytes(size: usize) -> String {
    if size.is_multiple_of(1024) { format!("{} KiB", size / 1024) } else { format!("{size} B") }
}
