//! A ring that goes on after the process that served it has died, or the frontend has gone and come again.
//!
//! With a record that outlives this process, chains are published as they are done, and the next process takes again what
//! the record says was in flight. Without one all that the next process has is the used index, so chains are published in
//! the order in which they were taken, if the device wants that: one that is done early waits.

use std::collections::{BTreeMap, VecDeque};

use super::{Batch, ENTRIES, Ring, RingFault, USED_BYTES};
use crate::message::VringAddress;
use crate::record::QueueRecord;

/// What a ring needs of it.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    record: Option<QueueRecord>,
    /// In flight when the process before died, and not taken again yet.
    again: VecDeque<u16>,
    /// The last order number of those.
    recovered: u64,
    given: u64,
    ordered: bool,
    /// Published in order: the number that comes next, and what was done before its turn.
    published: u64,
    early: BTreeMap<u64, (u16, u32)>,
}

impl Recovery {
    /// A head was taken.
    pub(super) fn took(&self, head: u16, order: u64) {
        if let Some(record) = &self.record {
            record.mark(head, order);
        }
    }

    /// It goes back to where it came from. True if that is not the available ring.
    pub(super) fn gives_back(&mut self, head: u16, order: u64) -> bool {
        if order <= self.recovered {
            self.again.push_front(head);
            return true;
        }
        if let Some(record) = &self.record {
            record.clear(head);
        }
        false
    }

    /// Whether a chain that is done may be published; else it is kept for its turn.
    pub(super) fn is_due(&mut self, done: (u16, u32), order: u64) -> bool {
        if self.ordered && order != self.published + 1 {
            self.early.insert(order, done);
            return false;
        }
        self.published += 1;
        true
    }

    /// What was waiting for the one before.
    pub(super) fn next_due(&mut self) -> Option<(u16, u32)> {
        let next = self.early.remove(&(self.published + 1))?;
        self.published += 1;
        Some(next)
    }

    /// So many are about to be published.
    pub(super) fn gives(&mut self, count: usize) {
        if let Some(record) = &self.record {
            self.given += count as u64;
            record.giving(self.given);
            #[cfg(test)]
            crate::fuse::burn();
        }
    }

    /// They are.
    pub(super) fn gave(&self, heads: impl Iterator<Item = (u16, u32)>) {
        let Some(record) = &self.record else { return heads.for_each(drop) };
        heads.for_each(|(head, _)| record.clear(head));
        record.gave(self.given);
    }

    /// The ring's parts are elsewhere.
    pub(super) fn moved(&self, address: &VringAddress) {
        if let Some(record) = &self.record {
            record.moved(address);
        }
    }

    /// The frontend knows where the ring stands.
    pub(super) fn end(&self) {
        if let Some(record) = &self.record {
            record.end();
        }
    }
}

impl Ring {
    /// What is taken and given back is in this record from now on. If it is of this very ring, the ring goes on as it says;
    /// how many chains were in flight then. Comes before the first [`Ring::pop`].
    pub(crate) fn go_on(&mut self, record: QueueRecord, keeps_order: bool) -> Option<usize> {
        self.recovery.ordered = keeps_order && !record.is_durable();
        let parts = (self.size, &self.address);
        let entry = |at: u16| {
            let slot = usize::from(at & (self.size - 1));
            self.parts.used.load_pair(ENTRIES + USED_BYTES * slot)[0]
        };
        let known = record.recover(parts, self.used, entry).filter(|known| {
            // What the frontend says was true when it looked: at most a ring before where the used index stands now.
            let most = known.next.wrapping_sub(self.used).saturating_add(self.size);
            known.next.wrapping_sub(self.next) <= most
        });
        let Some(known) = known else {
            record.begin(parts, self.used, self.next);
            self.recovery.given = self.used.into();
            self.recovery.record = Some(record);
            return None;
        };
        for head in &known.heads {
            self.order += 1;
            self.taken[usize::from(*head)] = self.order;
            // From 1 on again; who dies between two of them leaves them in order all the same.
            record.mark(*head, self.order);
        }
        (self.next, self.seen) = (known.next, known.next);
        let count = known.heads.len();
        self.in_flight = u16::try_from(count).expect("at most the ring's entries");
        let recovery = &mut self.recovery;
        (recovery.again, recovery.recovered, recovery.given) = (known.heads.into(), self.order, known.given);
        recovery.record = Some(record);
        Some(count)
    }

    /// What the device before had, first of all.
    pub(super) fn take_again(&mut self, batch: &mut Batch, most: usize) -> Result<(), RingFault> {
        while batch.len() < most
            && !batch.is_full()
            && let Some(head) = self.recovery.again.pop_front()
        {
            self.walk(head, batch)?;
        }
        Ok(())
    }

    /// What the device has and is not done with, in order.
    pub(super) fn left(&self) -> Vec<u16> {
        let left = (0..self.size).map(|head| (self.taken[usize::from(head)], head));
        let early = &self.recovery.early;
        let mut left: Vec<_> = left.filter(|(order, _)| *order != 0 && !early.contains_key(order)).collect();
        left.sort_unstable();
        left.into_iter().map(|(_, head)| head).collect()
    }
}
