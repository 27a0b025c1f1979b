//! A synthetic guest: a page is a counter of its writes, with content that identifies counter, place and
//! integrity.

use fastrand::Rng;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::net::Time;

pub(crate) const PAGE: usize = PAGE_SIZE as usize;
/// Interval, in writes, at which a page becomes zero.
const ZERO_EVERY: u64 = 5;
/// Interval of the words that change with each write; the others are constant, so XBZRLE can omit them.
const CHANGING: usize = 8;

/// The blocks of a guest, and its pages in a row.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) blocks: Vec<RamBlock>,
}

impl Layout {
    pub(crate) fn pages(&self) -> usize {
        self.blocks.iter().map(|block| block.pages() as usize).sum()
    }

    pub(crate) fn page_ref(&self, page: usize) -> PageRef {
        let mut first = 0;
        for (index, block) in self.blocks.iter().enumerate() {
            let pages = block.pages() as usize;
            if page < first + pages {
                return PageRef { block: BlockIndex(index as u32), offset: ((page - first) * PAGE) as u64 };
            }
            first += pages;
        }
        panic!("page {page} of {first}")
    }

    pub(crate) fn number(&self, page: PageRef) -> usize {
        let before = self.blocks[..page.block.index()].iter().map(|block| block.pages() as usize);
        before.sum::<usize>() + page.offset as usize / PAGE
    }
}

/// The counter of a page, 0 if it is zero.
pub(crate) fn shown(version: u64) -> u64 {
    if version.is_multiple_of(ZERO_EVERY) { 0 } else { version }
}

/// A page's content.
pub(crate) fn content(page: usize, version: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    let version = shown(version);
    if version == 0 {
        return bytes;
    }
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let own = (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(index as u32);
        let value = match index % CHANGING {
            0 => version.wrapping_add(own & !0xffff_ffff).wrapping_add((index as u64) << 40),
            _ => own,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The counter in a page's content; `None` if that is a mixture.
pub(crate) fn recognized(page: usize, bytes: &[u8]) -> Option<u64> {
    let own = (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0xffff_ffff;
    let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let version = if first == 0 { 0 } else { first.wrapping_sub(own) };
    (content(page, version)[..] == *bytes).then(|| shown(version))
}

/// Memory of a simulated guest.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) layout: Layout,
    versions: Vec<u64>,
    dirty: Vec<bool>,
    pub(crate) running: bool,
    /// Nanoseconds between two writes; 0: it writes nothing.
    write_ns: u64,
    /// Number of pages that it writes: the first ones.
    hot: usize,
    next_write: Time,
    /// Changes with the guest, and goes with its device state.
    pub(crate) serial: u32,
}

impl Guest {
    pub(crate) fn new(layout: Layout, write_ns: u64, hot: usize, rng: &mut Rng) -> Self {
        let versions: Vec<_> = (0..layout.pages()).map(|_| rng.u64(0..8)).collect();
        let dirty = vec![false; versions.len()];
        Self { layout, versions, dirty, running: true, write_ns, hot, next_write: 0, serial: 0 }
    }

    /// Lets it run up to `now`.
    pub(crate) fn run_until(&mut self, now: Time, rng: &mut Rng) {
        if !self.running || self.write_ns == 0 {
            self.next_write = now;
            return;
        }
        // Of a long time at once the last writes decide.
        let most = 4 * self.hot as u64;
        self.next_write = self.next_write.max(now.saturating_sub(most * self.write_ns));
        while self.next_write <= now {
            let page = rng.usize(0..self.hot);
            self.versions[page] += 1;
            self.dirty[page] = true;
            self.serial += 1;
            self.next_write += self.write_ns;
        }
    }

    pub(crate) fn version(&self, page: usize) -> u64 {
        self.versions[page]
    }

    /// Takes the pages written since the last call.
    pub(crate) fn harvest(&mut self) -> Vec<usize> {
        let dirty = self.dirty.iter_mut().enumerate();
        dirty.filter_map(|(page, dirty)| std::mem::take(dirty).then_some(page)).collect()
    }

    /// The counters of all pages.
    pub(crate) fn shown(&self) -> Vec<Option<u64>> {
        self.versions.iter().map(|&version| Some(shown(version))).collect()
    }
}
