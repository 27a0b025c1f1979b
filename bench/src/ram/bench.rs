//! Parameters of the measurement, and what all of its parts share.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use towline_channel::Cancel;

use crate::machine;

pub(super) const MIB: u64 = 1 << 20;
/// Free space that a run needs beyond two images.
const SPACE_MARGIN: u64 = 1 << 30;
/// Interval of checks of a process or counter.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(500);

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
pub(super) struct Bench<'a> {
    pub(super) parameters: &'a Parameters,
    /// Directory of the images, removed when this is dropped.
    pub(super) directory: TempDir,
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

    pub(super) fn data_bytes(&self) -> u64 {
        self.data_mib * MIB
    }
}

impl<'a> Bench<'a> {
    pub(super) fn new(parameters: &'a Parameters) -> Result<Self> {
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
    pub(super) fn images(&self) -> String {
        let kind = machine::filesystem(self.directory.path());
        format!("images on {kind}; removed after every save, so that each save writes new blocks")
    }

    /// Calls [`machine::prefault`] for more memory than the guest's data need.
    pub(super) fn prefault(&self) -> Result<()> {
        machine::prefault(self.parameters.data_bytes() / 4 * 5)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until `condition` returns a value.
    pub(super) fn wait<T>(
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
