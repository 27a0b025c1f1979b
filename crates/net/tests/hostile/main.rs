//! Hostile guests and frontends against the whole card, by chance; `cargo xtask soak net-device` and the fuzz target `net_device` play
//! more of them. `TOWLINE_SEEDS` says how many inputs, `TOWLINE_SECONDS` for how long at most.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod device;

use std::time::{Duration, Instant};

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().unwrap())
}

/// Random bytes are random steps; short inputs are played oftener.
fn input(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let longest = [60, 400, 1500][random.usize(..3)];
    let mut bytes = vec![random.u8(..), random.u8(..)];
    // Two steps that start both rings, so that the others find them.
    if random.u8(..8) > 0 {
        bytes.extend([[0; 7], [1, 0, 0, 0, 0, 0, 0]].concat());
    }
    bytes.extend((0..random.usize(1..longest)).map(|_| random.u8(..)));
    bytes
}

/// The steps of one input, by hand. The first two bytes are what is negotiated.
fn steps(steps: &[&[u8]]) -> Vec<u8> {
    [&[&[0, 0][..]], steps].concat().concat()
}

/// Ring 0 of 256 entries from 0 on, enabled.
const START_RECEIVING: &[u8] = &[0, 0, 0, 0, 0, 0, 0];
/// Descriptor 0 of ring 0: 256 bytes to be written.
const DESCRIBE: &[u8] = &[0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
/// Head 0 is made available, and the ring is kicked.
const OFFER: &[u8] = &[0, 7, 0, 1, 0, 0, 0, 0];
const LINK_DOWN: &[u8] = &[0, 12, 0];
const HOST_SENDS: &[u8] = &[0, 10, 0, 4, 15];

#[test]
fn a_card_whose_link_is_down_rests() {
    let name = "a_card_whose_link_is_down_rests";
    // A driver that starts while it is down, and one that was starved and posts buffers then.
    let started = steps(&[LINK_DOWN, START_RECEIVING, DESCRIBE, OFFER, HOST_SENDS]);
    let starved = steps(&[START_RECEIVING, HOST_SENDS, LINK_DOWN, HOST_SENDS, DESCRIBE, OFFER]);
    for input in [started, starved] {
        if let Err(why) = device::play(&input) {
            return towline_lab::skip(name, &why);
        }
    }
}

#[test]
fn nothing_that_a_guest_or_frontend_does_keeps_the_card_busy() {
    let name = "nothing_that_a_guest_or_frontend_does_keeps_the_card_busy";
    let (seeds, first) = (number("TOWLINE_SEEDS", 150), number("TOWLINE_FIRST_SEED", 0));
    let until = Instant::now() + Duration::from_secs(number("TOWLINE_SECONDS", 10));
    let mut played = 0;
    for seed in first..first + seeds {
        // Shown by the harness if it fails.
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
