//! Progress of a copy: a line on a terminal, or a JSON object per event.

mod estimate;
mod line;

use std::fmt::Display;
use std::io::IsTerminal;
use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(crate) use estimate::{Estimate, Estimator, Outlook};
use indicatif::{ProgressBar, ProgressStyle};
use term::{Term, truncate_str};
use towline_channel::Address;
use towline_control::plan::{CopyPhase, HostFacts, Observer, Progress};
use towline_migration::postcopy::FaultCounts;

use crate::args::Output;
use crate::console::{self, OverflowPolicy};
use crate::events::{CopyEvent, CopyProgress, Event, FailedPart, FinalEvent, InterimEvent, Reason};
use crate::exit::Exit;
use crate::lock::lock;
use crate::units::counted;

/// Interval of progress events.
const JSON_INTERVAL: Duration = Duration::from_millis(500);

/// Reports to the user by the queues of [`console`]. Its functions never wait for a reader, except [`Reporter::line`] and
/// [`Reporter::event`] of one that is [`Reporter::blocking`].
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) output: Output,
    is_blocking: bool,
    bar: Option<TerminalBar>,
    /// Beginning of the copy.
    started: Instant,
    estimator: Mutex<Estimator>,
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
struct TerminalBar {
    // Not dropped, as dropping the last handle draws.
    bar: ManuallyDrop<ProgressBar>,
    /// Text before the progress.
    phase: Mutex<String>,
}

impl Reporter {
    pub(crate) fn new(output: &Output) -> Self {
        Self::with_key(output, 0, None)
    }

    /// Returns a reporter for each of several destinations, with bars below each other.
    pub(crate) fn several<T: Display>(output: &Output, destinations: &[T]) -> Vec<Self> {
        let one = |(index, destination): (usize, &T)| {
            Self::with_key(output, index + 1, Some(destination.to_string()))
        };
        destinations.iter().enumerate().map(one).collect()
    }

    fn with_key(output: &Output, key: usize, destination: Option<String>) -> Self {
        let draws = !output.json && !output.quiet && std::io::stderr().is_terminal();
        Self {
            output: *output,
            is_blocking: false,
            bar: draws.then(TerminalBar::new),
            started: Instant::now(),
            estimator: Mutex::default(),
            reported: Mutex::new(None),
            key,
            destination,
        }
    }

    /// Has lines and events wait for space in the queue: for commands that may print much, and do not hold a guest.
    pub(crate) fn blocking(self) -> Self {
        Self { is_blocking: true, ..self }
    }

    /// Reports the failure of a command that has no more to report.
    pub(crate) fn failed(&self, text: &str, reason: Reason, exit: Exit) -> Exit {
        self.failed_with(FailedPart::Whole {}, text, reason, exit)
    }

    /// As [`Self::failed`], with more fields in the event.
    pub(crate) fn failed_with(&self, about: FailedPart<'_>, error: &str, reason: Reason, exit: Exit) -> Exit {
        self.result(FinalEvent::Failed { error, reason, about }, exit);
        console::error(error);
        exit
    }

    /// Writes an event, with `--json`.
    pub(crate) fn event(&self, event: InterimEvent<'_>) {
        self.write(&Event::Interim(event));
    }

    /// Writes a result, with `--json`. Returns the exit status.
    pub(crate) fn result(&self, event: FinalEvent<'_>, exit: Exit) -> Exit {
        self.write(&Event::last(event, exit));
        exit
    }

    fn write(&self, event: &Event<'_>) {
        if self.output.json && self.is_blocking {
            console::print_blocking(&event.line());
        } else if self.output.json {
            console::print(OverflowPolicy::Always, &event.line());
        }
    }

    fn queue(&self, keep: OverflowPolicy, event: CopyEvent<'_>) {
        if self.output.json {
            console::print(keep, &Event::OfCopy { event, destination: self.destination.as_deref() }.line());
        }
    }

    /// Writes a line for people, without control characters.
    pub(crate) fn line(&self, text: &str) {
        if self.output.json || self.output.quiet {
            return;
        }
        let text = console::printable(text);
        if self.is_blocking {
            console::print_blocking(&text);
        } else {
            console::print(OverflowPolicy::Always, &text);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            let bar = ProgressBar::clone(&bar.bar);
            console::draw(OverflowPolicy::Always, move || bar.finish_and_clear());
        }
    }
}

impl TerminalBar {
    fn new() -> Self {
        let style = ProgressStyle::with_template("{msg}");
        let bar = console::bars().add(ProgressBar::no_length());
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar: ManuallyDrop::new(bar), phase: Mutex::default() }
    }

    /// Draws the text of this phase within these columns.
    fn draw(&self, key: usize, text: impl FnOnce(&str, usize) -> String) {
        let (_, width) = Term::stderr().size();
        let width = usize::from(width).saturating_sub(1);
        let text = truncate_str(&text(&lock(&self.phase), width), width, "").into_owned();
        let bar = ProgressBar::clone(&self.bar);
        console::draw(OverflowPolicy::Latest(key), move || bar.set_message(text));
    }
}

impl Observer for Reporter {
    fn phase(&self, phase: CopyPhase) {
        let name = phase.name();
        tracing::info!(destination = self.destination.as_deref(), "phase {name}");
        if let Some(bar) = &self.bar {
            *lock(&bar.phase) = match &self.destination {
                Some(destination) => format!("{} {name}", console::printable(destination)),
                None => name.to_owned(),
            };
            bar.draw(self.key, |phase, _| phase.to_owned());
        }
        self.queue(OverflowPolicy::Always, CopyEvent::Phase { phase });
    }

    fn hosts(&self, [source_host, destination_host]: &[HostFacts; 2]) {
        self.queue(OverflowPolicy::Always, CopyEvent::Hosts { source_host, destination_host });
    }

    fn listening(&self, address: &Address) {
        self.queue(OverflowPolicy::Always, CopyEvent::Listening { address: address.to_string() });
    }

    fn progress(&self, progress: &Progress) {
        let estimate = lock(&self.estimator).observe(self.started.elapsed(), progress);
        if let Some(bar) = &self.bar {
            bar.draw(self.key, |phase, width| match (&progress.disks, &progress.faults) {
                (Some(disks), _) => format!("{phase} {}", line::disks_text(disks)),
                (None, Some(faults)) => format!("{phase} {}", faults_text(faults)),
                (None, None) => line::line(phase, &estimate, width),
            });
        }
        let mut reported = lock(&self.reported);
        if self.output.json && reported.is_none_or(|at| at.elapsed() >= JSON_INTERVAL) {
            *reported = Some(Instant::now());
            let event = CopyEvent::Progress(Box::new(CopyProgress::new(progress, &estimate)));
            self.queue(OverflowPolicy::Latest(self.key), event);
        }
    }

    fn notice(&self, text: &str) {
        tracing::debug!(text, "notice");
        self.queue(OverflowPolicy::Limited, CopyEvent::Notice { text });
        if !self.output.json && !self.output.quiet {
            let prefix =
                self.destination.as_ref().map(|destination| format!("{destination}: ")).unwrap_or_default();
            console::notice(&format!("{prefix}{text}"));
        }
    }
}

/// Formats postcopy faults for people.
pub(crate) fn faults_text(faults: &FaultCounts) -> String {
    let mut text = counted(faults.requests, "fault");
    if let (Some(p50), Some(p99)) = (faults.latency_p50, faults.latency_p99) {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        text += &format!(", p50 {:.2} ms, p99 {:.2} ms", milliseconds(p50), milliseconds(p99));
    }
    text
}
