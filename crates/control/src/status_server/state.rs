//! Progress of one copy, as replies and metrics show it.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use towline_migration::LaneSends;

use crate::plan::Progress;
use crate::statistics::Metric;

/// Size of the pages that are counted.
const PAGE_BYTES: u64 = 4096;

/// Progress of a copy.
#[derive(Debug)]
pub(super) struct State {
    pub(super) started: Instant,
    pub(super) status: &'static str,
    /// True if the guest runs at its source, to this side's knowledge.
    pub(super) running: bool,
    pub(super) progress: Progress,
    pub(super) lanes: Vec<LaneSends>,
    /// Start of the memory transfer.
    pub(super) transfer: Option<Instant>,
    pub(super) ended: Option<Duration>,
    pub(super) downtime_ms: Option<u64>,
    pub(super) error: Option<String>,
}

impl State {
    /// The state of a copy that starts now.
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            status: "setup",
            running: true,
            progress: Progress::default(),
            lanes: Vec::new(),
            transfer: None,
            ended: None,
            downtime_ms: None,
            error: None,
        }
    }

    /// Reply to `query-migrate`.
    pub(super) fn query_migrate(&self) -> Value {
        let mut reply = json!({ "status": self.status });
        let total = self.ended.unwrap_or_else(|| self.started.elapsed());
        reply["total-time"] = milliseconds(total);
        if let Some(transfer) = self.transfer {
            reply["setup-time"] = milliseconds(transfer - self.started);
            reply["ram"] = ram(&self.progress, total.saturating_sub(transfer - self.started));
        }
        let optional = [
            ("downtime", self.downtime_ms.map(Value::from)),
            ("expected-downtime", self.progress.expected_downtime.map(milliseconds)),
            ("cpu-throttle-percentage", self.progress.throttle_percent.map(Value::from)),
            ("error-desc", self.error.clone().map(Value::from)),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                reply[key] = value;
            }
        }
        reply
    }

    /// Metrics of the whole copy.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        let (progress, moved) = (&self.progress, &self.progress.moved);
        let done = (moved.normal + moved.duplicate) * PAGE_BYTES;
        let remaining = progress.remaining.unwrap_or_else(|| moved.total.saturating_sub(done));
        let took = self.ended.unwrap_or_else(|| self.started.elapsed());
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        vec![
            Metric::gauge(
                "running",
                "1 while the guest runs, as far as this side can tell",
                self.running.into(),
            ),
            Metric::gauge("ended", "1 when the copy is over", self.ended.is_some().into()),
            Metric::gauge(
                "failed",
                "1 when it was not done",
                matches!(self.status, "failed" | "cancelled").into(),
            ),
            Metric::gauge("time", "since it was begun, until it ended", took).in_milliseconds(),
            Metric::gauge("ram-bytes", "the guest's RAM", moved.total).in_bytes(),
            Metric::gauge("remaining-bytes", "what is still to be sent", remaining).in_bytes(),
            Metric::gauge(
                "dirty-rate-bytes",
                "what the guest writes in a second",
                progress.dirty_rate.unwrap_or(0),
            )
            .in_bytes(),
            Metric::byte_counter("transferred-bytes", "on all channels", moved.transferred),
            Metric::byte_counter("multifd-bytes", "on lanes", moved.multifd_bytes),
            Metric::counter("normal", "pages that went with content", moved.normal),
            Metric::counter("duplicate", "pages that went as zero", moved.duplicate),
            Metric::counter(
                "passes",
                "passes over the memory",
                progress.pass.unwrap_or(moved.dirty_sync_count),
            ),
            Metric::counter(
                "vectored-calls",
                "system calls that sent or received several buffers",
                moved.vectored_calls,
            ),
            Metric::counter(
                "plain-calls",
                "system calls that sent or received one buffer",
                moved.plain_calls,
            ),
            Metric::counter(
                "spliced-calls",
                "system calls that moved pages within the kernel",
                moved.spliced_calls,
            ),
        ]
    }
}

/// Metrics of a lane to the destination.
pub(super) fn lane_metrics(lane: &LaneSends) -> Vec<Metric> {
    vec![
        Metric::counter("plain-packets", "packets that the kernel copies", lane.plain.packets),
        Metric::byte_counter("plain-bytes", "pages in these", lane.plain.bytes),
        Metric::counter("zero-copy-packets", "packets sent without a copy", lane.zero_copy.packets),
        Metric::byte_counter("zero-copy-bytes", "pages in these", lane.zero_copy.bytes),
        Metric::counter(
            "spliced-packets",
            "packets moved between sockets by the kernel",
            lane.spliced.packets,
        ),
        Metric::byte_counter("spliced-bytes", "pages in these", lane.spliced.bytes),
        Metric::counter("zero-copied", "calls of these that the kernel did not copy", lane.zero_copied),
        Metric::counter("copied", "calls of these that the kernel copied all the same", lane.copied),
        Metric::counter("switches", "changes of the method", lane.switches),
    ]
}

/// Counters, and the rates that QEMU derives from them.
fn ram(progress: &Progress, took: Duration) -> Value {
    let moved = &progress.moved;
    let entries = moved.entries().into_iter().map(|(name, value)| (name, value.into()));
    let mut ram: Map<String, Value> = entries.collect();
    ram.insert("page-size".into(), PAGE_BYTES.into());
    let done = (moved.normal + moved.duplicate) * PAGE_BYTES;
    let remaining = progress.remaining.unwrap_or_else(|| moved.total.saturating_sub(done));
    ram.insert("remaining".into(), remaining.into());
    let seconds = took.as_secs_f64();
    let rate = progress.rate.map_or(moved.transferred as f64 / seconds.max(1e-3), |rate| rate as f64);
    ram.insert("mbps".into(), (rate * 8.0 / 1e6).into());
    ram.insert("dirty-pages-rate".into(), (progress.dirty_rate.unwrap_or(0) / PAGE_BYTES).into());
    if let Some(pass) = progress.pass {
        ram.insert("dirty-sync-count".into(), pass.into());
    }
    Value::Object(ram)
}

fn milliseconds(time: Duration) -> Value {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).into()
}
