//! The tables of `lanes`, and which goals they meet.

use serde_json::{Value, json};

use super::end::Mode;
use super::{Costs, Entry, Load, Means, Parameters, Peer};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// The goals: a ratio at least, or at most, so large.
const VECTORED_MIN: f64 = 1.2;
const QEMU_WARM_MIN: f64 = 1.1;
const QEMU_COLD_MIN: f64 = 1.5;
const QEMU_CPU_MAX: f64 = 0.8;
const IPERF_MIN: f64 = 1.0;
const AUTO_MIN: f64 = 0.97;
const TLS_MIN: f64 = 0.6;
const QEMU: Means = Means::Qemu(Peer::Plain);
const QEMU_TLS: Means = Means::Qemu(Peer::Tls);
const VECTORED: Means = Means::Towline(Mode::Vectored);

/// What each row is held against.
struct Found<'a> {
    entries: &'a [Entry],
    outcomes: &'a [Costs],
}

pub(super) fn all(parameters: &Parameters, entries: &[Entry], outcomes: &[Costs]) -> Vec<Table> {
    let found = Found { entries, outcomes };
    let kinds = [
        ("lanes", Load::Idle, false, "memory touched before, machine idle"),
        ("lanes-cold", Load::Idle, true, "destination's memory touched within the figure"),
        ("lanes-stress", Load::Stress, false, "memory touched before, a thread on each CPU computes"),
        ("lanes-pinned", Load::Pinned, false, "memory touched before, each side on its half of the CPUs"),
    ];
    let mut tables = Vec::new();
    for (name, load, is_cold, what) in kinds {
        let rows: Vec<usize> = (0..entries.len())
            .filter(|&row| (entries[row].load, entries[row].is_cold) == (load, is_cold))
            .collect();
        if !rows.is_empty() {
            tables.push(found.table(parameters, name, what, &rows));
        }
    }
    tables.push(found.goals());
    tables
}

impl Found<'_> {
    /// Of the same load and number of lanes.
    fn beside(&self, entry: Entry, means: Means) -> Option<&Costs> {
        let wanted = Entry { means, ..entry };
        let index = self.entries.iter().position(|other| *other == wanted)?;
        Some(&self.outcomes[index])
    }

    fn ratio(&self, entry: Entry, base: Means, figure: impl Fn(&Costs) -> Vec<f64>) -> Option<Summary> {
        let (own, base) = (self.beside(entry, entry.means)?, self.beside(entry, base)?);
        Summary::of_ratios(&figure(own), &figure(base))
    }

    /// The mode of ours that has the highest median rate.
    fn best(&self, entry: Entry) -> Option<Means> {
        let median = |means| Some(Summary::of(rates(self.beside(entry, means)?))?.median);
        let rated =
            Mode::PLAIN.map(Means::Towline).into_iter().filter_map(|means| Some((median(means)?, means)));
        rated.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, means)| means)
    }

    fn table(&self, parameters: &Parameters, name: &'static str, what: &str, rows: &[usize]) -> Table {
        Table {
            name,
            title: format!(
                "Lanes: {} MiB, memory to memory over TCP on the loopback, {what}, {} runs, median (min–max)",
                parameters.memory_mib, parameters.runs
            ),
            columns: vec![
                "what",
                "GB/s",
                "× QEMU's",
                "× iperf3",
                "CPU s/GB",
                "× QEMU's CPU",
                "µs CPU a send call",
                "calls",
            ],
            rows: rows.iter().map(|&row| self.row(row)).collect(),
            notes: vec![
                "towline: two processes; from before it connects until the destination has acknowledged the guest".into(),
                "QEMU: 10.0 to 10.0, stopped guest, total-time of query-migrate; iperf3: its own report".into(),
                "CPU: user and system time of both processes".into(),
            ],
        }
    }

    fn row(&self, row: usize) -> Row {
        let (entry, outcome) = (self.entries[row], &self.outcomes[row]);
        let contender = entry.contender();
        let content = match (&outcome.failure, Summary::of(rates(outcome))) {
            (Some(reason), _) => Content::Missing(reason.clone()),
            (None, None) => Content::Missing("no run".into()),
            (None, Some(rate)) => {
                let cell = |summary: Option<Summary>| summary.map_or_else(|| "–".into(), |it| it.to_string());
                let median = |summary: Option<Summary>| {
                    summary.map_or_else(|| "–".into(), |it| format!("{:.2}", it.median))
                };
                let of = |key: &str, scale: f64| {
                    Summary::of(
                        outcome.values.iter().filter_map(|cost| Some(cost.source[key].as_f64()? * scale)),
                    )
                };
                let calls =
                    of("sends", 1.0).map_or_else(|| "–".into(), |calls| format!("{:.0}", calls.median));
                let cells = vec![
                    rate.to_string(),
                    cell(self.ratio(entry, QEMU, rates)),
                    median(self.ratio(entry, Means::Iperf, rates)),
                    cell(Summary::of(cpu(outcome))),
                    median(self.ratio(entry, QEMU, cpu)),
                    median(of("send-ns", 1e-3)),
                    calls,
                ];
                Content::Measured { cells, data: data(outcome) }
            }
        };
        Row { group: contender.group, label: contender.label, content }
    }

    fn goals(&self) -> Table {
        let mut rows = Vec::new();
        let mut goal = |entry: Entry, label: &str, ratio: Option<Summary>, (bound, at_least): (f64, bool)| {
            let Some(ratio) = ratio else { return };
            let is_met = if at_least { ratio.median >= bound } else { ratio.median <= bound };
            let bound = format!("{} {bound}", if at_least { "≥" } else { "≤" });
            let cells = vec![ratio.to_string(), bound, if is_met { "yes" } else { "no" }.into()];
            let data = json!({ "ratio": ratio.median, "met": is_met });
            let (group, content) = (entry.contender().group, Content::Measured { cells, data });
            rows.push(Row { group, label: label.into(), content });
        };
        for entry in self.entries.iter().filter(|entry| entry.means == VECTORED) {
            let entry = *entry;
            if entry.is_cold {
                goal(
                    entry,
                    "vectored, rate against QEMU's",
                    self.ratio(entry, QEMU, rates),
                    (QEMU_COLD_MIN, true),
                );
                continue;
            }
            let linear = self.ratio(entry, Means::Towline(Mode::Linear), rates);
            goal(entry, "vectored, rate against 32 KiB buffer", linear, (VECTORED_MIN, true));
            goal(
                entry,
                "vectored, rate against QEMU's",
                self.ratio(entry, QEMU, rates),
                (QEMU_WARM_MIN, true),
            );
            goal(entry, "vectored, CPU against QEMU's", self.ratio(entry, QEMU, cpu), (QEMU_CPU_MAX, false));
            let auto = Entry { means: Means::Towline(Mode::Auto), ..entry };
            if let Some(best) = self.best(entry) {
                goal(
                    entry,
                    "auto, rate against the best mode",
                    self.ratio(auto, best, rates),
                    (AUTO_MIN, true),
                );
            }
            goal(
                entry,
                "vectored, rate against iperf3",
                self.ratio(entry, Means::Iperf, rates),
                (IPERF_MIN, true),
            );
            if entry.load == Load::Idle {
                let tls = Entry { means: Means::Towline(Mode::Tls), ..entry };
                goal(entry, "TLS, rate against vectored", self.ratio(tls, VECTORED, rates), (TLS_MIN, true));
                let label = "TLS, rate against QEMU's with TLS";
                goal(entry, label, self.ratio(tls, QEMU_TLS, rates), (QEMU_WARM_MIN, true));
            }
        }
        Table {
            name: "lanes-goals",
            title: "Ratios, round by round, against their goals".into(),
            columns: vec!["what", "ratio", "goal", "met"],
            rows,
            notes: Vec::new(),
        }
    }
}

fn rates(outcome: &Costs) -> Vec<f64> {
    outcome.values.iter().map(super::Cost::gigabytes_per_second).collect()
}

fn cpu(outcome: &Costs) -> Vec<f64> {
    outcome.values.iter().map(super::Cost::cpu_per_gigabyte).collect()
}

fn data(outcome: &Costs) -> Value {
    json!({
        "gigabytes-per-second": rates(outcome),
        "cpu-seconds-per-gigabyte": cpu(outcome),
        "source": outcome.values.iter().map(|cost| cost.source.clone()).collect::<Vec<_>>(),
    })
}
