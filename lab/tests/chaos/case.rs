//! The case of one run: guests, towlines and a fault, all derived from its seed.

use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;

/// Approximate duration of an undisturbed run, in milliseconds.
const RUN_MS: u64 = 1500;
/// Maximum time for which a process is suspended or a link delayed, in milliseconds.
const PAUSE_MS: u64 = 1500;
/// Maximum delay of a fault after its phase, in microseconds.
const BEHIND_US: u64 = 30_000;
/// Bandwidth limits: enough that the guest, which never stops writing, is stopped soon.
const RATES_MIB: Range<u64> = 8..32;
/// Phases of a switchover.
const PHASES: [&str; 5] = ["transfer", "switchover", "loaded", "release", "cut-over"];

/// Source and destination of the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From QEMU to QEMU.
    Copy,
    /// The same, and the source exits.
    Move,
    /// From QEMU into an image.
    Save,
    /// From an image, as a stream or loaded by QEMU itself.
    Restore { stream: bool },
    /// From an image to two QEMUs.
    Clones,
    /// A move by a towline at each end, with a link between them.
    Towlines,
    /// A move to a stock QEMU that listens, over a link.
    ToStock,
    /// From a stock QEMU that no towline drives, over a link.
    FromStock,
}

impl Kind {
    /// Returns true if there is a link that can be cut.
    pub(crate) fn has_link(self) -> bool {
        matches!(self, Self::Towlines | Self::ToStock | Self::FromStock)
    }

    /// Returns true if a guest runs at its source at the beginning.
    pub(crate) fn has_source(self) -> bool {
        !matches!(self, Self::Restore { .. } | Self::Clones)
    }

    /// Number of destination QEMUs.
    pub(crate) fn destinations(self) -> usize {
        match self {
            Self::Save => 0,
            Self::Clones => 2,
            _ => 1,
        }
    }

    /// Number of towlines.
    pub(crate) fn towlines(self) -> usize {
        if self == Self::Towlines { 2 } else { 1 }
    }
}

/// A process that a fault hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    Source,
    Destination(usize),
    Towline(usize),
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Nothing,
    /// SIGKILL.
    Kill(Victim),
    /// SIGSTOP, and SIGCONT after this time.
    Suspend(Victim, Duration),
    /// The link is reset.
    Cut,
    /// The link carries nothing for this time.
    Delay(Duration),
    /// The filesystem of the image has this many KiB: fewer than the guest fills.
    FullDisk(u64),
    /// An operator runs this command at the source's monitor.
    Operator(&'static str),
    /// An operator runs `stop` there, and `cont` after this time.
    StopAndCont(Duration),
    /// A signal to a towline, and the same again after this time.
    Signal(usize, &'static str, Option<Duration>),
    /// The output of the last towline goes into a pipe that is full and not read.
    UnreadOutput,
    /// The same, and the reader closes it: further writes fail with `EPIPE`.
    ClosedOutput,
    /// The last towline runs with nothing mounted at `/proc`.
    HiddenProc,
    /// The proxy between towline and this QEMU's monitor exits.
    CutMonitor(Victim),
    /// The link carries nothing for this time.
    HoldMonitor(Victim, Duration),
}

/// Time of the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// At this time after the start.
    After(Duration),
    /// At this time after a towline began this phase.
    Behind(&'static str, Duration),
}

/// One run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) fault: Fault,
    pub(crate) moment: Moment,
    pub(crate) lanes: usize,
    /// Bandwidth limit of the source, in MiB per second.
    pub(crate) rate_mib: u64,
    pub(crate) sweep_pages: u32,
    /// True if there is a proxy in front of each monitor.
    pub(crate) has_proxies: bool,
}

impl Case {
    pub(crate) fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let kinds = [
            Kind::Copy,
            Kind::Move,
            Kind::Save,
            Kind::Restore { stream: rng.bool() },
            Kind::Clones,
            Kind::Towlines,
            Kind::Towlines,
            Kind::ToStock,
            Kind::FromStock,
        ];
        let kind = kinds[rng.usize(..kinds.len())];
        let fault = fault(&mut rng, kind);
        // A towline whose output is not read reports no phases.
        let is_hidden = matches!(fault, Fault::UnreadOutput | Fault::ClosedOutput);
        let moment = if rng.bool() || is_hidden {
            Moment::After(Duration::from_millis(rng.u64(..RUN_MS)))
        } else {
            let behind = if rng.bool() { rng.u64(..BEHIND_US) } else { 0 };
            Moment::Behind(PHASES[rng.usize(..PHASES.len())], Duration::from_micros(behind))
        };
        let lanes = match kind {
            Kind::ToStock | Kind::FromStock => 0,
            _ => [0, 2][rng.usize(..2)],
        };
        let (rate_mib, sweep_pages) = (rng.u64(RATES_MIB), [32, 512][rng.usize(..2)]);
        let at_monitor = matches!(fault, Fault::CutMonitor(_) | Fault::HoldMonitor(..));
        let has_proxies = at_monitor || rng.u8(..8) == 0;
        Self { kind, fault, moment, lanes, rate_mib, sweep_pages, has_proxies }
    }

    /// Returns true if this process is killed.
    pub(crate) fn kills(&self, victim: Victim) -> bool {
        self.fault == Fault::Kill(victim)
    }

    /// Returns true if the output of a towline is not read.
    pub(crate) fn hides_output(&self) -> bool {
        matches!(self.fault, Fault::UnreadOutput | Fault::ClosedOutput)
    }

    /// Returns true if an operator may have paused the guest.
    pub(crate) fn may_be_paused(&self) -> bool {
        matches!(self.fault, Fault::Operator("stop") | Fault::StopAndCont(_))
    }
}

fn fault(rng: &mut Rng, kind: Kind) -> Fault {
    let mut victims: Vec<_> = (0..kind.destinations()).map(Victim::Destination).collect();
    if kind.has_source() {
        victims.push(Victim::Source);
    }
    let guest = victims[rng.usize(..victims.len())];
    victims.extend((0..kind.towlines()).map(Victim::Towline));
    let victim = victims[rng.usize(..victims.len())];
    let pause = Duration::from_millis(rng.u64(1..PAUSE_MS));
    let towline = rng.usize(..kind.towlines());
    let name = ["INT", "TERM"][rng.usize(..2)];
    let command = ["stop", "migrate_cancel"][rng.usize(..2)];
    match rng.u8(..26) {
        0 => Fault::Nothing,
        22 => Fault::HiddenProc,
        23 | 24 => Fault::CutMonitor(guest),
        25 => Fault::HoldMonitor(guest, pause),
        20 => Fault::UnreadOutput,
        21 => Fault::ClosedOutput,
        1..5 => Fault::Kill(victim),
        5..9 => Fault::Suspend(victim, pause),
        9..11 if kind.has_link() => Fault::Cut,
        11..13 if kind.has_link() => Fault::Delay(pause),
        9..13 if kind == Kind::Save => Fault::FullDisk(rng.u64(16..3500)),
        13 | 14 if kind.has_source() => Fault::Operator(command),
        15 if kind.has_source() => Fault::StopAndCont(pause / 4),
        16 => Fault::Signal(towline, name, Some(pause / 4)),
        _ => Fault::Signal(towline, name, None),
    }
}
