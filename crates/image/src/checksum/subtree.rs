//! BLAKE3's tree over a chunk's pages: its subtrees, and their chaining values for zeros. BLAKE3 hashes the
//! position too, so each subtree has its own.

use std::sync::LazyLock;

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root};
use towline_protocol::ram::PAGE_SIZE;

use super::{CHUNK_BYTES, CHUNK_PAGES};

/// One list per level, pages first; 32 KiB in all. The whole chunk is a root and has no chaining value.
static LEVELS: LazyLock<Vec<Vec<ChainingValue>>> = LazyLock::new(|| {
    let page = [0; PAGE_SIZE as usize];
    let pages = (0..CHUNK_BYTES).step_by(PAGE_SIZE as usize).map(|offset| chaining_value(offset, &page));
    let mut levels: Vec<Vec<ChainingValue>> = vec![pages.collect()];
    while let Some(below) = levels.last().filter(|below| below.len() > 2) {
        let merge = |pair: &[ChainingValue]| merge_subtrees_non_root(&pair[0], &pair[1], Mode::Hash);
        levels.push(below.chunks_exact(2).map(merge).collect());
    }
    debug_assert_eq!(levels[0].len(), usize::from(CHUNK_PAGES));
    levels
});

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

/// The chaining value of zeros in a subtree of a chunk.
pub(super) fn zeros(subtree: Subtree) -> &'static ChainingValue {
    &LEVELS[usize::from(subtree.level)][usize::from(subtree.first >> subtree.level)]
}
