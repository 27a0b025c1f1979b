//! Model check of a protection against every order of events of both hosts, the way between them, and the arbiter.
//!
//! ```text
//!   guest ─► card                              way: checkpoints, acknowledgements
//!     └────► ferry ───────────────────────────────────────────────────────► standby ─► its QEMU ─► its card
//!              └─ keeper ── session: release ───────────────────────────────┘  │
//!                   └─────────────── arbiter: one claimant for each generation ┘
//! ```
//! Each process may be as slow as it likes: every order of steps is explored. Mishaps are limited by a budget: a process that is killed, a cut, a
//! timeout that fires although the other end lives, an arbiter that does not answer, an order of the user or of the guest. A card, and a killed keeper,
//! are replaced: by a new process that holds, and by a repair.
//!
//! Properties: what has left the guest's card, the standby's state has sent as well, as long as the standby can go on, and then for ever; the
//! card does not pass while the guest runs at the other host; a guest that was shut down does not go on; and in the end one guest runs,
//! and its output goes, unless the last host with its state was killed.
//!
//! The protocol is explored with all rules kept. Some that concern a QEMU which has just died are kept by the code only within its times.
//!
//! A guest that is shut down goes on all the same if the keeper does not see that in time: it or the ferry was killed, or the way was lost before.
//!
//! A model of frames needs no more than the epoch in which each was sent: it keeps the highest one.

mod cluster;
mod effects;
mod invariants;
mod mishaps;
mod steps;
mod world;

use std::time::Instant;

use crate::explore::{Explored, Model, explore};
use steps::Step;
use world::World;

/// Rules of the protocol. Each is needed: without it, a property is violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Rule {
    /// The card holds before the guest runs in its first epoch.
    HoldsFirst,
    /// An epoch ends where the guest is stopped for its checkpoint.
    MarksWhileStopped,
    /// Output is released once its checkpoint is acknowledged.
    ReleasesAcknowledged,
    /// A checkpoint is acknowledged once it is written.
    AcknowledgesApplied,
    /// A standby whose memory is of no checkpoint does not go on.
    TornIsNoState,
    /// A card that is started again holds.
    NewCardHolds,
    /// The keeper knows that the standby may go on before that can have a checkpoint.
    NotedBeforeGo,
    /// The keeper claims before it lets output go.
    KeeperClaims,
    /// So does a repair.
    RepairClaims,
    /// It does so as the keeper that was killed.
    RepairHasClaimant,
    /// The protection of a keeper that was killed is decided before the guest is protected again.
    RepairsFirst,
    /// The guest runs on when its checkpoints have ended.
    RunsGuestOn,
    /// The standby claims before it runs the guest.
    StandbyClaims,
    /// The standby's QEMU has loaded the guest before it claims.
    LoadsFirst,
    /// The one that has lost a claim ends its guest.
    LoserEnds,
    /// A claim that is made again has the same result.
    ClaimsAreIdempotent,
    /// A standby that decides does not confirm its release.
    NoReleaseOnceDeciding,
    /// A guest that was shut down is not left to the standby.
    ShutdownIsNoDeath,
    /// A part may be missed because the guest was shut down.
    LossMayBeShutdown,
    /// The ferry keeps the way open while the keeper decides what has ended.
    KeepsWayOpen,
    /// The standby is released only if the guest's QEMU lives.
    ReleasesForLivingGuest,
    /// So is a generation claimed by the keeper.
    KeeperClaimsForLivingGuest,
    /// A standby claims only while its QEMU lives.
    StandbyClaimsForLivingGuest,
    /// A QEMU whose monitor is closed is seen to have exited.
    ExitIsSeen,
    // Those of a cluster as the arbiter.
    /// The guest's host has a generation once the other host's instance was stopped.
    ClusterStopsOthers,
    /// A stop ends the QEMU that waits.
    StopEndsWaiting,
    /// The standby has a generation once it is promoted.
    ClusterPromotes,
    /// A demotion kills the guest.
    DemotionKills,
    /// A request of a host that has lost its quorum is not carried out later.
    RequestsAreNotKept,
}

/// A rule, the least world in which it is needed, and what is violated there without it.
struct Need {
    rule: Rule,
    mishaps: u8,
    violated: &'static str,
}

impl Need {
    const fn new(rule: Rule, mishaps: u8, violated: &'static str) -> Self {
        Self { rule, mishaps, violated }
    }

    fn world(&self) -> World {
        let may_retry = self.rule == Rule::RepairsFirst;
        // With fewer mishaps there are fewer worlds.
        World::new(self.mishaps, 3 - self.mishaps, may_retry, Some(self.rule))
    }
}

const OUTPUT: &str = "output has left after checkpoint 1, from which the standby goes on";
const LOST: &str = "the guest is lost";
const SHUT_DOWN: &str = "a guest that was shut down runs at the other host";

const NEEDS: [Need; 24] = [
    Need::new(Rule::HoldsFirst, 1, OUTPUT),
    Need::new(Rule::MarksWhileStopped, 1, OUTPUT),
    Need::new(Rule::ReleasesAcknowledged, 1, OUTPUT),
    Need::new(Rule::AcknowledgesApplied, 1, OUTPUT),
    Need::new(Rule::TornIsNoState, 1, OUTPUT),
    Need::new(Rule::NewCardHolds, 1, OUTPUT),
    Need::new(Rule::NotedBeforeGo, 1, OUTPUT),
    Need::new(Rule::KeeperClaims, 1, OUTPUT),
    Need::new(Rule::RepairClaims, 1, OUTPUT),
    Need::new(Rule::RepairHasClaimant, 2, LOST),
    Need::new(Rule::RepairsFirst, 2, OUTPUT),
    Need::new(Rule::RunsGuestOn, 1, "the guest is stopped for ever"),
    Need::new(Rule::StandbyClaims, 1, OUTPUT),
    Need::new(Rule::LoadsFirst, 2, LOST),
    Need::new(Rule::LoserEnds, 1, "the guest runs at both hosts for ever"),
    Need::new(Rule::ClaimsAreIdempotent, 2, LOST),
    Need::new(Rule::NoReleaseOnceDeciding, 1, OUTPUT),
    Need::new(Rule::ShutdownIsNoDeath, 1, SHUT_DOWN),
    Need::new(Rule::LossMayBeShutdown, 1, SHUT_DOWN),
    Need::new(Rule::KeepsWayOpen, 1, SHUT_DOWN),
    Need::new(Rule::ReleasesForLivingGuest, 2, LOST),
    Need::new(Rule::KeeperClaimsForLivingGuest, 2, LOST),
    Need::new(Rule::StandbyClaimsForLivingGuest, 2, LOST),
    Need::new(Rule::ExitIsSeen, 1, LOST),
];

impl Model for World {
    type Step = Step;

    fn check(&self) -> Result<(), String> {
        self.verify()
    }

    fn steps(&self) -> Vec<Step> {
        self.own_steps().into_iter().chain(self.mishap_steps()).collect()
    }

    fn after(&self, step: Step) -> Self {
        self.taking(step)
    }
}

const CLUSTER_NEEDS: [Need; 5] = [
    Need::new(Rule::ClusterStopsOthers, 1, OUTPUT),
    Need::new(Rule::StopEndsWaiting, 1, OUTPUT),
    Need::new(Rule::ClusterPromotes, 1, OUTPUT),
    Need::new(Rule::DemotionKills, 2, "the guest's output is held for ever"),
    Need::new(Rule::RequestsAreNotKept, 2, LOST),
];

/// Number of mishaps; the soak test sets more with `TOWLINE_MODEL_MISHAPS`.
fn budget() -> u8 {
    std::env::var("TOWLINE_MODEL_MISHAPS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

fn explore_whole(name: &str, world: World) -> Explored<Step> {
    let begun = Instant::now();
    let explored = explore(world);
    if let Some((text, steps)) = &explored.violation {
        panic!("{name}: {text} after {steps:#?}");
    }
    println!("{name}: {} states, {} steps deep, {:.1?}", explored.states, explored.depth, begun.elapsed());
    explored
}

#[test]
fn a_protected_guest_runs_once_and_its_output_stays_true() {
    let explored = explore_whole("one attempt", World::new(budget(), 2, false, None));
    assert!(explored.states > 10_000 && explored.depth > 30);
}

/// A former standby, which may be late, has no part in it.
#[test]
fn a_guest_that_is_protected_again_runs_once() {
    let explored = explore_whole("two attempts", World::new(budget(), 1, true, None));
    assert!(explored.states > 10_000 && explored.depth > 40);
}

#[test]
fn a_guest_of_which_a_cluster_decides_runs_once() {
    for (epochs, may_retry) in [(2, false), (1, true)] {
        let world = World::of_cluster(budget(), epochs, may_retry, None);
        let explored = explore_whole("a cluster", world);
        assert!(explored.states > 10_000 && explored.depth > 30);
    }
}

/// Without any one of them, a property is violated.
#[test]
fn each_rule_is_needed() {
    let own = NEEDS.map(|need| (need.world(), need));
    let of_cluster =
        CLUSTER_NEEDS.map(|need| (World { cluster: Some(cluster::Cluster::NEW), ..need.world() }, need));
    for (world, need) in own.into_iter().chain(of_cluster) {
        let (rule, explored) = (need.rule, explore(world));
        let (text, steps) =
            explored.violation.unwrap_or_else(|| panic!("without {rule:?} nothing is violated"));
        println!("without {rule:?}: {text}, after {} steps: {steps:?}", steps.len());
        assert_eq!(text, need.violated, "without {rule:?}");
    }
}
