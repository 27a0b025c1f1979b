//! QMP server of one copy: `query-migrate`, events, statistics, and cancellation.
//!
//! ```text
//! plan ── Observer ─► StatusServer ◄─ Commands ── qmp::Server ── clients
//!                        └─ events ─────────────┘
//! ```
//!
//! Every reply is built from the last progress of the plan, under a lock that is held only to copy that, so
//! that a reply does not wait for the transfer.
//!
//! Out of scope: starting a copy, which is the command line's. Capabilities are fixed by the command line too,
//! because lanes cannot change during a copy. Rate and downtime can ([`Tuning`]).

mod state;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use towline_channel::Cancel;
use towline_migration::{LaneSends, Tuning, ZeroCopySend};
use towline_qmp::{CommandError, Commands, Emitter, Server};

use crate::lock::lock;
use crate::plan::{CopyPhase, CopyReport, CopyRequest, Failure, Observer, Progress, RequestedPages};
use crate::statistics::{self, StatsObject, StatsSource};
use state::{State, lane_metrics, milliseconds};

const NAMES: [&str; 11] = [
    "query-status",
    "query-stats",
    "query-stats-schemas",
    "query-migrate",
    "query-migrate-capabilities",
    "migrate-set-capabilities",
    "query-migrate-parameters",
    "migrate-set-parameters",
    "migrate_cancel",
    "query-name",
    "quit",
];

/// See the module's text.
#[derive(Debug)]
pub struct StatusServer {
    cancel: Cancel,
    name: String,
    capabilities: Vec<Capability>,
    parameters: Parameters,
    /// Status from the moment on when the guest is stopped at its source.
    switched: &'static str,
    tuning: Tuning,
    state: Mutex<State>,
    emitter: OnceLock<Emitter>,
}

/// One of QEMU's migration capabilities.
#[derive(Debug)]
struct Capability {
    name: &'static str,
    state: bool,
    /// Advice for another value.
    option: &'static str,
}

/// Initial values of parameters.
#[derive(Debug)]
struct Parameters {
    multifd_channels: Option<usize>,
    max_bandwidth: Option<u64>,
    downtime_limit: Duration,
}

impl StatusServer {
    /// A server for a copy named `name` with these options, which `cancel` ends.
    pub fn new(name: impl Into<String>, options: &CopyRequest, cancel: &Cancel) -> Self {
        Self {
            cancel: cancel.clone(),
            name: name.into(),
            capabilities: capabilities(options),
            parameters: Parameters {
                multifd_channels: options.transfer_options().multifd_channels,
                max_bandwidth: options.transfer_options().max_bandwidth,
                downtime_limit: options.downtime_limit,
            },
            switched: if options.is_postcopy() { "postcopy-active" } else { "device" },
            tuning: options.tuning.clone(),
            state: Mutex::new(State::new()),
            emitter: OnceLock::new(),
        }
    }

    /// Listens at `path` until the server is dropped.
    ///
    /// # Errors
    /// Those of [`Server::start`].
    pub fn serve(self: &Arc<Self>, path: &Path) -> towline_channel::Result<Server> {
        let server = Server::start(path, Arc::clone(self) as Arc<dyn Commands>)?;
        // Only the first server gets events.
        let _ = self.emitter.set(server.emitter());
        Ok(server)
    }

    /// Sets the result of the copy.
    pub fn ended(&self, outcome: Result<&CopyReport, &Failure>) {
        let status = match outcome {
            Ok(_) => "completed",
            Err(_) if self.cancel.is_cancelled() => "cancelled",
            Err(_) => "failed",
        };
        {
            let mut state = self.state();
            state.ended = Some(state.started.elapsed());
            match outcome {
                Ok(report) => {
                    state.progress.moved = report.moved;
                    state.lanes.clone_from(&report.lane_sends);
                    state.downtime_ms = report.downtime_ms;
                }
                Err(failure) => state.error = Some(failure.error.to_string()),
            }
        }
        self.becomes(status);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn becomes(&self, status: &'static str) {
        let before = std::mem::replace(&mut self.state().status, status);
        if before != status {
            self.emit("MIGRATION", &json!({ "status": status }));
        }
    }

    fn runs(&self, running: bool) {
        let before = std::mem::replace(&mut self.state().running, running);
        if before != running {
            self.emit(if running { "RESUME" } else { "STOP" }, &json!({}));
        }
    }

    fn emit(&self, event: &str, data: &Value) {
        if let Some(emitter) = self.emitter.get() {
            emitter.emit(event, data.as_object().cloned().unwrap_or_default());
        }
    }

    fn set_capabilities(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        let list = arguments.get("capabilities").and_then(Value::as_array);
        for wanted in list.ok_or_else(|| CommandError::generic("Parameter 'capabilities' is missing"))? {
            let name = wanted["capability"].as_str().unwrap_or_default();
            let Some(known) = self.capabilities.iter().find(|known| known.name == name) else {
                return Err(CommandError::generic(format!(
                    "Parameter 'capability' does not accept value '{name}'"
                )));
            };
            let Capability { state, option, .. } = known;
            if wanted["state"].as_bool() != Some(*state) {
                let text = format!("{name} is {state} for this copy and cannot change under way: {option}");
                return Err(CommandError::Generic(text));
            }
        }
        Ok(json!({}))
    }

    /// Parameters that apply to this copy; QEMU's others are in `query-migrate-parameters` of its own monitor.
    fn query_parameters(&self) -> Value {
        let max_bandwidth = self.tuning.max_bandwidth().unwrap_or(self.parameters.max_bandwidth);
        let downtime = self.tuning.downtime_limit().unwrap_or(self.parameters.downtime_limit);
        let mut parameters = json!({
            "downtime-limit": milliseconds(downtime),
            // As in QEMU, 0 is unlimited.
            "max-bandwidth": max_bandwidth.unwrap_or(0),
        });
        if let Some(lanes) = self.parameters.multifd_channels.filter(|&lanes| lanes > 0) {
            parameters["multifd-channels"] = lanes.into();
        }
        parameters
    }

    /// Sets all or none of them.
    fn set_parameters(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        let known = self.query_parameters();
        for (name, value) in arguments {
            match name.as_str() {
                "max-bandwidth" | "downtime-limit" if value.is_u64() => {}
                "max-bandwidth" | "downtime-limit" => {
                    return Err(CommandError::generic(format!(
                        "Parameter '{name}' expects a number, found {value}"
                    )));
                }
                name => match known.get(name) {
                    Some(same) if same == value => {}
                    Some(found) => {
                        let text = format!(
                            "{name} is {found} for this copy and cannot change under way: start it again with --{name} {value}"
                        );
                        return Err(CommandError::Generic(text));
                    }
                    None => return Err(CommandError::generic(format!("Parameter '{name}' is unexpected"))),
                },
            }
        }
        if let Some(rate) = arguments.get("max-bandwidth").and_then(Value::as_u64) {
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
        match phase {
            CopyPhase::Prepare | CopyPhase::Connect => {}
            CopyPhase::Transfer => {
                self.state().transfer.get_or_insert_with(Instant::now);
                self.becomes("active");
            }
            CopyPhase::Switchover => {
                self.runs(false);
                self.becomes(self.switched);
            }
            CopyPhase::Running => self.runs(true),
            _ => self.becomes(self.switched),
        }
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        let mut state = self.state();
        state.lanes.clear();
        state.lanes.extend_from_slice(lanes);
    }

    fn progress(&self, progress: &Progress) {
        let pass = |progress: &Progress| progress.pass.unwrap_or(progress.moved.dirty_sync_count);
        let before = std::mem::replace(&mut self.state().progress, *progress);
        if pass(progress) > pass(&before) {
            self.emit("MIGRATION_PASS", &json!({ "pass": pass(progress) }));
        }
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
            "query-status" => {
                let state = self.state();
                let status = match (state.running, state.status) {
                    (true, _) => "running",
                    (false, "completed") => "postmigrate",
                    (false, _) => "finish-migrate",
                };
                Ok(json!({ "running": state.running, "status": status }))
            }
            "query-migrate" => Ok(self.state().query_migrate()),
            "query-stats" => statistics::query(&self.statistics(), arguments),
            "query-stats-schemas" => statistics::schemas(&self.statistics(), arguments),
            "query-migrate-capabilities" => {
                let one = |known: &Capability| json!({ "capability": known.name, "state": known.state });
                Ok(self.capabilities.iter().map(one).collect())
            }
            "migrate-set-capabilities" => self.set_capabilities(arguments),
            "query-migrate-parameters" => Ok(self.query_parameters()),
            "migrate-set-parameters" => self.set_parameters(arguments),
            "query-name" => Ok(json!({ "name": self.name })),
            "migrate_cancel" | "quit" => {
                self.cancel.cancel();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}

fn capabilities(options: &CopyRequest) -> Vec<Capability> {
    let postcopy = options.postcopy();
    let known = [
        ("auto-converge", options.transfer_options().throttle, "start it again with or without --throttle"),
        ("background-snapshot", options.is_snapshot(), "start it again with or without --live"),
        ("events", true, "its events always come"),
        (
            "multifd",
            options.transfer_options().multifd_channels != Some(0),
            "start it again with another --multifd-channels",
        ),
        (
            "postcopy-preempt",
            postcopy.is_some_and(|postcopy| postcopy.requested_pages == RequestedPages::PreemptChannel),
            "start it again with or without --postcopy-preempt",
        ),
        ("postcopy-ram", postcopy.is_some(), "start it again with or without --postcopy"),
        ("return-path", options.return_path, "start it again with another --return-path"),
        (
            "zero-copy-send",
            options.zero_copy_send == ZeroCopySend::On,
            "start it again with another --zero-copy-send",
        ),
    ];
    known.map(|(name, state, option)| Capability { name, state, option }).into()
}
