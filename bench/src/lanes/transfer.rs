//! A transfer of the benchmark, and its cost.

use towline_migration::outgoing::ZeroCopySend;

use crate::table::Figures;

/// Memory of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// Touched before.
    Warm,
    /// Touched during the measurement.
    Cold,
}

/// Program and settings that send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Towline(Mode),
    Qemu(Peer),
    Iperf,
    /// The cipher of TLS lanes alone.
    Cipher,
}

/// A row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) memory: Memory,
    pub(super) lanes: usize,
    pub(super) method: Method,
}

/// Method of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Vectored,
    ZeroCopy,
    Auto,
    Tls,
}

impl Mode {
    pub(super) const ALL: [Self; 4] = [Self::Vectored, Self::ZeroCopy, Self::Auto, Self::Tls];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vectored => "vectored",
            Self::ZeroCopy => "zero-copy on",
            Self::Auto => "auto",
            Self::Tls => "vectored, TLS",
        }
    }

    pub(super) fn zero_copy_send(self) -> ZeroCopySend {
        match self {
            Self::ZeroCopy => ZeroCopySend::On,
            Self::Auto => ZeroCopySend::Auto,
            Self::Vectored | Self::Tls => ZeroCopySend::Off,
        }
    }
}

/// Settings of QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Plain,
    ZeroCopy,
    Tls,
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
