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

mod bench;
mod guest;
mod limits;
mod part;
mod peer;
mod restore;
mod save;
mod towline;

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::table::{Content, Row, Table};
pub use bench::Parameters;
use bench::{Bench, MIB};
use part::Counters;
pub(crate) use restore::{drop_cached, read_once};

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
    use super::part::row;
    use super::*;
    use crate::rounds::Outcome;

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
