//! Report of a successful copy for people, in lines.

use std::time::Duration;

use towline_control::plan::{ComparedDisks, CopyReport, PostcopyReport};
use towline_image::Increment;
use towline_image::checksum::CHUNK_BYTES;
use towline_memload::{BlockHash, CheckOutcome};

use crate::endpoint::Endpoint;
use crate::progress::faults_text;
use crate::units::{count, counted, size};

/// Returns the report; `memory`: the check of a guest that was received into memory (`mem:`).
pub(super) fn completed(
    verb: &str,
    [source, destination]: [&Endpoint; 2],
    report: &CopyReport,
    memory: Option<&CheckOutcome>,
) -> Vec<String> {
    let seconds = report.total_time.as_secs_f64();
    let mut lines = vec![format!("{verb} {source} to {destination} in {seconds:.2} s")];
    lines.extend(transfer(report));
    lines.extend(report.downtime_ms.map(|downtime_ms| format!("  downtime     {downtime_ms} ms")));
    lines.extend(report.compared_disks.map(|ComparedDisks { bytes, again_bytes, pause_ms }| {
        let (all, again) = (size(bytes), size(again_bytes));
        format!("  disks        {all} compared; {again} of them while the guest was stopped, {pause_ms} ms")
    }));
    lines.extend(report.postcopy.iter().flat_map(postcopy));
    lines.extend(memory.into_iter().flat_map(checked));
    lines.extend(report.increment.map(|Increment { stored, in_base }| {
        let (all, bytes) = (stored + in_base, stored as u64 * CHUNK_BYTES);
        format!(
            "  stored       {stored} of {} ({}); the base has the others",
            counted(all as u64, "chunk"),
            size(bytes)
        )
    }));
    lines.push(format!("  source       {}", report.source.text()));
    lines.push(format!("  destination  {}", report.destination.text()));
    lines
}

/// Amounts of memory.
fn transfer(report: &CopyReport) -> Vec<String> {
    let (moved, seconds) = (&report.moved, report.total_time.as_secs_f64());
    let mut lines = vec![format!(
        "  memory       {}: {}, {}",
        size(moved.total),
        counted(moved.normal, "plain page"),
        counted(moved.duplicate, "zero page")
    )];
    if let Some(uploaded) = &report.uploaded {
        lines.push(format!(
            "  uploaded     {} in {}; {} were stored already, {} are zero",
            counted(uploaded.sent_chunks, "chunk"),
            size(uploaded.sent_bytes),
            count(uploaded.known_chunks),
            count(uploaded.zero_chunks)
        ));
    }
    if report.loaded_by_qemu {
        let channels = counted(report.multifd_channels as u64, "channel");
        lines.push(format!("  moved        by QEMU, {channels}, from the image itself"));
    } else if moved.transferred > 0 {
        // Uploads have no stream, hence no rate.
        let lanes = match report.multifd_channels {
            0 => "without lanes".to_owned(),
            1 => "over 1 lane".to_owned(),
            lanes => format!("over {lanes} lanes"),
        };
        lines.push(format!(
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
        lines.push(format!("  compressed   {pages} of pages into {wire} on lanes, {ratio:.2}:1 ({method})"));
    }
    lines
}

fn postcopy(report: &PostcopyReport) -> Vec<String> {
    let faults = faults_text(&report.faults);
    let mut lines = vec![match report.running_after {
        Some(time) => format!("  ran after    {:.1} ms; {faults}", time.as_secs_f64() * 1e3),
        None => format!("  postcopy     {faults}"),
    }];
    if report.working_set_pages > 0 {
        let pages = counted(report.working_set_pages, "page");
        lines.push(format!("  working set  {pages} of earlier restores, sent first"));
    }
    if report.recoveries > 0 {
        lines.push(format!("  recovered    from {}", counted(report.recoveries, "lost connection")));
    }
    lines
}

/// Check of a guest that was received into memory.
fn checked(outcome: &CheckOutcome) -> Vec<String> {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let populated = outcome.populated.map_or_else(String::new, |populated| {
        format!(", {} of it to populate memory", seconds(populated.elapsed))
    });
    let mut lines = vec![format!("  received     in {}{populated}", seconds(outcome.transfer_time))];
    if let Some(pages) = outcome.verified_pages {
        let (pages, writes) = (count(pages), count(outcome.writes));
        let time = seconds(outcome.check_time);
        lines.push(format!(
            "  verified     {pages} pages are correct, with {writes} writes of the load; {time}"
        ));
    }
    for BlockHash { name, length, blake3 } in &outcome.hashes {
        lines.push(format!("  {name:<38} {:>11}  BLAKE3 {blake3}", size(*length)));
    }
    lines
}
