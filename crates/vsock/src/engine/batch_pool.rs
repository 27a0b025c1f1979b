//! Batches of packets of the guest, for as long as one of their chains is in use.

use towline_vhost_user::{Batch, ChainHead};

/// Maximum number of chains of a ring that are retained at a time.
pub(super) const RETAINED_MAX: usize = 256;
/// Maximum number of memory segments in a batch whose chains are retained: the descriptions of all segments
/// stay with the batch.
pub(super) const SEGMENTS_RETAINED_MAX: usize = 1024;
/// Number of idle batches that are kept for the next packets.
const IDLE_MAX: usize = 4;

/// Reference to a chain of a batch in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainRef {
    /// Slot of the batch in the pool.
    pub(super) batch: usize,
    /// Index of the chain in the batch.
    pub(super) chain: usize,
}

/// See the module.
#[derive(Default)]
pub(super) struct BatchPool {
    slots: Vec<Slot>,
    /// Number of retained chains.
    pub(super) retained: usize,
    /// Limit of `retained` for the present ring.
    pub(super) retained_max: usize,
    /// Chains that are no longer in use, to be completed.
    pub(super) completed: Vec<ChainHead>,
}

#[derive(Default)]
struct Slot {
    batch: Batch,
    /// Chains of the batch that are in use.
    users: usize,
    /// Memory segments of all chains in the batch.
    segments: usize,
}

impl BatchPool {
    /// Returns a slot whose batch is not in use.
    pub(super) fn idle_slot(&mut self) -> usize {
        self.slots.iter().position(|slot| slot.users == 0).unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        })
    }

    /// Counts the segments of a batch that was just filled.
    pub(super) fn count_segments(&mut self, batch: usize) {
        let slot = &mut self.slots[batch];
        slot.segments = segments(&slot.batch);
    }

    /// Returns true if chains of this batch may be retained.
    pub(super) fn may_retain(&self, batch: usize) -> bool {
        self.slots[batch].segments <= SEGMENTS_RETAINED_MAX
    }

    /// Frees idle batches that have much memory, and surplus ones.
    pub(super) fn trim(&mut self) {
        for slot in &mut self.slots {
            if slot.users == 0 && slot.segments > SEGMENTS_RETAINED_MAX {
                *slot = Slot::default();
            }
        }
        while self.slots.len() > IDLE_MAX && self.slots.last().is_some_and(|slot| slot.users == 0) {
            self.slots.pop();
        }
    }

    /// Drops all idle batches, which keep the guest's memory mapped.
    pub(super) fn drop_idle(&mut self) {
        self.slots.iter_mut().filter(|slot| slot.users == 0).for_each(|slot| *slot = Slot::default());
    }

    /// Returns the number of memory segments that are described by batches in use.
    pub(super) fn segments(&self) -> usize {
        self.slots.iter().filter(|slot| slot.users > 0).map(|slot| slot.segments).sum()
    }

    pub(super) fn batch(&self, batch: usize) -> &Batch {
        &self.slots[batch].batch
    }

    pub(super) fn batch_mut(&mut self, batch: usize) -> &mut Batch {
        debug_assert_eq!(self.slots[batch].users, 0);
        &mut self.slots[batch].batch
    }

    /// Marks a chain of a batch as in use.
    pub(super) fn add_user(&mut self, batch: usize) {
        self.slots[batch].users += 1;
    }

    /// Completes a chain.
    pub(super) fn complete(&mut self, chain: ChainRef) {
        let slot = &mut self.slots[chain.batch];
        self.completed.push(slot.batch.chain(chain.chain).head());
        slot.users -= 1;
    }
}

/// Returns the number of memory segments of all chains in a batch.
pub(super) fn segments(batch: &Batch) -> usize {
    batch.chains().map(|chain| chain.readable().len() + chain.writable().len()).sum()
}
