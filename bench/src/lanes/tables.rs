//! Tables and goals of `lanes`.

use serde_json::{Value, json};

use super::end::Mode;
use super::entry::{Costs, Entry, Load, Method, Parameters, Peer};
use super::process::Cost;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Goals, as ratios.
const VECTORED_MIN: f64 = 1.2;
const QEMU_WARM_MIN: f64 = 1.3;
const QEMU_COLD_MIN: f64 = 1.5;
const QEMU_CPU_MAX: f64 = 0.8;
const IPERF_MIN: f64 = 1.0;
const AUTO_MIN: f64 = 0.98;
/// Of the rate without TLS, or of the cipher alone, whichever is lower.
const TLS_MIN: f64 = 0.7;
const CIPHER_MIN: f64 = 0.9;
const QEMU: Method = Method::Qemu(Peer::Plain);
const QEMU_TLS: Method = Method::Qemu(Peer::Tls);
const VECTORED: Method = Method::Towline(Mode::Vectored);

/// Bound of a ratio.
#[derive(Debug, Clone, Copy)]
enum Bound {
    Min(f64),
    Max(f64),
}

/// Results, for comparison of rows.
struct Results<'a> {
    entries: &'a [Entry],
    outcomes: &'a [Costs],
}

pub(super) fn all(parameters: &Parameters, entries: &[Entry], outcomes: &[Costs]) -> Vec<Table> {
    let results = Results { entries, outcomes };
    let kinds = [
        ("lanes", Load::Idle, false, "memory touched before, machine idle"),
        ("lanes-cold", Load::Idle, true, "destination's memory touched during the measurement"),
        ("lanes-stress", Load::Stress, false, "memory touched before, a computing thread on each CPU"),
        ("lanes-pinned", Load::Pinned, false, "memory touched before, each side on its half of the CPUs"),
    ];
    let mut tables = Vec::new();
    for (name, load, is_cold, what) in kinds {
        let rows: Vec<usize> = (0..entries.len())
            .filter(|&row| (entries[row].load, entries[row].is_cold) == (load, is_cold))
            .collect();
        if !rows.is_empty() {
            tables.push(results.table(parameters, name, what, &rows));
        }
    }
    tables.push(results.goals());
    tables
}

impl Results<'_> {
    /// Returns the results of another contender under the same load and with as many lanes.
    fn beside(&self, entry: Entry, method: Method) -> Option<&Costs> {
        let wanted = Entry { method, ..entry };
        let index = self.entries.iter().position(|other| *other == wanted)?;
        Some(&self.outcomes[index])
    }

    fn ratio(&self, entry: Entry, base: Method, figure: impl Fn(&Costs) -> Vec<f64>) -> Option<Summary> {
        let (own, base) = (self.beside(entry, entry.method)?, self.beside(entry, base)?);
        Summary::of_ratios(&figure(own), &figure(base))
    }

    /// Returns towline's mode with the highest median rate.
    fn best(&self, entry: Entry) -> Option<Method> {
        let median = |method| Some(Summary::of(rates(self.beside(entry, method)?))?.median);
        let rated =
            Mode::PLAIN.map(Method::Towline).into_iter().filter_map(|method| Some((median(method)?, method)));
        rated.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, method)| method)
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
                    median(self.ratio(entry, Method::Iperf, rates)),
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
        let vectored = self.entries.iter().filter(|entry| entry.method == VECTORED);
        let rows = vectored.flat_map(|entry| {
            let goals = if entry.is_cold { vec![self.cold_goal(*entry)] } else { self.warm_goals(*entry) };
            let group = entry.contender().group;
            goals.into_iter().filter_map(move |goal| goal.row(&group))
        });
        Table {
            name: "lanes-goals",
            title: "Ratios, round by round, against their goals".into(),
            columns: vec!["what", "ratio", "goal", "met"],
            rows: rows.collect(),
            notes: Vec::new(),
        }
    }

    fn cold_goal(&self, entry: Entry) -> Goal {
        let ratio = self.ratio(entry, QEMU, rates);
        Goal::new("vectored, rate against QEMU's", ratio, Bound::Min(QEMU_COLD_MIN))
    }

    fn warm_goals(&self, entry: Entry) -> Vec<Goal> {
        let linear = self.ratio(entry, Method::Towline(Mode::Linear), rates);
        let auto = Entry { method: Method::Towline(Mode::Auto), ..entry };
        let best = self.best(entry).and_then(|best| self.ratio(auto, best, rates));
        let qemu = self.ratio(entry, QEMU, rates);
        let iperf = self.ratio(entry, Method::Iperf, rates);
        let mut goals = vec![
            Goal::new("vectored, rate against 32 KiB buffer", linear, Bound::Min(VECTORED_MIN)),
            Goal::new("vectored, rate against QEMU's", qemu, Bound::Min(QEMU_WARM_MIN)),
            Goal::new("vectored, CPU against QEMU's", self.ratio(entry, QEMU, cpu), Bound::Max(QEMU_CPU_MAX)),
            Goal::new("auto, rate against the best mode", best, Bound::Min(AUTO_MIN)),
            Goal::new("vectored, rate against iperf3", iperf, Bound::Min(IPERF_MIN)),
        ];
        if entry.load == Load::Idle {
            let tls = Entry { method: Method::Towline(Mode::Tls), ..entry };
            let (plain, qemu) = (self.ratio(tls, VECTORED, rates), self.ratio(tls, QEMU_TLS, rates));
            goals.push(Goal::new("TLS, rate against vectored", plain, Bound::Min(TLS_MIN)));
            let cipher = self.ratio(tls, Method::Cipher, rates);
            goals.push(Goal::new("TLS, rate against the cipher alone", cipher, Bound::Min(CIPHER_MIN)));
            goals.push(Goal::new("TLS, rate against QEMU's with TLS", qemu, Bound::Min(QEMU_WARM_MIN)));
        }
        goals
    }
}

/// A ratio and its goal.
struct Goal {
    label: &'static str,
    ratio: Option<Summary>,
    bound: Bound,
}

impl Goal {
    fn new(label: &'static str, ratio: Option<Summary>, bound: Bound) -> Self {
        Self { label, ratio, bound }
    }

    /// Returns its row, if the ratio was measured.
    fn row(&self, group: &str) -> Option<Row> {
        let ratio = self.ratio?;
        let (is_met, bound) = match self.bound {
            Bound::Min(min) => (ratio.median >= min, format!("≥ {min}")),
            Bound::Max(max) => (ratio.median <= max, format!("≤ {max}")),
        };
        let cells = vec![ratio.to_string(), bound, if is_met { "yes" } else { "no" }.into()];
        let data = json!({ "ratio": ratio.median, "met": is_met });
        let content = Content::Measured { cells, data };
        Some(Row { group: group.into(), label: self.label.into(), content })
    }
}

fn rates(outcome: &Costs) -> Vec<f64> {
    outcome.values.iter().map(Cost::gigabytes_per_second).collect()
}

fn cpu(outcome: &Costs) -> Vec<f64> {
    outcome.values.iter().map(Cost::cpu_per_gigabyte).collect()
}

fn data(outcome: &Costs) -> Value {
    json!({
        "gigabytes-per-second": rates(outcome),
        "cpu-seconds-per-gigabyte": cpu(outcome),
        "source": outcome.values.iter().map(|cost| cost.source.clone()).collect::<Vec<_>>(),
    })
}
