//! Checksums of a guest's memory: BLAKE3 of each 2 MiB, the *chunk*.
//!
//! What it is not: it stores nothing and reads nothing by itself. [`BlockHasher`] is told of pages while they pass by,
//! [`verify`] is told what somebody found.
//!
//! BLAKE3 is a tree, so a run of pages that is one of its subtrees gets its *chaining value* whenever it comes, and two
//! neighbouring values make their parent's without the bytes:
//!
//! ```text
//!                       root = the chunk's BLAKE3, the same as of its bytes in one go
//!               ┌─────────┴─────────┐
//!             1 MiB               1 MiB           a value takes part until its sibling is there
//!           ┌───┴───┐           ┌───┴───┐
//!        512 KiB    …           …       …         one multifd packet of pages is one value
//!        ┌──┴──┐
//!       … 4 KiB pages: the smallest run
//! ```
//!
//! A page of zeros has a value that depends on its place only, computed once per process. A chunk of nothing but zeros
//! is [`ChunkHash::Zero`] and needs no hash at all. The last chunk of a block may be shorter; it has BLAKE3's tree for
//! its length (left subtrees are the largest power of two), a last chunk of one page is a root by itself.
//!
//! Limits: 4 KiB pages; memory as [`BlockHasher`] says.

mod block;
mod subtree;
#[cfg(test)]
mod tests;
mod zeros;

use std::fmt;

use towline_protocol::ram::PAGE_SIZE;

pub use block::{BlockHasher, OPEN_BYTES_MAX, OpenBudget};

/// How many bytes of a block one checksum covers; the last of a block may cover less.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// The pages of a whole chunk.
const CHUNK_PAGES: u16 = (CHUNK_BYTES / PAGE_SIZE) as u16;

const _: () = assert!(CHUNK_PAGES.is_power_of_two() && CHUNK_BYTES.is_multiple_of(PAGE_SIZE));

/// What a chunk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChunkHash {
    /// Zeros only.
    Zero,
    /// Anything else, with the BLAKE3 of the chunk's bytes.
    Data([u8; 32]),
}

impl fmt::Display for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("all zero"),
            Self::Data(hash) => f.write_str(&blake3::Hash::from_bytes(*hash).to_hex()),
        }
    }
}

/// A chunk that is not what its manifest says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {block:?}, chunk {chunk} (from byte {:#x}): its BLAKE3 is {found}, the manifest says {expected}: the image is damaged there; take another copy of it or store the guest again",
    *chunk as u64 * CHUNK_BYTES
)]
pub struct CorruptChunk {
    /// The block's name.
    pub block: String,
    /// The chunk's index in the block.
    pub chunk: usize,
    /// What the chunk holds.
    pub found: ChunkHash,
    /// What it should hold.
    pub expected: ChunkHash,
}

/// The number of chunks of a block of `length` bytes.
pub fn chunk_count(length: u64) -> u64 {
    length.div_ceil(CHUNK_BYTES)
}

/// The hash of a chunk's bytes, for who has them all: `blake3::hash`, or [`ChunkHash::Zero`].
pub fn hash_chunk(bytes: &[u8]) -> ChunkHash {
    if is_zero(bytes) { ChunkHash::Zero } else { ChunkHash::Data(*blake3::hash(bytes).as_bytes()) }
}

/// Compares what chunk number `chunk` of the block named `block` holds with what its manifest says.
///
/// # Errors
/// [`CorruptChunk`].
pub fn verify(block: &str, chunk: usize, found: ChunkHash, expected: ChunkHash) -> Result<(), CorruptChunk> {
    if found == expected {
        return Ok(());
    }
    Err(CorruptChunk { block: block.into(), chunk, found, expected })
}

/// Compares the slice with itself, one byte on: `memcmp` stops at the first other byte.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && *rest == bytes[..rest.len()],
    }
}
