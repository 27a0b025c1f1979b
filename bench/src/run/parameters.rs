//! Parameters of the measurement.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_channel::Cancel;

/// Share of a guest's memory that is random.
pub(super) const DATA_PERCENT: u64 = 50;
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
    /// Returns the published parameters: guests of 512 MiB, 1, 4 and 8 GiB, images in `$TMPDIR`.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        let (sizes_mib, directory) = (vec![512, 1024, 4096, 8192], std::env::temp_dir());
        Self { sizes_mib, runs, towline: towline.into(), directory, cancel }
    }
}
