//! How a copy or a move ended, for people and in JSON, and the exit code that says so.

use serde_json::{Value, json};
use towline_control::plan::{self, Error, Failure, PostcopyReport, Report, SourceCategory};
use towline_image::checksum::CHUNK_BYTES;
use towline_image::{Increment, Uploaded};

use crate::Exit;
use crate::console;
use crate::endpoint::Endpoint;
use crate::memory;
use crate::progress::{Reporter, faults, faults_text, ram};
use crate::sandbox;
use crate::sends;
use crate::units::{count, size};

/// Tells of what was done to the guest of one source.
pub(crate) struct Outcome<'a> {
    pub(crate) reporter: &'a Reporter,
    pub(crate) source: &'a Endpoint,
    /// What was done: `copied`, `moved`.
    pub(crate) verb: &'static str,
    /// Whether there are other destinations, so that what is said has to say of which.
    pub(crate) is_one_of_several: bool,
}

impl Outcome<'_> {
    /// What was asked for cannot be.
    pub(crate) fn usage(&self, text: &str) -> Exit {
        self.reporter.event("failed", json!({ "error": text, "exit": Exit::Usage.code() }));
        console::error(text);
        Exit::Usage
    }

    /// It went well.
    pub(crate) fn done(&self, destination: &Endpoint, report: &Report) {
        let moved = &report.moved;
        let (source, state) = (report.source.text(), report.destination.text());
        self.reporter.event(
            "completed",
            json!({
                "source": self.source.to_string(),
                "destination": destination.to_string(),
                "total-time": report.total_time.as_millis() as u64,
                "downtime": report.downtime_ms,
                "multifd-channels": report.multifd_channels,
                "multifd-compression": report.compression.method().name(),
                "compression-ratio": report.compression_ratio(),
                "zero-copy-send": report.zero_copy_send.to_string(),
                "lanes": sends::json(&report.lane_sends),
                "handed-over": report.loaded_by_qemu,
                "source-state": source,
                "destination-state": state,
                "ram": ram(moved),
                "postcopy": report.postcopy.as_ref().map(postcopy),
                "uploaded": report.uploaded.as_ref().map(uploaded),
                "memory": report.memory.as_ref().map(memory::json),
                "increment": report.increment.map(|Increment { stored, in_base }| {
                    json!({ "chunks-stored": stored, "chunks-in-base": in_base })
                }),
            }),
        );
        self.tell_people(destination, report, [source, state]);
    }

    fn tell_people(&self, destination: &Endpoint, report: &Report, [source, state]: [&str; 2]) {
        let reporter = self.reporter;
        let moved = &report.moved;
        let seconds = report.total_time.as_secs_f64();
        reporter.line(&format!("{} {} to {destination} in {seconds:.2} s", self.verb, self.source));
        reporter.line(&format!(
            "  memory       {}: {} plain pages, {} zero pages",
            size(moved.total),
            count(moved.normal),
            count(moved.duplicate)
        ));
        if let Some(uploaded) = &report.uploaded {
            reporter.line(&format!(
                "  uploaded     {} chunks in {}; {} were there, {} are zero",
                count(uploaded.sent_chunks),
                size(uploaded.sent_bytes),
                count(uploaded.known_chunks),
                count(uploaded.zero_chunks)
            ));
        }
        match report.loaded_by_qemu {
            true => reporter.line(&format!(
                "  moved        by QEMU, {} channels, from the image itself",
                report.multifd_channels
            )),
            false => reporter.line(&format!(
                "  moved        {} at {}/s over {} lanes, in {} vectored, {} plain and {} spliced calls",
                size(moved.transferred),
                size((moved.transferred as f64 / seconds) as u64),
                report.multifd_channels,
                count(moved.vectored_calls),
                count(moved.plain_calls),
                count(moved.spliced_calls)
            )),
        }
        if let Some(ratio) = report.compression_ratio() {
            let (pages, wire) = (size(moved.normal_bytes), size(moved.multifd_bytes));
            let method = report.compression.method().name();
            reporter.line(&format!(
                "  compressed   {pages} of pages into {wire} on lanes, {ratio:.2}:1 ({method})"
            ));
        }
        for line in sends::lines(&report.lane_sends) {
            reporter.line(&format!("  lanes        {line}"));
        }
        if let Some(downtime_ms) = report.downtime_ms {
            reporter.line(&format!("  downtime     {downtime_ms} ms"));
        }
        if let Some(postcopy) = &report.postcopy {
            tell_postcopy(reporter, postcopy);
        }
        if let Some(memory) = &report.memory {
            memory::tell(reporter, memory);
        }
        if let Some(Increment { stored, in_base }) = report.increment {
            let (all, bytes) = (stored + in_base, stored as u64 * CHUNK_BYTES);
            reporter.line(&format!(
                "  stored       {stored} of {all} chunks ({}), the others are the base's",
                size(bytes)
            ));
        }
        reporter.line(&format!("  source       {source}"));
        reporter.line(&format!("  destination  {state}"));
    }

    /// It failed.
    pub(crate) fn failed(&self, destination: &Endpoint, failure: &Failure) -> Exit {
        let keeper = match self.source {
            Endpoint::Memory(_) => SourceCategory::Process,
            source if source.is_image() => SourceCategory::Image,
            _ => SourceCategory::Qemu,
        };
        let (row, guest) = (failure.guest.row(keeper), failure.guest.text(keeper));
        let exit = match failure.error.as_ref() {
            Error::Usage(_) => Exit::Usage,
            _ if row.exit_code == Exit::Safe.code() => Exit::Safe,
            _ => Exit::LookAt,
        };
        self.reporter.event(
            "failed",
            json!({
                "destination": destination.to_string(),
                "error": failure.error.to_string(),
                "guest": guest,
                "guest-state": row.id,
                "notes": failure.notes,
                "exit": exit.code(),
            }),
        );
        let of = if self.is_one_of_several { format!("{destination}: ") } else { String::new() };
        console::error(&format!("{of}{failure}"));
        if exit != Exit::Usage {
            console::error(&format!("{of}the guest: {guest}"));
        }
        let hint = sandbox::hint(&failure.to_string());
        let notes = failure.notes.iter().map(String::as_str).chain(hint.as_deref());
        notes.for_each(|note| console::error(&format!("{of}note: {note}")));
        exit
    }

    /// None of several copies was begun.
    pub(crate) fn refused(&self, failure: &Failure) -> Exit {
        if matches!(failure.error.as_ref(), Error::Usage(_)) {
            return self.usage(&failure.to_string());
        }
        let exit = Exit::Safe;
        let fields =
            json!({ "error": failure.error.to_string(), "notes": failure.notes, "exit": exit.code() });
        self.reporter.event("failed", fields);
        console::error(&failure.to_string());
        exit
    }

    /// All copies have ended.
    pub(crate) fn all(&self, outcomes: &[plan::CopyResult], exit: Exit) {
        let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let failed = outcomes.len() - done;
        self.reporter.event("all", json!({ "completed": done, "failed": failed, "exit": exit.code() }));
        let rest = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        self.reporter.line(&format!(
            "{} {} to {done} of {} destinations{rest}",
            self.verb,
            self.source,
            outcomes.len()
        ));
    }
}

fn postcopy(report: &PostcopyReport) -> Value {
    json!({
        "running-after": report.running_after.map(|time| time.as_millis() as u64),
        "faults": faults(&report.faults),
        "working-set-pages": report.working_set_pages,
        "recoveries": report.recoveries,
    })
}

fn tell_postcopy(reporter: &Reporter, report: &PostcopyReport) {
    if let Some(time) = report.running_after {
        reporter.line(&format!(
            "  ran after    {:.1} ms, and waited for {}",
            time.as_secs_f64() * 1e3,
            faults_text(&report.faults)
        ));
    } else {
        reporter.line(&format!("  waited for   {}", faults_text(&report.faults)));
    }
    if report.working_set_pages > 0 {
        reporter.line(&format!(
            "  working set  {} pages of earlier restores went first",
            count(report.working_set_pages)
        ));
    }
    if report.recoveries > 0 {
        reporter.line(&format!("  recovered    from {} lost connections", count(report.recoveries)));
    }
}

/// What was sent to an object store, for machines.
fn uploaded(uploaded: &Uploaded) -> Value {
    json!({
        "sent-chunks": uploaded.sent_chunks,
        "sent-bytes": uploaded.sent_bytes,
        "sent-memory-bytes": uploaded.sent_memory_bytes,
        "known-chunks": uploaded.known_chunks,
        "zero-chunks": uploaded.zero_chunks,
    })
}
