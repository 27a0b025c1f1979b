//! The page: a summary, the phases, charts of rates and of what remained, lanes, notices.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use towline_control::plan::{CopyPhase, CopyReport, Failure, PostcopyReport, SourceState};
use towline_migration::postcopy::LatencyRange;
use towline_report::{
    Bar, ChartLine, Emphasis, Group, Ink, Part, Row, bars, document, lines, list, parts, table,
};

use super::recorded::CopyRecording;
use crate::events;
use crate::progress::{Estimate, faults_text};
use crate::sends;
use crate::units::{counted, size};

const MIB: f64 = (1 << 20) as f64;

/// Facts of one page.
pub(super) struct Page<'a> {
    pub(super) source: String,
    pub(super) destination: String,
    pub(super) total: Duration,
    pub(super) recorded: &'a CopyRecording,
    pub(super) copied: Result<&'a CopyReport, &'a Failure>,
}

impl Page<'_> {
    /// Formats the page.
    pub(super) fn html(&self) -> Result<String> {
        let title = format!("{} to {}", self.source, self.destination);
        let time = humantime::format_rfc3339_seconds(SystemTime::now());
        let mut body = format!("<p>towline {}, {time}</p>\n", env!("CARGO_PKG_VERSION"));
        self.summary(&mut body);
        self.phases(&mut body);
        self.downtime(&mut body);
        self.charts(&mut body)?;
        self.faults(&mut body)?;
        self.lists(&mut body);
        Ok(document(&title, &body))
    }

    fn summary(&self, body: &mut String) {
        let mut rows = vec![Row::new("time", seconds(self.total))];
        match self.copied {
            Ok(report) => {
                let moved = &report.moved;
                rows.push(Row::new("result", "done"));
                rows.push(Row::new("source", report.source.text()));
                rows.push(Row::new("destination", report.destination.text()));
                let pages = format!(
                    "{}, {}",
                    counted(moved.normal, "plain page"),
                    counted(moved.duplicate, "zero page")
                );
                rows.push(Row::new("memory", format!("{}: {pages}", size(moved.total))));
                rows.push(Row::new("sent", size(moved.transferred)));
                rows.push(Row::new("lanes", report.multifd_channels.to_string()));
                rows.extend(
                    report.downtime_ms.map(|downtime| Row::new("downtime", format!("{downtime} ms"))),
                );
                rows.extend(report.postcopy.as_ref().map(|report| Row::new("postcopy", postcopy(report))));
            }
            Err(failure) => {
                rows.push(Row::new("result", "failed"));
                rows.push(Row::new("error", failure.to_string()));
            }
        }
        table(body, "Summary", &rows);
    }

    fn phases(&self, body: &mut String) {
        let phases = &self.recorded.phases;
        let ends = phases.iter().skip(1).map(|phase| phase.at).chain([self.total]);
        let phases = phases.iter().zip(ends).enumerate().map(|(color, (phase, end))| {
            let length = end.saturating_sub(phase.at);
            let cells = vec![seconds(length), format!("from {}", seconds(phase.at))];
            Part { name: phase.name.to_owned(), share: length.as_secs_f64(), color, cells }
        });
        parts(body, "Phases", &phases.collect::<Vec<_>>());
    }

    /// The time in which a guest that had run was stopped, by what it was needed for.
    fn downtime(&self, body: &mut String) {
        let Ok(report) = self.copied else { return };
        let (recorded, begin) = (self.recorded, self.recorded.begin_of(CopyPhase::Switchover));
        let end = match (report.source, recorded.begin_of(CopyPhase::Running)) {
            // The guest of an image was not stopped.
            (SourceState::Unchanged, _) => return,
            (_, Some(end)) => end,
            (SourceState::Running, None) => self.total,
            _ => return,
        };
        let Some(begin) = begin.filter(|begin| *begin < end) else { return };
        // Colors are those of the bar of all phases.
        let starts = recorded.phases.iter().enumerate().filter(|(_, phase)| (begin..end).contains(&phase.at));
        let ends = starts.clone().skip(1).map(|(_, phase)| phase.at).chain([end]);
        let downtime = starts.zip(ends).map(|((color, phase), end)| {
            let length = end.saturating_sub(phase.at);
            let share = length.as_secs_f64();
            let cells = vec![milliseconds(length), purpose(phase.name).to_owned()];
            Part { name: phase.name.to_owned(), share, color, cells }
        });
        parts(body, "Downtime", &downtime.collect::<Vec<_>>());
        let qemu = report.downtime_ms.map(|time| format!("; QEMU reports a downtime of {time} ms"));
        let _ = writeln!(
            body,
            "<p>Together {} from the stop of the guest, as the stream shows it, until it ran again{}.</p>",
            milliseconds(end.saturating_sub(begin)),
            qemu.unwrap_or_default()
        );
    }

    /// Histogram of the times that the guest's requests for pages took, each of which stops a vCPU.
    fn faults(&self, body: &mut String) -> Result<()> {
        let Ok(CopyReport { postcopy: Some(report), .. }) = self.copied else { return Ok(()) };
        let range = |range: &LatencyRange| {
            let label = format!("{} to {}", short(range.from), short(range.to));
            Bar::new(&label, &range.count.to_string(), Emphasis::Own)
        };
        let bars_of = report.faults.latencies.ranges().iter().filter_map(range).collect();
        let group = Group { name: String::new(), bars: bars_of };
        if let Some(svg) = bars("faults, by the time from the request until its pages were sent", &[group])? {
            let _ = writeln!(body, "<h2>Block times of vCPUs</h2>\n<figure>{svg}</figure>");
        }
        Ok(())
    }

    fn charts(&self, body: &mut String) -> Result<()> {
        let points = |value: &dyn Fn(&Estimate) -> Option<u64>| -> Vec<(f64, f64)> {
            let samples = self.recorded.samples.kept.iter();
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
        for (title, unit, chart) in [("Rates", "MiB/s", &rates[..]), ("Remaining memory", "MiB", &remaining)]
        {
            if let Some(svg) = lines(unit, chart)? {
                let _ = writeln!(body, "<h2>{title}</h2>\n<figure>{svg}</figure>");
            }
        }
        Ok(())
    }

    fn lists(&self, body: &mut String) {
        list(body, "Lanes", &sends::lines(&self.recorded.lanes));
        list(body, "Notices", &self.recorded.notices);
    }
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
    let is = |other| phase == events::phase(other);
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
    use super::super::page::Page;
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
        let error = Box::new(Error::Usage("a & b".into()));
        let failure = Failure { error, guest: GuestAfterFailure::SAFE, notes: Vec::new() };
        let recorded = lock(&recorder.recorded);
        let (source, destination) = ("qmp:<a>".into(), "file:b".into());
        let (total, copied) = (Duration::from_secs(2), Err(&failure));
        let page = Page { source, destination, total, recorded: &recorded, copied };
        let html = page.html().unwrap();
        assert!(html.contains("qmp:&lt;a&gt; to file:b") && html.contains("a &amp; b"), "{html}");
        assert!(html.contains("&lt;script&gt;") && !html.contains("<script"), "{html}");
        for reference in ["src=", "href=", "@import", "url("] {
            assert!(!html.contains(reference), "{reference}");
        }
        assert!(html.contains("prefers-color-scheme: dark") && html.contains("<svg"), "{html}");
        assert!(html.contains("transfer: "), "{html}");
    }
}
