//! The machine, tried against every order of events that two QEMUs, one or two towlines, an operator and a bad network can make.
//!
//! ```text
//!   QEMU ── link ── towline ── link ── QEMU                     one towline that drives both, or one of them
//!   QEMU ── link ── towline ── link ── towline ── link ── QEMU    one at each end
//! ```
//! A breadth-first search over whole worlds: at each one every step that anybody can take is tried, and every world that was not
//! there before is kept. The search is our own: it needs a set, a queue and the way back to the start, which is less than a
//! library for it asks for, and its worlds hold the real [`Switchover`]. QEMU is modelled as it behaves: a source that fails
//! has its guest back and runs it by itself, one that is acknowledged stops for good; a `qmp:` destination loads and stays
//! paused; another runs the guest with the last byte. Mishaps (a cut, a death, a silence, an operator, a cancellation, a full
//! disk) are bounded by a budget; steps of the protocol are not.
//!
//! What the judge allows, since no protocol can do without: an operator who runs the guest at a source that is complete; and with
//! a destination that runs by itself, an operator who cancels at the source, or a towline that is killed, between the last byte and
//! the acknowledgement.
//!
//! A towline dies at any point, also between a record and what is done by it, and the disk is full. Whatever is left then is looked at by
//! a later towline, at each end alone or with what both know, and finished as [`InterruptedMove`](super::InterruptedMove) has it: by evidence, and never by a
//! choice, which is an operator's.
//!
//! One destination stands for all clones of an image: each has a machine, a QEMU, a connection and an outcome of its own, the source is an
//! image, which no outcome changes and of which no machine waits for another one's, and nothing that one machine takes in comes from
//! another one's destination. A world of N of them is the product of N worlds that share no variable, so that whatever holds in each holds in all. That a
//! cancellation reaches all of them is a step that each has.

mod invariants;
mod world;

use std::collections::{HashMap, VecDeque};

use super::fault::{Fault, FaultSwitch};
use super::{DestinationKind, GuestRunState, RunRequest, SourceAction, SourceKind, SwitchoverRequest};
use world::{Step, World};

/// What a search came to.
pub(super) struct Explored {
    pub(super) states: usize,
    pub(super) depth: usize,
    /// The first violation, and the steps that lead there.
    pub(super) violation: Option<(String, Vec<Step>)>,
}

/// Tries everything from `start` on.
pub(super) fn explore(start: World) -> Explored {
    let mut seen: HashMap<World, Option<(usize, Step)>> = HashMap::new();
    let mut order = vec![(start, 0)];
    let mut queue = VecDeque::from([0]);
    seen.insert(start, None);
    let mut depth = 0;
    while let Some(index) = queue.pop_front() {
        let (world, at) = order[index];
        depth = depth.max(at);
        if let Err(text) = invariants::check(&world) {
            return Explored {
                states: order.len(),
                depth,
                violation: Some((text, way(&seen, &order, world))),
            };
        }
        for step in world.steps() {
            let next = world.after(step);
            if let std::collections::hash_map::Entry::Vacant(entry) = seen.entry(next) {
                entry.insert(Some((index, step)));
                order.push((next, at + 1));
                queue.push_back(order.len() - 1);
            }
        }
    }
    Explored { states: order.len(), depth, violation: None }
}

fn way(
    seen: &HashMap<World, Option<(usize, Step)>>,
    order: &[(World, usize)],
    mut world: World,
) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some(Some((from, step))) = seen.get(&world) {
        steps.push(*step);
        world = order[*from].0;
    }
    steps.reverse();
    steps
}

/// Mishaps in one run: more with `TOWLINE_MODEL_MISHAPS`, as the soak has it.
fn budget() -> u8 {
    std::env::var("TOWLINE_MODEL_MISHAPS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

const GUESTS: [GuestRunState; 3] = [GuestRunState::Running, GuestRunState::Suspended, GuestRunState::Stopped];
const RUNS: [RunRequest; 3] = [RunRequest::AsItWas, RunRequest::Run, RunRequest::Pause];

fn requests(source: SourceKind, destination: DestinationKind) -> Vec<SwitchoverRequest> {
    let afters: &[SourceAction] = match (source, destination) {
        (SourceKind::Qemu, DestinationKind::Stored) => {
            &[SourceAction::KeepPaused, SourceAction::Resume, SourceAction::Quit]
        }
        (SourceKind::Qemu, _) => &[SourceAction::KeepPaused, SourceAction::Quit],
        _ => &[SourceAction::KeepPaused],
    };
    let runs: &[RunRequest] = if destination == DestinationKind::Qemu { &RUNS } else { &RUNS[..1] };
    let of = |&after| runs.iter().map(move |&run| SwitchoverRequest { source, destination, run, after });
    afters.iter().flat_map(of).collect()
}

/// Every pair of ends that a command can have with one towline.
fn pairs() -> Vec<SwitchoverRequest> {
    let sources = [SourceKind::Qemu, SourceKind::Stream, SourceKind::Stored];
    let destinations = [DestinationKind::Qemu, DestinationKind::Stream, DestinationKind::Stored];
    sources.iter().flat_map(|&from| destinations.iter().flat_map(move |&to| requests(from, to))).collect()
}

fn check(name: &str, worlds: impl IntoIterator<Item = World>) -> (usize, usize) {
    let (mut states, mut depth) = (0, 0);
    let begun = std::time::Instant::now();
    for world in worlds {
        let explored = explore(world);
        if let Some((text, steps)) = explored.violation {
            panic!("{name}: {text}\n{world:#?}\nafter {steps:#?}");
        }
        (states, depth) = (states + explored.states, depth.max(explored.depth));
    }
    println!("{name}: {states} states, {depth} steps deep, {} mishaps, {:.1?}", budget(), begun.elapsed());
    (states, depth)
}

#[test]
fn one_towline_between_any_two_ends_keeps_every_guest_once() {
    let worlds = pairs().into_iter().flat_map(|request| {
        GUESTS.map(|guest| World::with_one(request, guest, budget(), FaultSwitch::default()))
    });
    let (states, depth) = check("one towline", worlds);
    assert!(states > 10_000 && depth > 10, "{states} states, {depth} deep");
}

#[test]
fn two_towlines_keep_every_guest_once() {
    let worlds = [SourceAction::KeepPaused, SourceAction::Quit].into_iter().flat_map(|after| {
        GUESTS.map(|guest| World::with_two(after, guest, budget(), FaultSwitch::default()))
    });
    let (states, depth) = check("two towlines", worlds);
    assert!(states > 10_000 && depth > 15, "{states} states, {depth} deep");
}

/// Every fault that was there is found when it is put back.
#[test]
fn faults_that_are_put_back_are_found() {
    let faults = [
        Fault::CancelAfterCommit,
        Fault::UndoesCommitted,
        Fault::IgnoresLink,
        Fault::TimeoutIsExit,
        Fault::CompletesCancelledSource,
        Fault::RunsWhenCut,
        Fault::AbandonsCompleteDestination,
        Fault::ActsBeforeRecord,
        Fault::ResumesWithoutEvidence,
        Fault::ReportsNotRunUnseen,
    ];
    for fault in faults {
        let one = pairs().into_iter().map(|request| {
            World::with_one(request, GuestRunState::Running, budget(), FaultSwitch::with(fault))
        });
        let two = World::with_two(
            SourceAction::KeepPaused,
            GuestRunState::Running,
            budget(),
            FaultSwitch::with(fault),
        );
        let found = one.chain([two]).find_map(|world| explore(world).violation);
        let (text, steps) = found.unwrap_or_else(|| panic!("{fault:?} is not found"));
        println!("{fault:?}: {text}, after {} steps: {steps:?}", steps.len());
    }
}
