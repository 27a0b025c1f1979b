//! Parameters of the measurement.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_channel::Cancel;

pub(super) const MIB: u64 = 1 << 20;

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Memory of the guest in MiB.
    pub memory_mib: u64,
    /// Random data in it in MiB.
    pub data_mib: u64,
    /// Rate of its writes in bytes per second.
    pub dirty_rate: u64,
    /// Range of its writes in MiB.
    pub dirty_mib: u64,
    /// Downtime limit of both contenders.
    pub downtime_limit: Duration,
    /// Numbers of lanes of towline and channels of QEMU, a group each; 0: none.
    pub lanes: Vec<usize>,
    /// Number of runs of each row.
    pub runs: usize,
    /// Binary under test.
    pub towline: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the parameters of the published table: 1 GiB, half of it random, 20 MB/s written.
    pub fn of(towline: &Path, runs: usize, cancel: Cancel) -> Self {
        Self {
            memory_mib: 1024,
            data_mib: 512,
            dirty_rate: 20_000_000,
            dirty_mib: 64,
            downtime_limit: Duration::from_millis(300),
            lanes: vec![4, 0],
            runs,
            towline: towline.into(),
            cancel,
        }
    }
}
