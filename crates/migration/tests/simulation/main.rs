//! Migrations in virtual time: both state machines of the protocol, joined by links that do what networks do,
//! moved by the convergence policy, and judged by what a guest's owner wants.
//!
//! ```text
//!   Scenario::random(seed) ─► World: Source ═ links ═ [Relay ═ links ═] Destination, Control above ─► judge ─► Ending
//! ```
//!
//! Real: everything of `towline_protocol` that the engine uses (writers, decoders, lane registries, barriers'
//! places, the return path's rules, XBZRLE) and `convergence`. Modelled as single steps: the engine's
//! threads, the switchover of `control`, and the QEMUs. Not here: compression, zero-copy, sockets, mapped-ram
//! files, which have no two ends.
//!
//! No thread, no clock: a seed replays its run exactly. `TOWLINE_SEEDS=first..last` (or a count) runs others
//! than the first 2,000; `TOWLINE_SEEDS=N..N+1` replays one. `cargo xtask soak simulation` runs 100,000.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod control;
mod destination;
mod guest;
mod judge;
mod lanes;
mod net;
mod out;
mod receiver;
mod relay;
mod scenario;
mod source;
mod world;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

use fastrand::Rng;
use judge::{Ending, judge};
use scenario::{Mutation, Scenario};
use towline_protocol::section::{SectionHeader, SectionType, put_footer};
use world::World;

const SEEDS: u64 = 2000;

/// Device sections, EOF and description, with the guest's serial in them.
fn device_state(serial: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let header = SectionHeader { id: 10, name: "cpu".into(), instance: 0, version: 1 };
    header.encode(SectionType::Full, &mut bytes);
    bytes.extend(serial.to_be_bytes());
    bytes.extend([0x5a; 300]);
    put_footer(&mut bytes, header.id);
    let description = r#"{"page_size":4096,"devices":[{"name":"cpu","instance_id":0}]}"#;
    bytes.extend([SectionType::Eof as u8, SectionType::VmDescription as u8]);
    bytes.extend((description.len() as u32).to_be_bytes());
    bytes.extend(description.bytes());
    bytes
}

fn serial_of(device_state: &[u8]) -> u32 {
    let begin = 1 + 4 + 1 + "cpu".len() + 4 + 4;
    u32::from_be_bytes(device_state[begin..begin + 4].try_into().unwrap())
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("TOWLINE_SEEDS") else { return 0..SEEDS };
    let number = |text: &str| text.trim().parse().expect("TOWLINE_SEEDS is a number or first..last");
    match text.split_once("..") {
        Some((first, last)) => number(first)..number(last),
        None => 0..number(&text),
    }
}

fn run(scenario: &Scenario, rng: Rng) -> (World, Result<Ending, String>) {
    let mut world = World::new(scenario, rng);
    let result = world.run().and_then(|()| judge(&world, scenario));
    (world, result)
}

fn run_seed(seed: u64, mutation: Option<Mutation>) -> Result<Ending, String> {
    let mut rng = Rng::with_seed(seed);
    let scenario = Scenario { mutation, ..Scenario::random(&mut rng) };
    run(&scenario, rng).1.map_err(|error| format!("seed {seed}: {error}\n{scenario:?}"))
}

#[test]
fn every_seed_ends_as_it_should() {
    let mut endings = BTreeMap::<Ending, u64>::new();
    let seeds = seeds();
    for seed in seeds.clone() {
        match run_seed(seed, None) {
            Ok(ending) => *endings.entry(ending).or_default() += 1,
            Err(error) => panic!("{error}"),
        }
    }
    writeln!(io::stderr(), "{} seeds: {endings:?}", seeds.end - seeds.start).unwrap();
    if seeds == (0..SEEDS) {
        // A simulation in which nothing happens finds nothing.
        for ending in [Ending::Moved, Ending::NotConverged, Ending::Failed, Ending::TakenOver, Ending::Paused]
        {
            assert!(endings.contains_key(&ending), "{ending:?} never came");
        }
        assert!(endings[&Ending::Moved] > SEEDS / 5 && endings[&Ending::Failed] > SEEDS / 10, "{endings:?}");
    }
}

/// Seeds that failed while this was built, with what was wrong then.
const REGRESSIONS: &[(u64, &str)] = &[
    (456, "buffers emptied byte by byte never filled again"),
    (2349, "a cut before the first byte was a hang"),
];

#[test]
fn regressions_stay_fixed() {
    for (seed, found) in REGRESSIONS {
        if let Err(error) = run_seed(*seed, None) {
            panic!("{found}: {error}");
        }
    }
}

#[test]
fn a_seed_replays_its_run_exactly() {
    for seed in 0..50 {
        let again = || {
            let mut rng = Rng::with_seed(seed);
            let scenario = Scenario::random(&mut rng);
            let (world, result) = run(&scenario, rng);
            (world.rounds, world.net.now, world.destination.memory, result)
        };
        assert_eq!(again(), again(), "seed {seed}");
    }
}

/// Every connection of a small migration is cut at every byte that goes over it, in each direction; quick
/// runs take some of them. `TOWLINE_CUT_STEP=1` takes all.
#[test]
fn a_cut_at_any_byte_is_no_loss() {
    let step = std::env::var("TOWLINE_CUT_STEP").ok().and_then(|text| text.parse().ok()).unwrap_or(41);
    let mut endings = BTreeMap::<Ending, u64>::new();
    for number in 0..6 {
        let scenario = small(number);
        let (whole, result) = run(&scenario, Rng::with_seed(number));
        assert_eq!(result, Ok(Ending::Moved), "{scenario:?}");
        for link in 0..scenario.links.len() {
            for forward in [true, false] {
                // At the last byte, too, which is the last that is needed.
                for byte in (0..=whole.net.written(link, forward)).step_by(step) {
                    let mut scenario = scenario.clone();
                    let (there, back, is_lossy) = &mut scenario.links[link];
                    *is_lossy = byte.is_multiple_of(2);
                    (if forward { there } else { back }).cut_at = Some(byte);
                    match run(&scenario, Rng::with_seed(number)).1 {
                        Ok(ending) => *endings.entry(ending).or_default() += 1,
                        Err(error) => {
                            panic!("{number}, link {link}, forward {forward}, byte {byte}: {error}")
                        }
                    }
                }
            }
        }
    }
    writeln!(io::stderr(), "cut at any byte: {endings:?}").unwrap();
    assert!(endings.contains_key(&Ending::Failed) && endings.contains_key(&Ending::Moved), "{endings:?}");
}

/// Migrations of a few pages: each machine type, with and without a relay.
fn small(number: u64) -> Scenario {
    let mut seed = 0;
    loop {
        seed += 1;
        let mut scenario = Scenario::random(&mut Rng::with_seed(seed));
        scenario.faults.clear();
        for (forward, backward, _) in &mut scenario.links {
            for knobs in [forward, backward] {
                (knobs.cut_at, knobs.stall) = (None, 0..0);
            }
        }
        let wanted = (number.is_multiple_of(2), Scenario::machine(number as usize / 2), 2);
        let is_small = scenario.layout.pages() <= 6 && !scenario.is_image;
        if is_small && (scenario.is_controlled, scenario.machine, scenario.lanes) == wanted {
            // It is not about convergence.
            scenario.write_ns *= 10;
            return Scenario { gives_up: false, ..scenario };
        }
    }
}

#[test]
fn the_judge_finds_each_fault_of_an_engine() {
    for mutation in [
        Mutation::DirtyPageLost,
        Mutation::NoBarrier,
        Mutation::AcknowledgedEarly,
        Mutation::ForwardedEarly,
        Mutation::RunEarly,
    ] {
        let first =
            (0..SEEDS).find_map(|seed| run_seed(seed, Some(mutation)).err().map(|error| (seed, error)));
        let (seed, error) = first.unwrap_or_else(|| panic!("{mutation:?} is not found within {SEEDS} seeds"));
        let error = error.lines().next().unwrap_or_default();
        writeln!(io::stderr(), "{mutation:?}: {error}").unwrap();
        assert!(seed < 500, "{mutation:?} is found at seed {seed} only");
    }
}
