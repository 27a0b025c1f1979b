//! Results of copies and moves: an event, lines for people, and the exit status.

mod text;

use serde_json::{Value, json};
use towline_channel::Address;
use towline_control::plan::{self, CopyReport, Error, Failure, PostcopyReport, SourceCategory};
use towline_memload::CheckOutcome;

use crate::endpoint::Endpoint;
use crate::exit::Exit;
use crate::progress::{Reporter, faults, ram};
use crate::sandbox::SandboxArgs;
use crate::{console, errors, events, sends};
pub(crate) use text::Verb;

/// Location of a synthetic guest after a failure.
const SYNTHETIC_GONE: &str = "gone: a synthetic guest ends with its process";

/// Reports the results of copies of one source.
pub(crate) struct Results<'a> {
    pub(crate) reporter: &'a Reporter,
    pub(crate) source: &'a Endpoint,
    pub(crate) verb: Verb,
    pub(crate) destinations: Destinations,
    pub(crate) sandbox: Option<&'a SandboxArgs>,
}

/// Number of destinations. With several, messages name theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destinations {
    One,
    Several,
}

impl<'a> Results<'a> {
    pub(crate) fn of(verb: Verb, reporter: &'a Reporter, source: &'a Endpoint) -> Self {
        Self { reporter, source, verb, destinations: Destinations::One, sandbox: None }
    }

    /// Reports a success.
    pub(crate) fn done(&self, destination: &Endpoint, report: &CopyReport) {
        let memory = match destination {
            Endpoint::Memory(memory) => memory.outcome(),
            _ => None,
        };
        let fields = completed(self.source, destination, report, memory.as_ref());
        self.reporter.event("completed", events::with_exit(fields, Exit::Done));
        for line in sends::lines(&report.lane_sends) {
            tracing::info!("lanes {line}");
        }
        let lines = text::completed(self.verb, [self.source, destination], report, memory.as_ref());
        lines.iter().for_each(|line| self.reporter.line(line));
    }

    /// Reports a failure.
    pub(crate) fn failed(&self, destination: &Endpoint, failure: &Failure) -> Exit {
        let keeper = match self.source {
            Endpoint::Memory(_) => SourceCategory::Process(SYNTHETIC_GONE),
            Endpoint::Stream(Address::Exec(_)) => SourceCategory::Command,
            source if source.is_image() => SourceCategory::Image,
            _ => SourceCategory::Qemu,
        };
        let guest = failure.guest.sentence(keeper);
        let exit = match failure.error.as_ref() {
            Error::Invalid(_) => Exit::Usage,
            _ if failure.guest.needs_attention() => Exit::NeedsAttention,
            _ => Exit::Failed,
        };
        let fields = json!({
            "destination": destination.to_string(),
            "error": errors::worded(failure),
            "reason": events::reason(&failure.error),
            "guest": guest,
            "guest-state": failure.guest.state(keeper),
            "notes": failure.notes,
        });
        self.reporter.event("failed", events::with_exit(fields, exit));
        let prefix = match self.destinations {
            Destinations::One => String::new(),
            Destinations::Several => format!("{destination}: "),
        };
        console::error(&format!("{prefix}{}", errors::failure_text(failure)));
        if exit != Exit::Usage {
            console::error(&format!("{prefix}the guest: {guest}"));
        }
        let notes = errors::notes(failure, self.sandbox);
        failure.notes.iter().chain(&notes).for_each(|note| console::error(&format!("{prefix}note: {note}")));
        exit
    }

    /// Reports that none of several copies was started.
    pub(crate) fn refused(&self, failure: &Failure) -> Exit {
        if matches!(failure.error.as_ref(), Error::Invalid(_)) {
            return self.reporter.failed(&errors::worded(failure), "usage", Exit::Usage);
        }
        let fields = json!({
            "error": errors::worded(failure),
            "reason": events::reason(&failure.error),
            "notes": failure.notes,
        });
        self.reporter.event("failed", events::with_exit(fields, Exit::Failed));
        console::error(&errors::failure_text(failure));
        Exit::Failed
    }

    /// Reports the end of all copies.
    pub(crate) fn all(&self, outcomes: &[plan::CopyResult], exit: Exit) {
        let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let failed = outcomes.len() - done;
        let fields = json!({ "completed": done, "failed": failed });
        self.reporter.event("all", events::with_exit(fields, exit));
        let rest = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        self.reporter.line(&format!(
            "{} {} to {done} of {} destinations{rest}",
            self.verb.name(),
            self.source,
            outcomes.len()
        ));
    }
}

/// Returns the fields of the event `completed`.
fn completed(
    source: &Endpoint,
    destination: &Endpoint,
    report: &CopyReport,
    memory: Option<&CheckOutcome>,
) -> Value {
    json!({
        "source": source.to_string(),
        "destination": destination.to_string(),
        "total-time": report.total_time.as_millis() as u64,
        "downtime": report.downtime_ms,
        "multifd-channels": report.multifd_channels,
        "multifd-compression": report.compression.method().name(),
        "compression-ratio": report.compression_ratio(),
        "zero-copy-send": events::zero_copy_send(report.zero_copy_send),
        "lanes": sends::json(&report.lane_sends),
        "handed-over": report.loaded_by_qemu,
        "source-state": report.source,
        "source-text": report.source.text(),
        "destination-state": report.destination,
        "destination-text": report.destination.text(),
        "ram": ram(&report.moved),
        "postcopy": report.postcopy.as_ref().map(postcopy),
        "uploaded": report.uploaded,
        "memory": memory.map(CheckOutcome::json),
        "increment": report.increment,
    })
}

fn postcopy(report: &PostcopyReport) -> Value {
    json!({
        "running-after": report.running_after.map(|time| time.as_millis() as u64),
        "faults": faults(&report.faults),
        "working-set-pages": report.working_set_pages,
        "recoveries": report.recoveries,
    })
}
