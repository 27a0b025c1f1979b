//! The result does not depend on how a stream is split.

use crate::support::*;

/// Reads `bytes` in pieces of these lengths, and asserts that the stream is complete with its last byte and
/// not before.
fn read_in(bytes: &[u8], mut length: impl FnMut() -> usize) -> Vec<Item> {
    let mut driver = Driver::default();
    let mut come = 0;
    while come < bytes.len() {
        assert!(!driver.is_complete(), "complete at {come} of {}", bytes.len());
        let next = bytes.len().min(come + length());
        driver.push(&bytes[come..next]).unwrap();
        come = next;
    }
    assert!(driver.is_complete(), "not complete with the last byte");
    driver.items
}

#[test]
fn each_recording_decodes_equally_byte_by_byte() {
    for name in STREAMS {
        let bytes = golden(name, "main");
        assert!(read_in(&bytes, || 1) == read_main(&bytes), "{name}");
    }
}

#[test]
fn each_recording_decodes_equally_in_random_pieces() {
    for name in STREAMS {
        let bytes = golden(name, "main");
        let whole = read_main(&bytes);
        for seed in 0..8 {
            let mut random = fastrand::Rng::with_seed(seed);
            let most = 1 << random.u32(2..18);
            assert!(read_in(&bytes, || random.usize(1..=most)) == whole, "{name}, seed {seed}");
        }
    }
}

#[test]
fn a_recording_cut_off_anywhere_is_incomplete_and_no_error() {
    for name in STREAMS {
        let bytes = golden(name, "main");
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..50 {
            let mut driver = Driver::default();
            driver.push(&bytes[..random.usize(..bytes.len())]).unwrap();
            assert!(!driver.is_complete(), "{name}");
        }
    }
}
