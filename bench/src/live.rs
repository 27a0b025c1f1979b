//! `cargo xtask bench live`: a busy Linux guest moves from QEMU to QEMU, through towline and directly.
//!
//! ```text
//!   QEMU ── multifd ─────────────────► QEMU        directly
//!   QEMU ── multifd ─► towline ── multifd ─► QEMU  through towline
//! ```
//! The same guest moves in every run, each time to a new QEMU, and the contenders take turns. It writes a pattern into memory, which it
//! checks after every run. Its downtime is measured from outside: its counter is read from both QEMUs' memory, from the last step
//! at the source to the first at the destination.
//!
//! Limits: one guest, two virtual processors, TCG, both QEMUs on one host.

mod guest;
mod moves;
mod parameters;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use guest::Guest;
use moves::{Method, Moved};
pub use parameters::Parameters;

/// Goal of the downtime, by the guest's counter and by QEMU, as a ratio to a direct move.
const DOWNTIME_MAX: f64 = 1.25;
/// Goal of the total time, as a ratio to a direct move.
const TOTAL_MAX: f64 = 1.15;
/// The same without multifd.
const TOTAL_MAX_OF_MAIN_CHANNEL: f64 = 1.1;
const METHODS: [Method; 2] = [Method::Direct, Method::Towline];

/// Measures the tables; takes a few minutes with [`Parameters::of`].
///
/// # Errors
/// The lab is missing, the guest does not boot, or the run was cancelled. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    if let Some(part) = towline_lab::paths::missing() {
        anyhow::bail!("{part} is missing; run `cargo xtask setup`");
    }
    ensure!(
        parameters.dirty_mib + parameters.data_mib < parameters.memory_mib,
        "the guest has too little memory for its data"
    );
    let all: Vec<(usize, Method)> =
        parameters.lanes.iter().flat_map(|&lanes| METHODS.map(|method| (lanes, method))).collect();
    let contenders: Vec<Contender> = all
        .iter()
        .map(|(lanes, method)| Contender { group: group(*lanes), label: method.label().into() })
        .collect();
    let mut guest = None;
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        let (lanes, method) = all[index];
        // A guest that a contender has lost is booted again.
        let at = match guest.take() {
            Some(at) => at,
            None => Guest::boot(parameters)?,
        };
        let (moved, moved_guest) = moves::run(parameters, &at, method, lanes)?;
        guest = Some(moved_guest);
        Ok(moved)
    })?;
    Ok(vec![table(parameters, &contenders, &outcomes), goals(parameters, &contenders, &outcomes)])
}

fn group(lanes: usize) -> String {
    match lanes {
        0 => "without multifd".into(),
        lanes => format!("{lanes} channels"),
    }
}

/// Figure of a column.
type Figure = fn(&Moved) -> f64;

const FIGURES: [(&str, Figure, usize); 6] = [
    ("downtime, ms", |moved| moved.downtime.as_secs_f64() * 1e3, 0),
    ("QEMU's downtime, ms", |moved| moved.qemu_downtime_ms, 0),
    ("s to done", |moved| moved.done.as_secs_f64(), 2),
    ("QEMU's total-time, s", |moved| moved.total_ms / 1e3, 2),
    ("CPU s, QEMUs", |moved| moved.qemu_cpu, 2),
    ("CPU s, towline", |moved| moved.towline_cpu, 2),
];

fn values(outcome: &Outcome<Moved>, figure: Figure) -> Vec<f64> {
    outcome.values.iter().map(figure).collect()
}

fn table(parameters: &Parameters, contenders: &[Contender], outcomes: &[Outcome<Moved>]) -> Table {
    let row = |(contender, outcome): (&Contender, &Outcome<Moved>)| {
        let content = match &outcome.failure {
            Some(reason) => Content::Missing(reason.clone()),
            None => {
                let cell = |(_, figure, digits): (&str, Figure, usize)| {
                    let summary = Summary::of(values(outcome, figure));
                    summary.map_or_else(|| "–".into(), |summary| format!("{summary:.digits$}"))
                };
                let data = FIGURES.map(|(name, figure, _)| (name.to_owned(), json!(values(outcome, figure))));
                Content::Measured {
                    cells: FIGURES.map(cell).into(),
                    data: Value::Object(data.into_iter().collect()),
                }
            }
        };
        Row { group: contender.group.clone(), label: contender.label.clone(), content }
    };
    Table {
        name: "live",
        title: format!(
            "Live: Linux guest of {} MiB, {} MiB random, 2 processors, writing {} MB/s over {} MiB, {} runs, median (min–max)",
            parameters.memory_mib,
            parameters.data_mib,
            parameters.dirty_rate / 1_000_000,
            parameters.dirty_mib,
            parameters.runs
        ),
        columns: std::iter::once("what").chain(FIGURES.map(|(name, ..)| name)).collect(),
        rows: contenders.iter().zip(outcomes).map(row).collect(),
        notes: vec![
            format!(
                "downtime: from the last step of the guest's counter at the source (it steps every 5 ms) to the first at the destination; {} ms allowed",
                parameters.downtime_limit.as_millis()
            ),
            "s to done: from the command (towline: its process's start; directly: `migrate`, settings made before) until towline ends or the source is `completed`, and the guest runs at the destination".into(),
            "QEMU's: query-migrate at the source afterwards".into(),
            "CPU s: user and system time during the move, without the QEMUs' virtual processors".into(),
            "after every run the guest checks its memory; memory for the destination was touched and freed just before".into(),
        ],
    }
}

fn goals(parameters: &Parameters, contenders: &[Contender], outcomes: &[Outcome<Moved>]) -> Table {
    let mut rows = Vec::new();
    let pairs = outcomes.chunks_exact(METHODS.len()).zip(contenders.chunks_exact(METHODS.len()));
    for (&lanes, (pair, labels)) in parameters.lanes.iter().zip(pairs) {
        let total = if lanes == 0 { TOTAL_MAX_OF_MAIN_CHANNEL } else { TOTAL_MAX };
        let maxima = [DOWNTIME_MAX, DOWNTIME_MAX, total, total];
        for ((name, figure, _), max) in FIGURES.into_iter().zip(maxima) {
            let Some(ratio) = Summary::of_ratios(&values(&pair[1], figure), &values(&pair[0], figure)) else {
                continue;
            };
            let verdict = if ratio.median <= max { "met" } else { "missed" };
            let cells = vec![format!("≤ {max} × directly"), ratio.to_string(), verdict.to_owned()];
            let data = json!({ "median": ratio.median, "min": ratio.min, "max": ratio.max });
            let label = format!("{}: {name}", labels[0].group);
            rows.push(Row { group: String::new(), label, content: Content::Measured { cells, data } });
        }
    }
    Table {
        name: "goals",
        title: "Goals".into(),
        columns: vec!["through towline", "goal", "found", ""],
        rows,
        notes: vec!["judged by the median; ratios are taken round by round".into()],
    }
}
