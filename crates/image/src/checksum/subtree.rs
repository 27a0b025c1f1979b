//! BLAKE3's tree over a chunk's pages: its subtrees.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt};

/// An aligned run of `1 << level` pages of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subtree {
    pub(super) first: u16,
    pub(super) level: u8,
}

impl Subtree {
    pub(super) fn end(self) -> u16 {
        self.first + (1 << self.level)
    }

    pub(super) fn sibling(self) -> Self {
        Self { first: self.first ^ (1 << self.level), level: self.level }
    }

    pub(super) fn parent(self) -> Self {
        Self { first: self.first & !(1 << self.level), level: self.level + 1 }
    }

    /// Returns true if BLAKE3's tree over a chunk of `pages` has a chaining value here: within the chunk, and
    /// not its root.
    pub(super) fn is_within(self, pages: u16) -> bool {
        self.end() <= pages && 1 << self.level < pages
    }
}

/// Splits the pages `first..end` of a chunk of `pages` into the fewest subtrees.
pub(super) fn subtrees(first: u16, end: u16, pages: u16) -> impl Iterator<Item = Subtree> {
    let mut next = first;
    std::iter::from_fn(move || {
        if next == end {
            return None;
        }
        let mut subtree = Subtree { first: next, level: 0 };
        // A chunk of one page has one subtree, which is its root.
        while subtree.parent().first == next
            && subtree.parent().end() <= end
            && subtree.parent().is_within(pages)
        {
            subtree = subtree.parent();
        }
        next = subtree.end();
        Some(subtree)
    })
}

/// Hashes `bytes`, a subtree at byte `offset` of its chunk.
pub(super) fn chaining_value(offset: u64, bytes: &[u8]) -> ChainingValue {
    Hasher::new().set_input_offset(offset).update(bytes).finalize_non_root()
}
