//! The benchmark of one size of the guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use towline_channel::Cancel;
use towline_lab::{Builder, Qemu, Version};

pub(super) const MIB: u64 = 1 << 20;
/// Share of a guest's memory that is random.
pub(super) const DATA_PERCENT: u64 = 75;
/// Memory of the guest's kernel in MiB.
pub(super) const KERNEL_MIB: u64 = 128;
pub(super) const WITHIN: Duration = Duration::from_secs(300);

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Memory of each guest in MiB.
    pub sizes_mib: Vec<u64>,
    /// Number of runs of each row.
    pub runs: usize,
    /// Binary under test.
    pub towline: PathBuf,
    /// Directory of temporary images.
    pub directory: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the published parameters: guests of 1, 4 and 8 GiB, images in `$TMPDIR`.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        let (sizes_mib, directory) = (vec![1024, 4096, 8192], std::env::temp_dir());
        Self { sizes_mib, runs, towline: towline.into(), directory, cancel }
    }
}

/// Benchmark of one size.
pub(super) struct Bench<'a> {
    pub(super) parameters: &'a Parameters,
    pub(super) memory_mib: u64,
    pub(super) directory: TempDir,
}

impl Bench<'_> {
    pub(super) fn data_mib(&self) -> u64 {
        (self.memory_mib * DATA_PERCENT / 100).min(self.memory_mib.saturating_sub(KERNEL_MIB))
    }

    pub(super) fn image(&self) -> PathBuf {
        self.directory.path().join("guest.img")
    }

    pub(super) fn builder(&self) -> Builder {
        Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(self.memory_mib)
    }
}
