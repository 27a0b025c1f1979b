//! Results of copies and moves: an event, lines for people, and the exit status.

mod text;

use towline_channel::Address;
use towline_control::plan::{CopyReport, CopyResult, Error, Failure, SourceCategory};

use crate::endpoint::Endpoint;
use crate::events::{self, Completed, FailedPart, FinalEvent, Reason};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::sandbox::SandboxArgs;
use crate::{console, errors, sends};

/// Location of a synthetic guest after a failure.
const SYNTHETIC_GONE: &str = "gone: a synthetic guest ends with its process";

/// Reports the results of copies of one source.
pub(crate) struct Results<'a> {
    pub(crate) reporter: &'a Reporter,
    pub(crate) source: &'a Endpoint,
    /// Participle for what was done to the guest.
    pub(crate) verb: &'static str,
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
    pub(crate) fn of(verb: &'static str, reporter: &'a Reporter, source: &'a Endpoint) -> Self {
        Self { reporter, source, verb, destinations: Destinations::One, sandbox: None }
    }

    /// Reports the result of a copy to one destination.
    pub(crate) fn report(&self, destination: &Endpoint, copied: &CopyResult) -> Exit {
        match copied {
            Ok(report) => {
                self.done(destination, report);
                Exit::Done
            }
            Err(failure) => self.failed(destination, failure),
        }
    }

    /// Reports a success.
    pub(crate) fn done(&self, destination: &Endpoint, report: &CopyReport) {
        let memory = match destination {
            Endpoint::Memory(memory) => memory.outcome(),
            _ => None,
        };
        let lines = text::completed(self.verb, [self.source, destination], report, memory.as_ref());
        let completed = Completed::new([self.source, destination], report, memory);
        self.reporter.result(FinalEvent::Completed(Box::new(completed)), Exit::Done);
        for line in sends::lines(&report.lane_sends) {
            tracing::info!("lanes {line}");
        }
        lines.iter().for_each(|line| self.reporter.line(line));
    }

    /// Reports a failure.
    pub(crate) fn failed(&self, destination: &Endpoint, failure: &Failure) -> Exit {
        let keeper = match self.source {
            Endpoint::Memory(_) => SourceCategory::Process(SYNTHETIC_GONE),
            Endpoint::Stream(Address::Exec(_)) => SourceCategory::Command,
            // Of another host, only an image can be a source.
            source if source.is_image() || matches!(source, Endpoint::Ssh(_)) => SourceCategory::Image,
            _ => SourceCategory::Qemu,
        };
        let guest = failure.guest.sentence(keeper);
        let exit = match failure.error.as_ref() {
            Error::Invalid(_) => Exit::Usage,
            _ if failure.guest.needs_attention() => Exit::NeedsAttention,
            _ => Exit::Failed,
        };
        let (to, state) = (destination.to_string(), failure.guest.state(keeper));
        let about =
            FailedPart::Copy { destination: to, guest: &guest, guest_state: state, notes: &failure.notes };
        self.failure(failure, about, exit);
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
            return self.reporter.failed(&errors::worded(failure), Reason::Usage, Exit::Usage);
        }
        let exit = self.failure(failure, FailedPart::Notes { notes: &failure.notes }, Exit::Failed);
        console::error(&errors::failure_text(failure));
        exit
    }

    /// Writes the event of a failure.
    fn failure(&self, failure: &Failure, about: FailedPart<'_>, exit: Exit) -> Exit {
        let (error, reason) = (&errors::worded(failure), events::reason(&failure.error));
        self.reporter.result(FinalEvent::Failed { error, reason, about }, exit)
    }

    /// Reports the end of all copies.
    pub(crate) fn all(&self, outcomes: &[CopyResult], exit: Exit) {
        let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let failed = outcomes.len() - done;
        self.reporter.result(FinalEvent::All { completed: done, failed }, exit);
        let rest = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        self.reporter.line(&format!(
            "{} {} to {done} of {} destinations{rest}",
            self.verb,
            self.source,
            outcomes.len()
        ));
    }
}
