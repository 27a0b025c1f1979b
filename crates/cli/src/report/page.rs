//! The page: a summary, the phases, charts of rates and of what remained, lanes, notices.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use towline_control::plan::{CopyReport, Failure, PostcopyReport};
use towline_report::{ChartLine, Ink, PHASE_COLORS, Row, document, lines, list, table};

use super::Recorded;
use crate::progress::{Estimate, faults_text};
use crate::sends;
use crate::units::{count, size};

const MIB: f64 = (1 << 20) as f64;

/// Facts of one page.
pub(super) struct Page<'a> {
    pub(super) source: String,
    pub(super) destination: String,
    pub(super) total: Duration,
    pub(super) recorded: &'a Recorded,
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
        self.charts(&mut body)?;
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
                let pages =
                    format!("{} plain pages, {} zero pages", count(moved.normal), count(moved.duplicate));
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

    /// A bar with the share of each phase, and a table.
    fn phases(&self, body: &mut String) {
        let phases = &self.recorded.phases;
        let total = self.total.as_secs_f64().max(f64::MIN_POSITIVE);
        let ends = phases.iter().skip(1).map(|phase| phase.at).chain([self.total]);
        let (mut bar, mut rows) = (String::new(), String::new());
        for (number, (phase, end)) in phases.iter().zip(ends).enumerate() {
            let length = end.saturating_sub(phase.at);
            let share = length.as_secs_f64() / total * 100.0;
            let _ = write!(
                bar,
                "<span class=\"p{}\" style=\"width:{share:.3}%\" title=\"{}: {}\"></span>",
                number % PHASE_COLORS,
                phase.name,
                seconds(length)
            );
            let _ = writeln!(
                rows,
                "<tr><th><i class=\"p{}\"></i> {}</th><td>{}</td><td>from {}</td></tr>",
                number % PHASE_COLORS,
                phase.name,
                seconds(length),
                seconds(phase.at)
            );
        }
        let _ = writeln!(body, "<h2>Phases</h2>\n<div class=\"bar\">{bar}</div>\n<table>\n{rows}</table>");
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

fn seconds(time: Duration) -> String {
    format!("{:.3} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use towline_control::plan::{CopyPhase, Error, GuestState, Observer as _, Progress};

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
        let failure = Failure { error, guest: GuestState::Safe, notes: Vec::new() };
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
