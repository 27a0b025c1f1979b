//! Memory with incompressible contents, generated fast on an emulated processor.
//!
//! A page is a table of pseudo-random words, one table per seed, XORed with a key of the page. That is one
//! load, one XOR and one store for each 16 bytes, where a generator would need a chain of dependent steps for
//! each 8. No two pages are alike, and within a page nothing repeats.

use std::num::NonZero;
use std::thread::{available_parallelism, scope};

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;
use twox_hash::XxHash64;

pub(crate) const PAGE_SIZE: usize = 4096;
/// Bytes of one hash.
const PART_SIZE: usize = 64 << 20;

/// `length` bytes, every page touched and zero.
pub(crate) fn zeroed(length: usize) -> Result<MmapMut> {
    let mut memory = mapped(length)?;
    memory.fill(0);
    Ok(memory)
}

/// `length` bytes of the pattern of `seed`.
pub(crate) fn filled(length: usize, seed: u64) -> Result<MmapMut> {
    let mut memory = mapped(length)?;
    let mut state = seed;
    let mut table = [0_u8; PAGE_SIZE];
    for word in table.chunks_exact_mut(8) {
        word.copy_from_slice(&next(&mut state).to_ne_bytes());
    }
    for page in memory.chunks_mut(PAGE_SIZE) {
        let key = u128::from(next(&mut state)) << 64 | u128::from(next(&mut state));
        for (to, from) in page.chunks_exact_mut(16).zip(table.chunks_exact(16)) {
            let from = u128::from_ne_bytes(from.try_into().expect("chunks of 16"));
            to.copy_from_slice(&(from ^ key).to_ne_bytes());
        }
    }
    Ok(memory)
}

/// XXH64 of the XXH64s of each [`PART_SIZE`] bytes, computed on all processors.
pub(crate) fn hash(memory: &[u8]) -> u64 {
    let parts: Vec<_> = memory.chunks(PART_SIZE).collect();
    let of_each = parts.len().div_ceil(available_parallelism().map_or(1, NonZero::get));
    let hashed = |parts: &[&[u8]]| {
        parts.iter().flat_map(|part| XxHash64::oneshot(0, part).to_le_bytes()).collect::<Vec<_>>()
    };
    let hashes: Vec<u8> = scope(|scope| {
        let threads: Vec<_> = parts.chunks(of_each).map(|parts| scope.spawn(move || hashed(parts))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("hashing cannot fail")).collect()
    });
    XxHash64::oneshot(0, &hashes)
}

/// `length` bytes of anonymous memory, in whole pages.
pub(crate) fn mapped(length: usize) -> Result<MmapMut> {
    ensure!(
        length > 0 && length.is_multiple_of(PAGE_SIZE),
        "{length} bytes, expected a multiple of {PAGE_SIZE}"
    );
    MmapMut::map_anon(length).with_context(|| format!("no {length} bytes available"))
}

/// Returns the next number of a splitmix64 sequence.
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed(*state)
}

/// Finaliser of splitmix64: all bits of the result depend on all bits of `value`.
pub(crate) fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
