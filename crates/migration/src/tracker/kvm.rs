//! KVM's dirty log: its memory slots, put together into blocks.
//!
//! ```text
//!   block 0   [ slot 0 ─ 640 KiB ][ slot 3 ─ the rest ]      KVM_GET_DIRTY_LOG(slot) ─► words of the slot ─► words of the block
//!   block 1   [ slot 1 ]
//! ```
//!
//! A VMM maps a block into its guest by one slot or several (a PC's memory has holes), and KVM keeps a log
//! for each. The ioctls are issued by the VMM, which has the VM's descriptor; their formats are here:
//!
//! - on: `KVM_SET_USER_MEMORY_REGION` of each slot with `KVM_MEM_LOG_DIRTY_PAGES`; off: without;
//! - take: `KVM_GET_DIRTY_LOG`, whose bitmap has the slot's first page in the lowest bit of the first `u64`
//!   and is a whole number of them, like `words`. With `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` it clears nothing:
//!   `KVM_CLEAR_DIRTY_LOG` of the same range has to follow within the same call.
//!
//! Writes that KVM does not see come from the VMM itself and its devices:
//! [`crate::SourceMemory::mark_dirty`].

use std::fmt;
use std::io;

use towline_protocol::BlockIndex;
use towline_protocol::ram::PAGE_SIZE;

use super::DirtyLogReader;

const WORD_BITS: u64 = 64;

/// A memory slot: which part of which block it maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySlot {
    /// KVM's slot number, with the address space in the upper half.
    pub id: u32,
    /// The block.
    pub block: BlockIndex,
    /// Offset of the slot in the block in bytes, a multiple of 4096.
    pub offset: u64,
    /// Length of the slot in bytes, a multiple of 4096.
    pub length: u64,
}

/// Switches a slot's log on or off.
type Switch<'a> = Box<dyn Fn(u32, bool) -> io::Result<()> + Send + Sync + 'a>;

/// A [`DirtyLogReader`] of KVM's slots, for [`super::DirtyLogTracker`].
pub struct KvmDirtyLog<'a, F> {
    slots: Vec<MemorySlot>,
    take: F,
    switch: Option<Switch<'a>>,
}

impl<'a, F: Fn(u32, &mut [u64]) -> io::Result<()> + Send + Sync> KvmDirtyLog<'a, F> {
    /// The log of these slots; `take` copies that of a slot into words, which are zero before, and clears it.
    /// The log is always on.
    pub fn new(slots: &[MemorySlot], take: F) -> Self {
        Self { slots: slots.to_vec(), take, switch: None }
    }

    /// Sets a callback that switches each slot's log on for a migration, and off afterwards.
    #[must_use]
    pub fn with_switch(mut self, switch: impl Fn(u32, bool) -> io::Result<()> + Send + Sync + 'a) -> Self {
        self.switch = Some(Box::new(switch));
        self
    }

    fn switch(&self, is_on: bool) -> io::Result<()> {
        let Some(switch) = &self.switch else { return Ok(()) };
        self.slots.iter().try_for_each(|slot| switch(slot.id, is_on))
    }
}

impl<F: Fn(u32, &mut [u64]) -> io::Result<()> + Send + Sync> DirtyLogReader for KvmDirtyLog<'_, F> {
    fn start(&self) -> io::Result<()> {
        self.switch(true)
    }

    fn fetch_and_clear(&self, block: BlockIndex, words: &mut [u64]) -> io::Result<()> {
        let mut log = Vec::new();
        for slot in self.slots.iter().filter(|slot| slot.block == block) {
            let pages = slot.length / PAGE_SIZE;
            log.clear();
            log.resize(usize::try_from(pages.div_ceil(WORD_BITS)).expect("fewer than its pages"), 0);
            (self.take)(slot.id, &mut log)?;
            // KVM leaves bits past the last page alone; other writers of the words may not.
            if let (Some(last), rest @ 1..) = (log.last_mut(), pages % WORD_BITS) {
                *last &= (1 << rest) - 1;
            }
            merge(&log, slot.offset / PAGE_SIZE, words).ok_or_else(|| outside(slot))?;
        }
        Ok(())
    }

    fn stop(&self) -> io::Result<()> {
        self.switch(false)
    }
}

/// Sets the bits of `log` in `words` from bit `first` on; `None` if they do not fit.
fn merge(log: &[u64], first: u64, words: &mut [u64]) -> Option<()> {
    let (word, shift) = (usize::try_from(first / WORD_BITS).ok()?, first % WORD_BITS);
    for (index, &bits) in log.iter().enumerate().filter(|(_, bits)| **bits != 0) {
        let low = bits << shift;
        // Two steps, as a shift by all 64 bits has no effect.
        let high = (bits >> 1) >> (WORD_BITS - 1 - shift);
        if low != 0 {
            *words.get_mut(word + index)? |= low;
        }
        if high != 0 {
            *words.get_mut(word + index + 1)? |= high;
        }
    }
    Some(())
}

fn outside(slot: &MemorySlot) -> io::Error {
    let MemorySlot { id, block, offset, length } = slot;
    let text = format!("slot {id}, {length} bytes at {offset:#x}, does not lie in block {}", block.0);
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl<F> fmt::Debug for KvmDirtyLog<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmDirtyLog").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::RamMapping;
    use crate::tracker::{DirtyLogTracker, DirtyTracker};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Mutex;

    const PAGE: u64 = PAGE_SIZE;

    fn slot(id: u32, block: u32, first: u64, pages: u64) -> MemorySlot {
        MemorySlot { id, block: BlockIndex(block), offset: first * PAGE, length: pages * PAGE }
    }

    /// KVM's log of each slot.
    type Logs = Mutex<BTreeMap<u32, Vec<u64>>>;

    fn take(logs: &Logs) -> impl Fn(u32, &mut [u64]) -> io::Result<()> + Send + Sync + '_ {
        |id, words| {
            let log = logs.lock().unwrap().remove(&id).unwrap_or_default();
            words[..log.len()].copy_from_slice(&log);
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn slots_are_put_where_they_belong(
            cuts in prop::collection::btree_set(1..300u64, 0..4),
            written in prop::collection::btree_set(0..300u64, 0..60),
        ) {
            let bounds: Vec<u64> = [0].into_iter().chain(cuts).chain([300]).collect();
            let slots: Vec<_> = (7..).zip(bounds.windows(2)).map(|(id, pair)| slot(id, 1, pair[0], pair[1] - pair[0])).collect();
            let logs = Logs::default();
            for slot in &slots {
                let (first, pages) = (slot.offset / PAGE, slot.length / PAGE);
                let mut log = vec![0_u64; pages.div_ceil(64) as usize];
                for page in written.range(first..first + pages) {
                    log[((page - first) / 64) as usize] |= 1 << ((page - first) % 64);
                }
                logs.lock().unwrap().insert(slot.id, log);
            }
            let log = KvmDirtyLog::new(&slots, take(&logs));
            let mut words = [0; 5];
            log.fetch_and_clear(BlockIndex(1), &mut words).unwrap();
            let found: BTreeSet<u64> = (0..320).filter(|page| words[*page as usize / 64] >> (page % 64) & 1 == 1).collect();
            prop_assert_eq!(found, written);
            let mut other = [0; 5];
            log.fetch_and_clear(BlockIndex(0), &mut other).unwrap();
            prop_assert_eq!(other, [0; 5]);
        }
    }

    #[test]
    fn a_tracker_switches_every_slot_and_reports_runs_across_them() {
        let (logs, switched) = (Logs::default(), Mutex::new(Vec::new()));
        let slots = [slot(1, 0, 0, 3), slot(2, 0, 3, 62)];
        let switch = |id, is_on| {
            switched.lock().unwrap().push((id, is_on));
            Ok(())
        };
        let tracker = DirtyLogTracker::new(KvmDirtyLog::new(&slots, take(&logs)).with_switch(switch));
        let region = RamMapping::anonymous(65 * 4096).unwrap();
        tracker.start(&[region.span()], &mut |_, _| panic!("KVM does not know what is untouched")).unwrap();
        // Bits past the last page are ignored.
        *logs.lock().unwrap() = BTreeMap::from([(1, vec![0b1100]), (2, vec![1 | 1 << 61 | 1 << 62])]);
        let mut runs = Vec::new();
        let mut report =
            |page: crate::tracker::PageRef, length| runs.push((page.offset / PAGE, length / PAGE));
        tracker.harvest(&[region.span()], &mut report).unwrap();
        assert_eq!(runs, [(2, 2), (64, 1)]);
        tracker.stop(&[region.span()]).unwrap();
        assert_eq!(*switched.lock().unwrap(), [(1, true), (2, true), (1, false), (2, false)]);
    }

    #[test]
    fn a_slot_that_leaves_its_block_is_named() {
        let log = KvmDirtyLog::new(&[slot(5, 0, 60, 10)], |_, words: &mut [u64]| {
            words[0] = 1 << 9;
            Ok(())
        });
        let error = log.fetch_and_clear(BlockIndex(0), &mut [0]).unwrap_err().to_string();
        assert_eq!(error, "slot 5, 40960 bytes at 0x3c000, does not lie in block 0");
    }
}
