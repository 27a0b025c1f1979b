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
/// Free space that a run needs beyond two images.
const SPACE_MARGIN: u64 = 1 << 30;
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

impl Memory {
    pub(super) const ALL: [Self; 2] = [Self::Cold, Self::Preallocated];
}

/// Guests that have filled their memory and are stopped.
pub(super) struct Sources {
    pub(super) cold: Qemu,
    pub(super) preallocated: Qemu,
}

/// Size of the guests, and directory of their images.
pub(super) struct Guests<'a> {
    pub(super) bench: &'a Bench,
    pub(super) memory_mib: u64,
    pub(super) directory: TempDir,
}

impl<'a> Guests<'a> {
    pub(super) fn new(bench: &'a Bench) -> Result<Self> {
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
    pub(super) fn data_bytes(&self) -> u64 {
        self.memory_mib / 2 * MIB
    }

    pub(super) fn builder(&self, memory: Memory) -> Builder {
        let backend = match memory {
            Memory::Cold => MemoryBackend::Default,
            Memory::Preallocated => MemoryBackend::Memfd { prealloc: true },
        };
        small(self.data_bytes() / MIB, backend).memory_mib(self.memory_mib)
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
