//! Prefetch: memory sent to the destination before the guest runs, from the head of its working set.
//!
//! A working set names the pages that were requested. The restore before also brought the neighbours of each
//! of them, which caused no faults because they were there: so neighbourhoods are prefetched, not pages.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use towline_protocol::PageRef;
use towline_protocol::postcopy::PostcopyBlock;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::RamWriter;

use super::connection::Postcopy;
use super::scheduler::{BlockRange, PREPARERS};
use crate::outgoing::RecordSender;
use crate::{ExtentKind, Result, parallel};

/// Size of the neighbourhood that is sent with a requested page.
const NEIGHBOUR_BYTES: u64 = 64 << 10;
/// Maximum number of prefetched bytes: some milliseconds of a fast link.
const BYTES_MAX: u64 = 32 << 20;
/// Charge of a zero page: its record is short, but the destination touches the page.
const ZERO_PAGE_BYTES: u64 = 256;
/// Time limits: for preparing the head, which may be slow; and for preparing and sending it.
const PREPARE_TIME_MAX: Duration = Duration::from_millis(40);
const TIME_MAX: Duration = Duration::from_millis(80);

/// The neighbourhoods of these runs within their blocks, each once: first those of the runs themselves, in
/// their order, then the following ones.
pub(super) fn neighbourhoods(working_set: &[BlockRange], blocks: &[PostcopyBlock]) -> Vec<BlockRange> {
    let (mut known, mut found) = (HashSet::new(), Vec::new());
    for behind in [0, NEIGHBOUR_BYTES] {
        for &(page, length) in working_set {
            let Some(block) = blocks.get(page.block.index()) else { continue };
            let size = NEIGHBOUR_BYTES.max(block.page_bytes);
            let (first, end) = (page.offset / size * size, page.offset.saturating_add(length));
            let end = end.saturating_add(behind).min(block.ram.length);
            for offset in (first..end).step_by(size as usize) {
                if known.insert((page.block, offset)) {
                    found.push((PageRef { offset, ..page }, size.min(block.ram.length - offset)));
                }
            }
        }
    }
    found
}

impl Postcopy<'_> {
    /// Sends the head of the working set, as much as is prepared and sent in time.
    pub(super) fn send_prefetched(&self, writer: &mut RecordSender, records: &mut RamWriter) -> Result<()> {
        let begun = Instant::now();
        for (page, length) in self.prepare_prefetch(begun + PREPARE_TIME_MAX)? {
            if begun.elapsed() < TIME_MAX {
                self.send_free(writer, records, page, length)?;
            }
            self.units.put(self.guest.0, page, length);
        }
        Ok(())
    }

    /// Prepares the head of the working set, and returns what was prepared in time.
    fn prepare_prefetch(&self, deadline: Instant) -> Result<Vec<BlockRange>> {
        let prepare = |&(page, length)| -> Result<Option<BlockRange>> {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.units.prepare(self.guest.0, page, length)?;
            Ok(Some((page, length)))
        };
        let prepared = parallel::for_each(&self.head(), PREPARERS, || prepare)?;
        Ok(prepared.into_iter().flatten().collect())
    }

    /// The part of the working set that may be sent ahead. Parts not sent in time come first once the guest
    /// runs.
    pub(super) fn head(&self) -> Vec<BlockRange> {
        let mut left = BYTES_MAX;
        let cost = |run: &&BlockRange| {
            let cost = self.cost(**run);
            let fits = cost <= left;
            left = left.saturating_sub(cost);
            fits
        };
        self.options.working_set.iter().take_while(cost).copied().collect()
    }

    fn cost(&self, (page, length): BlockRange) -> u64 {
        let (mut at, end, mut cost) = (page, page.offset + length, 0);
        while at.offset < end {
            let extent = self.guest.0.extent(at);
            let bytes = (extent.pages * PAGE_SIZE).min(end - at.offset);
            cost += match extent.kind {
                ExtentKind::Zero => bytes / PAGE_SIZE * ZERO_PAGE_BYTES,
                ExtentKind::Data | ExtentKind::Unknown => bytes,
            };
            at.offset += bytes;
        }
        cost
    }
}

#[cfg(test)]
mod tests {
    use towline_protocol::{BlockIndex, RamBlock};

    use super::*;

    #[test]
    fn neighbourhoods_stay_in_their_block_and_those_behind_come_last() {
        let block = |length, page_bytes| PostcopyBlock {
            ram: RamBlock { name: "pc.ram".into(), length, mapped: None },
            page_bytes,
        };
        let run = |block, offset, length| (PageRef { block: BlockIndex(block), offset }, length);
        let blocks = [block(4 * NEIGHBOUR_BYTES + 4096, 4096), block(4 << 20, 2 << 20)];
        let set = [
            run(0, 3 * NEIGHBOUR_BYTES + 4096, 4096),
            run(1, 4096, 4096),
            run(0, 3 * NEIGHBOUR_BYTES, 4096),
            run(0, 8192, u64::MAX),
            run(7, 0, 4096),
        ];
        let (near, huge) = (NEIGHBOUR_BYTES, 2 << 20);
        let expected = [
            run(0, 3 * near, near),
            run(1, 0, huge),
            run(0, 0, near),
            run(0, near, near),
            run(0, 2 * near, near),
            run(0, 4 * near, 4096),
        ];
        assert_eq!(neighbourhoods(&set, &blocks), expected);
        assert_eq!(neighbourhoods(&[run(0, 4096, 4096)], &blocks), [run(0, 0, near), run(0, near, near)]);
    }
}
