//! One pass over the memory, in units that lanes take one by one.

use std::ops::Range;
use std::sync::Mutex;

use towline_protocol::{BlockIndex, PageRef};

use crate::lock::lock;
use crate::{Guest, Result};

/// A unit's size and alignment: those of an image's checksums and of a host's huge pages.
pub(crate) const UNIT_BYTES: u64 = 2 << 20;

/// Runs of memory to be sent.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    runs: Vec<(PageRef, u64)>,
    next: Mutex<Position>,
}

/// Position in a list of runs.
#[derive(Debug, Default)]
pub(crate) struct Position {
    pub(crate) run: usize,
    done: u64,
}

impl Position {
    /// The next unit: at most 2 MiB, not across a multiple of that.
    pub(crate) fn next(&mut self, runs: &[(PageRef, u64)]) -> Option<(PageRef, u64)> {
        let &(page, length) = runs.get(self.run)?;
        let offset = page.offset + self.done;
        let unit = (UNIT_BYTES - offset % UNIT_BYTES).min(length - self.done);
        self.done += unit;
        if self.done == length {
            *self = Self { run: self.run + 1, done: 0 };
        }
        Some((PageRef { offset, ..page }, unit))
    }
}

impl Pass {
    /// All memory that the destination does not have.
    pub(crate) fn full(guest: &dyn Guest) -> Self {
        let mut runs = Vec::new();
        for (block, ram) in (0..).map(BlockIndex).zip(guest.blocks()) {
            if guest.is_present(block) {
                let run =
                    |range: &Range<u64>| (PageRef { block, offset: range.start }, range.end - range.start);
                runs.extend(guest.difference(block).iter().map(run));
            } else {
                runs.push((PageRef { block, offset: 0 }, ram.length));
            }
        }
        Self { runs, next: Mutex::default() }
    }

    /// The pages that the guest wrote since the last harvest, but for memory that the destination has.
    pub(crate) fn harvested(guest: &dyn Guest) -> Result<Self> {
        let mut runs = Vec::new();
        guest.harvest_dirty(&mut |page, length| {
            if !guest.is_present(page.block) {
                runs.push((page, length));
            }
        })?;
        Ok(Self { runs, next: Mutex::default() })
    }

    /// Adds another pass's runs; pages in both are sent once.
    pub(crate) fn merge(&mut self, other: Self) {
        self.runs.extend(other.runs);
        self.runs.sort_unstable();
        self.runs.dedup_by(|next, run| {
            let ((page, length), (next, next_length)) = (*run, *next);
            let touches = page.block == next.block && next.offset <= page.offset + length;
            if touches {
                run.1 = length.max(next.offset + next_length - page.offset);
            }
            touches
        });
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|(_, length)| length).sum()
    }

    /// The next unit.
    pub(crate) fn next(&self) -> Option<(PageRef, u64)> {
        lock(&self.next).next(&self.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_cover_every_run_and_respect_their_alignment() {
        let page = |offset| PageRef { block: BlockIndex(0), offset };
        let pass = Pass {
            runs: vec![(page(0x1000), UNIT_BYTES), (page(8 * UNIT_BYTES), 0x2000)],
            next: Mutex::default(),
        };
        let units: Vec<_> = std::iter::from_fn(|| pass.next()).collect();
        let expected =
            [(page(0x1000), UNIT_BYTES - 0x1000), (page(UNIT_BYTES), 0x1000), (page(8 * UNIT_BYTES), 0x2000)];
        assert_eq!(units, expected);
    }

    #[test]
    fn pages_in_two_passes_are_sent_once() {
        let page = |block, offset| PageRef { block: BlockIndex(block), offset };
        let pass = |runs| Pass { runs, next: Mutex::default() };
        let mut left = pass(vec![(page(0, 0x1000), 0x3000), (page(1, 0), 0x1000)]);
        left.merge(pass(vec![
            (page(0, 0x2000), 0x1000),
            (page(0, 0x3000), 0x3000),
            (page(1, 0x2000), 0x1000),
        ]));
        let expected = [(page(0, 0x1000), 0x5000), (page(1, 0), 0x1000), (page(1, 0x2000), 0x1000)];
        assert_eq!(left.runs, expected);
    }
}
