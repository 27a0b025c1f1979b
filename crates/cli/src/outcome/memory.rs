//! Report of a guest that was received into memory (`mem:`).

use std::time::Duration;

use serde_json::{Value, json};
use towline_migration::synthetic::{BlockHash, CheckOutcome};

use crate::progress::Reporter;
use crate::units::{count, size};

/// Returns the field `memory` of the event `completed`.
pub(super) fn json(outcome: &CheckOutcome) -> Value {
    let hash =
        |block: &BlockHash| json!({ "name": block.name, "length": block.length, "blake3": block.blake3 });
    json!({
        "verified-pages": outcome.verified_pages,
        "pages-written-by-load": outcome.verified_pages.map(|_| outcome.writes),
        "transfer-time": outcome.transfer_time.as_millis() as u64,
        "populate-time": outcome.populated.map(|populated| populated.elapsed.as_millis() as u64),
        "check-time": outcome.check_time.as_millis() as u64,
        "blocks": outcome.hashes.iter().map(hash).collect::<Vec<_>>(),
    })
}

/// Prints lines for people.
pub(super) fn print(reporter: &Reporter, outcome: &CheckOutcome) {
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
