//! Parameters of the measurement, and its results.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_channel::Cancel;

use crate::rounds::Outcome;
use crate::vhost::Window;

/// DPDK's test program.
pub const TESTPMD: &str = "dpdk-testpmd";
/// Cloud Hypervisor's backend.
pub const VHOST_USER_NET: &str = "vhost_user_net";

/// User-mode networking without a tap: it ends the guest's connections, and opens sockets for them.
pub const PASST: &str = "passt";

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// True for `net-queues`; else frames and TCP on one queue.
    pub multiqueue: bool,
    /// Message sizes of streams, in bytes.
    pub stream_sizes: Vec<usize>,
    /// Message sizes of streams with several sessions.
    pub session_sizes: Vec<usize>,
    /// Sizes of requests in bytes.
    pub request_sizes: Vec<usize>,
    /// Numbers of concurrent streams.
    pub stream_sessions: Vec<usize>,
    /// Numbers of concurrent requests.
    pub request_sessions: Vec<usize>,
    /// Numbers of queue pairs.
    pub queues: Vec<usize>,
    /// Length of each window.
    pub window: Duration,
    /// Number of runs of each row.
    pub runs: usize,
    /// Binary under test.
    pub towline: PathBuf,
    /// Value of towline's `--sandbox`; `None`: its default.
    pub sandbox: Option<&'static str>,
    /// dpdk-testpmd, if available.
    pub testpmd: Option<PathBuf>,
    /// vhost_user_net, if available.
    pub vhost_user_net: Option<PathBuf>,
    /// passt, if available.
    pub passt: Option<PathBuf>,
    /// Parts of the names of the rows to measure; empty: all.
    pub rows: Vec<String>,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the parameters of the published tables of one queue.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        Self {
            multiqueue: false,
            stream_sizes: [32, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 512 << 10].into(),
            session_sizes: Vec::new(),
            request_sizes: vec![64],
            stream_sessions: vec![1],
            request_sessions: vec![1],
            queues: vec![1],
            window: Duration::from_secs(1),
            runs,
            towline: towline.into(),
            sandbox: None,
            testpmd: None,
            vhost_user_net: None,
            passt: None,
            rows: Vec::new(),
            cancel,
        }
    }

    /// Returns the parameters of the published tables of several queues.
    pub fn multiqueue(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        Self {
            multiqueue: true,
            stream_sizes: vec![1, 64, 256, 512, 1 << 10, 4 << 10, 16 << 10],
            request_sizes: vec![1, 64, 256],
            stream_sessions: vec![1, 2, 4, 8],
            request_sessions: vec![1, 2, 4, 8, 20, 50, 100],
            queues: vec![1, 2, 4],
            ..Self::of(towline, runs, cancel)
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Figure {
    pub(super) window: Window,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// CPU time per frame of the thread that moves frames between rings and tap, in nanoseconds; 0 for TCP.
    pub(super) frame_ns: f64,
}

pub(super) type Figures = Outcome<Figure>;
