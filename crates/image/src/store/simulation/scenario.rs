//! Scenarios derived from seeds: the actors' tasks, their start times, and the rates of failures.

use std::time::Duration;

use fastrand::Rng;

use super::super::chunk;
use super::super::fault::StoreBug;
use super::model::Conditions;
use super::roles::{self, Task};
use super::world::{EventCounts, World};

/// All bugs that can be enabled.
pub(super) const ALL_FAULTS: [StoreBug; 12] = [
    StoreBug::SharedCollection,
    StoreBug::GapHeals,
    StoreBug::SuspendedTimeIgnored,
    StoreBug::IndexUnchecked,
    StoreBug::RemovalUnchecked,
    StoreBug::UploadChecksFirst,
    StoreBug::ReadersIgnored,
    StoreBug::ReadersFirst,
    StoreBug::ReaderUnconfirmed,
    StoreBug::UnknownIndexIgnored,
    StoreBug::LateIndexIgnored,
    StoreBug::LateRemovalIgnored,
];

/// Time after which all leases of ended actors have expired.
const LATER: Duration = Duration::from_secs(4 * 3600);

/// Rates of failures.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chaos {
    /// Rate of lost requests, of late requests, and of lost responses, each.
    pub(super) failing: f64,
    /// Rate of requests that take up to minutes.
    pub(super) slow: f64,
    /// Rate of suspended actors.
    pub(super) suspensions: f64,
    /// Rate of other actors that are suspended between requests, too briefly to lose a lease.
    pub(super) pauses: f64,
    /// Rate of actors that crash.
    pub(super) crashes: f64,
}

impl Chaos {
    /// No failures.
    pub(super) const CALM: Self =
        Self { failing: 0.0, slow: 0.0, suspensions: 0.0, pauses: 0.0, crashes: 0.0 };
}

/// A scenario.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) conditions: Conditions,
    pub(super) chaos: Chaos,
    pub(super) tasks: Vec<(Duration, Task)>,
}

impl Scenario {
    pub(super) fn random(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0x5eed);
        let kinds = [Conditions::All, Conditions::Create, Conditions::Refused, Conditions::Ignored];
        let chaos = Chaos {
            failing: [0.0, 0.02, 0.1][rng.usize(..3)],
            slow: [0.0, 0.1, 0.7][rng.usize(..3)],
            suspensions: [0.0, 0.3, 1.0][rng.usize(..3)],
            pauses: [0.0, 0.3, 1.0][rng.usize(..3)],
            crashes: [0.0, 0.1][rng.usize(..2)],
        };
        let span = [1.0, 60.0, 1800.0, 10_000.0][rng.usize(..4)];
        let mut tasks = if rng.u8(..4) > 0 { Task::contended(&mut rng) } else { Vec::new() };
        let more = if tasks.is_empty() { rng.usize(3..=7) } else { rng.usize(0..=2) };
        tasks.extend((0..more).map(|_| Task::random(&mut rng)));
        let mut starts: Vec<_> = tasks.iter().map(|_| span * rng.f64()).collect();
        match rng.u8(..3) {
            0 => {}
            1 => starts.sort_by(f64::total_cmp),
            // Actors suspended for this time are considered dead by the others.
            _ => starts.iter_mut().skip(1).for_each(|start| *start = 3600.0 + 9000.0 * rng.f64()),
        }
        let tasks = starts.into_iter().map(Duration::from_secs_f64).zip(tasks).collect();
        Self { seed, conditions: kinds[rng.usize(..4)], chaos, tasks }
    }
}

/// Runs a scenario: creates two images and some garbage, runs all tasks, and checks the remaining objects.
pub(super) fn run(scenario: &Scenario, world: &World) -> Result<EventCounts, String> {
    let at_once = Duration::ZERO;
    world.run(vec![(at_once, Box::new(roles::set_up))], Chaos::CALM)?;
    let tasks = scenario.tasks.iter().map(|(start, task)| (*start, task.clone().role())).collect();
    world.run(tasks, scenario.chaos)?;
    let counts = world.run(vec![(LATER, Box::new(roles::final_checks))], Chaos::CALM)?;
    let named = world.referenced();
    let left = world.keys().into_iter().find(|key| {
        let key = key.strip_prefix("vm/").unwrap_or(key);
        !key.ends_with(crate::Location::SUFFIX) && !chunk::name(key).is_some_and(|name| named.contains(&name))
    });
    match left {
        Some(left) => Err(format!("{left} is never collected")),
        None => Ok(counts),
    }
}
