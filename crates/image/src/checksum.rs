//! Checksums of a guest's memory: the BLAKE3 of each 2 MiB *chunk*.
//!
//! This module neither stores nor reads memory: [`BlockHasher`] receives pages while they are written.
//!
//! BLAKE3 is a tree. A run of pages that is one of its subtrees has a *chaining value*, whenever it arrives,
//! and two neighbouring values yield their parent's without the bytes:
//!
//! ```text
//!                       root = the chunk's BLAKE3, the same as of its bytes in one go
//!               ┌─────────┴─────────┐
//!             1 MiB               1 MiB           a value is kept until its sibling arrives
//!           ┌───┴───┐           ┌───┴───┐
//!        512 KiB    …           …       …         a multifd packet of pages is one value
//!        ┌──┴──┐
//!       … 4 KiB pages: the smallest run
//! ```
//!
//! The value of a page of zeros depends on its position only and is computed once per process. A chunk of
//! zeros is [`ChunkHash::Zero`] and needs no hash. The last chunk of a block may be shorter; it has BLAKE3's
//! tree for its length (left subtrees are the largest power of two), and a last chunk of one page is itself a
//! root.
//!
//! Limits: 4 KiB pages; for memory see [`BlockHasher`].

mod block;
mod open_chunk;
mod subtree;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use towline_protocol::ram::PAGE_SIZE;

use crate::manifest::Digest;

pub use block::{BlockHasher, OPEN_BYTES_MAX, OpenBudget};

/// Bytes of a block per checksum; the last chunk of a block may be shorter.
pub const CHUNK_BYTES: u64 = 2 << 20;

/// Pages of a whole chunk.
const CHUNK_PAGES: u16 = (CHUNK_BYTES / PAGE_SIZE) as u16;

const _: () = assert!(CHUNK_PAGES.is_power_of_two() && CHUNK_BYTES.is_multiple_of(PAGE_SIZE));

/// Content of a chunk; in JSON hex digits, or `null` for zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Option<Digest>", into = "Option<Digest>")]
pub enum ChunkHash {
    /// Zeros only.
    Zero,
    /// Anything else, with the BLAKE3 of the chunk's bytes.
    Data([u8; 32]),
}

impl ChunkHash {
    /// The BLAKE3; `None` for zeros.
    pub fn data(self) -> Option<[u8; 32]> {
        match self {
            Self::Zero => None,
            Self::Data(hash) => Some(hash),
        }
    }
}

impl From<Option<Digest>> for ChunkHash {
    fn from(hash: Option<Digest>) -> Self {
        hash.map_or(Self::Zero, |Digest(hash)| Self::Data(hash))
    }
}

impl From<ChunkHash> for Option<Digest> {
    fn from(hash: ChunkHash) -> Self {
        hash.data().map(Digest)
    }
}

impl fmt::Display for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("all zero"),
            Self::Data(hash) => f.write_str(&blake3::Hash::from_bytes(*hash).to_hex()),
        }
    }
}

/// A chunk that differs from its manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {block:?}, chunk {chunk} (from byte {:#x}): its BLAKE3 is {found}, the manifest says {expected}: the image is damaged there; take another copy of it or store the guest again",
    *chunk as u64 * CHUNK_BYTES
)]
pub struct CorruptChunk {
    /// Name of the block.
    pub block: String,
    /// Index of the chunk in the block.
    pub chunk: usize,
    /// Content of the chunk.
    pub found: ChunkHash,
    /// Content in the manifest.
    pub expected: ChunkHash,
}

/// Ranges of a block of `length` bytes whose chunks are selected by their index: ascending, and apart.
pub(crate) fn chunk_runs(length: u64, mut is_selected: impl FnMut(usize) -> bool) -> Vec<Range<u64>> {
    let mut runs = Vec::<Range<u64>>::new();
    for (chunk, start) in (0..length).step_by(CHUNK_BYTES as usize).enumerate() {
        if !is_selected(chunk) {
            continue;
        }
        let end = (start + CHUNK_BYTES).min(length);
        match runs.last_mut().filter(|run| run.end == start) {
            Some(run) => run.end = end,
            None => runs.push(start..end),
        }
    }
    runs
}

/// Hash of a complete chunk: `blake3::hash`, or [`ChunkHash::Zero`].
pub fn hash_chunk(bytes: &[u8]) -> ChunkHash {
    if is_zero(bytes) { ChunkHash::Zero } else { ChunkHash::Data(*blake3::hash(bytes).as_bytes()) }
}

/// Compares the slice with itself shifted by one byte: `memcmp` stops at the first difference.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && *rest == bytes[..rest.len()],
    }
}
