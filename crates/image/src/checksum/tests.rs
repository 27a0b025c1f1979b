//! Comparison with `blake3::hash` of all bytes at once.

use std::convert::Infallible;

use proptest::prelude::*;

use super::*;

const PAGE: usize = PAGE_SIZE as usize;

/// A write to a block: pages `first..first + pages` become zeros, or bytes derived from `seed`.
#[derive(Debug, Clone)]
struct Write {
    first: usize,
    pages: usize,
    /// 0: zeros passed to `zero`; 1: zeros passed to `data`.
    seed: u8,
}

impl Write {
    fn bytes(&self) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(self.seed.into());
        let mut bytes = vec![0; self.pages * PAGE];
        for page in bytes.chunks_exact_mut(PAGE) {
            // Some pages of a run are zero; in the others only the last byte differs from zero.
            if self.seed > 1 && random.u8(..4) > 0 {
                page[PAGE - 1] = random.u8(1..);
            }
        }
        bytes
    }

    fn apply(&self, hasher: &BlockHasher) {
        let offset = (self.first * PAGE) as u64;
        match self.seed {
            0 => hasher.zero(offset, (self.pages * PAGE) as u64),
            _ => hasher.data(offset, &self.bytes()),
        }
    }

    fn apply_to(&self, block: &mut [u8]) {
        block[self.first * PAGE..][..self.pages * PAGE].copy_from_slice(&self.bytes());
    }
}

fn expected(block: &[u8]) -> Vec<ChunkHash> {
    let hash = |chunk: &[u8]| {
        if chunk.iter().all(|&byte| byte == 0) {
            ChunkHash::Zero
        } else {
            ChunkHash::Data(*blake3::hash(chunk).as_bytes())
        }
    };
    block.chunks(CHUNK_BYTES as usize).map(hash).collect()
}

fn finish(hasher: &BlockHasher, threads: usize, block: &[u8]) -> Vec<ChunkHash> {
    let reread = |offset: u64, buffer: &mut [u8]| {
        assert!((buffer.as_ptr().addr() as u64).is_multiple_of(PAGE_SIZE));
        buffer.copy_from_slice(&block[offset as usize..][..buffer.len()]);
        Ok::<_, Infallible>(())
    };
    hasher.finish(threads, reread).unwrap()
}

/// Disjoint writes that cover a block in order, except for omitted ones (seed 255).
fn pass(pages: usize) -> impl Strategy<Value = Vec<Write>> {
    let runs = prop::collection::vec((1_usize..300, prop_oneof![Just(0), Just(1), 2_u8..=255]), 1..24);
    (runs, any::<u64>(), any::<bool>()).prop_map(move |(runs, seed, shuffled)| {
        let mut writes = Vec::new();
        let mut first = 0;
        for (length, seed) in runs.into_iter().cycle() {
            let length = length.min(pages - first);
            if length == 0 {
                break;
            }
            writes.push(Write { first, pages: length, seed });
            first += length;
        }
        writes.retain(|write| write.seed != 255);
        if shuffled {
            fastrand::Rng::with_seed(seed).shuffle(&mut writes);
        }
        writes
    })
}

fn passes() -> impl Strategy<Value = (usize, Vec<Vec<Write>>)> {
    (1_usize..1400).prop_flat_map(|pages| (Just(pages), prop::collection::vec(pass(pages), 1..4)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Several passes over a block, each from several threads, with memory for few or for many open chunks.
    #[test]
    fn threads_agree_with_blake3(
        (pages, passes) in passes(), threads in 1_usize..5, budget in prop_oneof![0_usize..3000, Just(OPEN_BYTES_MAX)],
    ) {
        let mut block = vec![0; pages * PAGE];
        let budget = OpenBudget::new(budget);
        let hasher = BlockHasher::new(block.len() as u64, budget);
        for writes in &passes {
            writes.iter().for_each(|write| write.apply_to(&mut block));
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (mine, hasher) = (writes.iter().skip(thread).step_by(threads), &hasher);
                    scope.spawn(move || mine.for_each(|write| write.apply(hasher)));
                }
            });
        }
        prop_assert_eq!(finish(&hasher, threads, &block), expected(&block));
    }

    /// Overlapping writes of all sizes, one after another.
    #[test]
    fn rewrites_agree_with_blake3(
        pages in 1_usize..700, writes in prop::collection::vec((any::<u32>(), 0_u32..11, 0_u8..6), 0..80),
    ) {
        let mut block = vec![0; pages * PAGE];
        let hasher = BlockHasher::new(block.len() as u64, OpenBudget::new(OPEN_BYTES_MAX));
        for (place, size, seed) in writes {
            let first = place as usize % pages;
            let write = Write { first, pages: (1 << size).min(pages - first), seed };
            write.apply(&hasher);
            write.apply_to(&mut block);
        }
        prop_assert_eq!(finish(&hasher, 1, &block), expected(&block));
    }
}

fn never(_: u64, _: &mut [u8]) -> Result<(), &'static str> {
    Err("read again")
}

fn one_chunk() -> (BlockHasher, Vec<u8>) {
    let block: Vec<u8> = (0..CHUNK_BYTES).map(|at| (at / PAGE_SIZE % 251 + 1) as u8).collect();
    (BlockHasher::new(CHUNK_BYTES, OpenBudget::new(OPEN_BYTES_MAX)), block)
}

#[test]
fn every_tail_length_is_a_tree_of_its_own() {
    let (_, block) = one_chunk();
    for pages in 1..=usize::from(CHUNK_PAGES) {
        let block = &block[..pages * PAGE];
        let hasher = BlockHasher::new(block.len() as u64, OpenBudget::new(OPEN_BYTES_MAX));
        let half = pages / 2 * PAGE;
        hasher.data(half as u64, &block[half..]);
        hasher.data(0, &block[..half]);
        assert_eq!(hasher.finish(1, never), Ok(vec![hash_chunk(block)]), "{pages} pages");
    }
}

#[test]
fn pages_in_any_order_need_no_reread() {
    let (hasher, block) = one_chunk();
    let mut pages: Vec<usize> = (0..usize::from(CHUNK_PAGES)).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut pages);
    for page in pages {
        hasher.data((page * PAGE) as u64, &block[page * PAGE..][..PAGE]);
    }
    assert_eq!(hasher.finish(1, never), Ok(vec![hash_chunk(&block)]));
}

#[test]
fn data_may_replace_zeros_page_by_page() {
    let (hasher, block) = one_chunk();
    hasher.zero(0, CHUNK_BYTES);
    for (page, bytes) in block.chunks_exact(PAGE).enumerate() {
        hasher.data((page * PAGE) as u64, bytes);
    }
    assert_eq!(hasher.finish(1, never), Ok(vec![hash_chunk(&block)]));
}

#[test]
fn zeros_may_replace_a_value_that_is_not_merged() {
    let (hasher, mut block) = one_chunk();
    hasher.data(0, &block[..CHUNK_BYTES as usize / 2]);
    hasher.zero(0, CHUNK_BYTES / 2);
    block[..CHUNK_BYTES as usize / 2].fill(0);
    hasher.data(CHUNK_BYTES / 2, &block[CHUNK_BYTES as usize / 2..]);
    assert_eq!(hasher.finish(1, never), Ok(vec![hash_chunk(&block)]));
}

#[test]
fn a_chunk_is_stale_after_one_of_its_pages_changes_until_it_arrives_whole() {
    let (hasher, block) = one_chunk();
    hasher.data(0, &block);
    assert_eq!(hasher.stale_chunks(), 0);
    hasher.data(PAGE_SIZE, &block[..PAGE]);
    assert_eq!(hasher.stale_chunks(), 1);
    hasher.data(0, &block);
    assert_eq!(hasher.finish(1, never), Ok(vec![hash_chunk(&block)]));
}

#[test]
fn the_first_failed_reread_is_the_result() {
    let (hasher, block) = one_chunk();
    hasher.data(0, &block);
    hasher.zero(0, PAGE_SIZE);
    assert_eq!(hasher.finish(2, never), Err("read again"));
}

#[test]
fn the_budget_is_observed_and_released() {
    let budget = OpenBudget::new(4096);
    let hasher = BlockHasher::new(64 * CHUNK_BYTES, budget.clone());
    for chunk in 0..64 {
        hasher.data(chunk * CHUNK_BYTES, &[1; PAGE]);
    }
    assert!(hasher.stale_chunks() > 0 && hasher.stale_chunks() < 64);
    // A whole chunk at once needs no budget.
    hasher.data(63 * CHUNK_BYTES, &vec![1; CHUNK_BYTES as usize]);
    let stale = hasher.stale_chunks();
    hasher.zero(0, 63 * CHUNK_BYTES);
    assert_eq!(hasher.stale_chunks(), 0, "{stale} before");
    drop(hasher);
    assert_eq!(budget.bytes_left(), 4096);
}

#[test]
fn memory_per_chunk_is_as_documented() {
    assert_eq!(block::memory_per_chunk(), 48);
    let mut open = open_chunk::OpenChunk::new(CHUNK_PAGES);
    let page =
        |first| open_chunk::Node::hash(subtree::Subtree { first, level: 0 }, first, &[1; PAGE], CHUNK_PAGES);
    for first in 0..CHUNK_PAGES - 1 {
        open.insert(page(first)).unwrap();
        assert!(open.bytes() <= 16 * 38, "{} bytes after page {first}", open.bytes());
    }
    let mut open = open_chunk::OpenChunk::new(CHUNK_PAGES);
    (0..CHUNK_PAGES).step_by(2).for_each(|first| open.insert(page(first)).unwrap());
    assert_eq!(open.bytes(), 256 * 38);
}

#[test]
fn an_error_names_the_chunk() {
    let expected = hash_chunk(&vec![1; CHUNK_BYTES as usize]);
    assert_eq!(hash_chunk(&[0; PAGE]), ChunkHash::Zero);
    let error = CorruptChunk { block: "pc.ram".into(), chunk: 3, found: ChunkHash::Zero, expected };
    assert!(
        error
            .to_string()
            .starts_with("block \"pc.ram\", chunk 3 (from byte 0x600000): its BLAKE3 is all zero")
    );
}
