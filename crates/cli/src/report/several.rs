//! The page of several guests that were started from one image: when each ran, and the phases of each.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use towline_control::plan::CopyPhase;
use towline_report::{Bar, Emphasis, Group, PHASE_COLORS, Row, bars, document, escape, table};

use super::page::seconds;
use super::recorded::{GuestReport, PhaseStart};
use crate::lock::lock;
use crate::units::size;

/// Maximum number of ranges of the histogram.
const RANGES_MAX: f64 = 12.0;

/// Formats the page.
pub(super) fn html(image: &str, total: Duration, guests: &[GuestReport<'_>]) -> Result<String> {
    let time = humantime::format_rfc3339_seconds(SystemTime::now());
    let mut body = format!("<p>towline {}, {time}</p>\n", env!("CARGO_PKG_VERSION"));
    let running: Vec<Duration> = guests.iter().filter_map(running_after).collect();
    summary(&mut body, total, guests, &running);
    if let Some(svg) = histogram(&running)? {
        let _ = writeln!(body, "<h2>Time until a guest ran</h2>\n<figure>{svg}</figure>");
    }
    phases(&mut body, total, guests);
    Ok(document(&format!("{} guests of {image}", guests.len()), &body))
}

/// Time from the begin of the command until the guest ran.
fn running_after(guest: &GuestReport<'_>) -> Option<Duration> {
    lock(&guest.recorder.recorded).begin_of(CopyPhase::Running)
}

fn summary(body: &mut String, total: Duration, guests: &[GuestReport<'_>], running: &[Duration]) {
    let mut rows = vec![
        Row::new("time", seconds(total)),
        Row::new("running", format!("{} of {} guests", running.len(), guests.len())),
    ];
    let mut sorted = running.to_vec();
    sorted.sort_unstable();
    if let (Some(first), Some(median), Some(last)) =
        (sorted.first(), sorted.get(sorted.len() / 2), sorted.last())
    {
        let text = format!("first {}, median {}, last {}", seconds(*first), seconds(*median), seconds(*last));
        rows.push(Row::new("ran after", text));
    }
    let sent = guests.iter().filter_map(|guest| Some(guest.copied.ok()?.moved.transferred)).sum();
    rows.push(Row::new("sent", size(sent)));
    table(body, "Summary", &rows);
}

/// Numbers of guests by the time until they ran, in ranges of equal length.
fn histogram(running: &[Duration]) -> Result<Option<String>> {
    let Some(last) = running.iter().max() else { return Ok(None) };
    let width = range_width(last.as_secs_f64());
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for time in running {
        *counts.entry((time.as_secs_f64() / width) as u64).or_default() += 1;
    }
    let end = |index: u64| format!("{:.3}", index as f64 * width);
    let bar = |index: u64| {
        let label = format!("{} to {} s", end(index), end(index + 1));
        Bar::new(&label, &counts.get(&index).copied().unwrap_or(0).to_string(), Emphasis::Own)
    };
    let (first, last) = (counts.keys().next().copied(), counts.keys().next_back().copied());
    let range = first.unwrap_or(0)..=last.unwrap_or(0);
    let group = Group { name: String::new(), bars: range.filter_map(bar).collect() };
    Ok(bars("guests", &[group])?)
}

/// A round length of ranges, of which at most [`RANGES_MAX`] reach to `end`.
fn range_width(end: f64) -> f64 {
    let least = end.max(0.001) / (RANGES_MAX - 1.0);
    let decade = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
    steps.into_iter().find(|step| *step >= least).unwrap_or(10.0 * decade)
}

/// A table of the guests, each with a bar of its phases, on one scale of time.
fn phases(body: &mut String, total: Duration, guests: &[GuestReport<'_>]) {
    let mut colors: Vec<&'static str> = Vec::new();
    let mut rows = String::new();
    for guest in guests {
        let recorded = lock(&guest.recorder.recorded);
        let bar = bar(&recorded.phases, total, &mut colors);
        let ran = recorded.begin_of(CopyPhase::Running).map_or("–".to_owned(), seconds);
        let result = guest.copied.err().map_or("done".to_owned(), ToString::to_string);
        let _ = writeln!(
            rows,
            "<tr><th>{}</th><td>{ran}</td><td class=\"track\">{bar}</td><td>{}</td></tr>",
            escape(guest.name),
            escape(&result)
        );
    }
    let legend: String = colors
        .iter()
        .enumerate()
        .map(|(number, name)| format!("<span><i class=\"p{}\"></i> {name}</span>", number % PHASE_COLORS))
        .collect();
    let _ = writeln!(
        body,
        "<h2>Guests</h2>\n<p class=\"legend\">{legend}</p>\n<table class=\"tracks\">\n\
         <tr><th>guest</th><td>ran after</td><td>phases, to {}</td><td>result</td></tr>\n{rows}</table>",
        seconds(total)
    );
}

fn bar(phases: &[PhaseStart], total: Duration, colors: &mut Vec<&'static str>) -> String {
    let ends = phases.iter().skip(1).map(|phase| phase.at).chain([total]);
    let mut bar = String::from("<div class=\"bar\">");
    for (phase, end) in phases.iter().zip(ends) {
        let number = colors.iter().position(|name| *name == phase.name).unwrap_or_else(|| {
            colors.push(phase.name);
            colors.len() - 1
        });
        let length = end.saturating_sub(phase.at);
        let percent = length.as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE) * 100.0;
        let _ = write!(
            bar,
            "<span class=\"p{}\" style=\"width:{percent:.3}%\" title=\"{}: {}\"></span>",
            number % PHASE_COLORS,
            phase.name,
            seconds(length)
        );
    }
    bar + "</div>"
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
        assert!(svg.contains("0.020 to 0.030 s") && svg.contains("0.090 to 0.100 s"), "{svg}");
        assert!(histogram(&[]).unwrap().is_none());
        let recorders = [(); 2].map(|()| ReportRecorder::of_started(Instant::now()));
        recorders[0].phase(CopyPhase::Transfer);
        recorders[0].phase(CopyPhase::Running);
        let error = Box::new(Error::Usage("<no>".into()));
        let failure = Failure { error, guest: GuestAfterFailure::SAFE, notes: Vec::new() };
        let guest = |name, recorder| GuestReport { name, recorder, copied: Err(&failure) };
        let guests = [guest("web-0", &recorders[0]), guest("web-1", &recorders[1])];
        let html = html("a.img", Duration::from_secs(1), &guests).unwrap();
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
