//! Tracking by an existing bitmap with a bit for each page: KVM's dirty log, or that of a device's emulation.

use std::io;

use towline_protocol::ram::PAGE_SIZE as PAGE;
use towline_protocol::{BlockIndex, PageRef};

use super::{DirtyTracker, TrackerError};
use crate::dirty::runs;
use crate::sys::Span;

const WORD_BITS: u64 = 64;

/// A dirty log of the embedder, such as KVM's. A closure that reads a block's log is one that is always on.
pub trait DirtyLogReader: Send + Sync {
    /// Switches it on (`KVM_MEM_LOG_DIRTY_PAGES`), with no bit set.
    ///
    /// # Errors
    /// The log cannot be switched on.
    fn start(&self) -> io::Result<()> {
        Ok(())
    }

    /// Puts the log of a block into `words` and clears it, as `KVM_GET_DIRTY_LOG` does: a bit for each page
    /// of 4096 bytes, the first page in the lowest bit of the first word. `words` is zero, one word for each
    /// 64 pages begun. A page must be write-protected again, or otherwise watched, before its bit is given.
    ///
    /// # Errors
    /// The log cannot be read; the migration ends.
    fn fetch_and_clear(&self, block: BlockIndex, words: &mut [u64]) -> io::Result<()>;

    /// Switches it off.
    ///
    /// # Errors
    /// The log stays on.
    fn stop(&self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: Fn(BlockIndex, &mut [u64]) -> io::Result<()> + Send + Sync> DirtyLogReader for F {
    fn fetch_and_clear(&self, block: BlockIndex, words: &mut [u64]) -> io::Result<()> {
        self(block, words)
    }
}

/// Tracks by an existing dirty log.
#[derive(Debug)]
pub struct DirtyLogTracker<L> {
    log: L,
}

impl<L: DirtyLogReader> DirtyLogTracker<L> {
    /// A tracker that reads `log`.
    pub fn new(log: L) -> Self {
        Self { log }
    }

    fn report_dirty(
        &self,
        memory: &[Span<'_>],
        report: &mut dyn FnMut(PageRef, u64),
    ) -> Result<(), TrackerError> {
        let mut words = Vec::new();
        for (block, span) in memory.iter().enumerate() {
            let pages = span.length() as u64 / PAGE;
            words.clear();
            words.resize(usize::try_from(pages.div_ceil(WORD_BITS)).expect("fewer than its pages"), 0);
            let index = BlockIndex(u32::try_from(block).expect("bounded by BLOCKS_MAX"));
            self.log
                .fetch_and_clear(index, &mut words)
                .map_err(|source| TrackerError::Log { block, source })?;
            let behind = words.last().map_or(0, |last| (last >> ((pages - 1) % WORD_BITS)) >> 1);
            if behind != 0 {
                let page = pages + u64::from(behind.trailing_zeros());
                return Err(TrackerError::LogBit { block, page, pages });
            }
            runs(words.iter().copied(), &mut |first, pages| {
                report(PageRef { block: index, offset: first * PAGE }, pages * PAGE);
            });
        }
        Ok(())
    }
}

impl<L: DirtyLogReader> DirtyTracker for DirtyLogTracker<L> {
    fn start(
        &self,
        memory: &[Span<'_>],
        _untouched: &mut dyn FnMut(PageRef, u64),
    ) -> Result<(), TrackerError> {
        self.log.start().map_err(|source| TrackerError::LogSwitch { on: true, source })?;
        // Discards earlier bits: everything is sent once anyway.
        self.report_dirty(memory, &mut |_, _| {})
    }

    fn harvest(&self, memory: &[Span<'_>], report: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError> {
        self.report_dirty(memory, report)
    }

    fn stop(&self, _memory: &[Span<'_>]) -> Result<(), TrackerError> {
        self.log.stop().map_err(|source| TrackerError::LogSwitch { on: false, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::RamMapping;
    use std::sync::Mutex;

    fn harvested(tracker: &impl DirtyTracker, memory: &[Span<'_>]) -> Result<Vec<(u32, u64, u64)>, String> {
        let mut runs = Vec::new();
        let mut report = |page: PageRef, length| runs.push((page.block.0, page.offset / PAGE, length / PAGE));
        tracker.harvest(memory, &mut report).map_err(|error| error.to_string())?;
        Ok(runs)
    }

    #[test]
    fn a_log_is_read_lowest_bit_first() {
        let regions = [RamMapping::anonymous(4096).unwrap(), RamMapping::anonymous(130 * 4096).unwrap()];
        let memory: Vec<_> = regions.iter().map(RamMapping::span).collect();
        let log = Mutex::new(vec![vec![1], vec![0, 0, 0]]);
        let take = |block: BlockIndex, words: &mut [u64]| {
            words.swap_with_slice(&mut log.lock().unwrap()[block.index()]);
            Ok(())
        };
        let tracker = DirtyLogTracker::new(take);
        tracker.start(&memory, &mut |_, _| panic!("a log does not know what is untouched")).unwrap();
        assert_eq!(harvested(&tracker, &memory), Ok(vec![]), "what stood in it before");
        *log.lock().unwrap() = vec![vec![1], vec![1 << 63 | 0b101, 1, 0b10]];
        let expected = vec![(0, 0, 1), (1, 0, 1), (1, 2, 1), (1, 63, 2), (1, 129, 1)];
        assert_eq!(harvested(&tracker, &memory), Ok(expected));
        assert_eq!(harvested(&tracker, &memory), Ok(vec![]));
        log.lock().unwrap()[1][2] = 0b100;
        let text = "the dirty log of block 1 has page 130, expected less than 130";
        assert_eq!(harvested(&tracker, &memory), Err(text.into()));
        tracker.stop(&memory).unwrap();
    }
}
