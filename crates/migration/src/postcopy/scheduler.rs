//! Order of the background pages: neighbours of faults, then the working set of earlier restores, then the
//! rest.
//!
//! ```text
//!   faults ──► neighbours (few, newest first) ─────────────────────────┐
//!   plan: working set · all memory ──► preparers (several) ──► ready ──┴─► the sender
//! ```
//! Preparing may take long: an image's chunk is read and hashed, an object store's fetched. So several
//! threads do it, a little ahead of the sender; neighbours are prepared by the thread that served the fault.
//! Items from here are prepared and in use, until the sender releases them.
//!
//! Where memory comes from far away ([`Background::AfterFaults`]), units around each fault are prepared next
//! (fault-around): a guest that starts needs some of them soon, and would wait for one after the other. No
//! fault waits for them, so they may fail.
//!
//! With [`Background::AfterFaults`] preparers pause while the guest waits for pages (`demand`).

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use towline_protocol::postcopy::PostcopyBlock;
use towline_protocol::{BlockIndex, PageRef};

use super::demand::{Background, Demand};
use super::sent_map::SentMap;
use crate::lock::lock;
use crate::outgoing::{Position, UNIT_BYTES};

/// Maximum size of a prepared run, which never crosses a multiple of it; an image's chunks have this size.
pub(super) const RUN_BYTES: u64 = UNIT_BYTES;

/// Threads that prepare for the background.
pub(super) const PREPARERS: usize = 4;
/// Threads that prepare units around faults, which include those: as many requests are under way beside those
/// of faults. More would delay faults at a server with few processors; with fewer, most of these units would
/// fault themselves.
const FAULT_AROUND_PREPARERS: usize = 8;
/// Maximum number of prepared, unsent runs: what is sent in 20 ms at a gigabyte per second.
const READY_MAX: usize = 10;
/// Maximum number of queued neighbourhoods; the oldest is dropped, and sent with the rest.
const NEIGHBOURS_MAX: usize = 64;

/// Maximum number of units around faults that wait to be prepared; the oldest are dropped, and sent with the
/// rest.
const FAULT_AROUND_MAX: usize = 64;

/// Bytes of one block.
pub(super) type BlockRange = (PageRef, u64);

/// An item for the sender: prepared, and in use until the sender releases it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) run: BlockRange,
    pub(super) kind: ItemKind,
}

/// Reason for which an item is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ItemKind {
    /// The guest is known to need it at once: no limit holds it up.
    Needed,
    /// Beside a page that the guest requested.
    Neighbour,
    /// All memory is sent.
    Rest,
}

/// Queues of the pages that the background sends.
#[derive(Debug)]
pub(super) struct SendScheduler {
    background: Background,
    state: Mutex<State>,
    /// For the sender: an item is ready.
    filled: Condvar,
    /// For preparers: there is room for more. Separate, so sending a piece does not wake all threads.
    taken: Condvar,
}

#[derive(Debug)]
struct State {
    plan: SendOrder,
    /// Units around faults, the newest first.
    fault_around: VecDeque<BlockRange>,
    neighbours: VecDeque<BlockRange>,
    ready: VecDeque<Item>,
    preparing: usize,
    demand: Demand,
    closed: bool,
}

impl SendScheduler {
    /// For memory of these blocks: first the runs of `working_set`, which an earlier restore needed, in their
    /// order; the first `needed` of them are needed at once.
    pub(super) fn new(
        blocks: &[PostcopyBlock],
        working_set: &[BlockRange],
        needed: usize,
        background: Background,
    ) -> Self {
        let plan = SendOrder::new(blocks, working_set, needed);
        let (fault_around, neighbours, ready) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let demand = Demand::new(background, Instant::now());
        let state = State { plan, fault_around, neighbours, ready, preparing: 0, demand, closed: false };
        let (filled, taken) = (Condvar::new(), Condvar::new());
        Self { background, state: Mutex::new(state), filled, taken }
    }

    /// Number of preparing threads.
    pub(super) fn preparers(&self) -> usize {
        match self.background {
            Background::AtOnce => PREPARERS,
            Background::AfterFaults => FAULT_AROUND_PREPARERS,
        }
    }

    /// A preparer's next run; `None` when there is nothing left to prepare.
    pub(super) fn next_to_prepare(&self, map: &SentMap) -> Option<Item> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if state.ready.len() + state.preparing >= READY_MAX {
                state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if let Some(run) = state.fault_around.pop_front() {
                if map.is_whole(run.0, run.1) {
                    continue;
                }
                state.preparing += 1;
                return Some(Item { run, kind: ItemKind::Neighbour });
            }
            let pause = state.demand.pause(Instant::now()).filter(|_| !state.plan.is_next_needed());
            if let Some(pause) = pause {
                state = self.taken.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            if state.preparing >= PREPARERS {
                state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let Some(item) = state.plan.next() else {
                self.filled.notify_one();
                return None;
            };
            if !map.is_whole(item.run.0, item.run.1) {
                state.preparing += 1;
                return Some(item);
            }
        }
    }

    /// Queues an item that is prepared.
    pub(super) fn prepared(&self, item: Item) {
        let mut state = lock(&self.state);
        state.preparing -= 1;
        if item.kind == ItemKind::Needed {
            state.demand.prepared_needed(Instant::now());
        }
        state.ready.push_back(item);
        self.filled.notify_one();
        self.taken.notify_all();
    }

    /// Counts an item that could not be prepared; it is sent with the rest, or for a request.
    pub(super) fn not_prepared(&self) {
        lock(&self.state).preparing -= 1;
        self.filled.notify_one();
        self.taken.notify_all();
    }

    /// Has these units around a fault prepared next, the first of them first.
    pub(super) fn prepare_around(&self, units: impl DoubleEndedIterator<Item = BlockRange>) {
        let mut state = lock(&self.state);
        units.rev().for_each(|unit| state.fault_around.push_front(unit));
        state.fault_around.truncate(FAULT_AROUND_MAX);
        self.taken.notify_all();
    }

    /// A request of the guest is being served, until [`Self::request_served`].
    pub(super) fn request_received(&self) {
        lock(&self.state).demand.begin();
    }

    /// The request of [`Self::request_received`] was served.
    pub(super) fn request_served(&self) {
        // Preparers wait for a time without requests, which begins here: their waits are long enough.
        lock(&self.state).demand.end(Instant::now());
    }

    /// Queues the prepared neighbourhood of a requested page first. Returns the one dropped for it.
    #[must_use]
    pub(super) fn queue_neighbours(&self, run: BlockRange) -> Option<BlockRange> {
        let mut state = lock(&self.state);
        let forgotten =
            if state.neighbours.len() == NEIGHBOURS_MAX { state.neighbours.pop_back() } else { None };
        state.neighbours.push_front(run);
        self.filled.notify_one();
        forgotten
    }

    /// The newest neighbourhood, if one waits.
    pub(super) fn next_neighbours(&self) -> Option<BlockRange> {
        lock(&self.state).neighbours.pop_front()
    }

    /// The sender's next item; `None` when all were returned.
    pub(super) fn next(&self) -> Option<Item> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(run) = state.neighbours.pop_front() {
                return Some(Item { run, kind: ItemKind::Neighbour });
            }
            if let Some(item) = state.ready.pop_front() {
                self.taken.notify_one();
                return Some(item);
            }
            if state.preparing == 0 && state.plan.is_done() {
                return None;
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `done`, which is evaluated after each [`Self::notify`]; false if the scheduler is closed
    /// before.
    pub(super) fn wait_until(&self, done: impl Fn() -> bool) -> bool {
        let mut state = lock(&self.state);
        while !done() {
            if state.closed {
                return false;
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Wakes [`Self::wait_until`] to check its condition.
    pub(super) fn notify(&self) {
        drop(lock(&self.state));
        self.filled.notify_one();
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.filled.notify_all();
        self.taken.notify_all();
    }
}

/// Order of all pages, in runs that can each be prepared at once.
#[derive(Debug)]
struct SendOrder {
    runs: Vec<BlockRange>,
    /// Number of these runs that are needed soon.
    needed: usize,
    next: Position,
}

impl SendOrder {
    fn new(blocks: &[PostcopyBlock], working_set: &[BlockRange], needed: usize) -> Self {
        let whole = blocks
            .iter()
            .zip(0..)
            .map(|(block, index)| (PageRef { block: BlockIndex(index), offset: 0 }, block.ram.length));
        let runs = working_set.iter().copied().chain(whole).filter(|(_, length)| *length > 0).collect();
        Self { runs, needed, next: Position::default() }
    }

    fn is_done(&self) -> bool {
        self.next.run == self.runs.len()
    }

    fn is_next_needed(&self) -> bool {
        self.next.run < self.needed
    }

    fn next(&mut self) -> Option<Item> {
        let kind = if self.is_next_needed() { ItemKind::Needed } else { ItemKind::Rest };
        Some(Item { run: self.next.next(&self.runs)?, kind })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use towline_protocol::RamBlock;

    use super::super::demand;
    use super::*;

    fn block(length: u64) -> PostcopyBlock {
        PostcopyBlock { ram: RamBlock { name: "pc.ram".into(), length, mapped: None }, page_bytes: 4096 }
    }

    fn page(block: u32, offset: u64) -> PageRef {
        PageRef { block: BlockIndex(block), offset }
    }

    #[test]
    fn what_is_needed_is_prepared_beside_a_request_and_the_rest_behind_it() {
        let blocks = [block(2 * RUN_BYTES)];
        let needed = [(page(0, RUN_BYTES), 4096)];
        let scheduler = SendScheduler::new(&blocks, &needed, 1, Background::AfterFaults);
        let map = SentMap::new(&blocks);
        scheduler.request_received();
        assert_eq!(scheduler.next_to_prepare(&map), Some(Item { run: needed[0], kind: ItemKind::Needed }));
        thread::scope(|scope| {
            let rest = scope.spawn(|| scheduler.next_to_prepare(&map).map(|item| (item, Instant::now())));
            // A waiting thread cannot be observed, but it must not have finished before.
            let served = Instant::now();
            scheduler.request_served();
            let (item, at) = rest.join().unwrap().unwrap();
            assert_eq!(item, Item { run: (page(0, 0), RUN_BYTES), kind: ItemKind::Rest });
            assert!(at - served >= demand::QUIET_TIME, "{:?}", at - served);
        });
    }

    #[test]
    fn units_around_the_newest_fault_are_prepared_next_and_what_fails_comes_with_the_rest() {
        let blocks = [block(RUN_BYTES)];
        let (scheduler, map) =
            (SendScheduler::new(&blocks, &[], 0, Background::AfterFaults), SentMap::new(&blocks));
        let unit = |index: u64| (page(0, index * 4096), 4096);
        scheduler.request_received();
        let many = FAULT_AROUND_MAX as u64;
        scheduler.prepare_around((0..many).map(unit));
        scheduler.prepare_around([many + 1, many].map(unit).into_iter());
        assert_eq!(map.claim_run(unit(0).0, 4096, |_, _| {}), 4096);
        for index in [many + 1, many].into_iter().chain(1..many - 2) {
            let item = Item { run: unit(index), kind: ItemKind::Neighbour };
            assert_eq!(scheduler.next_to_prepare(&map), Some(item));
            if index % 2 == 0 {
                scheduler.not_prepared();
            } else {
                scheduler.prepared(item);
                assert_eq!(scheduler.next(), Some(item));
            }
        }
        scheduler.request_served();
    }

    #[test]
    fn the_working_set_comes_first_and_then_everything() {
        let blocks = [block(3 * RUN_BYTES + 4096), block(8192)];
        let working_set = [(page(0, RUN_BYTES - 4096), 8192), (page(1, 4096), 4096)];
        let scheduler = SendScheduler::new(&blocks, &working_set, 1, Background::AtOnce);
        let map = SentMap::new(&blocks);
        let mut items = Vec::new();
        while let Some(item) = scheduler.next_to_prepare(&map) {
            scheduler.prepared(item);
            items.extend(scheduler.next());
        }
        let expected = [
            (page(0, RUN_BYTES - 4096), 4096),
            (page(0, RUN_BYTES), 4096),
            (page(1, 4096), 4096),
            (page(0, 0), RUN_BYTES),
            (page(0, RUN_BYTES), RUN_BYTES),
            (page(0, 2 * RUN_BYTES), RUN_BYTES),
            (page(0, 3 * RUN_BYTES), 4096),
            (page(1, 0), 8192),
        ];
        let kind = |index: usize| if index < 2 { ItemKind::Needed } else { ItemKind::Rest };
        let item = |(index, run)| Item { run, kind: kind(index) };
        assert_eq!(items, expected.into_iter().enumerate().map(item).collect::<Vec<_>>());
        assert_eq!(scheduler.next(), None);
    }

    #[test]
    fn neighbours_come_before_what_is_ready_and_the_newest_of_them_first() {
        let blocks = [block(2 * RUN_BYTES)];
        let (scheduler, map) =
            (SendScheduler::new(&blocks, &[], 0, Background::AtOnce), SentMap::new(&blocks));
        let first = scheduler.next_to_prepare(&map).unwrap();
        scheduler.prepared(first);
        let neighbours = |index: u64| (page(0, RUN_BYTES + index * 4096), 4096);
        assert!(
            (0..NEIGHBOURS_MAX as u64).all(|index| scheduler.queue_neighbours(neighbours(index)).is_none())
        );
        assert_eq!(scheduler.queue_neighbours(neighbours(NEIGHBOURS_MAX as u64)), Some(neighbours(0)));
        for index in (1..=NEIGHBOURS_MAX as u64).rev() {
            assert_eq!(scheduler.next(), Some(Item { run: neighbours(index), kind: ItemKind::Neighbour }));
        }
        assert_eq!(scheduler.next(), Some(first));
    }
}
