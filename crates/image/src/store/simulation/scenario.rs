//! What a seed makes: who does what, when, and what goes wrong.

use std::time::Duration;

use fastrand::Rng;

use super::super::chunk;
use super::super::fault::Fault;
use super::model::Conditions;
use super::roles::{self, Part};
use super::world::{Tally, World};

/// All that can be put back.
pub(super) const ALL_FAULTS: [Fault; 12] = [
    Fault::SharedCollection,
    Fault::GapHeals,
    Fault::SuspendedTimeIgnored,
    Fault::IndexUnchecked,
    Fault::RemovalUnchecked,
    Fault::UploadLooksFirst,
    Fault::ReadersIgnored,
    Fault::ReadersFirst,
    Fault::ReaderUnconfirmed,
    Fault::UnknownIndexIgnored,
    Fault::LateIndexIgnored,
    Fault::LateRemovalIgnored,
];

/// Long enough that everything that is left of others is old.
const LATER: Duration = Duration::from_secs(4 * 3600);

/// How often things go wrong.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chaos {
    /// Requests that do not arrive, that are late, and whose answer is lost: each.
    pub(super) failing: f64,
    /// Requests that take up to minutes.
    pub(super) slow: f64,
    /// Actors that are suspended.
    pub(super) suspensions: f64,
    /// Others that are suspended behind a request, for less than loses a lease.
    pub(super) pauses: f64,
    /// Actors that crash.
    pub(super) crashes: f64,
}

impl Chaos {
    /// Nothing goes wrong.
    pub(super) const CALM: Self =
        Self { failing: 0.0, slow: 0.0, suspensions: 0.0, pauses: 0.0, crashes: 0.0 };
}

/// One run.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) conditions: Conditions,
    pub(super) chaos: Chaos,
    pub(super) parts: Vec<(Duration, Part)>,
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
        let mut parts = if rng.u8(..4) > 0 { Part::contended(&mut rng) } else { Vec::new() };
        let more = if parts.is_empty() { rng.usize(3..=7) } else { rng.usize(0..=2) };
        parts.extend((0..more).map(|_| Part::random(&mut rng)));
        let mut starts: Vec<_> = parts.iter().map(|_| span * rng.f64()).collect();
        match rng.u8(..3) {
            0 => {}
            1 => starts.sort_by(f64::total_cmp),
            // Whoever is suspended in time is taken for dead by the others.
            _ => starts.iter_mut().skip(1).for_each(|start| *start = 3600.0 + 9000.0 * rng.f64()),
        }
        let parts = starts.into_iter().map(Duration::from_secs_f64).zip(parts).collect();
        Self { seed, conditions: kinds[rng.usize(..4)], chaos, parts }
    }
}

/// Runs it: two images and some garbage are made, everybody does their part, and then nobody is left.
pub(super) fn run(scenario: &Scenario, world: &World) -> Result<Tally, String> {
    let at_once = Duration::ZERO;
    world.run(vec![(at_once, Box::new(roles::set_up))], Chaos::CALM)?;
    let parts = scenario.parts.iter().map(|(start, part)| (*start, part.clone().role())).collect();
    world.run(parts, scenario.chaos)?;
    let tally = world.run(vec![(LATER, Box::new(roles::tidy))], Chaos::CALM)?;
    let named = world.named();
    let left = world.keys().into_iter().find(|key| {
        let key = key.strip_prefix("vm/").unwrap_or(key);
        !key.ends_with(super::super::location::SUFFIX)
            && !chunk::name(key).is_some_and(|name| named.contains(&name))
    });
    match left {
        Some(left) => Err(format!("{left} is left for ever")),
        None => Ok(tally),
    }
}
