//! Progress of a copy: a bar on a terminal, or a JSON object per event.

use std::io::IsTerminal;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use towline_channel::Address;
use towline_control::plan::{Observer, Phase, Progress};
use towline_migration::Snapshot;
use towline_migration::postcopy::FaultCounts;

use crate::args::Output;
use crate::console::{self, Keep};
use crate::endpoint::Endpoint;
use crate::events;
use crate::lock::lock;
use crate::log::RequestId;
use crate::units::{count, size};

/// Interval of progress events.
const JSON_INTERVAL: Duration = Duration::from_millis(500);

/// Reports to the user by the queues of [`console`]. Its functions never wait for a reader, except [`Reporter::line`] and
/// [`Reporter::event`] of one that is [`Reporter::blocking`].
#[derive(Debug)]
pub(crate) struct Reporter {
    json: bool,
    quiet: bool,
    is_blocking: bool,
    bar: Option<Bar>,
    /// Time of the last progress event.
    reported: Mutex<Option<Instant>>,
    /// Key of this reporter's progress in the queue.
    key: usize,
    /// Destination of this reporter, if there are several.
    destination: Option<String>,
}

/// A progress bar, drawn by the thread that writes standard error. Only that thread may use it: while a terminal's output is
/// stopped, drawing blocks with the bar locked.
#[derive(Debug)]
struct Bar {
    // Not dropped, as dropping the last handle draws.
    bar: ManuallyDrop<ProgressBar>,
    shown: Mutex<Shown>,
}

#[derive(Debug, Clone, Default)]
struct Shown {
    prefix: String,
    position: u64,
    length: u64,
    message: String,
}

impl Reporter {
    pub(crate) fn new(output: &Output) -> Self {
        let bars = bars(output);
        Self::with_bar(output, 0, bars, None)
    }

    /// Returns a reporter for all of several destinations, and one for each, with bars below each other.
    pub(crate) fn several(output: &Output, destinations: &[Endpoint]) -> (Self, Vec<Self>) {
        let bars = bars(output);
        let one = |(index, destination): (usize, &Endpoint)| {
            Self::with_bar(output, index + 1, bars, Some(destination.to_string()))
        };
        let each = destinations.iter().enumerate().map(one).collect();
        (Self::with_bar(output, 0, None, None), each)
    }

    fn with_bar(
        output: &Output,
        key: usize,
        bars: Option<&MultiProgress>,
        destination: Option<String>,
    ) -> Self {
        let (json, quiet) = (output.json, output.quiet);
        Self {
            json,
            quiet,
            is_blocking: false,
            bar: bars.map(Bar::new),
            reported: Mutex::new(None),
            key,
            destination,
        }
    }

    /// Has lines and events wait for space in the queue: for commands that may print much, and do not hold a guest.
    pub(crate) fn blocking(self) -> Self {
        Self { is_blocking: true, ..self }
    }

    /// Writes the first event of a copy, with the id that its log lines begin with.
    pub(crate) fn begun(&self, request: Option<RequestId>) {
        if let Some(request) = request {
            self.event("begun", json!({ "request": request.to_string() }));
        }
    }

    /// Writes an event, with `--json`.
    pub(crate) fn event(&self, name: &str, fields: Value) {
        if !self.is_blocking {
            return self.queue(Keep::Always, name, fields);
        }
        if let Some(line) = self.json_line(name, fields) {
            console::print_blocking(&line);
        }
    }

    fn queue(&self, keep: Keep, name: &str, fields: Value) {
        if let Some(line) = self.json_line(name, fields) {
            console::print(keep, &line);
        }
    }

    fn json_line(&self, name: &str, mut fields: Value) -> Option<String> {
        if !self.json {
            return None;
        }
        if let Some(destination) = &self.destination {
            fields["destination"] = destination.as_str().into();
        }
        Some(events::line(name, fields))
    }

    /// Writes a line for people.
    pub(crate) fn line(&self, text: &str) {
        if self.json || self.quiet {
            return;
        }
        if self.is_blocking {
            console::print_blocking(text);
        } else {
            console::print(Keep::Always, text);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            let bar = ProgressBar::clone(&bar.bar);
            console::draw(Keep::Always, move || bar.finish_and_clear());
        }
    }
}

/// Returns the bars on standard error, if that is a terminal.
fn bars(output: &Output) -> Option<&'static MultiProgress> {
    let draws = !output.json && !output.quiet && std::io::stderr().is_terminal();
    draws.then(console::bars)
}

impl Bar {
    fn new(bars: &MultiProgress) -> Self {
        let style = ProgressStyle::with_template(
            "{prefix:10} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} ETA {eta} {msg}",
        );
        let bar = bars.add(ProgressBar::no_length());
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        Self { bar: ManuallyDrop::new(bar), shown: Mutex::default() }
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        lock(&self.shown)
    }

    fn draw(&self, key: usize) {
        let (bar, shown) = (ProgressBar::clone(&self.bar), self.shown().clone());
        console::draw(Keep::Latest(key), move || {
            bar.set_prefix(shown.prefix);
            bar.set_length(shown.length);
            bar.set_position(shown.position);
            bar.set_message(shown.message);
        });
    }
}

impl Observer for Reporter {
    fn phase(&self, phase: Phase) {
        let name = events::phase(phase);
        if let Some(bar) = &self.bar {
            bar.shown().prefix = match &self.destination {
                Some(destination) => format!("{destination} {name}"),
                None => name.to_owned(),
            };
            bar.draw(self.key);
        }
        self.queue(Keep::Always, "phase", json!({ "phase": name }));
    }

    fn listening(&self, address: &Address) {
        self.queue(Keep::Always, "listening", json!({ "address": address.to_string() }));
    }

    fn progress(&self, progress: &Progress) {
        let moved = &progress.moved;
        if let Some(bar) = &self.bar {
            let mut shown = bar.shown();
            shown.length = moved.total;
            shown.position = ((moved.normal + moved.duplicate) * 4096).min(moved.total);
            shown.message = message(progress);
            drop(shown);
            bar.draw(self.key);
        }
        let mut reported = lock(&self.reported);
        if self.json && reported.is_none_or(|at| at.elapsed() >= JSON_INTERVAL) {
            *reported = Some(Instant::now());
            let fields = json!({
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
            self.queue(Keep::Latest(self.key), "progress", fields);
        }
    }

    fn notice(&self, text: &str) {
        self.queue(Keep::Limited, "notice", json!({ "text": text }));
        if !self.json && !self.quiet {
            let prefix =
                self.destination.as_ref().map(|destination| format!("{destination}: ")).unwrap_or_default();
            console::notice(&format!("{prefix}{text}"));
        }
    }
}

fn pass(progress: &Progress) -> u64 {
    progress.pass.unwrap_or(progress.moved.dirty_sync_count).max(1)
}

/// Formats postcopy faults for an event.
pub(crate) fn faults(faults: &FaultCounts) -> Value {
    json!({
        "requests": faults.requests,
        "served": faults.served,
        "on-their-way": faults.late,
        "latency-p50-us": faults.latency_p50.map(|time| time.as_micros() as u64),
        "latency-p99-us": faults.latency_p99.map(|time| time.as_micros() as u64),
    })
}

/// Formats postcopy faults for people.
pub(crate) fn faults_text(faults: &FaultCounts) -> String {
    let mut text = format!("{} faults", count(faults.requests));
    if let (Some(p50), Some(p99)) = (faults.latency_p50, faults.latency_p99) {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        text += &format!(", p50 {:.2} ms, p99 {:.2} ms", milliseconds(p50), milliseconds(p99));
    }
    text
}

/// Returns the bar's message.
fn message(progress: &Progress) -> String {
    if let Some(faults) = &progress.faults {
        return faults_text(faults);
    }
    let mut text = format!("pass {}", pass(progress));
    if let Some(rate) = progress.dirty_rate.filter(|&rate| rate > 0) {
        text += &format!(", dirtied {}/s", size(rate));
    }
    if let Some(percent) = progress.throttle_percent.filter(|&percent| percent > 0) {
        text += &format!(", throttled by {percent} %");
    }
    if let Some(downtime) = progress.expected_downtime.filter(|_| progress.pass > Some(1)) {
        text += &format!(", downtime {} ms", downtime.as_millis());
    }
    match progress.expected_time().filter(|_| progress.pass > Some(1)) {
        Some(time) => text + &format!(", {:.0} s left", time.as_secs_f64()),
        None => text,
    }
}

/// Returns the counters with the names of `query-migrate`.
pub(crate) fn ram(moved: &Snapshot) -> Value {
    Value::Object(moved.entries().into_iter().map(|(name, value)| (name, value.into())).collect())
}
