//! A transfer of the benchmark, and its cost.

use serde::{Deserialize, Serialize};

use crate::table::Figures;

/// Memory of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Memory {
    /// Touched before.
    Warm,
    /// Touched during the measurement.
    Cold,
}

/// Settings of QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Plain,
    ZeroCopy,
    Tls,
}

/// Memory and connections of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Conditions {
    pub(super) memory: Memory,
    pub(super) lanes: usize,
}

/// Cost of a transfer.
pub(super) struct Cost {
    pub(super) seconds: f64,
    /// CPU time of both ends.
    pub(super) cpu_seconds: f64,
    /// Bytes of page contents.
    pub(super) bytes: f64,
}

impl Cost {
    pub(super) fn figures(&self) -> Figures {
        let gigabytes = self.bytes / 1e9;
        Figures::from([("GB/s", gigabytes / self.seconds), ("CPU s/GB", self.cpu_seconds / gigabytes)])
    }
}
