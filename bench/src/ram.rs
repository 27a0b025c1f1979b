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

use crate::machine::MIB;
use crate::options::Bench;
use crate::table::Table;
use guests::{Guests, Memory, Sources};

/// Measures the tables.
///
/// # Errors
/// QEMU is missing, there is too little space for the images, the guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let guests = Guests::new(bench)?;
    eprintln!("ram: filling {} MiB of two guests", guests.data_bytes() / MIB);
    let sources = Sources {
        cold: bench.filled(guests.builder(Memory::Cold))?,
        preallocated: bench.filled(guests.builder(Memory::Preallocated))?,
    };
    let mut tables = save::measure(&guests, &sources)?;
    tables.extend(restore::measure(&guests, &sources.cold)?);
    Ok(tables)
}
