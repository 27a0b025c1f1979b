//! The record of one queue.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::PAGE;
use crate::message::VringAddress;
use crate::ring::RING_SIZE_MAX;
use crate::sys::Area;

/// In the page before the words, in bytes.
const RUNS: usize = 0;
const ENTRIES: usize = 8;
const DESCRIPTORS: usize = 16;
const AVAILABLE: usize = 24;
const USED: usize = 32;
const GIVEN: usize = 40;
const GIVING: usize = 48;
const SKIPPED: usize = 56;

/// See the module above.
#[derive(Debug, Clone)]
pub(crate) struct QueueRecord {
    area: Area,
    durable: bool,
}

/// What a record says of a ring that goes on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    /// Heads that were taken and not given back, in the order in which they were.
    pub(crate) heads: Vec<u16>,
    /// Chains given back, counted from where the ring began.
    pub(crate) given: u64,
    /// Where the available ring goes on behind them.
    pub(crate) next: u16,
}

impl QueueRecord {
    pub(super) fn new(area: Area, durable: bool) -> Self {
        Self { area, durable }
    }

    /// Whether the next process will find it.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    /// What is wrong with it.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.load(RUNS) {
            0 => return Ok(()),
            1 => {}
            found => return Err(format!("its state is {found}, expected 0 or 1")),
        }
        let entries = self.load(ENTRIES);
        if !entries.is_power_of_two() || entries > RING_SIZE_MAX.into() {
            return Err(format!(
                "its ring has {entries} entries, expected a power of two up to {RING_SIZE_MAX}"
            ));
        }
        let (given, giving) = (self.load(GIVEN), self.load(GIVING));
        if giving.wrapping_sub(given) > entries || giving < given {
            return Err(format!("{giving} chains were given back, expected {given} to {entries} more"));
        }
        let mut orders: Vec<u64> = self.marked().into_iter().map(|(order, _)| order).collect();
        orders.dedup();
        if orders.len() != self.marked().len() {
            return Err("two heads were taken at the same time".to_owned());
        }
        Ok(())
    }

    /// Of a ring with these parts: what is in flight, if it goes on. `used` is its used index, `entry` reads its used ring.
    pub(crate) fn recover(
        &self,
        (entries, address): (u16, &VringAddress),
        used: u16,
        entry: impl Fn(u16) -> u32,
    ) -> Option<InFlight> {
        let parts = [address.descriptors, address.available, address.used].map(|part| part.get());
        let known = [DESCRIPTORS, AVAILABLE, USED].map(|offset| self.load(offset));
        if self.load(RUNS) != 1 || self.load(ENTRIES) != u64::from(entries) || known != parts {
            return None;
        }
        let (given, giving) = (self.load(GIVEN), self.load(GIVING));
        let low = |count: u64| u16::try_from(count & 0xffff).expect("it is masked");
        // A ring that has given nothing back has lost nothing, and looks like any that begins.
        if used == low(given) && given > 0 {
            self.store(GIVING, given);
        } else if used == low(giving) && giving > 0 {
            for at in given..giving {
                let head = u16::try_from(entry(low(at))).ok().filter(|head| *head < entries)?;
                self.clear(head);
            }
            self.store(GIVEN, giving);
        } else {
            return None;
        }
        let heads: Vec<u16> = self.marked().into_iter().map(|(_, head)| head).collect();
        let marked = heads.len() as u64;
        Some(InFlight {
            heads,
            given: self.load(GIVEN),
            next: used.wrapping_add(low(marked)).wrapping_add(low(self.load(SKIPPED))),
        })
    }

    /// What is marked, in order.
    fn marked(&self) -> Vec<(u64, u16)> {
        let entries = u16::try_from(self.load(ENTRIES)).unwrap_or(RING_SIZE_MAX).min(RING_SIZE_MAX);
        let marked =
            (0..entries).map(|head| (self.load(Self::word(head)), head)).filter(|(order, _)| *order != 0);
        let mut marked: Vec<(u64, u16)> = marked.collect();
        marked.sort_unstable();
        marked
    }

    /// A ring begins, with nothing in flight: at this used index, and with this available entry.
    pub(crate) fn begin(&self, (entries, address): (u16, &VringAddress), used: u16, next: u16) {
        self.end();
        (0..entries).for_each(|head| self.clear(head));
        self.store(ENTRIES, entries.into());
        self.store(GIVEN, used.into());
        self.store(GIVING, used.into());
        self.store(SKIPPED, next.wrapping_sub(used).into());
        self.moved(address);
        self.store(RUNS, 1);
    }

    /// Its parts are elsewhere now.
    pub(crate) fn moved(&self, address: &VringAddress) {
        self.store(DESCRIPTORS, address.descriptors.get());
        self.store(AVAILABLE, address.available.get());
        self.store(USED, address.used.get());
    }

    /// The ring was stopped: whoever did that knows where it stands.
    pub(crate) fn end(&self) {
        self.store(RUNS, 0);
    }

    /// A head is taken, as the `order`th.
    pub(crate) fn mark(&self, head: u16, order: u64) {
        self.store(Self::word(head), order);
    }

    /// A head is the driver's again.
    pub(crate) fn clear(&self, head: u16) {
        self.store(Self::word(head), 0);
    }

    /// Chains are about to be given back, so that it will have been so many.
    pub(crate) fn giving(&self, count: u64) {
        self.store(GIVING, count);
    }

    /// It has been, and they are cleared.
    pub(crate) fn gave(&self, count: u64) {
        self.store(GIVEN, count);
    }

    fn word(head: u16) -> usize {
        PAGE + 8 * usize::from(head)
    }

    fn load(&self, offset: usize) -> u64 {
        self.area.load_64(offset, Acquire)
    }

    /// In the order of the program: a process that is killed has done all stores before one that it has done.
    fn store(&self, offset: usize, value: u64) {
        #[cfg(test)]
        crate::fuse::burn();
        self.area.store_64(offset, value, Release);
    }
}
