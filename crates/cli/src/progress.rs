//! How a copy goes: a bar on a terminal, or a JSON object per event.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};
use towline_control::plan::{Observer, Phase, Progress};
use towline_migration::Snapshot;
use towline_migration::postcopy::FaultCounts;

use crate::args::Output;
use crate::endpoint::Endpoint;
use crate::log::RequestId;
use crate::units::{count, size};

/// How often progress is told in JSON.
const JSON_INTERVAL: Duration = Duration::from_millis(500);

/// Tells the user.
#[derive(Debug)]
pub(crate) struct Reporter {
    json: bool,
    quiet: bool,
    bar: ProgressBar,
    told: Mutex<Option<Instant>>,
    /// The one of several destinations that this tells of.
    destination: Option<String>,
}

impl Reporter {
    pub(crate) fn new(output: &Output) -> Self {
        let draws = !output.json && !output.quiet && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self::with_bar(output, ProgressBar::with_draw_target(None, target), None)
    }

    /// One for all of several destinations, and one for each, with bars below each other.
    pub(crate) fn several(output: &Output, destinations: &[Endpoint]) -> (Self, Vec<Self>) {
        let draws = !output.json && !output.quiet && std::io::stderr().is_terminal();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let one = |destination: &Endpoint| {
            let bar = bars.add(ProgressBar::no_length());
            Self::with_bar(output, bar, Some(destination.to_string()))
        };
        let each = destinations.iter().map(one).collect();
        (Self::with_bar(output, ProgressBar::hidden(), None), each)
    }

    fn with_bar(output: &Output, bar: ProgressBar, destination: Option<String>) -> Self {
        let style = ProgressStyle::with_template(
            "{prefix:10} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} ETA {eta} {msg}",
        );
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        Self { json: output.json, quiet: output.quiet, bar, told: Mutex::new(None), destination }
    }

    /// The first event of a copy: by what its lines in the log are known.
    pub(crate) fn begun(&self, request: Option<RequestId>) {
        if let Some(request) = request {
            self.event("begun", json!({ "request": request.to_string() }));
        }
    }

    /// Writes an event's line, in JSON.
    pub(crate) fn event(&self, name: &str, fields: Value) {
        if !self.json {
            return;
        }
        let mut event = Map::new();
        event.insert("event".into(), name.into());
        if let Some(destination) = &self.destination {
            event.insert("destination".into(), destination.as_str().into());
        }
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        print_line(&Value::Object(event).to_string());
    }

    /// Writes a line for people.
    pub(crate) fn line(&self, text: &str) {
        if !self.json && !self.quiet {
            print_line(text);
        }
    }

    /// Says something while no bar is drawn.
    pub(crate) fn suspend<T>(&self, say: impl FnOnce() -> T) -> T {
        self.bar.suspend(say)
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Reporter {
    fn phase(&self, phase: Phase) {
        let name = match phase {
            Phase::Prepare => "prepare",
            Phase::Connect => "connect",
            Phase::Transfer => "transfer",
            Phase::Switchover => "switchover",
            Phase::Loaded => "loaded",
            Phase::Release => "release",
            Phase::CutOver => "cut-over",
            Phase::Running => "running",
        };
        match &self.destination {
            Some(destination) => self.bar.set_prefix(format!("{destination} {name}")),
            None => self.bar.set_prefix(name),
        }
        self.event("phase", json!({ "phase": name }));
    }

    fn progress(&self, progress: &Progress) {
        let moved = &progress.moved;
        self.bar.set_length(moved.total);
        self.bar.set_position(((moved.normal + moved.duplicate) * 4096).min(moved.total));
        self.bar.set_message(live(progress));
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if self.json && told.is_none_or(|at| at.elapsed() >= JSON_INTERVAL) {
            *told = Some(Instant::now());
            let rest = json!({
                "ram": ram(moved),
                "pass": pass(progress),
                "bytes-rate": progress.rate,
                "dirty-bytes-rate": progress.dirty_rate,
                "remaining": progress.remaining,
                "cpu-throttle-percentage": progress.throttle_percent,
                "expected-downtime": progress.expected_downtime.map(|time| time.as_millis() as u64),
                "faults": progress.faults.as_ref().map(faults),
                "expected-time": progress.expected_time().map(|time| time.as_millis() as u64),
            });
            self.event("progress", rest);
        }
    }

    fn notice(&self, text: &str) {
        self.event("notice", json!({ "text": text }));
        if !self.json && !self.quiet {
            let of =
                self.destination.as_ref().map(|destination| format!("{destination}: ")).unwrap_or_default();
            self.bar.suspend(|| eprintln!("towline: {of}{text}"));
        }
    }
}

fn pass(progress: &Progress) -> u64 {
    progress.pass.unwrap_or(progress.moved.dirty_sync_count).max(1)
}

/// What a guest waited for, in microseconds.
pub(crate) fn faults(faults: &FaultCounts) -> Value {
    json!({
        "requests": faults.requests,
        "served": faults.served,
        "on-their-way": faults.late,
        "latency-p50-us": faults.latency_p50.map(|time| time.as_micros() as u64),
        "latency-p99-us": faults.latency_p99.map(|time| time.as_micros() as u64),
    })
}

/// The same for people.
pub(crate) fn faults_text(faults: &FaultCounts) -> String {
    let mut text = format!("{} faults", count(faults.requests));
    if let (Some(p50), Some(p99)) = (faults.latency_p50, faults.latency_p99) {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        text += &format!(", p50 {:.2} ms, p99 {:.2} ms", milliseconds(p50), milliseconds(p99));
    }
    text
}

/// What there is to say of a guest that runs meanwhile.
fn live(progress: &Progress) -> String {
    if let Some(faults) = &progress.faults {
        return faults_text(faults);
    }
    let mut text = format!("pass {}", pass(progress));
    if let Some(rate) = progress.dirty_rate.filter(|&rate| rate > 0) {
        text += &format!(", dirtied {}/s", size(rate));
    }
    if let Some(percent) = progress.throttle_percent.filter(|&percent| percent > 0) {
        text += &format!(", slowed by {percent} %");
    }
    if let Some(downtime) = progress.expected_downtime.filter(|_| progress.pass > Some(1)) {
        text += &format!(", downtime {} ms", downtime.as_millis());
    }
    match progress.expected_time().filter(|_| progress.pass > Some(1)) {
        Some(time) => text + &format!(", {:.0} s left", time.as_secs_f64()),
        None => text,
    }
}

/// A reader that went away (`towline … | head`) is no reason to end a copy.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The counters as `query-migrate` names them.
pub(crate) fn ram(moved: &Snapshot) -> Value {
    Value::Object(moved.entries().into_iter().map(|(name, value)| (name, value.into())).collect())
}
