//! Units of the guest's memory: each is prepared before any of it is read, kept while in use, and released
//! when all of it was sent.
//!
//! Most of a unit that a fault had prepared may stay unsent for long. When such idle units exceed
//! [`IDLE_BYTES_MAX`] the least recently used one is released too, and prepared again later, so a guest with
//! scattered accesses does not pin all of its memory here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use towline_protocol::postcopy::PostcopyBlock;
use towline_protocol::{BlockIndex, PageRef};

use super::scheduler::RUN_BYTES;
use crate::lock::lock;
use crate::{Guest, Result};

/// Maximum size of units that are prepared, unused, and not sent as a whole.
const IDLE_BYTES_MAX: u64 = 32 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not here.
    Absent,
    /// Being prepared.
    Preparing,
    /// Readable by its users.
    Prepared {
        users: u32,
        /// Key in [`Table::idle`] while it is unused.
        idle: u64,
    },
    /// Sent completely, and released.
    Done,
}

/// States of all units of one guest.
#[derive(Debug)]
pub(super) struct Units {
    unit_bytes: u64,
    idle_bytes_max: u64,
    blocks: Vec<BlockUnits>,
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug)]
struct BlockUnits {
    length: u64,
    /// Bytes of each unit that were sent.
    sent: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Table {
    states: Vec<Vec<State>>,
    /// Units that became idle, oldest first, each with its sequence number. An entry is stale if its unit has
    /// been used since.
    idle: VecDeque<(PageRef, u64)>,
    idle_bytes: u64,
    count: u64,
}

impl Table {
    fn state(&mut self, unit: PageRef, unit_bytes: u64) -> &mut State {
        &mut self.states[unit.block.index()][(unit.offset / unit_bytes) as usize]
    }
}

impl Units {
    /// Units of `unit_bytes`, a power of two of at most [`RUN_BYTES`].
    pub(super) fn new(blocks: &[PostcopyBlock], unit_bytes: u64) -> Self {
        let count = |block: &PostcopyBlock| block.ram.length.div_ceil(unit_bytes) as usize;
        let block_units = |block: &PostcopyBlock| BlockUnits {
            length: block.ram.length,
            sent: (0..count(block)).map(|_| AtomicU64::new(0)).collect(),
        };
        let states = blocks.iter().map(|block| vec![State::Absent; count(block)]).collect();
        Self {
            unit_bytes,
            idle_bytes_max: IDLE_BYTES_MAX,
            blocks: blocks.iter().map(block_units).collect(),
            table: Mutex::new(Table { states, ..Table::default() }),
            changed: Condvar::new(),
        }
    }

    /// The unit that a page lies in.
    pub(super) fn of(&self, page: PageRef) -> (PageRef, u64) {
        let offset = page.offset / self.unit_bytes * self.unit_bytes;
        (PageRef { offset, ..page }, self.length(page.block, offset))
    }

    /// The unit after this one, within its block.
    pub(super) fn behind(&self, unit: PageRef, length: u64) -> Option<(PageRef, u64)> {
        let next = PageRef { offset: unit.offset + length, ..unit };
        (next.offset < self.blocks[unit.block.index()].length).then(|| self.of(next))
    }

    /// The `count` units after this one, within its block, and as many before it: the nearest first.
    pub(super) fn around(&self, unit: PageRef, count: u64) -> Vec<(PageRef, u64)> {
        let length = self.blocks[unit.block.index()].length;
        let behind = |n: u64| Some(unit.offset + n * self.unit_bytes).filter(|&offset| offset < length);
        let before = |n: u64| unit.offset.checked_sub(n * self.unit_bytes);
        let offsets = (1..=count).flat_map(|n| [behind(n), before(n)]).flatten();
        offsets.map(|offset| self.of(PageRef { offset, ..unit })).collect()
    }

    /// Prepares every unit that these bytes touch, unless it is prepared, and uses them until [`Self::put`]:
    /// concurrent callers wait for the first.
    pub(super) fn prepare(&self, guest: &dyn Guest, page: PageRef, length: u64) -> Result<()> {
        self.prepare_then(guest, page, length, &mut || {})
    }

    /// As [`Self::prepare`], calling `requested` after each request whose result must be awaited.
    pub(super) fn prepare_then(
        &self,
        guest: &dyn Guest,
        page: PageRef,
        length: u64,
        requested: &mut dyn FnMut(),
    ) -> Result<()> {
        let end = page.offset + length;
        let mut at = self.of(page).0;
        while at.offset < end {
            at.offset += match self.acquire_or_claim(at, end) {
                None => self.unit_bytes,
                Some(bytes) => {
                    guest.request(at, bytes);
                    requested();
                    let result = guest.prepare(at, bytes);
                    let state = match result {
                        Ok(()) => State::Prepared { users: 1, idle: 0 },
                        Err(_) => State::Absent,
                    };
                    self.set(at, bytes, state);
                    result?;
                    bytes.max(self.unit_bytes)
                }
            };
        }
        Ok(())
    }

    /// Ends a use. Releases units that are sent as a whole, and idle ones if there are too many.
    pub(super) fn put(&self, guest: &dyn Guest, page: PageRef, length: u64) {
        let end = page.offset + length;
        let (mut at, mut table) = (self.of(page).0, lock(&self.table));
        while at.offset < end {
            let length = self.length(at.block, at.offset);
            let (is_sent, count) = (self.sent_of(at).load(Ordering::Acquire) == length, table.count + 1);
            match table.state(at, self.unit_bytes) {
                State::Prepared { users, .. } if *users > 1 => *users -= 1,
                state @ State::Prepared { .. } if is_sent => {
                    *state = State::Done;
                    // With the table locked, so it cannot be prepared at the same time.
                    guest.release(at, length);
                }
                state @ State::Prepared { .. } => {
                    *state = State::Prepared { users: 0, idle: count };
                    table.count = count;
                    table.idle.push_back((at, count));
                    table.idle_bytes += length;
                }
                State::Absent | State::Preparing | State::Done => {}
            }
            at.offset += length;
        }
        self.release_idle(&mut table, guest);
    }

    /// Marks bytes of one run in use as sent.
    pub(super) fn sent(&self, page: PageRef, length: u64) {
        let end = page.offset + length;
        let mut at = page;
        while at.offset < end {
            let (unit, unit_length) = self.of(at);
            let bytes = (unit.offset + unit_length).min(end) - at.offset;
            self.sent_of(unit).fetch_add(bytes, Ordering::AcqRel);
            at.offset = unit.offset + unit_length;
        }
    }

    /// Returns true if every byte was sent.
    pub(super) fn is_all_sent(&self) -> bool {
        let sent =
            |block: &BlockUnits| -> u64 { block.sent.iter().map(|sent| sent.load(Ordering::Acquire)).sum() };
        self.blocks.iter().all(|block| sent(block) == block.length)
    }

    /// After a lost connection only pages that the destination received count as sent, and nothing is in use:
    /// all units are released, to be prepared again where needed.
    pub(super) fn reset(&self, guest: &dyn Guest, free_bytes: impl Fn(PageRef, u64) -> u64) {
        let mut table = lock(&self.table);
        for (block, index) in self.blocks.iter().zip(0..) {
            for (sent, unit) in block.sent.iter().zip(0..) {
                let page = PageRef { block: BlockIndex(index), offset: unit * self.unit_bytes };
                let length = self.length(page.block, page.offset);
                sent.store(length - free_bytes(page, length), Ordering::Release);
                let state = table.state(page, self.unit_bytes);
                if let State::Prepared { .. } = std::mem::replace(state, State::Absent) {
                    guest.release(page, length);
                }
            }
        }
        *table = Table { states: std::mem::take(&mut table.states), ..Table::default() };
    }

    /// Acquires the unit if it is prepared, or was sent as a whole: `None`. Otherwise claims it, and the absent
    /// ones after it up to `end`, for the caller to prepare: the number of their bytes.
    fn acquire_or_claim(&self, unit: PageRef, end: u64) -> Option<u64> {
        let length = self.length(unit.block, unit.offset);
        let mut table = lock(&self.table);
        loop {
            match *table.state(unit, self.unit_bytes) {
                State::Done => return None,
                State::Prepared { users, idle } => {
                    *table.state(unit, self.unit_bytes) = State::Prepared { users: users + 1, idle };
                    if users == 0 {
                        table.idle_bytes -= length;
                    }
                    return None;
                }
                State::Absent => break,
                State::Preparing => {
                    table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        // Not beyond what may be read at once.
        let end = end.min((unit.offset / RUN_BYTES + 1) * RUN_BYTES);
        let mut at = unit;
        while at.offset < end && *table.state(at, self.unit_bytes) == State::Absent {
            *table.state(at, self.unit_bytes) = State::Preparing;
            at.offset += self.length(at.block, at.offset);
        }
        Some(at.offset - unit.offset)
    }

    fn set(&self, first: PageRef, length: u64, state: State) {
        let mut table = lock(&self.table);
        let mut at = first;
        while at.offset < first.offset + length {
            *table.state(at, self.unit_bytes) = state;
            at.offset += self.unit_bytes;
        }
        self.changed.notify_all();
    }

    fn release_idle(&self, table: &mut Table, guest: &dyn Guest) {
        while let Some(&(unit, number)) = table.idle.front() {
            let state = table.state(unit, self.unit_bytes);
            let is_idle = *state == State::Prepared { users: 0, idle: number };
            if is_idle && table.idle_bytes <= self.idle_bytes_max {
                return;
            }
            table.idle.pop_front();
            if is_idle {
                let length = self.length(unit.block, unit.offset);
                *table.state(unit, self.unit_bytes) = State::Absent;
                table.idle_bytes -= length;
                guest.release(unit, length);
            }
        }
    }

    fn length(&self, block: BlockIndex, offset: u64) -> u64 {
        self.unit_bytes.min(self.blocks[block.index()].length - offset)
    }

    fn sent_of(&self, unit: PageRef) -> &AtomicU64 {
        &self.blocks[unit.block.index()].sent[(unit.offset / self.unit_bytes) as usize]
    }
}

#[cfg(test)]
mod tests {
    use towline_channel::IoBuf;
    use towline_protocol::RamBlock;
    use towline_protocol::configuration::Configuration;

    use super::*;
    use crate::Extent;

    const UNIT: u64 = 64 << 10;

    /// Counts the uses of each unit.
    #[derive(Default)]
    struct Counting {
        held: Mutex<Vec<i32>>,
        calls: Mutex<Vec<(u64, u64)>>,
    }

    impl Counting {
        fn add(&self, page: PageRef, length: u64, count: i32) {
            let mut held = self.held.lock().unwrap();
            for unit in page.offset / UNIT..(page.offset + length).div_ceil(UNIT) {
                let units = held.len().max(unit as usize + 1);
                held.resize(units, 0);
                held[unit as usize] += count;
            }
        }

        fn held(&self) -> Vec<u64> {
            let held = self.held.lock().unwrap();
            assert!(held.iter().all(|count| (0..=1).contains(count)), "{held:?}");
            (0..).zip(held.iter()).filter_map(|(unit, &count)| (count > 0).then_some(unit)).collect()
        }
    }

    impl Guest for Counting {
        fn configuration(&self) -> &Configuration {
            unreachable!("not called")
        }

        fn blocks(&self) -> &[RamBlock] {
            &[]
        }

        fn extent(&self, _page: PageRef) -> Extent {
            unreachable!("not called")
        }

        fn prepare(&self, page: PageRef, length: u64) -> Result<()> {
            self.calls.lock().unwrap().push((page.offset / UNIT, length));
            self.add(page, length, 1);
            Ok(())
        }

        fn release(&self, page: PageRef, length: u64) {
            self.add(page, length, -1);
        }

        fn memory(&self, _page: PageRef, _length: u64) -> IoBuf<'_> {
            unreachable!("not called")
        }

        fn device_state(&self) -> Result<Vec<u8>> {
            Ok(Vec::new())
        }
    }

    fn units(length: u64) -> Units {
        let ram = RamBlock { name: "pc.ram".into(), length, mapped: None };
        Units::new(&[PostcopyBlock { ram, page_bytes: 4096 }], UNIT)
    }

    fn page(offset: u64) -> PageRef {
        PageRef { block: BlockIndex(0), offset }
    }

    #[test]
    fn absent_units_are_prepared_in_one_call_and_released_when_sent() {
        let (guest, units) = (Counting::default(), units(RUN_BYTES + UNIT + 4096));
        units.prepare(&guest, page(UNIT + 4096), 4096).unwrap();
        units.prepare(&guest, page(0), RUN_BYTES + UNIT + 4096).unwrap();
        let rest = RUN_BYTES - 2 * UNIT;
        assert_eq!(*guest.calls.lock().unwrap(), [(1, UNIT), (0, UNIT), (2, rest), (32, UNIT + 4096)]);
        units.sent(page(0), RUN_BYTES + UNIT + 4096);
        units.put(&guest, page(0), RUN_BYTES + UNIT + 4096);
        assert_eq!(guest.held(), [1], "it is still in use");
        units.put(&guest, page(UNIT + 4096), 4096);
        assert_eq!(guest.held(), Vec::<u64>::new());
        assert!(units.is_all_sent());
    }

    #[test]
    fn units_around_one_are_within_the_block_and_the_nearest_come_first() {
        let units = units(4 * UNIT + 4096);
        let unit = |index: u64| (page(index * UNIT), if index == 4 { 4096 } else { UNIT });
        assert_eq!(units.around(page(UNIT), 3), [2, 0, 3, 4].map(unit));
        assert_eq!(units.around(page(4 * UNIT), 1), [3].map(unit));
    }

    #[test]
    fn a_caller_goes_on_while_it_waits_for_what_it_requested() {
        let (guest, units) = (Counting::default(), units(2 * UNIT));
        let mut requested = Vec::new();
        let mut prepare = |length| {
            let mut note = || requested.push(guest.calls.lock().unwrap().len());
            units.prepare_then(&guest, page(0), length, &mut note).unwrap();
        };
        [4096, 4096, 2 * UNIT].into_iter().for_each(&mut prepare);
        assert_eq!(requested, [0, 1], "before each call, and not for what is prepared");
    }

    #[test]
    fn behind_so_much_that_is_idle_the_oldest_goes_and_comes_again() {
        let (guest, mut units) = (Counting::default(), units(8 * UNIT));
        units.idle_bytes_max = 2 * UNIT;
        let touch = |unit: u64| {
            units.prepare(&guest, page(unit * UNIT), 4096).unwrap();
            units.put(&guest, page(unit * UNIT), 4096);
        };
        units.prepare(&guest, page(7 * UNIT), 4096).unwrap();
        [0, 1, 2, 1, 3].into_iter().for_each(touch);
        assert_eq!(guest.held(), [1, 3, 7], "what is used stays");
        touch(0);
        assert_eq!(guest.held(), [0, 3, 7]);
        units.reset(&guest, |_, length| length);
        assert_eq!(guest.held(), Vec::<u64>::new());
    }
}
