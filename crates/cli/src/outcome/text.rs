//! Report of a successful copy for people.

use std::time::Duration;

use towline_control::plan::{CopyReport, PostcopyReport};
use towline_image::Increment;
use towline_image::checksum::CHUNK_BYTES;
use towline_memload::{BlockHash, CheckOutcome};

use super::verb::Verb;
use crate::endpoint::Endpoint;
use crate::progress::{Reporter, faults_text};
use crate::sends;
use crate::units::{count, counted, size};

/// Prints the report.
pub(super) fn completed(
    reporter: &Reporter,
    verb: Verb,
    [source, destination]: [&Endpoint; 2],
    report: &CopyReport,
) {
    let seconds = report.total_time.as_secs_f64();
    reporter.line(&format!("{} {source} to {destination} in {seconds:.2} s", verb.name()));
    transfer(reporter, report);
    for line in sends::lines(&report.lane_sends) {
        tracing::info!("lanes {line}");
    }
    if let Some(downtime_ms) = report.downtime_ms {
        reporter.line(&format!("  downtime     {downtime_ms} ms"));
    }
    if let Some(report) = &report.postcopy {
        postcopy(reporter, report);
    }
    if let Some(outcome) = received(destination) {
        checked(reporter, &outcome);
    }
    if let Some(Increment { stored, in_base }) = report.increment {
        let (all, bytes) = (stored + in_base, stored as u64 * CHUNK_BYTES);
        reporter.line(&format!(
            "  stored       {stored} of {} ({}); the base has the others",
            counted(all as u64, "chunk"),
            size(bytes)
        ));
    }
    reporter.line(&format!("  source       {}", report.source.text()));
    reporter.line(&format!("  destination  {}", report.destination.text()));
}

/// Prints the amounts of memory.
fn transfer(reporter: &Reporter, report: &CopyReport) {
    let (moved, seconds) = (&report.moved, report.total_time.as_secs_f64());
    reporter.line(&format!(
        "  memory       {}: {}, {}",
        size(moved.total),
        counted(moved.normal, "plain page"),
        counted(moved.duplicate, "zero page")
    ));
    if let Some(uploaded) = &report.uploaded {
        reporter.line(&format!(
            "  uploaded     {} in {}; {} were stored already, {} are zero",
            counted(uploaded.sent_chunks, "chunk"),
            size(uploaded.sent_bytes),
            count(uploaded.known_chunks),
            count(uploaded.zero_chunks)
        ));
    }
    if report.loaded_by_qemu {
        let channels = counted(report.multifd_channels as u64, "channel");
        reporter.line(&format!("  moved        by QEMU, {channels}, from the image itself"));
    } else if moved.transferred > 0 {
        // Uploads have no stream, hence no rate.
        let lanes = match report.multifd_channels {
            0 => "without lanes".to_owned(),
            1 => "over 1 lane".to_owned(),
            lanes => format!("over {lanes} lanes"),
        };
        reporter.line(&format!(
            "  moved        {} at {}/s {lanes}",
            size(moved.transferred),
            size((moved.transferred as f64 / seconds) as u64)
        ));
        tracing::info!(
            vectored = moved.vectored_calls,
            plain = moved.plain_calls,
            spliced = moved.spliced_calls,
            "system calls"
        );
    }
    if let Some(ratio) = report.compression_ratio() {
        let (pages, wire) = (size(moved.normal_bytes), size(moved.multifd_bytes));
        let method = report.compression.method().name();
        reporter
            .line(&format!("  compressed   {pages} of pages into {wire} on lanes, {ratio:.2}:1 ({method})"));
    }
}

fn postcopy(reporter: &Reporter, report: &PostcopyReport) {
    let faults = faults_text(&report.faults);
    match report.running_after {
        Some(time) => {
            reporter.line(&format!("  ran after    {:.1} ms; {faults}", time.as_secs_f64() * 1e3));
        }
        None => reporter.line(&format!("  postcopy     {faults}")),
    }
    if report.working_set_pages > 0 {
        let pages = counted(report.working_set_pages, "page");
        reporter.line(&format!("  working set  {pages} of earlier restores, sent first"));
    }
    if report.recoveries > 0 {
        reporter.line(&format!("  recovered    from {}", counted(report.recoveries, "lost connection")));
    }
}

/// Prints the check of a guest that was received into memory.
fn checked(reporter: &Reporter, outcome: &CheckOutcome) {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let populated = outcome.populated.map_or_else(String::new, |populated| {
        format!(", {} of it to populate memory", seconds(populated.elapsed))
    });
    reporter.line(&format!("  received     in {}{populated}", seconds(outcome.transfer_time)));
    if let Some(pages) = outcome.verified_pages {
        let (pages, writes) = (count(pages), count(outcome.writes));
        let time = seconds(outcome.check_time);
        reporter.line(&format!(
            "  verified     {pages} pages are correct, with {writes} writes of the load; {time}"
        ));
    }
    for BlockHash { name, length, blake3 } in &outcome.hashes {
        reporter.line(&format!("  {name:<38} {:>11}  BLAKE3 {blake3}", size(*length)));
    }
}

/// The guest that was received into memory (`mem:`).
pub(super) fn received(destination: &Endpoint) -> Option<CheckOutcome> {
    match destination {
        Endpoint::Memory(memory) => memory.outcome(),
        _ => None,
    }
}
