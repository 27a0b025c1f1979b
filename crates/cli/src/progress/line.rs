//! The line of a copy's progress on a terminal, fitted to its width.
//!
//! ```text
//!   transfer [=====>    ] 54 %, 74.10 MiB/s, 3 s left
//!   transfer pass 14: 12.29 MiB left, 77.20 MiB/s, dirtied 68.10 MiB/s, downtime 189 of 300 ms, 4 s left
//!   transfer pass 14: 12.29 MiB left, 77.20 MiB/s, not converging
//! ```

use std::time::Duration;

use term::{measure_text_width, truncate_str};
use towline_control::plan::DiskProgress;

use super::estimate::{Estimate, Outlook};
use crate::units::size;

/// Width of the bar between its brackets.
const BAR_WIDTH: usize = 10;

/// A part of the line. Of those that do not fit, the ones of the lowest rank are left out first.
struct LinePart {
    rank: u8,
    text: String,
}

/// Formats the line, with at most `width` columns.
pub(super) fn line(prefix: &str, estimate: &Estimate, width: usize) -> String {
    let head = match estimate.pass {
        0 | 1 => format!("{prefix} {}", first_pass(estimate)),
        pass => format!("{prefix} pass {pass}: {} left", size(estimate.remaining)),
    };
    let mut parts = parts(estimate);
    while !parts.is_empty() && measure_text_width(&joined(&head, &parts)) > width {
        let last = parts.iter().enumerate().max_by_key(|(_, part)| part.rank).map_or(0, |(index, _)| index);
        parts.remove(last);
    }
    truncate_str(&joined(&head, &parts), width, "").into_owned()
}

/// Formats the progress of disks, of which there is no estimate: a guest that writes adds to them.
pub(super) fn disks_text(disks: &DiskProgress) -> String {
    let percent = disks.copied as u128 * 100 / u128::from(disks.total.max(1));
    format!("{percent} %, {} of {}", size(disks.copied), size(disks.total))
}

fn joined(head: &str, parts: &[LinePart]) -> String {
    parts.iter().fold(head.to_owned(), |line, part| format!("{line}, {}", part.text))
}

fn first_pass(estimate: &Estimate) -> String {
    // Before the first reply nothing is known, and nothing is done.
    let total = estimate.pass_bytes.max(1);
    let done = estimate.pass_bytes - estimate.remaining.min(estimate.pass_bytes);
    let filled = (done as f64 / total as f64 * BAR_WIDTH as f64) as usize;
    let mut bar = "=".repeat(filled);
    if filled < BAR_WIDTH {
        bar.push('>');
    }
    format!("[{bar:<BAR_WIDTH$}] {} %", done as u128 * 100 / total as u128)
}

/// The parts after the head, in their order.
fn parts(estimate: &Estimate) -> Vec<LinePart> {
    let mut parts = Vec::new();
    let mut push = |rank, text| parts.push(LinePart { rank, text });
    if let Some(rate) = estimate.rate {
        push(2, format!("{}/s", size(rate)));
    }
    if let Some(rate) = estimate.dirty_rate {
        push(3, format!("dirtied {}/s", size(rate)));
    }
    if let Some(downtime) = estimate.downtime {
        let limit = estimate.downtime_limit.map(|limit| format!(" of {}", limit.as_millis()));
        push(4, format!("downtime {}{} ms", downtime.as_millis(), limit.unwrap_or_default()));
    }
    if let Some(percent) = estimate.throttle_percent {
        push(5, format!("throttled by {percent} %"));
    }
    if estimate.outlook == Outlook::NotConverging {
        push(0, "not converging".into());
    } else if let Some(time) = estimate.time_left {
        push(1, format!("{} left", time_text(time)));
    }
    parts
}

/// Formats a time in its two largest units.
fn time_text(time: Duration) -> String {
    let seconds = time.as_secs_f64().ceil() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn late() -> Estimate {
        Estimate {
            pass: 14,
            pass_bytes: 200 * MIB,
            remaining: 12 * MIB + 300_000,
            rate: Some(77 * MIB),
            dirty_rate: Some(68 * MIB),
            downtime: Some(Duration::from_millis(1886)),
            downtime_limit: Some(Duration::from_millis(300)),
            throttle_percent: None,
            outlook: Outlook::NotConverging,
            time_left: None,
        }
    }

    #[test]
    fn a_line_fits_the_width_and_keeps_the_most_important_parts() {
        assert_eq!(
            line("transfer", &late(), 120),
            "transfer pass 14: 12.29 MiB left, 77.00 MiB/s, dirtied 68.00 MiB/s, downtime 1886 of 300 ms, not converging"
        );
        assert_eq!(
            line("transfer", &late(), 64),
            "transfer pass 14: 12.29 MiB left, 77.00 MiB/s, not converging"
        );
        for width in 10..120 {
            let line = line("transfer", &late(), width);
            assert!(line.chars().count() <= width, "{width}: {line}");
        }
    }

    #[test]
    fn the_first_pass_has_a_bar_and_the_remaining_time() {
        let first = Estimate {
            pass: 1,
            remaining: 92 * MIB,
            downtime: None,
            dirty_rate: None,
            outlook: Outlook::Unknown,
            time_left: Some(Duration::from_millis(2100)),
            ..late()
        };
        assert_eq!(line("transfer", &first, 60), "transfer [=====>    ] 54 %, 77.00 MiB/s, 3 s left");
        let done = Estimate { remaining: 0, time_left: Some(Duration::ZERO), ..first };
        assert_eq!(line("transfer", &done, 60), "transfer [==========] 100 %, 77.00 MiB/s, 0 s left");
        let unknown = Estimate { pass_bytes: 0, remaining: 0, rate: None, time_left: None, ..first };
        assert_eq!(line("transfer", &unknown, 60), "transfer [>         ] 0 %");
    }

    #[test]
    fn times_have_two_units() {
        let texts = [59, 60, 3599, 3600, 90_061].map(|seconds| time_text(Duration::from_secs(seconds)));
        assert_eq!(texts, ["59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "25 h 1 min"]);
    }
}
