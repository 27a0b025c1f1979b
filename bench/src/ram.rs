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

mod restore;
mod save;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::json;
use tempfile::TempDir;
use towline_lab::{Builder, MemoryBackend, Qemu, paths};

use crate::guest::{configure, small};
use crate::machine::{self, MIB};
use crate::options::Bench;
use crate::table::Table;

/// Memory of the guest in MiB.
const MEMORY_MIB: u64 = 3072;
/// Lanes of towline and channels of QEMU.
const LANES: usize = 4;
/// Free space that a run needs beyond two images.
const SPACE_MARGIN: u64 = 1 << 30;
/// Note on [`machine::prefault`] below the tables.
const PREFAULTED: &str = "just before each measurement, memory was touched and freed, so that the host backs it: see docs/benchmarks.md";

/// Measures the tables.
///
/// # Errors
/// QEMU is missing, there is too little space for the images, the guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    ensure!(
        Path::new(paths::QEMU_10_0).is_file(),
        "{} is missing; run `cargo xtask setup`",
        paths::QEMU_10_0
    );
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

/// Kind of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// QEMU's default: a destination's pages are allocated at first touch.
    Cold,
    /// A shared memfd that QEMU touches before it starts.
    Preallocated,
}

impl Memory {
    const ALL: [Self; 2] = [Self::Cold, Self::Preallocated];
}

/// Guests that have filled their memory and are stopped.
struct Sources {
    cold: Qemu,
    preallocated: Qemu,
}

/// Size of the guests, and directory of their images.
struct Guests<'a> {
    bench: &'a Bench,
    memory_mib: u64,
    directory: TempDir,
}

impl<'a> Guests<'a> {
    fn new(bench: &'a Bench) -> Result<Self> {
        let (directory, memory_mib) = (bench.directory()?, bench.size_mib(MEMORY_MIB));
        let this = Self { bench, memory_mib, directory };
        let space = rustix::fs::statvfs(this.directory.path())?;
        let free = space.f_bavail * space.f_frsize;
        let wanted = 2 * this.data_bytes() + SPACE_MARGIN;
        ensure!(
            free >= wanted,
            "{}: {} MiB are free, two images and a margin need {}; free some space, or set TMPDIR",
            this.directory.path().display(),
            free / MIB,
            wanted / MIB
        );
        Ok(this)
    }

    /// Random data of each guest; the rest of its memory is zero.
    fn data_bytes(&self) -> u64 {
        self.memory_mib / 2 * MIB
    }

    fn builder(&self, memory: Memory) -> Builder {
        let backend = match memory {
            Memory::Cold => MemoryBackend::Default,
            Memory::Preallocated => MemoryBackend::Memfd { prealloc: true },
        };
        small(self.data_bytes() / MIB, backend).memory_mib(self.memory_mib)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn title(&self, what: &str) -> String {
        format!("{what}, {} MiB guest, {} MiB random, {LANES} channels", self.memory_mib, self.memory_mib / 2)
    }

    /// Describes the location of the images.
    fn images(&self) -> String {
        format!("images on {}", machine::filesystem(self.directory.path()))
    }

    fn prefault(&self) -> Result<()> {
        machine::prefault(self.data_bytes())
    }
}

/// Has QEMU migrate to or from a file with pages at fixed offsets.
fn use_mapped_ram(qemu: &Qemu, direct_io: bool) -> Result<()> {
    let parameters = json!({ "multifd-channels": LANES, "direct-io": direct_io });
    configure(qemu, &[("multifd", true), ("mapped-ram", true)], parameters)
}
