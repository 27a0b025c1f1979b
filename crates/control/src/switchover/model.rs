//! Model check of the switchover against every order of events of two QEMUs, one or two towlines, an operator
//! and a failing network.
//!
//! ```text
//!   QEMU ── link ── towline ── link ── QEMU                     one towline that drives both, or one of them
//!   QEMU ── link ── towline ── link ── towline ── link ── QEMU    one at each end
//! ```
//! A breadth-first search ([`explore`]) over whole worlds: in each one every possible step of every party is tried, and
//! each new world is kept. Its worlds hold the real [`Switchover`]. QEMU
//! is modelled as it behaves: a failed source has its guest back and resumes it by itself, an acknowledged
//! one stops for good; a `qmp:` destination loads and stays paused; any other runs the guest with the last
//! byte. Mishaps (a lost connection, an exit, a monitor without reply, an operator, a cancellation, a full
//! disk) are limited by a budget; steps of the protocol are not.
//!
//! The invariants exempt what no protocol can exclude: an operator who resumes the guest at a completed
//! source; and, with a destination that runs the guest by itself, an operator who cancels at the source or a
//! towline that is killed between the last byte and the acknowledgement.
//!
//! A towline can be killed at any point, also between a record and the action on it, and its disk can be
//! full, become read-only or lose the records at any point as well. Another party can send `cont` to the
//! destination, while it loads and later, pause it again, and send a source's guest elsewhere when no towline
//! watches it. A later towline then queries each end alone or both, and finishes the move as
//! [`InterruptedMove`](super::InterruptedMove) decides: by evidence, never by a choice, which is an
//! operator's.
//!
//! One destination stands for all clones of an image. Each has its own machine, QEMU, connection and outcome;
//! the source is an image, which no outcome changes; and no input of a machine comes from another clone. A
//! world of N clones is the product of N worlds that share no variable, so every invariant that holds in each
//! holds in all. A cancellation of all of them is a step of each.

mod invariants;
mod world;

use super::fault::{FaultSwitch, SwitchoverBug};
use super::{
    DestinationKind, GuestRunState, MemorySharing, RunRequest, SourceAction, SourceKind, SwitchoverRequest,
};
use crate::explore::{Model, explore};
use world::{Step, World};

impl Model for World {
    type Step = Step;

    fn check(&self) -> Result<(), String> {
        invariants::check(self)
    }

    fn steps(&self) -> Vec<Step> {
        World::steps(self)
    }

    fn after(&self, step: Step) -> Self {
        World::after(*self, step)
    }
}

/// Number of mishaps in one run; the soak test sets more with `TOWLINE_MODEL_MISHAPS`.
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
    let memory = MemorySharing::Copied;
    let of =
        |&after| runs.iter().map(move |&run| SwitchoverRequest { source, destination, run, after, memory });
    afters.iter().flat_map(of).collect()
}

/// Every pair of ends that a command with one towline can have.
fn pairs() -> Vec<SwitchoverRequest> {
    let sources = [SourceKind::Qemu, SourceKind::Stream, SourceKind::Stored];
    let destinations = [DestinationKind::Qemu, DestinationKind::Stream, DestinationKind::Stored];
    sources.iter().flat_map(|&from| destinations.iter().flat_map(move |&to| requests(from, to))).collect()
}

/// A QEMU that is replaced under its guest.
fn upgrade() -> SwitchoverRequest {
    SwitchoverRequest {
        source: SourceKind::Qemu,
        destination: DestinationKind::Qemu,
        run: RunRequest::AsItWas,
        after: SourceAction::Quit,
        memory: MemorySharing::Shared,
    }
}

/// Guests that run at their destination before all of their memory is there.
fn postcopies() -> Vec<SwitchoverRequest> {
    let memory = MemorySharing::Postcopy;
    // Each request, and each action, in some world.
    let between_qemus = requests(SourceKind::Qemu, DestinationKind::Qemu).into_iter().filter(|request| {
        request.run == RunRequest::AsItWas
            || (request.run == RunRequest::Run) == (request.after == SourceAction::KeepPaused)
    });
    let restored = [DestinationKind::Qemu, DestinationKind::Stream];
    let restored = restored.into_iter().flat_map(|to| requests(SourceKind::Stored, to));
    between_qemus.chain(restored).map(|request| SwitchoverRequest { memory, ..request }).collect()
}

fn check(name: &str, worlds: impl IntoIterator<Item = World>) -> (usize, usize) {
    let (mut states, mut depth) = (0, 0);
    let started = std::time::Instant::now();
    for world in worlds {
        let explored = explore(world);
        if let Some((text, steps)) = explored.violation {
            panic!("{name}: {text}\n{world:#?}\nafter {steps:#?}");
        }
        (states, depth) = (states + explored.states, depth.max(explored.depth));
    }
    println!("{name}: {states} states, {depth} steps deep, {} mishaps, {:.1?}", budget(), started.elapsed());
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

/// Up to `cont` at the new QEMU every failure gives the old one its guest back; from then on it never runs
/// the guest.
#[test]
fn an_upgrade_keeps_every_guest_once_and_its_memory_consistent() {
    let worlds = GUESTS.map(|guest| World::with_one(upgrade(), guest, budget(), FaultSwitch::default()));
    let (states, depth) = check("upgrade", worlds);
    assert!(states > 1000 && depth > 10, "{states} states, {depth} deep");
}

/// A guest that has switched is run by its destination alone, and an end that lacks memory is named.
#[test]
fn postcopy_keeps_every_guest_once() {
    let worlds = postcopies().into_iter().flat_map(|request| {
        GUESTS.map(|guest| World::with_one(request, guest, budget(), FaultSwitch::default()))
    });
    let (states, depth) = check("postcopy", worlds);
    assert!(states > 10_000 && depth > 15, "{states} states, {depth} deep");
}

#[test]
fn two_towlines_keep_every_guest_once() {
    check_two("two towlines", MemorySharing::Copied, &GUESTS);
}

/// As before, with QEMUs that are connected to each other: a source gets its guest back until its towline has sent that it is done.
#[test]
fn two_towlines_beside_connected_qemus_keep_every_guest_once() {
    let guests = [GuestRunState::Running, GuestRunState::Stopped];
    check_two("two towlines, connected QEMUs", MemorySharing::Connected, &guests);
}

/// As before, with a source that may be switched to postcopy.
#[test]
fn two_towlines_beside_qemus_in_postcopy_keep_every_guest_once() {
    let guests = [GuestRunState::Running, GuestRunState::Stopped];
    check_two("two towlines, postcopy", MemorySharing::ConnectedPostcopy, &guests);
}

fn check_two(name: &str, memory: MemorySharing, guests: &[GuestRunState]) {
    let worlds = [SourceAction::KeepPaused, SourceAction::Quit].into_iter().flat_map(|after| {
        let of = move |&guest| World::with_two(after, memory, guest, budget(), FaultSwitch::default());
        guests.iter().map(of)
    });
    let (states, depth) = check(name, worlds);
    assert!(states > 10_000 && depth > 15, "{states} states, {depth} deep");
}

/// A source that was sent runs its guest again only in a generation that its destination then does not get.
#[test]
fn a_guest_with_generations_runs_once() {
    let of = |after, memory, guest| {
        World::with_two(after, memory, guest, budget(), FaultSwitch::default()).with_generations()
    };
    let worlds = [SourceAction::KeepPaused, SourceAction::Quit]
        .into_iter()
        .flat_map(|after| GUESTS.map(|guest| of(after, MemorySharing::Copied, guest)));
    let connected = of(SourceAction::Quit, MemorySharing::Connected, GuestRunState::Running);
    let (states, depth) = check("generations", worlds.chain([connected]));
    assert!(states > 10_000 && depth > 15, "{states} states, {depth} deep");
}

/// Every known fault is found when it is injected.
#[test]
fn injected_faults_are_found() {
    let faults = [
        SwitchoverBug::CancelAfterCommit,
        SwitchoverBug::UndoesCommitted,
        SwitchoverBug::IgnoresLink,
        SwitchoverBug::TimeoutIsExit,
        SwitchoverBug::CompletesCancelledSource,
        SwitchoverBug::RunsWhenCut,
        SwitchoverBug::AbandonsCompleteDestination,
        SwitchoverBug::ActsBeforeRecord,
        SwitchoverBug::ResumesWithoutEvidence,
        SwitchoverBug::ReportsNotRunUnseen,
        SwitchoverBug::RevivesSharedSource,
        SwitchoverBug::EndsBeforeRetract,
        SwitchoverBug::ResumeTakesRunBack,
        SwitchoverBug::ReportsPausedUnretracted,
        SwitchoverBug::OverlooksRunningDestination,
        SwitchoverBug::LocksWhenLoaded,
        SwitchoverBug::RunsAfterLoading,
        SwitchoverBug::TakesAnyCompletion,
        SwitchoverBug::LeftHasNotRun,
        SwitchoverBug::FencedHasNotRun,
    ];
    for fault in faults {
        let one = pairs().into_iter().chain([upgrade()]).map(|request| {
            World::with_one(request, GuestRunState::Running, budget(), FaultSwitch::with(fault))
        });
        find(fault, one.chain([with_fault(MemorySharing::Copied, fault)]));
    }
}

/// Two towlines that keep the guest paused at its source, one of which has this fault.
fn with_fault(memory: MemorySharing, fault: SwitchoverBug) -> World {
    let (after, guest) = (SourceAction::KeepPaused, GuestRunState::Running);
    World::with_two(after, memory, guest, budget(), FaultSwitch::with(fault))
}

/// The same of QEMUs that are connected to each other.
#[test]
fn injected_faults_of_connected_qemus_are_found() {
    let faults = [
        SwitchoverBug::RunsWhenCut,
        SwitchoverBug::CompletesCancelledSource,
        SwitchoverBug::ActsBeforeRecord,
        SwitchoverBug::TimeoutIsExit,
        SwitchoverBug::ResumesWithoutEvidence,
        SwitchoverBug::ReportsNotRunUnseen,
        SwitchoverBug::RegainsCompleted,
    ];
    for fault in faults {
        find(fault, [with_fault(MemorySharing::Connected, fault)].into_iter());
    }
    let of_postcopy = [
        SwitchoverBug::CompletesWithoutMemory,
        SwitchoverBug::RunsWithoutMemory,
        SwitchoverBug::ReportsNotRunUnseen,
        SwitchoverBug::RegainsDisconnected,
    ];
    for fault in of_postcopy {
        find(fault, [with_fault(MemorySharing::ConnectedPostcopy, fault)].into_iter());
    }
}

#[test]
fn a_destination_that_runs_without_its_generation_is_found() {
    let fault = SwitchoverBug::RunsWithoutGeneration;
    find(fault, std::iter::once(with_fault(MemorySharing::Copied, fault).with_generations()));
}

/// The same of postcopy.
#[test]
fn injected_faults_of_postcopy_are_found() {
    let faults = [
        SwitchoverBug::ConnectsUnrecorded,
        SwitchoverBug::LostReplyIsRefusal,
        SwitchoverBug::CancelAfterSwitch,
        SwitchoverBug::RunsBeforeSwitch,
        SwitchoverBug::PausedIsFailed,
        SwitchoverBug::UnseenSourceHasGuest,
        SwitchoverBug::CompletesWithoutMemory,
        SwitchoverBug::DecidesAgain,
        SwitchoverBug::ResumesWithoutMemory,
        SwitchoverBug::UnloadedIsSafe,
        SwitchoverBug::LostMonitorIsExit,
    ];
    for fault in faults {
        let worlds = postcopies().into_iter().map(|request| {
            World::with_one(request, GuestRunState::Running, budget(), FaultSwitch::with(fault))
        });
        find(fault, worlds);
    }
}

fn find(fault: SwitchoverBug, mut worlds: impl Iterator<Item = World>) {
    let found = worlds.find_map(|world| explore(world).violation);
    let (text, steps) = found.unwrap_or_else(|| panic!("{fault:?} is not found"));
    println!("{fault:?}: {text}, after {} steps: {steps:?}", steps.len());
}
