//! `cargo xtask bench run`: a guest from an image by one command, its memory mapped.
//!
//! ```text
//!   towline run ─► QEMU's monitor answers ─► RUNNING ─► the guest's first tick
//!   └─ command ──┴──────── restore ─────────┴─ tick ──┘
//! ```
//! QEMU 10.0 and the newest one, each size, with the image in the page cache and not. The restore is the time from the answer of QEMU's
//! monitor until the guest ran, by towline's own clock: `migrate-incoming`, and what precedes it. The counter is read through
//! `/proc/PID/mem` from the moment that the guest ran.
//!
//! Limits: one guest at a time, TCG.

mod guest;
mod parameters;

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use towline_lab::{Version, require_qemu};

use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use guest::{Arrival, Stored};
use parameters::DATA_PERCENT;
pub use parameters::Parameters;

/// State of the image before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Cached,
    Dropped,
}

/// Measures the table.
///
/// # Errors
/// A guest does not start, or the run was cancelled. A row that fails has the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let mut table = table(parameters);
    for &size in &parameters.sizes_mib {
        for (version, name) in [(Version::V10_0, "QEMU 10.0"), (Version::Newest, "the newest QEMU")] {
            parameters.cancel.check()?;
            if !require_qemu(name, &[version]) {
                continue;
            }
            let stored = Stored::make(parameters, version, size)?;
            table.rows.extend(rows(parameters, &stored, &format!("{size} MiB, {name}"))?);
        }
    }
    table.notes.push(format!("images on {}", crate::machine::filesystem(&parameters.directory)));
    Ok(vec![table])
}

fn rows(parameters: &Parameters, stored: &Stored, group: &str) -> Result<Vec<Row>> {
    let kinds = [(Cache::Cached, "image in the page cache"), (Cache::Dropped, "not in the page cache")];
    let contender =
        |(_, label): &(Cache, &str)| Contender { group: group.to_owned(), label: (*label).to_owned() };
    let contenders: Vec<_> = kinds.iter().map(contender).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        match kinds[index].0 {
            // The first time from the disk, which leaves the host of a virtual machine busy with its memory.
            Cache::Cached => (0..2).try_for_each(|_| crate::ram::read_once(&stored.path()))?,
            Cache::Dropped => crate::ram::drop_cached(&stored.path())?,
        }
        stored.run(&parameters.towline)
    })?;
    let row = |(contender, outcome): (Contender, Outcome<Arrival>)| {
        let content = match &outcome.failure {
            Some(reason) => Content::Missing(reason.clone()),
            None => measured(&outcome),
        };
        Row { group: contender.group, label: contender.label, content }
    };
    Ok(contenders.into_iter().zip(outcomes).map(row).collect())
}

fn table(parameters: &Parameters) -> Table {
    Table {
        name: "run",
        title: format!(
            "towline run: a Linux guest from an image, {DATA_PERCENT} % of it random, memory mapped, {} runs, ms, median (min–max)",
            parameters.runs
        ),
        columns: vec![
            "what",
            "until QEMU answers",
            "then to RUNNING",
            "then to first tick",
            "whole command to first tick",
        ],
        rows: Vec::new(),
        notes: vec![
            "until QEMU answers: from the begin of towline's process, with the checks of image and command line and the start of QEMU".into(),
            "both following columns begin when QEMU's monitor has answered".into(),
        ],
    }
}

fn measured(outcome: &Outcome<Arrival>) -> Content {
    let figures = |of: fn(&Arrival) -> Duration| {
        outcome.values.iter().map(|arrival| of(arrival).as_secs_f64() * 1e3).collect::<Vec<_>>()
    };
    let columns = [
        figures(|arrival| arrival.answered),
        figures(|arrival| arrival.running),
        figures(|arrival| arrival.tick),
        figures(|arrival| arrival.whole),
    ];
    let cell = |values: &Vec<f64>| match Summary::of(values.iter().copied()) {
        Some(summary) => format!("{summary:.1}"),
        None => "–".into(),
    };
    let cells = columns.iter().map(cell).collect();
    let [answered, running, tick, whole] = columns;
    let data = json!({
        "answered-ms": answered,
        "running-ms": running,
        "first-tick-ms": tick,
        "whole-command-ms": whole,
    });
    Content::Measured { cells, data }
}
