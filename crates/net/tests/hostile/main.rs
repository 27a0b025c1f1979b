//! Random steps of a hostile guest and frontend against the whole card. `cargo xtask soak net-device` and the
//! fuzz target `net_device` play more of them. `TOWLINE_SEEDS` is the number of inputs, `TOWLINE_SECONDS` the
//! time limit.
#![allow(clippy::unwrap_used, reason = "a failure of a helper is a failure of its test")]

mod device;

use std::time::{Duration, Instant};

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().unwrap())
}

/// Random bytes are random steps; short inputs are more frequent.
fn input(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let longest = [60, 400, 1500][random.usize(..3)];
    let mut bytes = vec![random.u8(..), random.u8(..)];
    // Mostly, both rings are started first.
    if random.u8(..8) > 0 {
        bytes.extend([[0; 7], [1, 0, 0, 0, 0, 0, 0]].concat());
    }
    bytes.extend((0..random.usize(1..longest)).map(|_| random.u8(..)));
    bytes
}

/// An input of these steps. Its first two bytes select the negotiated features.
fn steps(steps: &[&[u8]]) -> Vec<u8> {
    [&[&[0, 0][..]], steps].concat().concat()
}

/// Starts ring 0, of 256 entries, enabled, with base 0.
const START_RECEIVING: &[u8] = &[0, 0, 0, 0, 0, 0, 0];
/// Writes descriptor 0 of ring 0: 256 writable bytes.
const DESCRIBE: &[u8] = &[0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
/// Makes head 0 available and kicks.
const OFFER: &[u8] = &[0, 7, 0, 1, 0, 0, 0, 0];
const LINK_DOWN: &[u8] = &[0, 12, 0];
const HOST_SENDS: &[u8] = &[0, 10, 0, 4, 15];

#[test]
fn a_card_whose_link_is_down_is_idle() {
    let name = "a_card_whose_link_is_down_is_idle";
    // A driver that starts while the link is down, and one that adds the first buffers then.
    let started = steps(&[LINK_DOWN, START_RECEIVING, DESCRIBE, OFFER, HOST_SENDS]);
    let exhausted = steps(&[START_RECEIVING, HOST_SENDS, LINK_DOWN, HOST_SENDS, DESCRIBE, OFFER]);
    for input in [started, exhausted] {
        if let Err(why) = device::play(&input) {
            return towline_lab::skip(name, &why);
        }
    }
}

#[test]
fn a_card_is_idle_after_any_steps_of_guest_and_frontend() {
    let name = "a_card_is_idle_after_any_steps_of_guest_and_frontend";
    let (seeds, first) = (number("TOWLINE_SEEDS", 150), number("TOWLINE_FIRST_SEED", 0));
    let until = Instant::now() + Duration::from_secs(number("TOWLINE_SECONDS", 10));
    let mut played = 0;
    for seed in first..first + seeds {
        // The test harness prints it on failure.
        println!("seed {seed}");
        if let Err(why) = device::play(&input(seed)) {
            return towline_lab::skip(name, &why);
        }
        played += 1;
        if Instant::now() > until {
            break;
        }
    }
    assert!(played > 0);
    println!("{played} inputs");
}
