//! Resumes a ring after the process that served it has died, or its frontend has reconnected.
//!
//! With a record that outlives this process, chains are published as they complete, and the next process
//! resubmits the chains that the record has in flight. Without one the next process knows the used index
//! only, so the device may have its chains published in the order in which they were popped: a chain that
//! completes early is kept back.

use super::{Batch, ChainHead, ENTRIES, Ring, RingFault, USED_BYTES};
use crate::record::QueueRecord;

impl Ring {
    /// Records chains in flight from now on, before the first [`Ring::pop`]. If the record is of this very
    /// ring, the ring resumes from it; returns the number of chains that were in flight then.
    pub(crate) fn resume(&mut self, record: QueueRecord, in_order: bool) -> Option<usize> {
        self.recovery.in_order = in_order && !record.is_durable();
        let used_head = |index: u16| {
            let slot = usize::from(index & (self.size - 1));
            self.parts.used.load_used_elem(ENTRIES + USED_BYTES * slot)[0]
        };
        let recovered = record.recover(self.size, &self.address, self.used_idx, used_head);
        let recovered = recovered.filter(|recovered| {
            // The frontend's base is the used index at an earlier time: at most a ring before the present
            // one.
            let most = recovered.last_avail_idx.wrapping_sub(self.used_idx).saturating_add(self.size);
            recovered.last_avail_idx.wrapping_sub(self.last_avail_idx) <= most
        });
        let Some(recovered) = recovered else {
            record.begin(self.size, &self.address, self.used_idx, self.last_avail_idx);
            self.recovery.published = self.used_idx.into();
            self.recovery.record = Some(record);
            return None;
        };
        for head in &recovered.heads {
            self.last_seq += 1;
            self.in_flight_seq[usize::from(*head)] = self.last_seq;
            // Numbered from 1 again. A crash between two of these stores leaves them in order as well.
            record.mark(*head, self.last_seq);
        }
        self.last_avail_idx = recovered.last_avail_idx;
        self.cached_avail_idx = recovered.last_avail_idx;
        let count = recovered.heads.len();
        self.in_flight = u16::try_from(count).expect("at most the ring's entries");
        self.recovery.resubmit = recovered.heads.into();
        self.recovery.resubmit_seq_max = self.last_seq;
        self.recovery.published = recovered.published;
        self.recovery.record = Some(record);
        Some(count)
    }

    /// Pops the chains that were in flight in the previous process, before all others.
    pub(super) fn resubmit(&mut self, batch: &mut Batch, most: usize) -> Result<(), RingFault> {
        while batch.len() < most
            && !batch.is_full()
            && let Some(head) = self.recovery.resubmit.pop_front()
        {
            self.walk(head, batch)?;
        }
        Ok(())
    }

    /// Takes the chains that were in flight when the record was read, so [`Ring::pop`] does not return them.
    /// They stay in flight until they are completed ([`Ring::complete_head`]). For a device whose previous
    /// process may have passed them to hardware or the kernel.
    pub fn take_resubmitted(&mut self) -> Vec<ChainHead> {
        let epoch = self.epoch;
        self.recovery.resubmit.drain(..).map(|index| ChainHead { index, epoch }).collect()
    }

    /// Chains in flight that are not completed, in the order in which they were popped.
    pub(super) fn incomplete(&self) -> Vec<u16> {
        let heads = (0..self.size).map(|head| (self.in_flight_seq[usize::from(head)], head));
        let early = &self.recovery.early;
        let mut heads: Vec<_> = heads.filter(|(seq, _)| *seq != 0 && !early.contains_key(seq)).collect();
        heads.sort_unstable();
        heads.into_iter().map(|(_, head)| head).collect()
    }
}
