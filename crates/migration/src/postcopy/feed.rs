//! What the background sends next: neighbours of faults, then what earlier restores needed, then the rest.
//!
//! ```text
//!   faults ──► near (few, newest first) ───────────────────────────────┐
//!   plan: working set · all memory ──► preparers (several) ──► ready ──┴─► the sender
//! ```
//! Preparing is what may take long: an image's chunk is read and hashed, an object store's fetched. So several threads do it,
//! a little ahead of the sender; neighbours need none, as the fault has had their unit prepared.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use towline_protocol::postcopy::Block;
use towline_protocol::{BlockIndex, PageRef};

use super::UNIT_BYTES;
use super::sent_map::SentMap;

/// Units that are prepared and not sent yet: what a sender of a gigabyte a second takes in 20 ms.
const READY_MAX: usize = 10;
/// Neighbourhoods that wait; behind so many newer ones the oldest is forgotten, and goes with the rest.
const NEAR_MAX: usize = 64;
/// What goes after a page that was asked for: as much as Linux reads around a fault.
const NEAR_BYTES: u64 = 64 << 10;

/// Bytes of one block.
pub(super) type Run = (PageRef, u64);

/// See the module's picture.
#[derive(Debug)]
pub(super) struct Feed {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    plan: Plan,
    near: VecDeque<Run>,
    ready: VecDeque<Run>,
    preparing: usize,
    closed: bool,
}

impl Feed {
    /// With the runs that an earlier restore needed, in their order.
    pub(super) fn new(blocks: &[Block], working_set: &[Run]) -> Self {
        let plan = Plan::new(blocks, working_set);
        let (near, ready) = (VecDeque::new(), VecDeque::new());
        let state = State { plan, near, ready, preparing: 0, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A preparer's next run; `None` when there is nothing left to prepare.
    pub(super) fn next_to_prepare(&self, map: &SentMap) -> Option<Run> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if state.ready.len() + state.preparing >= READY_MAX {
                state = self.wait(state);
                continue;
            }
            let (page, length) = state.plan.next()?;
            if !map.is_whole(page, length) {
                state.preparing += 1;
                return Some((page, length));
            }
        }
    }

    /// That run is prepared.
    pub(super) fn prepared(&self, run: Run) {
        let mut state = self.state();
        state.preparing -= 1;
        state.ready.push_back(run);
        self.changed.notify_all();
    }

    /// A page was asked for: its neighbours are next.
    pub(super) fn fault(&self, page: PageRef, unit: Run) {
        let start = page.offset / NEAR_BYTES * NEAR_BYTES;
        // The rest of its neighbourhood, and the next one, within what was prepared for it.
        let start = start.max(unit.0.offset);
        let end = (start + 2 * NEAR_BYTES).min(unit.0.offset + unit.1);
        if start >= end {
            return;
        }
        let mut state = self.state();
        if state.near.len() == NEAR_MAX {
            state.near.pop_back();
        }
        state.near.push_front((PageRef { offset: start, ..page }, end - start));
        self.changed.notify_all();
    }

    /// The newest neighbourhood, if one waits.
    pub(super) fn next_near(&self) -> Option<Run> {
        self.state().near.pop_front()
    }

    /// What the sender takes next; `None` when everything was handed out.
    pub(super) fn next(&self) -> Option<Run> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            let next = state.near.pop_front().or_else(|| state.ready.pop_front());
            if next.is_some() {
                self.changed.notify_all();
                return next;
            }
            if state.preparing == 0 && state.plan.is_done() {
                return None;
            }
            state = self.wait(state);
        }
    }

    /// Waits until `done`, which is asked again after each [`Self::notify`]; false if the feed is closed before.
    pub(super) fn wait_until(&self, done: impl Fn() -> bool) -> bool {
        let mut state = self.state();
        while !done() {
            if state.closed {
                return false;
            }
            state = self.wait(state);
        }
        true
    }

    /// Something that [`Self::wait_until`] waits for may have come.
    pub(super) fn notify(&self) {
        drop(self.state());
        self.changed.notify_all();
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The order of everything, as runs that lie within a unit each.
#[derive(Debug)]
struct Plan {
    runs: Vec<Run>,
    run: usize,
    done: u64,
}

impl Plan {
    fn new(blocks: &[Block], working_set: &[Run]) -> Self {
        let whole = blocks
            .iter()
            .zip(0..)
            .map(|(block, index)| (PageRef { block: BlockIndex(index), offset: 0 }, block.ram.length));
        let runs = working_set.iter().copied().chain(whole).filter(|(_, length)| *length > 0).collect();
        Self { runs, run: 0, done: 0 }
    }

    fn is_done(&self) -> bool {
        self.run == self.runs.len()
    }

    fn next(&mut self) -> Option<Run> {
        let &(page, length) = self.runs.get(self.run)?;
        let offset = page.offset + self.done;
        let unit = (UNIT_BYTES - offset % UNIT_BYTES).min(length - self.done);
        self.done += unit;
        if self.done == length {
            (self.run, self.done) = (self.run + 1, 0);
        }
        Some((PageRef { offset, ..page }, unit))
    }
}

#[cfg(test)]
mod tests {
    use towline_protocol::RamBlock;

    use super::*;

    fn block(length: u64) -> Block {
        Block { ram: RamBlock { name: "pc.ram".into(), length, mapped: None }, page_bytes: 4096 }
    }

    fn page(block: u32, offset: u64) -> PageRef {
        PageRef { block: BlockIndex(block), offset }
    }

    #[test]
    fn the_working_set_comes_first_and_then_everything() {
        let blocks = [block(3 * UNIT_BYTES + 4096), block(8192)];
        let feed = Feed::new(&blocks, &[(page(0, UNIT_BYTES - 4096), 8192), (page(1, 4096), 4096)]);
        let map = SentMap::new(&blocks);
        let mut runs = Vec::new();
        while let Some(run) = feed.next_to_prepare(&map) {
            feed.prepared(run);
            runs.extend(feed.next());
        }
        let expected = [
            (page(0, UNIT_BYTES - 4096), 4096),
            (page(0, UNIT_BYTES), 4096),
            (page(1, 4096), 4096),
            (page(0, 0), UNIT_BYTES),
            (page(0, UNIT_BYTES), UNIT_BYTES),
            (page(0, 2 * UNIT_BYTES), UNIT_BYTES),
            (page(0, 3 * UNIT_BYTES), 4096),
            (page(1, 0), 8192),
        ];
        assert_eq!(runs, expected);
        assert_eq!(feed.next(), None);
    }

    #[test]
    fn neighbours_come_before_what_is_ready_and_stay_in_their_unit() {
        let blocks = [block(2 * UNIT_BYTES)];
        let (feed, map) = (Feed::new(&blocks, &[]), SentMap::new(&blocks));
        let first = feed.next_to_prepare(&map).unwrap();
        feed.prepared(first);
        feed.fault(page(0, UNIT_BYTES + NEAR_BYTES + 4096), (page(0, UNIT_BYTES), UNIT_BYTES));
        feed.fault(page(0, UNIT_BYTES - 4096), (page(0, 0), UNIT_BYTES));
        assert_eq!(feed.next(), Some((page(0, UNIT_BYTES - NEAR_BYTES), NEAR_BYTES)));
        assert_eq!(feed.next(), Some((page(0, UNIT_BYTES + NEAR_BYTES), 2 * NEAR_BYTES)));
        assert_eq!(feed.next(), Some(first));
    }
}
