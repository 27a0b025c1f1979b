//! Every decoder against changed recordings and against noise: what the fuzz targets do, with fixed seeds and
//! quickly.

use fastrand::Rng;

use crate::harness::TARGETS;
use crate::seeds::seeds;

/// Inputs per target.
const INPUTS: usize = 4000;

#[test]
fn the_seeds_themselves_pass() {
    for (target, body) in TARGETS {
        for (name, seed) in seeds(target) {
            eprintln!("{target}/{name}");
            body(&seed);
        }
    }
}

#[test]
fn changed_seeds_are_decoded_or_refused() {
    for (target, body) in TARGETS {
        let seeds: Vec<_> = seeds(target).into_values().collect();
        let mut random = Rng::with_seed(0x746f_776c);
        for _ in 0..INPUTS {
            body(&changed(&seeds, &mut random));
        }
    }
}

#[test]
fn noise_is_decoded_or_refused() {
    for (_, body) in TARGETS {
        let mut random = Rng::with_seed(1);
        for _ in 0..INPUTS {
            let noise: Vec<u8> = (0..random.usize(..300)).map(|_| random.u8(..)).collect();
            body(&noise);
        }
    }
}

/// One of the seeds with a few changes; among them lengths that lie.
fn changed(seeds: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut bytes = random.choice(seeds).unwrap().clone();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..=bytes.len());
        let end = bytes.len().min(at + random.usize(..16));
        match random.u8(..6) {
            0 => bytes[at..end].iter_mut().for_each(|byte| *byte ^= 1 << random.u8(..8)),
            1 => bytes[at..end].fill(*random.choice(&[0, 1, 0x7f, 0x80, 0xff]).unwrap()),
            2 => drop(bytes.drain(at..end)),
            3 => bytes.truncate(at),
            4 => {
                let twice = bytes[at..end].to_vec();
                bytes.splice(at..at, twice);
            }
            _ => {
                let other = random.choice(seeds).unwrap();
                let from = random.usize(..=other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
        }
    }
    bytes
}
