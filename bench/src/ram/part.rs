//! Parts of the tables.

use serde_json::Value;

use crate::rounds::Outcome;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Note on [`super::bench::Bench::prefault`] below the tables.
pub(super) const PREFAULTED: &str = "just before each measurement, memory was touched and freed, so that the host backs it: see docs/benchmarks.md";

/// Summary of a contender, for the tables of several.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) group: String,
    pub(super) label: String,
    pub(super) value: Summary,
}

/// towline's counters of a contender's last round.
#[derive(Debug, Clone)]
pub(super) struct Counters {
    pub(super) group: String,
    pub(super) label: String,
    pub(super) ram: Value,
}

/// A table, with figures for others.
pub(super) struct Part {
    pub(super) table: Table,
    /// Ratios to QEMU's own of the same group.
    pub(super) ratios: Vec<Named>,
    /// Rates in GB/s.
    pub(super) rates: Vec<Named>,
    pub(super) counters: Vec<Counters>,
}

/// Returns the row of an outcome, with `cells` if it has values.
pub(super) fn row<T>(
    group: &str,
    label: &str,
    outcome: &Outcome<T>,
    cells: impl FnOnce(&[T]) -> (Vec<String>, Value),
) -> Row {
    let content = match &outcome.failure {
        Some(reason) => Content::Missing(reason.clone()),
        None => {
            let (cells, data) = cells(&outcome.values);
            Content::Measured { cells, data }
        }
    };
    Row { group: group.into(), label: label.into(), content }
}

/// Formats a summary; a dash without one.
pub(super) fn cell(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |summary| summary.to_string())
}
