//! `cargo xtask bench ram`: save and restore of a guest's memory, against QEMU's mapped-ram files and its multifd.
//!
//! ```text
//!   save      running QEMU ─► file           QEMU's own · QEMU's own with direct-io · towline
//!   restore   file ─► waiting QEMU ─► tick   QEMU's own · towline: handed over, verified, streamed · QEMU to QEMU, live
//!   limits    a copy in this process, one TCP stream
//! ```
//! All contenders restore the same image. A measurement ends when the guest's counter, read from the destination's memory, steps.
//!
//! Limits: one guest, mostly random pages, one virtual processor, TCG.

mod guest;
mod limits;
mod peer;
mod restore;
mod save;
mod towline;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use towline_channel::Cancel;

pub(crate) use restore::{drop_cached, read_once};

use crate::machine;
use crate::rounds::Outcome;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

const MIB: u64 = 1 << 20;
/// Free space that a run needs beyond two images.
const SPACE_MARGIN: u64 = 1 << 30;
/// Interval of checks of a process or counter.
const POLL_INTERVAL: Duration = Duration::from_micros(500);

/// Note on [`Bench::prefault`] below the tables.
const PREFAULTED: &str = "just before each measurement, memory was touched and freed, so that the host backs it: see docs/benchmarks.md";

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Memory of the guest in MiB.
    pub memory_mib: u64,
    /// Random data in it in MiB; the rest is zero.
    pub data_mib: u64,
    /// Lanes of towline and channels of QEMU.
    pub lanes: usize,
    /// Number of runs of each row.
    pub runs: usize,
    /// Duration of the measurement of a TCP stream.
    pub tcp_time: Duration,
    /// Binary under test.
    pub towline: PathBuf,
    /// Directory of temporary images.
    pub directory: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

/// Shared by all parts of a run.
struct Bench<'a> {
    parameters: &'a Parameters,
    /// Directory of the images, removed when this is dropped.
    directory: TempDir,
}

impl Parameters {
    /// Returns the published parameters: a guest of 3 GiB, half of it random; images in `$TMPDIR`.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        Self {
            memory_mib: 3072,
            data_mib: 1536,
            lanes: 4,
            runs,
            tcp_time: Duration::from_secs(3),
            towline: towline.into(),
            directory: std::env::temp_dir(),
            cancel,
        }
    }

    fn data_bytes(&self) -> u64 {
        self.data_mib * MIB
    }
}

/// Measures the tables; takes some minutes with [`Parameters::of`].
///
/// # Errors
/// QEMU is missing, there is too little space for the images, the guest does not start, or the run was cancelled. A contender that fails
/// is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    ensure!(
        Path::new(towline_lab::paths::QEMU_10_0).is_file(),
        "{} is missing; run `cargo xtask setup`",
        towline_lab::paths::QEMU_10_0
    );
    let bench = Bench::new(parameters)?;
    eprintln!("ram: {}", bench.images());
    let limits = limits::measure(parameters)?;
    let source = guest::Source::start(&bench, guest::Memory::Cold)?;
    let saves = save::measure(&bench, &source)?;
    let restores = restore::measure(&bench, &source)?;
    let counters = counters(&[&saves.counters[..], &restores.counters].concat());
    let rates = [&saves.rates[..], &restores.rates].concat();
    Ok(vec![
        saves.table,
        restores.table,
        restore::goals(&saves.ratios, &restores.ratios),
        limits.table(&rates),
        counters,
    ])
}

impl<'a> Bench<'a> {
    fn new(parameters: &'a Parameters) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("towline-bench-").tempdir_in(&parameters.directory);
        let directory = directory
            .with_context(|| format!("directory for images in {}", parameters.directory.display()))?;
        let space = rustix::fs::statvfs(directory.path())?;
        let free = space.f_bavail * space.f_frsize;
        let wanted = 2 * parameters.data_bytes() + SPACE_MARGIN;
        ensure!(
            free >= wanted,
            "{}: {} MiB are free, two images and a margin need {}; free some space, or set TMPDIR",
            parameters.directory.display(),
            free / MIB,
            wanted / MIB
        );
        Ok(Self { parameters, directory })
    }

    /// Describes the location of the images.
    fn images(&self) -> String {
        let kind = machine::filesystem(self.directory.path());
        format!("images on {kind}; removed after every save, so that each save writes new blocks")
    }

    /// Calls [`machine::prefault`] for more memory than the guest's data need.
    fn prefault(&self) -> Result<()> {
        machine::prefault(self.parameters.data_bytes() / 4 * 5)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until `condition` returns a value.
    fn wait<T>(
        &self,
        what: &str,
        within: Duration,
        mut condition: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            self.parameters.cancel.check()?;
            if let Some(value) = condition()? {
                return Ok(value);
            }
            if Instant::now() >= deadline {
                bail!("{what}: not within {} s", within.as_secs());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Summary of a contender, for the tables of several.
#[derive(Debug, Clone)]
struct Named {
    group: String,
    label: String,
    value: Summary,
}

/// towline's counters of a contender's last round.
#[derive(Debug, Clone)]
struct Counters {
    group: String,
    label: String,
    ram: Value,
}

/// A table, with figures for others.
struct Part {
    table: Table,
    /// Ratios to QEMU's own of the same group.
    ratios: Vec<Named>,
    /// Rates in GB/s.
    rates: Vec<Named>,
    counters: Vec<Counters>,
}

/// Returns the row of an outcome, with `cells` if it has values.
fn row<T>(
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
fn cell(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |summary| summary.to_string())
}

/// Returns the table of calls and pages.
fn counters(counted: &[Counters]) -> Table {
    const COLUMNS: [(&str, &str); 6] = [
        ("plain pages", "normal"),
        ("zero pages", "duplicate"),
        ("passes", "dirty-sync-count"),
        ("vectored calls", "vectored-calls"),
        ("plain calls", "plain-calls"),
        ("MiB on lanes", "multifd-bytes"),
    ];
    let number = |ram: &Value, name: &str| match ram[name].as_u64() {
        Some(bytes) if name.ends_with("bytes") => (bytes / MIB).to_string(),
        Some(count) => count.to_string(),
        None => "–".into(),
    };
    let row = |counted: &Counters| {
        let cells = COLUMNS.iter().map(|(_, name)| number(&counted.ram, name)).collect();
        let data = json!({ "ram": counted.ram });
        let content = Content::Measured { cells, data };
        Row { group: counted.group.clone(), label: counted.label.clone(), content }
    };
    Table {
        name: "counters",
        title: "towline's counters of the last round (--json)".into(),
        columns: std::iter::once("what").chain(COLUMNS.iter().map(|(title, _)| *title)).collect(),
        rows: counted.iter().map(row).collect(),
        notes: vec!["a handed-over image is loaded by QEMU itself, without pages or calls of towline".into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_contender_is_a_row_with_its_reason() {
        let outcome = Outcome { values: vec![1.0], failure: Some("no direct I/O".into()) };
        let row = row("g", "l", &outcome, |_| unreachable!());
        assert!(matches!(row.content, Content::Missing(reason) if reason == "no direct I/O"));
    }

    #[test]
    fn missing_counters_are_dashes() {
        let counted = Counters {
            group: "g".into(),
            label: "l".into(),
            ram: json!({ "normal": 3, "multifd-bytes": 5 << 20 }),
        };
        let table = counters(&[counted]);
        let Content::Measured { cells, .. } = &table.rows[0].content else { panic!("{table}") };
        assert_eq!(cells, &["3", "–", "–", "–", "–", "5"]);
    }
}
