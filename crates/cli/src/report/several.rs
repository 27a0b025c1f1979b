//! The page of several guests that were started from one image: when each ran, and the phases of each.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use towline_control::plan::CopyPhase;
use towline_report::{Bar, Svg, bars, page};

use super::page::{about, chart, seconds};
use super::recorded::{GuestReport, PhaseLength};
use crate::lock::lock;
use crate::units::size;

/// Maximum number of ranges of the histogram.
const RANGES_MAX: f64 = 12.0;

/// Formats the page.
pub(crate) fn html(image: &dyn Display, total: Duration, guests: &[GuestReport<'_>]) -> Result<String> {
    let running: Vec<Duration> = guests.iter().filter_map(running_after).collect();
    let mut sections = vec![summary(total, guests, &running)];
    sections.extend(chart("Time until a guest ran", histogram(&running)?));
    sections.push(phases(total, guests));
    Ok(page(&format!("{} guests of {image}", guests.len()), &about(), &sections)?)
}

/// Time from the begin of the command until the guest ran.
fn running_after(guest: &GuestReport<'_>) -> Option<Duration> {
    lock(&guest.recorder.recorded).begin_of(CopyPhase::Running)
}

fn summary(total: Duration, guests: &[GuestReport<'_>], running: &[Duration]) -> Value {
    let mut rows =
        vec![("time", seconds(total)), ("running", format!("{} of {} guests", running.len(), guests.len()))];
    let mut sorted = running.to_vec();
    sorted.sort_unstable();
    if let (Some(first), Some(median), Some(last)) =
        (sorted.first(), sorted.get(sorted.len() / 2), sorted.last())
    {
        let text = format!("first {}, median {}, last {}", seconds(*first), seconds(*median), seconds(*last));
        rows.push(("ran after", text));
    }
    let sent = guests.iter().filter_map(|guest| Some(guest.copied.ok()?.moved.transferred)).sum();
    rows.push(("sent", size(sent)));
    json!({ "kind": "table", "title": "Summary", "rows": rows })
}

/// Numbers of guests by the time until they ran, in ranges of equal length.
fn histogram(running: &[Duration]) -> Result<Option<Svg>> {
    let Some(last) = running.iter().max() else { return Ok(None) };
    let width = range_width(last.as_secs_f64());
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for time in running {
        *counts.entry((time.as_secs_f64() / width) as u64).or_default() += 1;
    }
    let end = |index: u64| format!("{:.3}", index as f64 * width);
    let bar = |index: u64| Bar {
        label: format!("{} to {} s", end(index), end(index + 1)),
        count: counts.get(&index).copied().unwrap_or(0),
    };
    let (first, last) = (counts.keys().next().copied(), counts.keys().next_back().copied());
    let ranges: Vec<Bar> = (first.unwrap_or(0)..=last.unwrap_or(0)).map(bar).collect();
    Ok(bars("guests", &ranges)?)
}

/// A round length of ranges, of which at most [`RANGES_MAX`] reach to `end`.
fn range_width(end: f64) -> f64 {
    let least = end.max(0.001) / (RANGES_MAX - 1.0);
    let decade = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
    steps.into_iter().find(|step| *step >= least).unwrap_or(10.0 * decade)
}

/// A table of the guests, each with a bar of its phases, on one scale of time.
fn phases(total: Duration, guests: &[GuestReport<'_>]) -> Value {
    let mut legend: Vec<&'static str> = Vec::new();
    let mut tracks = Vec::new();
    for guest in guests {
        let recorded = lock(&guest.recorder.recorded);
        let part = |phase: PhaseLength| {
            let color = legend.iter().position(|name| *name == phase.name).unwrap_or_else(|| {
                legend.push(phase.name);
                legend.len() - 1
            });
            phase.part(total, color, &[&seconds(phase.length)])
        };
        let parts: Vec<_> = recorded.lengths(Duration::ZERO..total).into_iter().map(part).collect();
        tracks.push(json!({
            "name": guest.name,
            "begin": recorded.begin_of(CopyPhase::Running).map_or("–".to_owned(), seconds),
            "parts": parts,
            "result": guest.copied.err().map_or("done".to_owned(), ToString::to_string),
        }));
    }
    let heads = ["guest", "ran after", &format!("phases, to {}", seconds(total)), "result"];
    json!({ "kind": "tracks", "title": "Guests", "legend": legend, "heads": heads, "tracks": tracks })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use towline_control::plan::{Error, Failure, GuestAfterFailure, Observer as _};

    use super::super::ReportRecorder;
    use super::*;

    #[test]
    fn ranges_are_round_and_few() {
        assert_eq!([0.0211, 0.4, 19.9].map(range_width), [0.002, 0.05, 2.0]);
        assert_eq!(range_width(0.0), 0.0001);
        for end in [0.001, 0.0137, 0.11, 1.0, 3.3, 250.0] {
            assert!((end / range_width(end)).floor() < RANGES_MAX, "{end}");
        }
    }

    #[test]
    fn each_guest_is_in_the_histogram_and_has_its_phases() {
        let times = [20, 21, 90].map(Duration::from_millis);
        let svg = histogram(&times).unwrap().unwrap();
        let svg = svg.as_str();
        assert!(svg.contains("0.020 to 0.030 s") && svg.contains("0.090 to 0.100 s"), "{svg}");
        assert!(histogram(&[]).unwrap().is_none());
        let recorders = [(); 2].map(|()| ReportRecorder::of_started(Instant::now()));
        recorders[0].phase(CopyPhase::Transfer);
        recorders[0].phase(CopyPhase::Running);
        let error = Box::new(Error::PeerDidNotRun { reason: "<no>".into() });
        let failure = Failure { error, guest: GuestAfterFailure::SAFE, notes: Vec::new() };
        let guest = |name, recorder| GuestReport { name, recorder, copied: Err(&failure) };
        let guests = [guest("web-0", &recorders[0]), guest("web-1", &recorders[1])];
        let html = html(&"a.img", Duration::from_secs(1), &guests).unwrap();
        for part in [
            "2 guests of a.img",
            "1 of 2 guests",
            "<th>web-1</th><td>–</td>",
            "&lt;no&gt;",
            "> running</span>",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("<no>"));
    }
}
