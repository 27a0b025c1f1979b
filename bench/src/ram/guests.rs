//! Guests of the benchmark, and their images.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::json;
use tempfile::TempDir;
use towline_lab::{Builder, MemoryBackend, Qemu};

use crate::guest::{configure, small};
use crate::machine::{self, MIB};
use crate::options::Bench;

/// Memory of the guest in MiB.
const MEMORY_MIB: u64 = 3072;
/// Lanes of towline and channels of QEMU.
pub(super) const LANES: usize = 4;
/// Free space in MiB that a run needs beyond two images.
const SPACE_MARGIN_MIB: u64 = 1024;
/// Note on [`machine::prefault`] below the tables.
pub(super) const PREFAULTED: &str = "just before each measurement, memory was touched and freed, so that the host backs it: see docs/benchmarks.md";

/// Kind of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// QEMU's default: a destination's pages are allocated at first touch.
    Cold,
    /// A shared memfd that QEMU touches before it starts.
    Preallocated,
}

/// Guests that have filled their memory and are stopped, and the directory of their images.
pub(super) struct Guests<'a> {
    pub(super) bench: &'a Bench,
    pub(super) memory_mib: u64,
    pub(super) directory: TempDir,
    pub(super) cold: Qemu,
    pub(super) preallocated: Qemu,
}

/// Returns the builder of a guest that fills half of this memory with random data; the rest is zero.
pub(super) fn builder(memory_mib: u64, memory: Memory) -> Builder {
    let backend = match memory {
        Memory::Cold => MemoryBackend::Default,
        Memory::Preallocated => MemoryBackend::Memfd { prealloc: true },
    };
    small(memory_mib / 2, backend).memory_mib(memory_mib)
}

impl<'a> Guests<'a> {
    pub(super) fn start(bench: &'a Bench) -> Result<Self> {
        let (directory, memory_mib) = (bench.directory()?, bench.size_mib(MEMORY_MIB));
        let space = rustix::fs::statvfs(directory.path())?;
        let free_mib = space.f_bavail * space.f_frsize / MIB;
        let wanted_mib = memory_mib + SPACE_MARGIN_MIB;
        ensure!(
            free_mib >= wanted_mib,
            "{}: {free_mib} MiB are free, two images and a margin need {wanted_mib}; free some space, or set TMPDIR",
            directory.path().display()
        );
        eprintln!("ram: filling {} MiB of two guests", memory_mib / 2);
        let filled = |memory| bench.filled(builder(memory_mib, memory));
        let (cold, preallocated) = (filled(Memory::Cold)?, filled(Memory::Preallocated)?);
        Ok(Self { bench, memory_mib, directory, cold, preallocated })
    }

    /// Random data of each guest.
    pub(super) fn data_bytes(&self) -> u64 {
        self.memory_mib / 2 * MIB
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn title(&self, what: &str) -> String {
        format!("{what}, {} MiB guest, {} MiB random, {LANES} channels", self.memory_mib, self.memory_mib / 2)
    }

    /// Describes the location of the images.
    pub(super) fn images(&self) -> String {
        format!("images on {}", machine::filesystem(self.directory.path()))
    }

    pub(super) fn prefault(&self) -> Result<()> {
        machine::prefault(self.data_bytes())
    }
}

/// Has QEMU migrate to or from a file with pages at fixed offsets.
pub(super) fn use_mapped_ram(qemu: &Qemu, direct_io: bool) -> Result<()> {
    let parameters = json!({ "multifd-channels": LANES, "direct-io": direct_io });
    configure(qemu.qmp(), &[("multifd", true), ("mapped-ram", true)], parameters)
}
