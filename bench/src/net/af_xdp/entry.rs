//! Parameters, the rows to measure, and the addresses of both sides.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use towline_channel::Cancel;

use crate::rounds::Contender;

pub(super) const OUTSIDE: &str = "10.99.0.1";
pub(super) const INSIDE: &str = "10.99.0.2";
pub(super) const STREAM_PORT: u16 = 5000;
pub(super) const REQUEST_PORT: u16 = 5001;
/// Address of the interface on the way out.
pub(super) const OUT: &str = "52:54:00:63:00:01";
pub(super) const SOCKET: &str = "/tmp/net.sock";

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Message sizes of streams, in bytes.
    pub stream_sizes: Vec<usize>,
    /// Sizes of requests, in bytes.
    pub request_sizes: Vec<usize>,
    /// Length of each window.
    pub window: Duration,
    /// Number of runs of each row.
    pub runs: usize,
    /// Binary under test.
    pub towline: PathBuf,
    /// This program, which is also the driver in the guest.
    pub own: PathBuf,
    /// Parts of the names of the rows to measure; empty: all.
    pub rows: Vec<String>,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

/// Traffic of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// A stream from the guest.
    Stream(usize),
    /// Requests of the guest, one at a time, and replies of the same length.
    Request(usize),
}

/// Path of the guest's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Tap,
    CopyMode,
    References,
    /// Without options: what a user gets.
    Default,
    /// As `Tap` and `Default`; the guest's kernel computes packets and checksums itself. This driver can read only such packets
    /// from guest memory, as it accepts one descriptor per packet.
    TapWithoutOffloads,
    DefaultWithoutOffloads,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) work: Work,
    pub(super) carrier: Carrier,
}

/// Result of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figure {
    /// Bytes or requests per second.
    pub(super) rate: f64,
    pub(super) p50_us: f64,
    /// CPU seconds of the card, and of the receiving application, per unit.
    pub(super) card_seconds: f64,
    pub(super) receiver_seconds: f64,
    /// Kicks, interrupts and frames per unit.
    pub(super) kicks: f64,
    pub(super) calls: f64,
    /// Share of the frames that the network card read from guest memory.
    pub(super) zero_copy: f64,
}

/// Data that the applications of this machine have received.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) bytes: u64,
    pub(super) cpu: Duration,
}

impl Entry {
    /// Figures of a run. Whatever the card counts covers the whole connection.
    pub(super) fn figure(self, measured: &Value, received: &Received, transmit: &Value) -> Result<Figure> {
        let number = |value: &Value| value.as_f64().with_context(|| format!("`{value}`, expected a number"));
        let mode = transmit["mode"].as_str().unwrap_or_default();
        ensure!(mode == self.carrier.mode(), "the mode of transmission was {mode}");
        let [units, seconds, card, all, p50_us] =
            ["units", "seconds", "card-seconds", "all-units", "p50-us"].map(|key| number(&measured[key]));
        let (units, all) = (units?, all?);
        let [kicks, calls, packets, zero_copy] =
            ["kicks", "notifications", "packets", "zero-copy"].map(|key| number(&transmit[key]));
        Ok(Figure {
            rate: units / seconds?,
            p50_us: p50_us?,
            card_seconds: card? / units,
            receiver_seconds: received.cpu.as_secs_f64() / received.bytes.max(1) as f64,
            kicks: kicks? / all,
            calls: calls? / all,
            zero_copy: zero_copy? / packets?.max(1.0),
        })
    }

    pub(super) fn contender(&self) -> Contender {
        let group = match self.work {
            Work::Stream(size) => format!("TCP stream from the guest, {size} B"),
            Work::Request(size) => format!("TCP requests, {size} B"),
        };
        Contender { group, label: self.carrier.name().into() }
    }
}

impl Carrier {
    pub(super) const ALL: [Self; 6] = [
        Self::Tap,
        Self::CopyMode,
        Self::References,
        Self::Default,
        Self::TapWithoutOffloads,
        Self::DefaultWithoutOffloads,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::CopyMode => "AF_XDP, copy",
            Self::References => "AF_XDP, zero-copy",
            Self::Default => "default",
            Self::TapWithoutOffloads => "tap, no offloads",
            Self::DefaultWithoutOffloads => "default, no offloads",
        }
    }

    pub(super) fn arguments(self) -> &'static str {
        match self {
            Self::Tap | Self::TapWithoutOffloads => "",
            Self::CopyMode => "--af-xdp eth0 --af-xdp-copy",
            Self::References => "--af-xdp eth0 --zero-copy-send on",
            Self::Default | Self::DefaultWithoutOffloads => "--af-xdp eth0",
        }
    }

    /// The tap with the same offloads, which it is compared with.
    pub(super) fn tap(self) -> Self {
        if self.offloads() == "off" { Self::TapWithoutOffloads } else { Self::Tap }
    }

    /// Offloads that the driver negotiates.
    pub(super) fn offloads(self) -> &'static str {
        match self {
            Self::TapWithoutOffloads | Self::DefaultWithoutOffloads => "off",
            _ => "on",
        }
    }

    /// The mode that the card reports.
    pub(super) fn mode(self) -> &'static str {
        match self {
            Self::Tap | Self::Default | Self::TapWithoutOffloads => "tap",
            Self::CopyMode => "af-xdp-copy",
            Self::References | Self::DefaultWithoutOffloads => "af-xdp-zero-copy",
        }
    }
}
