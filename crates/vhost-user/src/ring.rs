//! The device side of a split virtqueue. Chains are popped in batches, and used entries published in batches.
//!
//! ```text
//!   pop(batch, most) ─► chains ─► complete(chain, written) … ─► publish()
//!     one load of the           staged here, dirty pages          used entries, one store of the used index,
//!     available index           gathered                          log flushed, at most one notification
//! ```
//! A ring neither waits nor knows threads; see [`Worker`](crate::Worker). Packed virtqueues are not
//! supported.
//!
//! A driver is not trusted. Every violation ends with a [`RingFault`] that names it, after bounded work: a
//! chain has at most [`CHAIN_DESCRIPTORS_MAX`] descriptors in [`CHAIN_SEGMENTS_MAX`] segments and
//! [`CHAIN_BYTES_MAX`] bytes. No more chains are popped from a ring with a fault, but those in flight can be
//! completed.

mod batch;
mod chain_walker;
mod control;
mod fault;
mod limits;
mod notify;
mod recovery;
mod recovery_state;
#[cfg(test)]
mod recovery_tests;
mod setup;
mod suppression;

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use batch::{Batch, Chain, ChainHead};
pub use fault::RingFault;
pub use limits::{
    BATCH_SEGMENTS_MAX, CHAIN_BYTES_MAX, CHAIN_DESCRIPTORS_MAX, CHAIN_SEGMENTS_MAX, RING_SIZE_MAX,
};
use limits::{DESCRIPTOR_BYTES, ENTRIES, INDEX, USED_BYTES};
pub(crate) use setup::RingExtent;
pub use setup::{RingSetup, RingStatistics};

use crate::eventfd;
use crate::features;
use crate::log::DirtyCache;
use crate::memory::GuestMemory;
use crate::message::VringAddress;
use chain_walker::ChainWalker;
use recovery_state::{Completion, RingRecovery};
use setup::{RingParts, ring_size};
use suppression::SuppressionWords;

/// In [`VringAddress::flags`]: writes to the used ring are logged (`VHOST_VRING_F_LOG`).
const LOG_USED: u32 = 1;

/// A started virtqueue.
#[derive(Debug)]
pub struct Ring {
    memory: Arc<GuestMemory>,
    parts: RingParts,
    address: VringAddress,
    size: u16,
    event_index: bool,
    indirect: bool,
    call: Option<OwnedFd>,
    dirty: DirtyCache,
    /// Index of the next available entry to pop.
    last_avail_idx: u16,
    /// The driver's available index when it was last loaded.
    cached_avail_idx: u16,
    /// The driver's available index that was last reported to the worker, by a load in [`Ring::pop`] or by
    /// [`Ring::enable_notification_and_recheck`], which reports each value once.
    reported_avail_idx: u16,
    used_idx: u16,
    /// The used index at the last notification, sent or suppressed.
    signalled_used: u16,
    /// By head: sequence number of a chain in flight; 0 if it is not in flight.
    in_flight_seq: Vec<u64>,
    /// Sequence number of the chain that was popped last.
    last_seq: u64,
    recovery: RingRecovery,
    in_flight: u16,
    /// Completed chains that are not published yet.
    staged: VecDeque<Completion>,
    /// True if the worker wants kicks while it waits.
    notification_wanted: bool,
    epoch: u64,
    fault: Option<RingFault>,
    statistics: RingStatistics,
}

impl Ring {
    /// Starts a ring in this memory. `epoch` distinguishes its [`ChainHead`]s from those of other rings and
    /// of predecessors.
    ///
    /// # Errors
    /// [`RingFault::Size`], [`RingFault::Unmapped`], [`RingFault::Overlap`].
    pub fn new(setup: RingSetup, memory: Arc<GuestMemory>, epoch: u64) -> Result<Self, RingFault> {
        let RingSetup { size, address, base, features, call, switch, log } = setup;
        let size = ring_size(size)?;
        let event_index = features & features::EVENT_IDX != 0;
        let parts = RingParts::find(&memory, &address, size, event_index)?;
        let used_idx = parts.used.load_le16(INDEX, Ordering::Acquire);
        Ok(Self {
            memory,
            parts,
            address,
            size,
            event_index,
            indirect: features & features::INDIRECT_DESC != 0,
            call,
            dirty: DirtyCache::new(switch, log),
            last_avail_idx: base,
            cached_avail_idx: base,
            reported_avail_idx: base,
            used_idx,
            signalled_used: used_idx,
            in_flight_seq: vec![0; usize::from(size)],
            last_seq: 0,
            recovery: RingRecovery::default(),
            in_flight: 0,
            staged: VecDeque::new(),
            notification_wanted: true,
            epoch,
            fault: None,
            statistics: RingStatistics::default(),
        })
    }

    /// Pops at most `most` chains into the batch, whose former contents are dropped. Returns their number: 0
    /// if the driver has made no more available, or the ring has a fault.
    pub fn pop(&mut self, batch: &mut Batch, most: usize) -> usize {
        batch.begin(&self.memory, self.epoch);
        if self.fault.is_none()
            && let Err(fault) = self.pop_chains(batch, most)
        {
            self.fault = Some(fault);
        }
        batch.len()
    }

    fn pop_chains(&mut self, batch: &mut Batch, most: usize) -> Result<(), RingFault> {
        self.resubmit(batch, most)?;
        let most = most - batch.len();
        if usize::from(self.cached_avail_idx.wrapping_sub(self.last_avail_idx)) < most {
            self.refresh_avail_idx()?;
        }
        let pending = usize::from(self.cached_avail_idx.wrapping_sub(self.last_avail_idx));
        for _ in 0..pending.min(most) {
            if batch.is_full() {
                // The worker may take a short batch for an empty ring: have the remainder reported.
                self.reported_avail_idx = self.last_avail_idx;
                break;
            }
            let entry = ENTRIES + 2 * usize::from(self.last_avail_idx & (self.size - 1));
            let head = self.parts.available.load_le16(entry, Ordering::Relaxed);
            if head >= self.size {
                return Err(RingFault::Head { found: head, size: self.size });
            }
            if self.in_flight_seq[usize::from(head)] != 0 {
                return Err(RingFault::HeadInFlight { head });
            }
            self.walk(head, batch)?;
            self.last_seq += 1;
            self.in_flight_seq[usize::from(head)] = self.last_seq;
            self.recovery.popped(head, self.last_seq);
            self.in_flight += 1;
            self.last_avail_idx = self.last_avail_idx.wrapping_add(1);
        }
        Ok(())
    }

    /// Appends the chain of `head` to the batch.
    fn walk(&self, head: u16, batch: &mut Batch) -> Result<(), RingFault> {
        let (memory, table) = (&self.memory, &self.parts.table);
        ChainWalker { memory, table, size: self.size, indirect: self.indirect }.append(head, batch)
    }

    /// Loads the driver's available index.
    fn refresh_avail_idx(&mut self) -> Result<(), RingFault> {
        let found = self.parts.available.load_le16(INDEX, Ordering::Acquire);
        let free = self.size - self.in_flight;
        if found.wrapping_sub(self.last_avail_idx) > free {
            let most = self.last_avail_idx.wrapping_add(free);
            return Err(RingFault::AvailableIndex { found, most, last_avail_idx: self.last_avail_idx });
        }
        self.cached_avail_idx = found;
        self.reported_avail_idx = found;
        Ok(())
    }

    /// Returns to the ring the chains of the batch from `first` on, which were popped last and are not
    /// completed. The next [`Ring::pop`] returns them again.
    ///
    /// # Panics
    /// If a chain is not in flight, or the batch belongs to another ring.
    pub fn rewind(&mut self, batch: &mut Batch, first: usize) {
        assert_eq!(batch.epoch, self.epoch, "a batch of another ring");
        for layout in batch.chains.drain(first..).rev() {
            let seq = &mut self.in_flight_seq[usize::from(layout.head)];
            assert!(*seq != 0, "chain {} was completed and rewound", layout.head);
            if self.recovery.rewound(layout.head, *seq) {
                continue;
            }
            *seq = 0;
            self.in_flight -= 1;
            self.last_seq -= 1;
            self.last_avail_idx = self.last_avail_idx.wrapping_sub(1);
        }
    }

    /// Completes a chain of which the device wrote the first `written` bytes of the writable part. The driver
    /// sees it after [`Ring::publish`].
    pub fn complete(&mut self, chain: Chain<'_>, written: u32) {
        let written = written.min(chain.writable_bytes());
        self.mark_written(chain, written);
        self.stage(chain.head(), written);
    }

    /// Marks the first `written` bytes of the writable part as dirty, without completing the chain: for a
    /// device that has written to a chain and rewinds it.
    pub fn mark_written(&mut self, chain: Chain<'_>, written: u32) {
        let mut left = written;
        for segment in chain.writable_segments() {
            let here = left.min(segment.len);
            self.dirty.mark(chain.batch.memory.guest_address(segment), here.into());
            left -= here;
        }
    }

    /// Completes a chain to which nothing was written: as [`Ring::complete`], but later and in any order.
    pub fn complete_head(&mut self, head: ChainHead) {
        self.stage(head, 0);
    }

    fn stage(&mut self, head: ChainHead, written: u32) {
        // The chains of a ring that was stopped in between were returned by the stop.
        if head.epoch != self.epoch {
            return;
        }
        let seq = self.in_flight_seq[usize::from(head.index)];
        let completion = Completion { head: head.index, written };
        if seq == 0 || !self.recovery.may_publish(completion, seq) {
            return;
        }
        let mut next = Some(completion);
        while let Some(completion) = next {
            self.in_flight_seq[usize::from(completion.head)] = 0;
            self.in_flight -= 1;
            self.staged.push_back(completion);
            next = self.recovery.next_in_order();
        }
    }

    /// Publishes the completed chains, and notifies the driver once unless it suppresses notifications.
    /// Returns true if it was notified.
    pub fn publish(&mut self) -> bool {
        self.publish_quietly();
        self.signalled_used != self.used_idx && self.notify()
    }

    /// As [`Ring::publish`], but the driver is notified with the next one, which the worker's thread calls
    /// after each [`Worker::run`](crate::Worker::run): for entries that nothing waits for, while more is
    /// expected at once.
    pub fn publish_quietly(&mut self) {
        if self.staged.is_empty() {
            return;
        }
        // Before the driver can see them: this process may be killed at any time, and QEMU then logs the used
        // ring itself.
        self.flush_log();
        let (mut index, count) = (self.used_idx, self.staged.len());
        self.recovery.begin_publish(count);
        for Completion { head, written } in &self.staged {
            let slot = usize::from(index & (self.size - 1));
            self.parts.used.store_used_elem(ENTRIES + USED_BYTES * slot, [(*head).into(), *written]);
            index = index.wrapping_add(1);
        }
        let first = std::mem::replace(&mut self.used_idx, index);
        self.parts.used.store_le16(INDEX, index, Ordering::Release);
        self.recovery.end_publish(self.staged.drain(..));
        self.mark_used(first, count);
        self.flush_log();
        self.statistics.chains += count as u64;
        self.statistics.batches += 1;
    }

    /// Marks the used index and `count` used entries as dirty.
    fn mark_used(&mut self, first: u16, count: usize) {
        let slot = usize::from(first & (self.size - 1));
        let before_wrap = count.min(usize::from(self.size) - slot);
        self.mark_used_ring(0, ENTRIES);
        self.mark_used_ring(ENTRIES + USED_BYTES * slot, USED_BYTES * before_wrap);
        self.mark_used_ring(ENTRIES, USED_BYTES * (count - before_wrap));
    }

    /// Marks bytes of the used ring as dirty.
    fn mark_used_ring(&mut self, offset: usize, len: usize) {
        if self.address.flags & LOG_USED != 0 {
            self.dirty.mark(self.address.log.saturating_add(offset as u64), len as u64);
        }
    }

    fn flush_log(&mut self) {
        if let Some(page) = self.dirty.flush() {
            self.fault.get_or_insert(RingFault::OutsideLog { page });
        }
    }

    /// Notifies the driver unless it suppresses notifications.
    fn notify(&mut self) -> bool {
        let signalled = std::mem::replace(&mut self.signalled_used, self.used_idx);
        let wanted = notify::wants_call(&self.suppression(), signalled, self.used_idx);
        if wanted {
            self.statistics.notifications += 1;
            self.call_driver();
        } else {
            self.statistics.notifications_suppressed += 1;
        }
        wanted
    }

    /// Notifies the driver, whether or not it suppresses notifications.
    pub(crate) fn call_driver(&self) {
        if let Some(call) = &self.call {
            // Fails if the counter is full, which is readable too, or if the descriptor is unusable.
            if let Err(error) = eventfd::signal(call.as_fd()) {
                tracing::debug!(%error, "cannot signal the driver's eventfd");
            }
        }
    }

    /// Enables or suppresses kicks for new chains from the next wait on; enabled at first. A device that
    /// waits for another event (a packet to receive, while it has buffers) suppresses them.
    pub fn set_notification(&mut self, wanted: bool) {
        if std::mem::replace(&mut self.notification_wanted, wanted) && !wanted && !self.event_index {
            self.store_used_flags(notify::NO_NOTIFY);
        }
    }

    /// Enables kicks before the device waits, if [`Ring::set_notification`] permits. Returns true if the
    /// driver has moved its available index since it was last loaded, so the device must not wait.
    ///
    /// Each value of the index is reported once. A worker that leaves available chains in the ring is called
    /// again when the driver adds more, or by one of its own events ([`Worker::poll`](crate::Worker::poll)).
    pub fn enable_notification_and_recheck(&mut self) -> bool {
        if !self.notification_wanted || self.fault.is_some() {
            return false;
        }
        let mut reported = self.reported_avail_idx;
        let recheck = notify::enable_and_recheck(&self.suppression(), &mut reported);
        self.reported_avail_idx = reported;
        if recheck.stored {
            let offset = if self.event_index { SuppressionWords::event_offset(self.size) } else { 0 };
            self.mark_used_ring(offset, 2);
        }
        self.flush_log();
        recheck.moved
    }

    /// Suppresses kicks while the device works.
    pub(crate) fn suppress_notification(&mut self) {
        if !self.event_index && self.parts.used.load_le16(0, Ordering::Relaxed) & notify::NO_NOTIFY == 0 {
            self.store_used_flags(notify::NO_NOTIFY);
        }
    }

    fn store_used_flags(&mut self, flags: u16) {
        self.parts.used.store_le16(0, flags, Ordering::Relaxed);
        self.mark_used_ring(0, 2);
    }

    fn suppression(&self) -> SuppressionWords<'_> {
        let Self { parts, size, event_index, .. } = self;
        let RingParts { available, used, .. } = parts;
        SuppressionWords { available, used, size: *size, event_index: *event_index }
    }

    /// Memory of the ring and its buffers.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The fault that ended the ring.
    pub fn fault(&self) -> Option<&RingFault> {
        self.fault.as_ref()
    }

    /// Number of chains in flight.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Counts notifications by the driver.
    pub(crate) fn add_kicks(&mut self, kicks: u64) {
        self.statistics.kicks = self.statistics.kicks.saturating_add(kicks);
    }

    /// Counters since the start of the ring.
    pub fn statistics(&self) -> RingStatistics {
        self.statistics
    }
}
