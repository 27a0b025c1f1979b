//! The meaning of a seed: a guest, two hosts, the links between them, and faults.

use std::time::Duration;

use fastrand::Rng;
use towline_migration::convergence::{Limits, MinWindow};
use towline_protocol::RamBlock;

use super::guest::{Layout, PAGE};
use super::net::{Knobs, Time};

/// FLUSH records with zero pages on lanes; FLUSH records without; barriers at each section's end.
const MACHINES: [&str; 3] = ["pc-q35-10.0", "pc-q35-8.2", "pc-q35-7.2"];
const NAMES: [&str; 3] = ["pc.ram", "vga.vram", "0000:00:02.0/rom"];
const LANES_MAX: usize = 8;

/// A fault in the engine that the judge must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// One page that was written is not sent again.
    DirtyPageLost,
    /// No SYNC and no FLUSH between passes.
    NoBarrier,
    /// The destination acknowledges the guest before its device state came.
    AcknowledgedEarly,
    /// The relay acknowledges it when it has sent everything.
    ForwardedEarly,
    /// The destination runs when it has loaded, not when the source is done.
    RunEarly,
}

/// A moment that a fault is aimed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// At this number of steps after the beginning.
    Begin,
    /// The source's guest is stopped.
    Stopped,
    /// The relay has sent everything.
    Sent,
    /// The destination has loaded everything.
    Loaded,
    /// The message is on the way.
    Said,
    /// The relay has it.
    Forwarding,
    /// The source has it.
    Completed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    Source,
    Destination,
    Towline,
}

/// An event at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScenarioEvent {
    /// The source's side ends the migration.
    CancelSource,
    /// Ctrl-C at the relay.
    CancelTowline,
    /// The destination cannot load the guest.
    LoadFails,
    /// A process dies.
    Kill(Who),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) moment: Moment,
    /// Rounds after it.
    pub(crate) after: u64,
    pub(crate) event: ScenarioEvent,
}

/// One simulated migration with its faults.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) machine: &'static str,
    pub(crate) layout: Layout,
    pub(crate) lanes: usize,
    /// A relay between two QEMUs, and control that hands over; else the two ends meet, and the destination
    /// runs the guest on its own.
    pub(crate) is_controlled: bool,
    /// The source is an image: it neither runs nor is lost.
    pub(crate) is_image: bool,
    pub(crate) return_path: bool,
    pub(crate) xbzrle: bool,
    /// As QEMU before 9.0: SYNC on the last packet with pages.
    pub(crate) syncs_on_pages: bool,
    /// As QEMU: several PARTs a pass.
    pub(crate) breaks_sections: bool,
    pub(crate) unit_pages: usize,
    pub(crate) write_ns: u64,
    pub(crate) hot: usize,
    pub(crate) limits: Limits,
    /// A guest that cannot converge runs on; else it is stopped for as long as it takes.
    pub(crate) gives_up: bool,
    /// Each connection of the first hop, then of the second: forward, backward, lossy.
    pub(crate) links: Vec<(Knobs, Knobs, bool)>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) mutation: Option<Mutation>,
}

impl Scenario {
    /// The scenario of a seed.
    pub(crate) fn random(rng: &mut Rng) -> Self {
        let layout = layout(rng);
        let pages = layout.pages();
        let is_controlled = rng.bool();
        let is_image = !is_controlled && rng.u8(0..8) == 0;
        let lanes = if rng.u8(0..4) == 0 { 0 } else { rng.usize(1..=LANES_MAX) };
        let is_old = rng.bool();
        let kib_ns = *rng.choice([200, 1_000, 10_000, 100_000].iter()).expect("not empty");
        let connections = (1 + lanes) * (1 + usize::from(is_controlled));
        let mut scenario = Self {
            machine: MACHINES[rng.usize(0..MACHINES.len())],
            hot: rng.usize(1..=pages),
            layout,
            lanes,
            is_controlled,
            is_image,
            return_path: !is_image || rng.bool(),
            xbzrle: lanes == 0 && !is_controlled && rng.bool(),
            syncs_on_pages: is_old && lanes > 0,
            breaks_sections: rng.bool(),
            unit_pages: rng.usize(1..=16),
            write_ns: 0,
            limits: Limits {
                downtime: Duration::from_nanos(4 * kib_ns * rng.u64(1..40)),
                switchover_cost: Duration::ZERO,
                min_window: MinWindow { passes: rng.u32(1..5), time: Duration::from_micros(rng.u64(0..500)) },
            },
            gives_up: rng.bool(),
            links: Vec::new(),
            faults: Vec::new(),
            mutation: None,
        };
        if !is_image {
            // From a tenth of what the link takes to twice that.
            scenario.write_ns = (4 * kib_ns * rng.u64(5..100) / 10).max(1);
        }
        scenario.links = (0..connections).map(|_| link(rng, kib_ns)).collect();
        scenario.break_something(rng);
        scenario
    }

    /// The machine types that differ on the wire.
    pub(crate) fn machine(number: usize) -> &'static str {
        MACHINES[number % MACHINES.len()]
    }

    fn break_something(&mut self, rng: &mut Rng) {
        for _ in 0..*rng.choice([0, 1, 1, 1, 2].iter()).expect("not empty") {
            match rng.u8(0..10) {
                0..4 => self.cut(rng),
                4 => self.stall(rng),
                _ => self.faults.push(fault(rng, self.is_controlled, self.is_image)),
            }
        }
    }

    fn cut(&mut self, rng: &mut Rng) {
        let link = rng.usize(0..self.links.len());
        let is_main = link.is_multiple_of(self.lanes + 1);
        let most = [70, 1_500, 20_000, 200_000][rng.usize(0..4)];
        let (forward, backward, is_lossy) = &mut self.links[link];
        *is_lossy = rng.bool();
        if is_main && rng.u8(0..3) == 0 {
            backward.cut_at = Some(rng.u64(0..32));
        } else {
            forward.cut_at = Some(rng.u64(0..most));
        }
    }

    fn stall(&mut self, rng: &mut Rng) {
        let link = rng.usize(0..self.links.len());
        let begin: Time = rng.u64(0..5_000_000);
        let stall = begin..begin + rng.u64(0..50_000_000);
        let (forward, backward, _) = &mut self.links[link];
        (if rng.bool() { forward } else { backward }).stall = stall;
    }
}

fn layout(rng: &mut Rng) -> Layout {
    let blocks = rng.usize(1..=NAMES.len());
    let most = [2, 8, 24][rng.usize(0..3)];
    let block = |name: &&str, rng: &mut Rng| RamBlock {
        name: (*name).into(),
        length: (rng.usize(1..=most) * PAGE) as u64,
        mapped: None,
    };
    Layout { blocks: NAMES[..blocks].iter().map(|name| block(name, rng)).collect() }
}

fn link(rng: &mut Rng, kib_ns: u64) -> (Knobs, Knobs, bool) {
    let delay_ns = [0, 1_000, 50_000, 500_000][rng.usize(0..4)];
    let jitter_ns = [0, 0, 10_000, 500_000][rng.usize(0..4)];
    let mut knobs = || Knobs {
        kib_ns,
        delay_ns,
        jitter_ns,
        // A buffer that is small for its delay makes long runs, and finds nothing more.
        capacity: [500, 3_000, 10_000, 100_000][rng.usize(0..4)].max(delay_ns as usize / 50),
        cut_at: None,
        stall: 0..0,
    };
    (knobs(), knobs(), false)
}

fn fault(rng: &mut Rng, is_controlled: bool, is_image: bool) -> Fault {
    use Moment::{Begin, Completed, Forwarding, Loaded, Said, Sent, Stopped};
    let moments: &[_] = if is_controlled {
        &[Begin, Begin, Begin, Stopped, Sent, Loaded, Said, Forwarding, Completed]
    } else {
        &[Begin, Begin, Begin, Stopped, Loaded, Said]
    };
    let events: &[_] = if is_controlled {
        &[
            ScenarioEvent::CancelSource,
            ScenarioEvent::CancelTowline,
            ScenarioEvent::LoadFails,
            ScenarioEvent::Kill(Who::Source),
            ScenarioEvent::Kill(Who::Destination),
            ScenarioEvent::Kill(Who::Towline),
        ]
    } else {
        &[
            ScenarioEvent::CancelSource,
            ScenarioEvent::LoadFails,
            ScenarioEvent::Kill(Who::Destination),
            // An image still exists afterwards.
            if is_image { ScenarioEvent::CancelSource } else { ScenarioEvent::Kill(Who::Source) },
        ]
    };
    let moment = moments[rng.usize(0..moments.len())];
    let most = if moment == Begin { [20, 300, 3_000][rng.usize(0..3)] } else { [1, 4, 60][rng.usize(0..3)] };
    Fault { moment, after: rng.u64(0..most), event: events[rng.usize(0..events.len())] }
}
