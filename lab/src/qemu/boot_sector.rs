//! The smallest guest: it fills memory with a pattern, reports that, and then counts and dirties memory
//! forever: some steps at each tick of its timer, 1,000 times a second, or all the time.
//!
//! Strictly a multiboot image, not a boot sector, so it needs no disk and no image lock, and is the same on
//! every version and machine type. The assembler is in `sys/guest_image.rs`.
//!
//! ```text
//! 0x100000   the image; parameters at 0x100020: pages, words per page, seed, pages to sweep, whether to use popcnt,
//!            steps at each tick
//! 0x110000   the word "EADYRAND" once memory is filled, 0 before
//! 0x110008   a 64-bit counter, stepped for ever after
//! 0x111000   the interrupt table of one entry; the stack ends at 0x120000
//! 0x200000   the filled range: page i begins with `words_per_page` numbers of an xorshift32 that starts from i and seed,
//!            and is zero behind them. The first byte of each page of the sweep, which begins here too, starts as 0
//!            and is stepped page after page, round and round.
//! ```
//! As the sweep goes in order, at any moment its first bytes are n+1 up to some page and n after it: anything
//! else is a torn or stale page. Memory is used below 2 GiB only.

use anyhow::{Result, bail, ensure};

use crate::sys::guest_image;

const PARAMETERS: usize = 0x20;
pub(super) const PAGE_SIZE: u64 = 4096;
const PAGES_PER_MIB: u64 = 256;
/// MiB at the top that are left to the firmware.
const RESERVED_TOP_MIB: u64 = 2;
/// The guest's addresses are below this: its code is 32-bit.
const REACH_MIB: u64 = 2048;

/// Parameters of the small guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootSector {
    /// MiB that are filled, starting at [`BootSector::FILL_ADDRESS`].
    pub fill_mib: u64,
    /// Pseudo-random 32-bit words at the beginning of each filled page, 0 to 1024.
    pub words_per_page: u32,
    /// Seed of the pattern.
    pub seed: u32,
    /// Pages at the beginning of the filled range that are dirtied forever.
    pub sweep_pages: u32,
    /// Steps at each tick of its timer, between which it leaves the host's processors to others; 0: it spins. A guest that may wait for
    /// a page of its memory must spin: QEMU's main loop waits too if an emulated processor takes an interrupt then.
    pub steps_per_tick: u32,
    /// True if it executes `popcnt` forever, which CPU models before Nehalem do not have.
    pub uses_popcnt: bool,
}

impl Default for BootSector {
    /// 16 MiB with 16 words in each page, and a sweep over one MiB in 16 ms.
    fn default() -> Self {
        Self {
            fill_mib: 16,
            words_per_page: 16,
            seed: 1,
            sweep_pages: 256,
            steps_per_tick: 16,
            uses_popcnt: false,
        }
    }
}

impl BootSector {
    /// Guest-physical address of the filled range.
    pub const FILL_ADDRESS: u64 = 0x20_0000;
    /// Guest-physical address of the counter.
    pub const COUNTER_ADDRESS: u64 = 0x11_0008;

    /// Pages of the filled range.
    pub fn pages(&self) -> u64 {
        self.fill_mib * PAGES_PER_MIB
    }

    /// Expected content of page `index` of the filled range; the first byte of a page of the sweep is 0 here.
    pub fn page(&self, index: u64) -> [u8; PAGE_SIZE as usize] {
        let mut page = [0; PAGE_SIZE as usize];
        let index = u32::try_from(index).expect("the filled range has fewer pages");
        let mut state = (index.wrapping_mul(0x9e37_79b1) ^ self.seed).max(1);
        for word in page.chunks_exact_mut(4).take(self.words_per_page as usize) {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            word.copy_from_slice(&state.to_le_bytes());
        }
        if index < self.sweep_pages {
            page[0] = 0;
        }
        page
    }

    /// Returns the image with these parameters, for a guest with `memory_mib` of memory.
    pub(crate) fn image(&self, memory_mib: u64) -> Result<Vec<u8>> {
        let start_mib = Self::FILL_ADDRESS >> 20;
        let room_mib = memory_mib.min(REACH_MIB).saturating_sub(start_mib + RESERVED_TOP_MIB);
        let fill_mib = self.fill_mib;
        ensure!(
            fill_mib <= room_mib,
            "fill_mib is {fill_mib}, a guest of {memory_mib} MiB has room for {room_mib}"
        );
        ensure!(
            self.words_per_page <= 1024,
            "words_per_page is {}, expected at most 1024",
            self.words_per_page
        );
        let pages = u32::try_from(self.pages())?;
        ensure!(self.sweep_pages <= pages, "sweep_pages is {}, expected at most {pages}", self.sweep_pages);
        let mut image = guest_image().to_vec();
        let parameters = [
            pages,
            self.words_per_page,
            self.seed,
            self.sweep_pages,
            u32::from(self.uses_popcnt),
            self.steps_per_tick,
        ];
        for (to, value) in image[PARAMETERS..].chunks_exact_mut(4).zip(parameters) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        Ok(image)
    }

    /// Checks the filled range in `memory`: every page as written, the sweep in order. The error names the
    /// first page that is torn or stale. Returns the first bytes of the sweep's pages.
    pub(super) fn check(&self, memory: &[u8]) -> Result<Vec<u8>> {
        let pages = || memory.chunks_exact(PAGE_SIZE as usize);
        let sweep_pages = self.sweep_pages as usize;
        for (index, page) in pages().enumerate() {
            let wanted = self.page(index as u64);
            let skipped = usize::from(index < sweep_pages);
            if page[skipped..] != wanted[skipped..]
                && let Some(at) = (skipped..page.len()).find(|at| page[*at] != wanted[*at])
            {
                let (found, wanted) = (page[at], wanted[at]);
                bail!("page {index} has {found:#04x} at byte {at}, expected {wanted:#04x}: torn or stale");
            }
        }
        let firsts: Vec<u8> = pages().take(sweep_pages).map(|page| page[0]).collect();
        check_order(&firsts)?;
        Ok(firsts)
    }
}

/// Checks that the sweep's first bytes are n+1, … n+1, n, … n.
fn check_order(firsts: &[u8]) -> Result<()> {
    let Some(value) = firsts.last().copied() else { return Ok(()) };
    let ahead = value.wrapping_add(1);
    let position = firsts.iter().take_while(|first| **first == ahead).count();
    if let Some(at) = firsts[position..].iter().position(|first| *first != value) {
        let index = position + at;
        let found = firsts[index];
        bail!("page {index} of the sweep is at {found}, those before at {ahead}, the last at {value}: stale");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_has_one_step_at_most() {
        for in_order in [&[][..], &[7, 7, 7], &[0, 0, 255]] {
            check_order(in_order).unwrap();
        }
        let stale = check_order(&[8, 8, 6, 7]).unwrap_err().to_string();
        assert_eq!(stale, "page 2 of the sweep is at 6, those before at 8, the last at 7: stale");
        assert!(check_order(&[8, 7, 8, 7]).is_err());
    }

    #[test]
    fn pages_differ_and_end_in_zeros() {
        let guest = BootSector::default();
        assert_ne!(guest.page(300), guest.page(301));
        assert_ne!(guest.page(300), BootSector { seed: 2, ..guest }.page(300));
        assert!(guest.page(300)[64..].iter().all(|byte| *byte == 0));
        assert_eq!(guest.page(3)[0], 0);
    }

    #[test]
    fn parameters_are_checked_against_the_memory() {
        let guest = BootSector { fill_mib: 64, ..BootSector::default() };
        assert!(guest.image(128).is_ok());
        let error = guest.image(64).unwrap_err().to_string();
        assert_eq!(error, "fill_mib is 64, a guest of 64 MiB has room for 60");
    }
}
