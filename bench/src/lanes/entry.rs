//! Parameters, and the rows to measure.

use std::path::{Path, PathBuf};

use towline_channel::Cancel;

use super::end::Mode;
use super::process::Cost;
use crate::rounds::{Contender, Outcome};

pub(super) const MIB: u64 = 1 << 20;

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Memory of the guest in MiB, which QEMU's fills.
    pub memory_mib: u64,
    /// Memory of the guest of `calls` in MiB.
    pub calls_mib: u64,
    /// Numbers of lanes.
    pub lanes: Vec<usize>,
    /// Number of runs of each row.
    pub runs: usize,
    /// Number of runs of each row of `calls`.
    pub calls_runs: usize,
    /// Duration of iperf3 in seconds.
    pub iperf_seconds: u64,
    /// True if QEMU is among the contenders.
    pub has_qemu: bool,
    /// The program that runs the ends: this one.
    pub program: PathBuf,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

impl Parameters {
    /// Returns the parameters of the published tables: guests of 2 GiB, and 4 GiB for `calls`.
    pub fn of(program: &Path, runs: usize, cancel: Cancel) -> Self {
        Self {
            memory_mib: 2048,
            calls_mib: 4096,
            lanes: vec![1, 2, 4, 8],
            runs,
            calls_runs: 2 * runs,
            iperf_seconds: 2,
            has_qemu: true,
            program: program.into(),
            cancel,
        }
    }
}

/// Other load on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// None.
    Idle,
    /// A computing thread on each CPU.
    Stress,
    /// None; the source's processes run on the first half of the CPUs, the destination's on the other.
    Pinned,
}

/// Contender of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Towline(Mode),
    Qemu(Peer),
    Iperf,
    /// The cipher of TLS lanes alone.
    Cipher,
}

/// Settings of QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Plain,
    ZeroCopy,
    Tls,
}

/// A row to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) load: Load,
    pub(super) is_cold: bool,
    pub(super) lanes: usize,
    pub(super) method: Method,
}

impl Entry {
    pub(super) fn contender(&self) -> Contender {
        let lanes = if self.lanes == 1 { "lane" } else { "lanes" };
        Contender { group: format!("{}, {} {lanes}", self.table(), self.lanes), label: self.label().into() }
    }

    pub(super) fn table(&self) -> &'static str {
        match (self.is_cold, self.load) {
            (true, _) => "cold",
            (false, Load::Idle) => "warm",
            (false, Load::Stress) => "stress",
            (false, Load::Pinned) => "pinned",
        }
    }

    pub(super) fn label(&self) -> &'static str {
        match self.method {
            Method::Towline(mode) => mode.name(),
            Method::Qemu(Peer::Plain) => "QEMU's multifd",
            Method::Qemu(Peer::ZeroCopy) => "QEMU's multifd, zero-copy-send",
            Method::Qemu(Peer::Tls) => "QEMU's multifd, TLS",
            Method::Iperf => "iperf3",
            Method::Cipher => "the cipher alone",
        }
    }
}

/// Results of a contender.
pub(super) type Costs = Outcome<Cost>;
