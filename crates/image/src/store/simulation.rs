//! Uploads, readers and collections on one prefix in simulated time, checked against the guarantees of
//! docs/store.md.
//!
//! ```text
//!   Scenario::random(seed) ─► World: actors, one at a time ─► requests ─► model of a store ─► checks
//! ```
//!
//! Real code: leases, uploads, index objects, collections and the reader, above `object_store`'s trait.
//! Simulated: the store below that trait ([`model`]), with four kinds of conditional writes, requests that
//! fail, are late or lose their response, and retries below the trait, which are checked as in `connector`.
//! Actors crash and are suspended for hours. Not covered: HTTP, the spool, hashing threads.
//!
//! Checked: a present index references only present chunks, at all times; a reader that has begun reads its
//! whole image, unless its lease was not renewed for [`LEASE_AGE_MAX`], and then its error says so; after all
//! actors have ended, one collection leaves only the images and their chunks, and an upload and a read
//! succeed.
//!
//! Deterministic: without clocks, and one thread at a time, so a seed replays its run.
//! `TOWLINE_SEEDS=first..last` (or a count) selects other seeds than the first [`SEEDS`]; `cargo xtask soak
//! store-leases` runs 100,000.

mod actor;
mod model;
mod roles;
mod scenario;
mod world;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

pub(in crate::store) use actor::Actor;
use scenario::Scenario;
use world::{EventCounts, World};

#[cfg(doc)]
use super::LEASE_AGE_MAX;
use super::fault::StoreBug;

/// Number of scenarios in an ordinary test run.
const SEEDS: u64 = 600;
/// Maximum number of scenarios to find a bug.
const SEEDS_PER_BUG_MAX: u64 = 50_000;

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("TOWLINE_SEEDS") else { return 0..SEEDS };
    let number = |text: &str| text.trim().parse().expect("TOWLINE_SEEDS is a number or first..last");
    match text.split_once("..") {
        Some((first, last)) => number(first)..number(last),
        None => 0..number(&text),
    }
}

/// Runs a scenario. A violation names the seed and, if `TOWLINE_TRACE` is set, has all events.
fn run_seed(seed: u64, fault: Option<StoreBug>) -> Result<EventCounts, String> {
    let scenario = Scenario::random(seed);
    let world = World::new(&scenario, fault);
    scenario::run(&scenario, &world).map_err(|error| {
        let trace = if std::env::var_os("TOWLINE_TRACE").is_some() { world.trace() } else { String::new() };
        format!("{trace}seed {seed}: {error}\n{scenario:?}")
    })
}

#[test]
fn every_order_leaves_whole_images_and_no_garbage() {
    let seeds = seeds();
    let mut counts = EventCounts::default();
    for seed in seeds.clone() {
        match run_seed(seed, None) {
            Ok(found) => counts += found,
            Err(error) => panic!("{error}"),
        }
    }
    writeln!(io::stderr(), "{} seeds: {counts:?}", seeds.end - seeds.start).unwrap();
    if seeds == (0..SEEDS) {
        // A simulation without events would find nothing.
        for (what, count) in counts.all() {
            assert!(count > 0, "no {what}");
        }
    }
}

#[test]
fn a_seed_replays_its_run() {
    for seed in 0..10 {
        let (first, second) = (run_seed(seed, None), run_seed(seed, None));
        assert_eq!(first, second, "seed {seed}");
    }
}

/// Each bug and a seed that detects it, so the ordinary tests need not search for it.
const FAULTS: &[(StoreBug, u64)] = &[
    (StoreBug::SharedCollection, 1804),
    (StoreBug::GapHeals, 1253),
    (StoreBug::SuspendedTimeIgnored, 861),
    (StoreBug::IndexUnchecked, 1253),
    (StoreBug::RemovalUnchecked, 861),
    (StoreBug::UploadChecksFirst, 782),
    (StoreBug::ReadersIgnored, 1182),
    (StoreBug::ReadersFirst, 1695),
    (StoreBug::ReaderUnconfirmed, 227),
    (StoreBug::UnknownIndexIgnored, 1182),
    (StoreBug::LateIndexIgnored, 6975),
    (StoreBug::LateRemovalIgnored, 7084),
];

#[test]
fn each_fault_that_is_put_back_is_found() {
    for (fault, seed) in FAULTS {
        let found = run_seed(*seed, Some(*fault));
        assert!(
            found.is_err(),
            "{fault:?} passes with seed {seed}: use one that every_fault_has_seeds_that_find_it prints"
        );
        assert!(run_seed(*seed, None).is_ok(), "seed {seed} also fails without {fault:?}");
    }
}

/// Searches the first seed that detects each bug: for the table above, and in the soak test.
#[test]
fn every_fault_has_seeds_that_find_it() {
    // `all`, or names of bugs.
    let Ok(wanted) = std::env::var("TOWLINE_FIND_FAULTS") else { return };
    let is_wanted = |fault: &StoreBug| wanted == "all" || wanted.contains(&format!("{fault:?}"));
    let mut first = BTreeMap::new();
    for fault in scenario::ALL_FAULTS.into_iter().filter(is_wanted) {
        let found = (0..SEEDS_PER_BUG_MAX).find_map(|seed| Some((seed, run_seed(seed, Some(fault)).err()?)));
        let shown = found.as_ref().map(|(seed, error)| format!("{seed}: {}", error.lines().next().unwrap()));
        writeln!(io::stderr(), "{fault:?}: {shown:?}").unwrap();
        first.insert(format!("{fault:?}"), found.map(|(seed, _)| seed));
    }
    assert!(first.values().all(Option::is_some), "{first:?}");
}
