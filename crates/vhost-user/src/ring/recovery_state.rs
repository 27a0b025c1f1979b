//! State of a ring for its recovery.

use std::collections::{BTreeMap, VecDeque};

use crate::message::VringAddress;
use crate::record::QueueRecord;

/// A used entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) head: u16,
    pub(super) written: u32,
}

/// State of a ring for its recovery.
#[derive(Debug, Default)]
pub(super) struct RingRecovery {
    pub(super) record: Option<QueueRecord>,
    /// Heads that were in flight in the previous process and are not popped yet.
    pub(super) resubmit: VecDeque<u16>,
    /// Highest sequence number of those.
    pub(super) resubmit_seq_max: u64,
    /// Number of chains published, counted as the record does.
    pub(super) published: u64,
    /// Chains are published in the order in which they were popped.
    pub(super) in_order: bool,
    /// Sequence number of the chain that was published last, in order.
    pub(super) last_published_seq: u64,
    /// Chains that completed early, by sequence number.
    pub(super) early: BTreeMap<u64, Completion>,
}

impl RingRecovery {
    /// Records that a head was popped.
    pub(super) fn popped(&self, head: u16, seq: u64) {
        if let Some(record) = &self.record {
            record.mark(head, seq);
        }
    }

    /// Records that a head was rewound. Returns true if it will be resubmitted instead of popped from the
    /// available ring.
    pub(super) fn rewound(&mut self, head: u16, seq: u64) -> bool {
        if seq <= self.resubmit_seq_max {
            self.resubmit.push_front(head);
            return true;
        }
        if let Some(record) = &self.record {
            record.clear(head);
        }
        false
    }

    /// Returns true if a completed chain may be published; otherwise it is kept until its turn.
    pub(super) fn may_publish(&mut self, completion: Completion, seq: u64) -> bool {
        if self.in_order && seq != self.last_published_seq + 1 {
            self.early.insert(seq, completion);
            return false;
        }
        self.last_published_seq += 1;
        true
    }

    /// The completed chain that follows the last published one.
    pub(super) fn next_in_order(&mut self) -> Option<Completion> {
        let next = self.early.remove(&(self.last_published_seq + 1))?;
        self.last_published_seq += 1;
        Some(next)
    }

    /// Records that `count` chains are about to be published.
    pub(super) fn begin_publish(&mut self, count: usize) {
        if let Some(record) = &self.record {
            self.published += count as u64;
            record.begin_publish(self.published);
            #[cfg(test)]
            crate::crash_point::reach();
        }
    }

    /// Records that they are published.
    pub(super) fn end_publish(&self, completions: impl Iterator<Item = Completion>) {
        let Some(record) = &self.record else { return completions.for_each(drop) };
        completions.for_each(|completion| record.clear(completion.head));
        record.end_publish(self.published);
    }

    /// Records new addresses of the ring.
    pub(super) fn remapped(&self, address: &VringAddress) {
        if let Some(record) = &self.record {
            record.set_address(address);
        }
    }

    /// Ends the record of the ring: from now on the frontend knows its state.
    pub(super) fn end(&self) {
        if let Some(record) = &self.record {
            record.end();
        }
    }
}
