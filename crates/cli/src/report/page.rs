//! The page: a summary, the phases, charts of rates and of what remained, lanes, notices.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde_json::{Value, json};
use towline_control::plan::{CopyPhase, CopyReport, Failure, HostFacts, PostcopyReport, SourceState};
use towline_migration::postcopy::LatencyRange;
use towline_report::{Bar, ChartLine, Ink, Svg, bars, lines, page};

use super::recorded::{CopyRecording, PhaseLength};
use crate::progress::{Estimate, faults_text};
use crate::sends;
use crate::units::{counted, size};

const MIB: f64 = (1 << 20) as f64;

/// Formats the page.
pub(super) fn html(
    [source, destination]: [&dyn Display; 2],
    total: Duration,
    recorded: &CopyRecording,
    copied: Result<&CopyReport, &Failure>,
) -> Result<String> {
    let mut sections = vec![summary(total, recorded, copied), phases(total, recorded)];
    sections.extend(copied.ok().and_then(|report| downtime(total, recorded, report)));
    sections.extend(charts(recorded)?);
    if let Ok(CopyReport { postcopy: Some(report), .. }) = copied {
        sections.extend(faults(report)?);
    }
    let lanes = sends::lines(&recorded.lanes);
    sections.push(json!({ "kind": "list", "title": "Lanes", "items": lanes }));
    sections.push(json!({ "kind": "list", "title": "Notices", "items": recorded.notices }));
    Ok(page(&format!("{source} to {destination}"), &about(), &sections)?)
}

fn summary(total: Duration, recorded: &CopyRecording, copied: Result<&CopyReport, &Failure>) -> Value {
    let mut rows = vec![("time", seconds(total))];
    let ends = ["source host", "destination host"].into_iter().zip(&recorded.hosts);
    rows.extend(ends.map(|(end, HostFacts { name, kernel, qemu })| {
        let qemu = qemu.as_ref().map(|qemu| format!(", QEMU {qemu}")).unwrap_or_default();
        (end, format!("{name}, Linux {kernel}{qemu}"))
    }));
    match copied {
        Ok(report) => {
            let moved = &report.moved;
            rows.push(("result", "done".to_owned()));
            rows.push(("source", report.source.text().to_owned()));
            rows.push(("destination", report.destination.text().to_owned()));
            let pages =
                format!("{}, {}", counted(moved.normal, "plain page"), counted(moved.duplicate, "zero page"));
            rows.push(("memory", format!("{}: {pages}", size(moved.total))));
            rows.push(("sent", size(moved.transferred)));
            rows.push(("lanes", report.multifd_channels.to_string()));
            rows.extend(report.downtime_ms.map(|downtime| ("downtime", format!("{downtime} ms"))));
            rows.extend(report.postcopy.as_ref().map(|report| ("postcopy", postcopy(report))));
        }
        Err(failure) => {
            rows.push(("result", "failed".to_owned()));
            rows.push(("error", crate::errors::worded(failure)));
        }
    }
    json!({ "kind": "table", "title": "Summary", "rows": rows })
}

fn phases(total: Duration, recorded: &CopyRecording) -> Value {
    let part = |phase: PhaseLength| {
        let from = format!("from {}", seconds(phase.at));
        phase.part(total, phase.index, &[&seconds(phase.length), &from])
    };
    let parts: Vec<_> = recorded.lengths(Duration::ZERO..total).into_iter().map(part).collect();
    json!({ "kind": "parts", "title": "Phases", "parts": parts, "note": null })
}

/// The time in which a guest that had run was stopped, by what it was needed for.
fn downtime(total: Duration, recorded: &CopyRecording, report: &CopyReport) -> Option<Value> {
    let begin = recorded.begin_of(CopyPhase::Switchover)?;
    let end = match (report.source, recorded.begin_of(CopyPhase::Running)) {
        // The guest of an image was not stopped.
        (SourceState::Unchanged, _) => return None,
        (_, Some(end)) => end,
        (SourceState::Running, None) => total,
        _ => return None,
    };
    let whole = end.checked_sub(begin).filter(|whole| !whole.is_zero())?;
    // Colors are those of the bar of all phases.
    let part = |phase: PhaseLength| {
        phase.part(whole, phase.index, &[&milliseconds(phase.length), purpose(phase.name)])
    };
    let parts: Vec<_> = recorded.lengths(begin..end).into_iter().map(part).collect();
    let qemu = report.downtime_ms.map(|time| format!("; QEMU reports a downtime of {time} ms"));
    let note = format!(
        "Together {} from the stop of the guest, as the stream shows it, until it ran again{}.",
        milliseconds(whole),
        qemu.unwrap_or_default()
    );
    Some(json!({ "kind": "parts", "title": "Downtime", "parts": parts, "note": note }))
}

/// Histogram of the times that the guest's requests for pages took, each of which stops a vCPU.
fn faults(report: &PostcopyReport) -> Result<Option<Value>> {
    let bar = |range: &LatencyRange| Bar {
        label: format!("{} to {}", short(range.from), short(range.to)),
        count: range.count,
    };
    let ranges: Vec<Bar> = report.faults.latencies.ranges().iter().map(bar).collect();
    let svg = bars("faults, by the time from the request until its pages were sent", &ranges)?;
    Ok(chart("Block times of vCPUs", svg))
}

fn charts(recorded: &CopyRecording) -> Result<Vec<Value>> {
    let points = |value: &dyn Fn(&Estimate) -> Option<u64>| -> Vec<(f64, f64)> {
        let samples = recorded.samples.kept.iter();
        samples
            .filter_map(|sample| Some((sample.at.as_secs_f64(), value(&sample.estimate)? as f64 / MIB)))
            .collect()
    };
    let rates = [
        ChartLine { name: "sent", ink: Ink::Blue, points: points(&|estimate| estimate.rate) },
        ChartLine {
            name: "written by the guest",
            ink: Ink::Orange,
            points: points(&|estimate| estimate.dirty_rate),
        },
    ];
    let remaining = [ChartLine {
        name: "remaining of the pass",
        ink: Ink::Blue,
        points: without_leading_zeros(points(&|estimate| Some(estimate.remaining))),
    }];
    let rates = chart("Rates", lines("MiB/s", &rates)?);
    let remaining = chart("Remaining memory", lines("MiB", &remaining)?);
    Ok(rates.into_iter().chain(remaining).collect())
}

/// A section with a chart; `None` if there was nothing to draw.
pub(super) fn chart(title: &str, svg: Option<Svg>) -> Option<Value> {
    svg.map(|svg| json!({ "kind": "chart", "title": title, "svg": svg.as_str() }))
}

/// The first line of every page.
pub(super) fn about() -> String {
    let time = humantime::format_rfc3339_seconds(SystemTime::now());
    format!("towline {}, {time}", env!("CARGO_PKG_VERSION"))
}

/// A QEMU that has not begun reports that nothing remains.
fn without_leading_zeros(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.into_iter().skip_while(|(_, remaining)| *remaining == 0.0).collect()
}

fn postcopy(report: &PostcopyReport) -> String {
    let faults = faults_text(&report.faults);
    match report.running_after {
        Some(time) => format!("ran after {:.1} ms; {faults}", time.as_secs_f64() * 1e3),
        None => faults,
    }
}

/// Purpose of a phase in which the guest is stopped.
fn purpose(phase: &str) -> &'static str {
    let is = |other: CopyPhase| phase == other.name();
    if is(CopyPhase::Switchover) {
        "the rest of the memory and the device state, until the destination has loaded them"
    } else if is(CopyPhase::Loaded) {
        "the acknowledgement to the source"
    } else if is(CopyPhase::Release) {
        "the source completes"
    } else if is(CopyPhase::CutOver) {
        "the start at the destination"
    } else {
        "the state that a postcopy needs before the start"
    }
}

pub(super) fn seconds(time: Duration) -> String {
    format!("{:.3} s", time.as_secs_f64())
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

/// Formats a latency with the unit that suits it.
fn short(time: Duration) -> String {
    match time.as_nanos() {
        0 => "0".to_owned(),
        1..1_000_000 => format!("{:.0} µs", time.as_secs_f64() * 1e6),
        1_000_000..1_000_000_000 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", time.as_secs_f64()),
    }
}

#[cfg(test)]
mod tests {
    use towline_control::plan::{Error, GuestAfterFailure, Observer as _, Progress};
    use towline_report::PHASE_COLORS;

    use super::super::ReportRecorder;
    use super::*;
    use crate::lock::lock;

    #[test]
    fn what_remains_begins_when_it_is_known() {
        let points = vec![(0.0, 0.0), (0.1, 0.0), (0.2, 80.0), (0.3, 0.0), (0.4, 20.0), (0.5, 0.0)];
        assert_eq!(without_leading_zeros(points.clone()), points[2..]);
    }

    #[test]
    fn each_phase_has_a_color_of_its_own() {
        assert!(PHASE_COLORS > CopyPhase::Running as usize, "a color for each phase");
    }

    #[test]
    fn a_page_has_no_script_and_loads_nothing() {
        let recorder = ReportRecorder::new();
        recorder.phase(CopyPhase::Prepare);
        recorder.phase(CopyPhase::Transfer);
        for pass in 1..4 {
            let rates = (Some(80 << 20), Some(60 << 20));
            let progress =
                Progress { pass: Some(pass), rate: rates.0, dirty_rate: rates.1, ..Progress::default() };
            recorder.progress(&Progress { remaining: Some(pass << 24), ..progress });
        }
        recorder.notice("<script>alert(1)</script>");
        let error = Box::new(Error::PeerDidNotRun { reason: "a & b".into() });
        let failure = Failure { error, guest: GuestAfterFailure::SAFE, notes: Vec::new() };
        let recorded = lock(&recorder.recorded);
        let html = html([&"qmp:<a>", &"file:b"], Duration::from_secs(2), &recorded, Err(&failure)).unwrap();
        assert!(html.contains("qmp:&lt;a&gt; to file:b") && html.contains("a &amp; b"), "{html}");
        assert!(html.contains("&lt;script&gt;") && !html.contains("<script"), "{html}");
        for reference in ["src=", "href=", "@import", "url("] {
            assert!(!html.contains(reference), "{reference}");
        }
        assert!(html.contains("prefers-color-scheme: dark") && html.contains("<svg"), "{html}");
        assert!(html.contains("transfer: "), "{html}");
    }
}
