//! The sent map: a bit for each of the destination's pages, claimed once by the thread that sends it.
//!
//! A destination in postcopy accepts each page once; a second copy of it is an error that stops it. So each
//! page is [`claimed`](SentMap::claim) before it is sent, and of concurrent claims exactly one succeeds: a
//! claim is one atomic OR. The request path and the background meet here and nowhere else.

use std::sync::atomic::{AtomicU64, Ordering};

use towline_protocol::postcopy::PostcopyBlock;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef};

const WORD_BITS: u64 = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct SentMap {
    blocks: Vec<BlockMap>,
    claimed_bytes: AtomicU64,
}

#[derive(Debug)]
struct BlockMap {
    length: u64,
    page_bytes: u64,
    words: Vec<AtomicU64>,
}

impl BlockMap {
    fn pages(&self) -> u64 {
        self.length.div_ceil(self.page_bytes)
    }

    /// Bytes of pages from `first` on, to the block's end at most.
    fn bytes(&self, first: u64, pages: u64) -> u64 {
        (first + pages).saturating_mul(self.page_bytes).min(self.length) - first * self.page_bytes
    }

    fn is_claimed(&self, page: u64) -> bool {
        self.words[(page / WORD_BITS) as usize].load(Ordering::Acquire) >> (page % WORD_BITS) & 1 == 1
    }

    /// The first page from `page` on that is not claimed; the number of pages if there is none.
    fn next_unclaimed(&self, page: u64) -> u64 {
        let pages = self.pages();
        let mut at = page;
        while at < pages {
            let word = self.words[(at / WORD_BITS) as usize].load(Ordering::Acquire);
            match !word >> (at % WORD_BITS) {
                0 => at = (at / WORD_BITS + 1) * WORD_BITS,
                bits => return (at + u64::from(bits.trailing_zeros())).min(pages),
            }
        }
        pages
    }
}

impl SentMap {
    pub(super) fn new(blocks: &[PostcopyBlock]) -> Self {
        let block = |block: &PostcopyBlock| BlockMap {
            length: block.ram.length,
            page_bytes: block.page_bytes,
            words: (0..block.host_pages().div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect(),
        };
        Self { blocks: blocks.iter().map(block).collect(), claimed_bytes: AtomicU64::new(0) }
    }

    /// Claims the page that contains `page`: true for one caller only.
    pub(super) fn claim(&self, page: PageRef) -> bool {
        self.claim_run(page, 1, |_, _| {}) > 0
    }

    /// Claims the unclaimed pages that begin in `length` bytes from `page` on, and reports each run of them:
    /// its first byte and length. Returns the total number of bytes.
    pub(super) fn claim_run(&self, page: PageRef, length: u64, mut run: impl FnMut(u64, u64)) -> u64 {
        let block = &self.blocks[page.block.index()];
        let (mut at, mut all) = (page.offset / block.page_bytes, 0);
        let end = (page.offset + length).div_ceil(block.page_bytes).min(block.pages());
        while at < end {
            let (word, shift) = ((at / WORD_BITS) as usize, at % WORD_BITS);
            let pages = (WORD_BITS - shift).min(end - at);
            let mask = (u64::MAX >> (WORD_BITS - pages)) << shift;
            let mut ours = mask & !block.words[word].fetch_or(mask, Ordering::AcqRel);
            while ours != 0 {
                let first = u64::from(ours.trailing_zeros());
                let count = u64::from((ours >> first).trailing_ones());
                let index = at - shift + first;
                let bytes = block.bytes(index, count);
                run(index * block.page_bytes, bytes);
                all += bytes;
                ours &= !((u64::MAX >> (WORD_BITS - count)) << first);
            }
            at += pages;
        }
        self.claimed_bytes.fetch_add(all, Ordering::AcqRel);
        all
    }

    /// Returns true if this page is claimed.
    pub(super) fn is_claimed(&self, page: PageRef) -> bool {
        let block = &self.blocks[page.block.index()];
        block.is_claimed(page.offset / block.page_bytes)
    }

    /// Returns true if all pages of these bytes are claimed.
    pub(super) fn is_whole(&self, page: PageRef, length: u64) -> bool {
        let block = &self.blocks[page.block.index()];
        let end = (page.offset + length).div_ceil(block.page_bytes).min(block.pages());
        block.next_unclaimed(page.offset / block.page_bytes) >= end
    }

    /// The destination's pages that these bytes touch: first byte and length.
    pub(super) fn whole_pages(&self, page: PageRef, length: u64) -> (PageRef, u64) {
        let block = &self.blocks[page.block.index()];
        let offset = page.offset / block.page_bytes * block.page_bytes;
        let end = (page.offset + length).next_multiple_of(block.page_bytes).min(block.length);
        (PageRef { offset, ..page }, end - offset)
    }

    /// The size of this block's pages at the destination.
    pub(super) fn page_bytes(&self, block: BlockIndex) -> u64 {
        self.blocks[block.index()].page_bytes
    }

    /// Bytes of all pages that are taken.
    pub(super) fn claimed_bytes(&self) -> u64 {
        self.claimed_bytes.load(Ordering::Acquire)
    }

    /// Number of unclaimed bytes in this range. There are no concurrent claims.
    pub(super) fn free_bytes(&self, page: PageRef, length: u64) -> u64 {
        let block = &self.blocks[page.block.index()];
        let end = page.offset + length;
        let mut free = 0;
        let mut at = page.offset;
        while at < end {
            let host = at / block.page_bytes;
            let next = ((host + 1) * block.page_bytes).min(end);
            free += if block.is_claimed(host) { 0 } else { next - at };
            at = next;
        }
        free
    }

    /// After a lost connection: sets the claims to the destination's bitmap of received pages, a bit for each
    /// target page. A page is received when all of its target pages are. There are no concurrent claims.
    pub(super) fn set_received(&self, block: BlockIndex, bits: &[u8]) {
        let map = &self.blocks[block.index()];
        let targets = map.page_bytes / PAGE_SIZE;
        let has =
            |target: u64| bits.get((target / 8) as usize).is_some_and(|byte| byte >> (target % 8) & 1 == 1);
        let (mut before, mut after) = (0, 0);
        for (word, index) in map.words.iter().zip(0..) {
            let mut value = 0;
            let pages = (index * WORD_BITS..((index + 1) * WORD_BITS).min(map.pages())).zip(0..);
            for (page, bit) in pages {
                before += map.bytes(page, 1) * u64::from(map.is_claimed(page));
                let end = ((page + 1) * targets).min(map.length / PAGE_SIZE);
                if (page * targets..end).all(has) {
                    value |= 1 << bit;
                    after += map.bytes(page, 1);
                }
            }
            word.store(value, Ordering::Release);
        }
        self.claimed_bytes.fetch_add(after, Ordering::AcqRel);
        self.claimed_bytes.fetch_sub(before, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::thread;

    use proptest::prelude::*;
    use towline_protocol::RamBlock;

    use super::*;

    fn block(pages: u64, page_bytes: u64) -> PostcopyBlock {
        PostcopyBlock {
            ram: RamBlock { name: "pc.ram".into(), length: pages * PAGE_SIZE, mapped: None },
            page_bytes,
        }
    }

    fn page(block: u32, offset: u64) -> PageRef {
        PageRef { block: BlockIndex(block), offset }
    }

    /// An operation of a test's thread.
    #[derive(Debug, Clone)]
    enum Try {
        One { block: u32, page: u64 },
        Run { block: u32, page: u64, pages: u64 },
    }

    fn tries(pages: u64) -> impl Strategy<Value = Vec<Try>> {
        let one = (0..2u32, 0..pages).prop_map(|(block, page)| Try::One { block, page });
        let run =
            (0..2u32, 0..pages, 1..pages).prop_map(|(block, page, pages)| Try::Run { block, page, pages });
        proptest::collection::vec(prop_oneof![one, run], 1..40)
    }

    /// Executes the claims, and returns each host page that was won.
    fn attempt(map: &SentMap, tries: &[Try]) -> Vec<(u32, u64)> {
        let mut won = Vec::new();
        for attempt in tries {
            match *attempt {
                Try::One { block, page: index } => {
                    let size = map.page_bytes(BlockIndex(block));
                    let at = index * PAGE_SIZE / size * size;
                    if map.claim(page(block, at)) {
                        won.push((block, at));
                    }
                }
                Try::Run { block, page: index, pages } => {
                    let size = map.page_bytes(BlockIndex(block));
                    let at = index * PAGE_SIZE / size * size;
                    map.claim_run(page(block, at), pages * PAGE_SIZE, |start, bytes| {
                        won.extend((start..start + bytes).step_by(size as usize).map(|at| (block, at)));
                    });
                }
            }
        }
        won
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_page_is_won_exactly_once(threads in proptest::collection::vec(tries(300), 2..5)) {
            let blocks = [block(300, PAGE_SIZE), block(300, 4 * PAGE_SIZE)];
            let map = SentMap::new(&blocks);
            let won: Vec<_> = thread::scope(|scope| {
                let map = &map;
                let all: Vec<_> = threads.iter().map(|tries| scope.spawn(move || attempt(map, tries))).collect();
                all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            let mut times: HashMap<_, u32> = HashMap::new();
            won.iter().for_each(|page| *times.entry(*page).or_default() += 1);
            prop_assert!(times.values().all(|&times| times == 1));
            let bytes: u64 = times.keys().map(|&(block, _)| blocks[block as usize].page_bytes).sum();
            prop_assert_eq!(map.claimed_bytes(), bytes);
            // Unclaimed pages are free, and claimed ones are not.
            for index in 0..2 {
                let free = map.free_bytes(page(index, 0), 300 * PAGE_SIZE);
                let taken = times.keys().filter(|(block, _)| *block == index).count() as u64;
                prop_assert_eq!(free + taken * blocks[index as usize].page_bytes, 300 * PAGE_SIZE);
            }
            // The rest can be won, once.
            for index in 0..2 {
                map.claim_run(page(index, 0), 300 * PAGE_SIZE, |_, _| {});
                prop_assert_eq!(map.claim_run(page(index, 0), 300 * PAGE_SIZE, |_, _| {}), 0);
                prop_assert!(map.is_whole(page(index, 0), 300 * PAGE_SIZE));
            }
            prop_assert_eq!(map.claimed_bytes(), 600 * PAGE_SIZE);
        }

        #[test]
        fn received_pages_are_claimed_and_no_others(bits in proptest::collection::vec(any::<u8>(), 40)) {
            let map = SentMap::new(&[block(300, PAGE_SIZE), block(300, 4 * PAGE_SIZE)]);
            map.claim_run(page(0, 0), 77 * PAGE_SIZE, |_, _| {});
            map.claim_run(page(1, 0), 77 * PAGE_SIZE, |_, _| {});
            map.set_received(BlockIndex(0), &bits);
            map.set_received(BlockIndex(1), &bits);
            let has = |target: u64| bits[(target / 8) as usize] >> (target % 8) & 1 == 1;
            let mut bytes = 0;
            for target in 0..300 {
                prop_assert_eq!(map.is_claimed(page(0, target * PAGE_SIZE)), has(target));
                bytes += PAGE_SIZE * u64::from(has(target));
            }
            for host in 0..75 {
                let all = (host * 4..host * 4 + 4).all(has);
                prop_assert_eq!(map.is_claimed(page(1, host * 4 * PAGE_SIZE)), all);
                bytes += 4 * PAGE_SIZE * u64::from(all);
            }
            prop_assert_eq!(map.claimed_bytes(), bytes);
        }
    }

    #[test]
    fn the_last_page_may_be_short() {
        let map = SentMap::new(&[block(5, 4 * PAGE_SIZE)]);
        let mut runs = Vec::new();
        assert_eq!(
            map.claim_run(page(0, 0), 5 * PAGE_SIZE, |start, bytes| runs.push((start, bytes))),
            5 * PAGE_SIZE
        );
        assert_eq!(runs, [(0, 5 * PAGE_SIZE)]);
        assert!(map.is_whole(page(0, 0), 5 * PAGE_SIZE));
        assert_eq!(map.free_bytes(page(0, 0), 5 * PAGE_SIZE), 0);
    }
}
