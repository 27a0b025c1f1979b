//! A Linux guest in an image.

use std::path::PathBuf;

use anyhow::Result;
use tempfile::TempDir;
use towline_lab::expect::qmp;
use towline_lab::{Builder, Qemu, Version};

use crate::guest::{Counter, WITHIN, file};
use crate::machine::MIB;
use crate::options::Bench;
use crate::table::{self, Entry, Figures, Results, Row};

/// Memory of the guest's kernel in MiB.
pub(crate) const KERNEL_MIB: u64 = 128;

/// Content of a stored image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) version: Version,
    pub(crate) memory_mib: u64,
    /// Share of the memory that is random.
    pub(crate) data_percent: u64,
}

/// A Linux guest in an image.
pub(crate) struct Stored<'a> {
    pub(crate) bench: &'a Bench,
    pub(crate) shape: Shape,
    directory: TempDir,
    /// Its counter.
    pub(crate) tick: u64,
    /// Guest-physical address of its counter.
    pub(crate) tick_address: u64,
    /// Hash of its data.
    pub(crate) hash: String,
    /// Its kernel: options and values.
    pub(crate) kernel: Vec<String>,
}

/// Measures the chosen entries, and stores a guest of this shape for those that follow each other and have the same one.
///
/// # Errors
/// None is chosen, a guest does not start, or the run was cancelled.
pub(crate) fn measure<'a, R: Row, K: Copy + PartialEq>(
    bench: &'a Bench,
    entries: Vec<Entry<R, K>>,
    shape: impl Fn(R) -> Shape,
    run: impl Fn(&Stored<'a>, Entry<R, K>) -> Result<Figures>,
) -> Result<Results<R, K>> {
    let mut results = Results::none();
    for group in bench.chosen(entries)?.chunk_by(|one, other| shape(one.row) == shape(other.row)) {
        let stored = Stored::new(bench, shape(group[0].row))?;
        results.extend(table::measure(bench, group.iter().copied(), |it| run(&stored, it))?);
    }
    Ok(results)
}

impl Shape {
    /// One of QEMU 10.0.
    pub(crate) fn of(memory_mib: u64, data_percent: u64) -> Self {
        Self { version: Version::V10_0, memory_mib, data_percent }
    }

    pub(crate) fn builder(self) -> Builder {
        let builder = Qemu::builder(self.version).machine(Version::V10_0.machine()).cpu("Nehalem");
        builder.linux().memory_mib(self.memory_mib)
    }

    pub(crate) fn data_mib(self) -> u64 {
        let most = self.memory_mib.saturating_sub(KERNEL_MIB).max(1);
        (self.memory_mib * self.data_percent / 100).min(most)
    }
}

impl<'a> Stored<'a> {
    /// Boots and fills the guest, and saves it.
    fn new(bench: &'a Bench, shape: Shape) -> Result<Self> {
        bench.cancel.check()?;
        eprintln!("booting a guest of {} MiB, and filling {} MiB", shape.memory_mib, shape.data_mib());
        let (directory, source) = (bench.directory()?, shape.builder().start()?);
        let mut agent = source.linux(WITHIN)?;
        agent.fill(shape.data_mib() * MIB, 1)?;
        let (hash, tick_address) = (agent.hash()?, agent.tick_address()?);
        drop(agent);
        let kernel = source.kernel_options()?;
        let mut stored = Self { bench, shape, directory, tick: 0, tick_address, hash, kernel };
        bench.copy([&*qmp(&source), &file(&stored.path())])?.wait(bench)?;
        // The guest is paused since it was saved.
        stored.tick = Counter::at(&source, tick_address)?.read()?;
        Ok(stored)
    }

    /// The image.
    pub(crate) fn path(&self) -> PathBuf {
        self.file("guest.img")
    }

    /// A file beside it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}
