//! Figures of the checkpoints, each second.

use std::time::{Duration, Instant};

use super::request::{Checkpoints, Times};

/// Interval of reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Checkpoints since the last report.
pub(super) struct Report {
    since: Instant,
    all: Checkpoints,
    pauses: Vec<u64>,
    latencies: Vec<u64>,
}

impl Default for Report {
    fn default() -> Self {
        Self { since: Instant::now(), all: Checkpoints::default(), pauses: Vec::new(), latencies: Vec::new() }
    }
}

impl Report {
    pub(super) fn took(&mut self, epoch: u64, pause_us: u64, bytes: u64, pages: u64) {
        self.all.epoch = epoch;
        self.all.count += 1;
        self.all.bytes += bytes;
        self.all.pages += pages;
        self.pauses.push(pause_us);
    }

    pub(super) fn acknowledged(&mut self, latency_us: u64) {
        self.latencies.push(latency_us);
    }

    /// The report, if it is time.
    pub(super) fn due(&mut self) -> Option<Checkpoints> {
        if self.since.elapsed() < REPORT_INTERVAL { None } else { self.rest() }
    }

    /// The report; `None` for no checkpoint.
    pub(super) fn rest(&mut self) -> Option<Checkpoints> {
        if self.pauses.is_empty() {
            return None;
        }
        let Self { mut all, pauses, latencies, .. } = std::mem::take(self);
        (all.pause, all.latency) = (Times::of(pauses), Times::of(latencies));
        Some(all)
    }
}

impl Times {
    fn of(mut us: Vec<u64>) -> Self {
        us.sort_unstable();
        Self {
            median_us: us.get(us.len() / 2).copied().unwrap_or_default(),
            longest_us: us.last().copied().unwrap_or_default(),
            total_us: us.iter().sum(),
        }
    }
}
