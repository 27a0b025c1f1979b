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

mod state;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use towline_channel::Cancel;
use towline_migration::{LaneSends, Tuning};
use towline_qmp::{CommandError, Commands, Server};

use crate::lock::lock;
use crate::plan::{CopyPhase, CopyReport, CopyRequest, Observer, Progress};
use crate::statistics::{StatsObject, StatsSource};
use state::{State, lane_metrics};

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
            state: Mutex::new(State::new()),
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
        let mut state = self.state();
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

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
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
        let mut state = self.state();
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
        let mut state = self.state();
        state.lanes.clear();
        state.lanes.extend_from_slice(lanes);
    }

    fn progress(&self, progress: &Progress) {
        self.state().progress = *progress;
    }
}

impl StatsSource for StatusServer {
    fn statistics(&self) -> Vec<StatsObject> {
        let state = self.state();
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
            "query-migrate" => Ok(self.state().query_migrate()),
            "migrate-set-parameters" => self.set_parameters(arguments),
            "migrate_cancel" => {
                self.cancel.cancel();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}
