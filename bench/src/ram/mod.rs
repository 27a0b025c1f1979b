//! `cargo xtask bench ram`: saving and restoring a guest's memory, against QEMU's own mapped-ram files and its multifd.
//!
//! ```text
//!   save      running QEMU ─► file           QEMU's own · QEMU's own with direct-io · towline
//!   restore   file ─► waiting QEMU ─► tick   QEMU's own · towline: handed over, verified, streamed · QEMU to QEMU, live
//!   limits    a copy in this process, one TCP stream
//! ```
//! Every restore is of one and the same image, with all contenders; its guest's counter, read out of the destination's
//! memory past QEMU, ends the clock.
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
/// Free space beyond two images that a run wants.
const SPACE_MARGIN: u64 = 1 << 30;
/// How often a process or a counter is looked at.
const LOOK_INTERVAL: Duration = Duration::from_micros(500);

/// What [`Bench::settle`] does, below the tables.
const SETTLED: &str = "just before the clock starts, memory was touched and freed, so that a host above backs it: see docs/benchmarks.md";

/// What is measured, on what guest.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// MiB that the guest has.
    pub memory_mib: u64,
    /// MiB of it that hold random data; the rest is zero.
    pub data_mib: u64,
    /// Lanes of towline and channels of QEMU.
    pub lanes: usize,
    /// Runs of each row.
    pub runs: usize,
    /// How long one TCP stream is measured.
    pub tcp_time: Duration,
    /// The binary under test.
    pub towline: PathBuf,
    /// Where images go, and are removed from.
    pub directory: PathBuf,
    /// Ends it early.
    pub cancel: Cancel,
}

/// What all parts of a run share.
struct Bench<'a> {
    parameters: &'a Parameters,
    /// Of the images; goes with this value.
    directory: TempDir,
}

impl Parameters {
    /// The guest of the published table: 3 GiB, half of it random; images under `$TMPDIR`.
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

/// Measures all; takes some minutes with [`Parameters::of`].
///
/// # Errors
/// There is no QEMU or no room for the images, the guest does not get going, or it was cancelled. A contender that fails
/// is a row that says so.
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
            .with_context(|| format!("no directory for images in {}", parameters.directory.display()))?;
        let space = rustix::fs::statvfs(directory.path())?;
        let free = space.f_bavail * space.f_frsize;
        let wanted = 2 * parameters.data_bytes() + SPACE_MARGIN;
        ensure!(
            free >= wanted,
            "{} has {} MiB free, two images and a margin need {}; free some, or set TMPDIR",
            parameters.directory.display(),
            free / MIB,
            wanted / MIB
        );
        Ok(Self { parameters, directory })
    }

    /// Where images lie, in words.
    fn images(&self) -> String {
        let kind = machine::filesystem(self.directory.path());
        format!("images on {kind}; removed after every save, so that each save writes new blocks")
    }

    /// As [`machine::settle`], for more memory than the guest's data will take.
    fn settle(&self) -> Result<()> {
        machine::settle(self.parameters.data_bytes() / 4 * 5)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Asks `condition` until it says when it came true.
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
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// What a contender's rounds came to, for the tables that are made of several.
#[derive(Debug, Clone)]
struct Named {
    group: String,
    label: String,
    value: Summary,
}

/// What towline counted in a contender's last round.
#[derive(Debug, Clone)]
struct Counters {
    group: String,
    label: String,
    ram: Value,
}

/// One of the tables with what others need of it.
struct Part {
    table: Table,
    /// Against QEMU's own of the same group.
    ratios: Vec<Named>,
    /// In GB/s.
    rates: Vec<Named>,
    counters: Vec<Counters>,
}

/// A row for an outcome, from `cells` if there is any value.
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

/// A summary's text, or a dash where there is none.
fn cell(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |summary| summary.to_string())
}

/// The calls and pages of each kind.
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
        title: "What towline counted in the last round (its --json)".into(),
        columns: std::iter::once("what").chain(COLUMNS.iter().map(|(title, _)| *title)).collect(),
        rows: counted.iter().map(row).collect(),
        notes: vec![
            "a handed over image is loaded by QEMU itself: towline moves no page, and makes no call for one"
                .into(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contender_that_failed_has_its_reason_for_a_row() {
        let outcome = Outcome { values: vec![1.0], failure: Some("no direct I/O".into()) };
        let row = row("g", "l", &outcome, |_| unreachable!());
        assert!(matches!(row.content, Content::Missing(reason) if reason == "no direct I/O"));
    }

    #[test]
    fn counters_say_what_towline_did_not() {
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
