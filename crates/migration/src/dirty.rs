//! Dirty map: a bitmap that many threads mark and one harvests, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

const WORD_BITS: u64 = 64;

/// A bit for each page of each block.
#[derive(Debug)]
pub struct DirtyMap {
    blocks: Vec<Bits>,
}

#[derive(Debug)]
struct Bits {
    words: Vec<AtomicU64>,
    pages: u64,
}

impl DirtyMap {
    /// Makes a map of these blocks, with no page marked.
    pub fn new(blocks: &[RamBlock]) -> Self {
        let bits = |block: &RamBlock| Bits {
            words: (0..block.pages().div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect(),
            pages: block.pages(),
        };
        Self { blocks: blocks.iter().map(bits).collect() }
    }

    /// Marks the pages of `length` bytes from `page` on. Call it after the write: a page that is marked first
    /// may be harvested and sent before the write.
    ///
    /// # Panics
    /// If there is no such block or page.
    pub fn mark(&self, page: PageRef, length: u64) {
        let bits = &self.blocks[page.block.index()];
        bits.masks(page, length).for_each(|(word, mask)| {
            // Releases the write to the thread that harvests the mark.
            bits.words[word].fetch_or(mask, Ordering::Release);
        });
    }

    /// Takes all marks and reports each run of them: its first page and its length in bytes.
    pub fn harvest(&self, report: &mut dyn FnMut(PageRef, u64)) {
        for (index, bits) in self.blocks.iter().enumerate() {
            let block = BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX"));
            // Most words are 0; a swap would take their cache lines from the marking threads.
            let take = |marks: &AtomicU64| match marks.load(Ordering::Relaxed) {
                0 => 0,
                _ => marks.swap(0, Ordering::Acquire),
            };
            runs(bits.words.iter().map(take), &mut |first, pages| {
                report(PageRef { block, offset: first * PAGE_SIZE }, pages * PAGE_SIZE);
            });
        }
    }

    /// Clears the marks of the pages of `length` bytes from `page` on, and returns them.
    pub(crate) fn unmark(&self, page: PageRef, length: u64) {
        let bits = &self.blocks[page.block.index()];
        bits.masks(page, length).for_each(|(word, mask)| {
            bits.words[word].fetch_and(!mask, Ordering::Relaxed);
        });
    }

    /// Returns true if a page is marked.
    pub fn is_marked(&self, page: PageRef) -> bool {
        let number = page.offset / PAGE_SIZE;
        let word = &self.blocks[page.block.index()].words[(number / WORD_BITS) as usize];
        word.load(Ordering::Acquire) >> (number % WORD_BITS) & 1 == 1
    }

    /// Number of pages from `page` on, between 1 and `most`, that are all marked or all unmarked, and true if
    /// they are marked.
    pub(crate) fn alike(&self, page: PageRef, most: u64) -> (u64, bool) {
        let is_marked = self.is_marked(page);
        let most = most.min(self.blocks[page.block.index()].pages - page.offset / PAGE_SIZE);
        let is_alike = |&pages: &u64| {
            let offset = page.offset + pages * PAGE_SIZE;
            self.is_marked(PageRef { offset, ..page }) == is_marked
        };
        (1 + (1..most).take_while(is_alike).count() as u64, is_marked)
    }
}

impl Bits {
    /// The words and their bits for `length` bytes from `page` on.
    fn masks(&self, page: PageRef, length: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let (first, end) = (page.offset / PAGE_SIZE, (page.offset + length).div_ceil(PAGE_SIZE));
        let end = if length == 0 { first } else { end };
        assert!(end <= self.pages, "page {} of block {} with {}", end - 1, page.block.0, self.pages);
        (first / WORD_BITS..end.div_ceil(WORD_BITS)).filter(move |_| first < end).map(move |word| {
            let from = first.max(word * WORD_BITS) % WORD_BITS;
            let to = (end - 1).min(word * WORD_BITS + WORD_BITS - 1) % WORD_BITS;
            (word as usize, (u64::MAX << from) & (u64::MAX >> (WORD_BITS - 1 - to)))
        })
    }
}

/// Reports each run of set bits, the lowest first: the number of its first bit, and its length.
pub(crate) fn runs(words: impl Iterator<Item = u64>, report: &mut dyn FnMut(u64, u64)) {
    let mut run: Option<(u64, u64)> = None;
    for (word, mut marks) in words.enumerate() {
        while marks != 0 {
            let from = marks.trailing_zeros();
            let bits = (marks >> from).trailing_ones();
            let first = word as u64 * WORD_BITS + u64::from(from);
            run = match run {
                Some((begin, length)) if begin + length == first => Some((begin, length + u64::from(bits))),
                before => {
                    if let Some((begin, length)) = before {
                        report(begin, length);
                    }
                    Some((first, bits.into()))
                }
            };
            marks &= u64::MAX.checked_shl(from + bits).unwrap_or(0);
        }
    }
    if let Some((begin, length)) = run {
        report(begin, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn blocks(pages: &[u64]) -> Vec<RamBlock> {
        let block = |(index, pages): (usize, &u64)| RamBlock {
            name: format!("block{index}"),
            length: pages * PAGE_SIZE,
            mapped: None,
        };
        pages.iter().enumerate().map(block).collect()
    }

    fn harvested(map: &DirtyMap) -> Vec<(u32, u64, u64)> {
        let mut runs = Vec::new();
        map.harvest(&mut |page, length| {
            runs.push((page.block.0, page.offset / PAGE_SIZE, length / PAGE_SIZE));
        });
        runs
    }

    proptest! {
        #[test]
        fn every_mark_is_harvested_once_in_runs(marks in prop::collection::vec((0..300u64, 1..140u64), 0..20)) {
            let map = DirtyMap::new(&blocks(&[1, 300]));
            let mut expected = BTreeSet::new();
            for (first, pages) in marks {
                let pages = pages.min(300 - first);
                map.mark(PageRef { block: BlockIndex(1), offset: first * PAGE_SIZE }, pages * PAGE_SIZE);
                expected.extend(first..first + pages);
            }
            let runs = harvested(&map);
            let found: Vec<u64> = runs.iter().flat_map(|&(_, first, pages)| first..first + pages).collect();
            prop_assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
            prop_assert!(runs.windows(2).all(|pair| pair[0].1 + pair[0].2 < pair[1].1), "{:?}", runs);
            prop_assert_eq!(harvested(&map), []);
        }
    }

    #[test]
    fn a_mark_covers_every_page_that_its_bytes_touch() {
        let map = DirtyMap::new(&blocks(&[4]));
        map.mark(PageRef { block: BlockIndex(0), offset: 4095 }, 2);
        map.mark(PageRef { block: BlockIndex(0), offset: 3 * 4096 }, 0);
        assert_eq!(map.alike(PageRef { block: BlockIndex(0), offset: 0 }, 9), (2, true));
        assert_eq!(map.alike(PageRef { block: BlockIndex(0), offset: 8192 }, 9), (2, false));
        map.unmark(PageRef { block: BlockIndex(0), offset: 100 }, 1);
        assert_eq!(harvested(&map), [(0, 1, 1)]);
    }
}
