//! QMP server of one copy: its progress, its rate and downtime, and its cancellation; and its metrics.
//!
//! ```text
//! plan ── Observer ─► StatusServer ◄─ Commands ── qmp::Server ── clients
//! ```
//!
//! Every reply is built from the last progress of the plan, under a lock that is held only to copy that, so a
//! reply does not wait for the transfer.
//!
//! Out of scope: starting a copy, and what cannot change during it, which are the command line's. Rate and
//! downtime can change ([`Tuning`]).

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use towline_channel::Cancel;
use towline_migration::{LaneSends, Tuning};
use towline_qmp::{CommandError, Commands, Server};

use crate::journal::milliseconds;
use crate::lock::lock;
use crate::plan::{CopyPhase, CopyReport, CopyRequest, Observer, Progress};
use crate::statistics::{Metric, StatsObject, StatsSource};

const NAMES: [&str; 3] = ["query-migrate", "migrate-set-parameters", "migrate_cancel"];

/// See the module's text.
#[derive(Debug)]
pub struct StatusServer {
    cancel: Cancel,
    /// Status from the moment on when the guest is stopped at its source.
    switched: &'static str,
    tuning: Tuning,
    state: Mutex<State>,
}

impl StatusServer {
    /// A server for a copy with these options, which `cancel` ends.
    pub fn new(options: &CopyRequest, cancel: &Cancel) -> Self {
        Self {
            cancel: cancel.clone(),
            switched: if options.is_postcopy() { "postcopy-active" } else { "device" },
            tuning: options.tuning.clone(),
            state: Mutex::new(State {
                started: Instant::now(),
                status: "setup",
                running: true,
                progress: Progress::default(),
                lanes: Vec::new(),
                transfer: None,
                ended: None,
                downtime_ms: None,
                error: None,
            }),
        }
    }

    /// Listens at `path` until the server is dropped.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn serve(self: &Arc<Self>, path: &Path) -> towline_channel::Result<Server> {
        Server::start(path, Arc::clone(self) as Arc<dyn Commands>)
    }

    /// Sets the result of the copy: its report, or the text of its failure.
    pub fn ended(&self, outcome: Result<&CopyReport, String>) {
        let status = match &outcome {
            Ok(_) => "completed",
            Err(_) if self.cancel.is_cancelled() => "cancelled",
            Err(_) => "failed",
        };
        let mut state = lock(&self.state);
        state.status = status;
        state.ended = Some(state.started.elapsed());
        match outcome {
            Ok(report) => {
                state.progress.moved = report.moved;
                state.lanes.clone_from(&report.lane_sends);
                state.downtime_ms = report.downtime_ms;
            }
            Err(error) => state.error = Some(error),
        }
    }

    /// Sets all or none of them.
    fn set_parameters(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        for (name, value) in arguments {
            if !matches!(name.as_str(), "max-bandwidth" | "downtime-limit") {
                return Err(CommandError::generic(format!(
                    "Parameter '{name}' cannot change during a copy: max-bandwidth and downtime-limit can"
                )));
            }
            if !value.is_u64() {
                return Err(CommandError::generic(format!(
                    "Parameter '{name}' expects a number, found {value}"
                )));
            }
        }
        if let Some(rate) = arguments.get("max-bandwidth").and_then(Value::as_u64) {
            // As in QEMU, 0 is unlimited.
            self.tuning.set_max_bandwidth((rate > 0).then_some(rate));
        }
        if let Some(limit) = arguments.get("downtime-limit").and_then(Value::as_u64) {
            self.tuning.set_downtime_limit(Duration::from_millis(limit));
        }
        Ok(json!({}))
    }
}

impl Observer for StatusServer {
    fn phase(&self, phase: CopyPhase) {
        let mut state = lock(&self.state);
        match phase {
            CopyPhase::Prepare | CopyPhase::Connect => {}
            CopyPhase::Transfer => {
                state.transfer.get_or_insert_with(Instant::now);
                state.status = "active";
            }
            CopyPhase::Switchover => (state.running, state.status) = (false, self.switched),
            CopyPhase::Running => state.running = true,
            _ => state.status = self.switched,
        }
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        let mut state = lock(&self.state);
        state.lanes.clear();
        state.lanes.extend_from_slice(lanes);
    }

    fn progress(&self, progress: &Progress) {
        lock(&self.state).progress = *progress;
    }
}

impl StatsSource for StatusServer {
    fn statistics(&self) -> Vec<StatsObject> {
        let state = lock(&self.state);
        let lane = |(index, lane): (usize, &LaneSends)| StatsObject {
            kind: "migration-lane",
            labels: vec![("lane", index.to_string())],
            metrics: lane_metrics(lane),
        };
        let lanes = state.lanes.iter().enumerate().map(lane);
        let copy = StatsObject { kind: "migration", labels: Vec::new(), metrics: state.metrics() };
        std::iter::once(copy).chain(lanes).collect()
    }
}

impl Commands for StatusServer {
    fn names(&self) -> &[&'static str] {
        &NAMES
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        match name {
            "query-migrate" => Ok(lock(&self.state).query_migrate()),
            "migrate-set-parameters" => self.set_parameters(arguments),
            "migrate_cancel" => {
                self.cancel.cancel();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}

/// Size of the pages that are counted.
const PAGE_BYTES: u64 = 4096;

/// Progress of a copy.
#[derive(Debug)]
struct State {
    started: Instant,
    status: &'static str,
    /// True if the guest runs at its source, to this side's knowledge.
    running: bool,
    progress: Progress,
    lanes: Vec<LaneSends>,
    /// Start of the memory transfer.
    transfer: Option<Instant>,
    ended: Option<Duration>,
    downtime_ms: Option<u64>,
    error: Option<String>,
}

impl State {
    /// Reply to `query-migrate`.
    fn query_migrate(&self) -> Value {
        let mut reply = json!({ "status": self.status });
        let total = self.ended.unwrap_or_else(|| self.started.elapsed());
        reply["total-time"] = milliseconds(total).into();
        if let Some(transfer) = self.transfer {
            reply["setup-time"] = milliseconds(transfer - self.started).into();
            reply["ram"] = ram(&self.progress, total.saturating_sub(transfer - self.started));
        }
        let optional = [
            ("downtime", self.downtime_ms.map(Value::from)),
            ("expected-downtime", self.progress.expected_downtime.map(|time| milliseconds(time).into())),
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
    fn metrics(&self) -> Vec<Metric> {
        let (progress, moved) = (&self.progress, &self.progress.moved);
        let done = (moved.normal + moved.duplicate) * PAGE_BYTES;
        let remaining = progress.remaining.unwrap_or_else(|| moved.total.saturating_sub(done));
        let took = self.ended.unwrap_or_else(|| self.started.elapsed());
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
            Metric::gauge("time", "since it was begun, until it ended", milliseconds(took)).in_milliseconds(),
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
fn lane_metrics(lane: &LaneSends) -> Vec<Metric> {
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
