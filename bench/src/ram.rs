//! `cargo xtask bench ram`: save and restore of a guest's memory, against QEMU's mapped-ram files and its multifd.
//!
//! ```text
//!   save      running QEMU ─► file           QEMU's own · QEMU's own with direct-io · towline · the disk itself
//!   restore   file ─► waiting QEMU ─► tick   QEMU's own · towline: handed over, verified, streamed · QEMU to QEMU, live
//! ```
//! All contenders restore the same image. A measurement ends when the guest's counter, read from the destination's memory, steps;
//! reading it touches only its own page.
//!
//! Limits: one guest, half of it random pages, one virtual processor, TCG.

mod guests;
mod restore;
mod save;

use anyhow::Result;

use crate::options::Bench;
use crate::table::Table;
use guests::Guests;

/// Measures the tables.
///
/// # Errors
/// QEMU is missing, there is too little space for the images, the guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let (saves, restores) = (bench.chosen(save::all()), bench.chosen(restore::all()));
    // With --rows, one of them may be empty.
    let restores = if saves.is_ok() { restores.unwrap_or_default() } else { restores? };
    let guests = Guests::start(bench)?;
    let mut tables = vec![save::measure(&guests, saves.unwrap_or_default())?];
    if !restores.is_empty() {
        tables.push(restore::measure(&guests, restores)?);
    }
    Ok(tables)
}
