//! Chaining values of zeros: BLAKE3 hashes the position too, so each subtree has its own.

use std::sync::LazyLock;

use blake3::hazmat::{ChainingValue, Mode, merge_subtrees_non_root};
use towline_protocol::ram::PAGE_SIZE;

use super::subtree::{Subtree, chaining_value};
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

/// The chaining value of zeros in a subtree of a chunk.
pub(super) fn zeros(subtree: Subtree) -> &'static ChainingValue {
    &LEVELS[usize::from(subtree.level)][usize::from(subtree.first >> subtree.level)]
}
