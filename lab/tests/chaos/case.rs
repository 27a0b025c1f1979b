//! What is done in one run, all of which follows from its seed.

use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;

/// About how long an undisturbed run takes, in milliseconds.
const RUN_MS: u64 = 1500;
/// How long a process is suspended, or a link delayed, at most.
const PAUSE_MS: u64 = 1500;
/// How far behind a phase a fault comes that is aimed at it, in microseconds.
const BEHIND_US: u64 = 30_000;
/// What the source may send: enough that the guest, which writes for ever, is stopped soon.
const RATES_MIB: Range<u64> = 8..32;
/// Phases with a switchover between them.
const PHASES: [&str; 5] = ["transfer", "switchover", "loaded", "release", "cut-over"];

/// What is copied, from where to where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From QEMU to QEMU.
    Copy,
    /// The same, and the source is ended.
    Move,
    /// From QEMU into an image.
    Save,
    /// Out of an image, as a stream or by QEMU itself.
    Restore { stream: bool },
    /// Out of an image into two QEMUs.
    Clones,
    /// A move by a towline at each end, with a link between them.
    Towlines,
    /// A move to a stock QEMU that listens, over a link.
    ToStock,
    /// From a stock QEMU that nobody of ours drives, over a link.
    FromStock,
}

impl Kind {
    /// Whether there is a link that can be cut.
    pub(crate) fn has_link(self) -> bool {
        matches!(self, Self::Towlines | Self::ToStock | Self::FromStock)
    }

    /// Whether a guest runs at its source at the beginning.
    pub(crate) fn has_source(self) -> bool {
        !matches!(self, Self::Restore { .. } | Self::Clones)
    }

    /// How many QEMUs wait for it.
    pub(crate) fn destinations(self) -> usize {
        match self {
            Self::Save => 0,
            Self::Clones => 2,
            _ => 1,
        }
    }

    /// How many towlines there are.
    pub(crate) fn towlines(self) -> usize {
        if self == Self::Towlines { 2 } else { 1 }
    }
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    Source,
    Destination(usize),
    Towline(usize),
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Nothing,
    /// SIGKILL.
    Kill(Victim),
    /// SIGSTOP, and SIGCONT some time after.
    Suspend(Victim, Duration),
    /// The link is reset.
    Cut,
    /// The link carries nothing for some time.
    Delay(Duration),
    /// The filesystem that the image goes to has this many KiB: fewer than the guest fills.
    FullDisk(u64),
    /// Somebody says this at the source's monitor.
    Operator(&'static str),
    /// Somebody says `stop` there, and some time after `cont`.
    StopAndCont(Duration),
    /// A signal to a towline, and once more some time after.
    Signal(usize, &'static str, Option<Duration>),
    /// What the last towline writes goes into a pipe that is full, and that nobody reads.
    UnreadOutput,
    /// The same, and its reader closes it: what is written then is `EPIPE`.
    ClosedOutput,
    /// The last towline runs where nothing is mounted at `/proc`.
    HiddenProc,
    /// The proxy between towline and this QEMU's monitor ends.
    CutMonitor(Victim),
    /// It carries nothing for some time.
    HoldMonitor(Victim, Duration),
}

/// When.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// So long after the start.
    After(Duration),
    /// So long after a towline began this phase.
    Behind(&'static str, Duration),
}

/// One run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) fault: Fault,
    pub(crate) moment: Moment,
    pub(crate) lanes: usize,
    /// Bytes per second that the source may send, in MiB.
    pub(crate) rate_mib: u64,
    pub(crate) sweep_pages: u32,
    /// Whether there is a proxy in front of each monitor.
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
        // One whose output goes to nobody does not say where it is.
        let is_hidden = matches!(fault, Fault::UnreadOutput | Fault::ClosedOutput);
        let moment = match rng.bool() || is_hidden {
            true => Moment::After(Duration::from_millis(rng.u64(..RUN_MS))),
            false => {
                let behind = if rng.bool() { rng.u64(..BEHIND_US) } else { 0 };
                Moment::Behind(PHASES[rng.usize(..PHASES.len())], Duration::from_micros(behind))
            }
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

    /// Whether a process of this kind is killed.
    pub(crate) fn kills(&self, victim: Victim) -> bool {
        self.fault == Fault::Kill(victim)
    }

    /// Whether what a towline says goes to nobody.
    pub(crate) fn hides_output(&self) -> bool {
        matches!(self.fault, Fault::UnreadOutput | Fault::ClosedOutput)
    }

    /// Whether an operator may have paused the guest.
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
