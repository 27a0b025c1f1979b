//! The part of one queue in the in-flight record.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::layout::PAGE;
use crate::message::VringAddress;
use crate::ring::RING_SIZE_MAX;
use crate::sys::Area;

/// Offsets in the page before the words.
const RUNNING: usize = 0;
const ENTRIES: usize = 8;
const DESCRIPTORS: usize = 16;
const AVAILABLE: usize = 24;
const USED: usize = 32;
const PUBLISHED: usize = 40;
const PUBLISHING: usize = 48;
/// Difference of available and used index when the ring began.
const SKIPPED: usize = 56;

/// In-flight record of a queue.
#[derive(Debug, Clone)]
pub(crate) struct QueueRecord {
    area: Area,
    durable: bool,
}

/// State of a ring to resume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RecoveredRing {
    /// Heads in flight, in the order in which they were popped.
    pub(crate) heads: Vec<u16>,
    /// Number of chains published, counted from the used index with which the ring began.
    pub(crate) published: u64,
    /// Index of the next available entry to pop.
    pub(crate) last_avail_idx: u16,
}

impl QueueRecord {
    pub(super) fn new(area: Area, durable: bool) -> Self {
        Self { area, durable }
    }

    /// Returns true if the record outlives this process.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable && !self.is_lost()
    }

    /// Returns true if the file was truncated; the record ends with this process then.
    pub(crate) fn is_lost(&self) -> bool {
        self.area.mapping().is_lost()
    }

    /// Checks the record. Returns its damage, with the value.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.load(RUNNING) {
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
        let (published, publishing) = (self.load(PUBLISHED), self.load(PUBLISHING));
        if publishing.wrapping_sub(published) > entries || publishing < published {
            return Err(format!(
                "{publishing} chains were published, expected {published} to {entries} more"
            ));
        }
        let mut sequence: Vec<u64> = self.marked().into_iter().map(|(seq, _)| seq).collect();
        sequence.dedup();
        if sequence.len() != self.marked().len() {
            return Err("two heads have the same sequence number".to_owned());
        }
        Ok(())
    }

    /// State of the ring with this size and these addresses, if it is the recorded one. `used_head` reads a
    /// head in its used ring.
    pub(crate) fn recover(
        &self,
        entries: u16,
        address: &VringAddress,
        used: u16,
        used_head: impl Fn(u16) -> u32,
    ) -> Option<RecoveredRing> {
        let parts = [address.descriptors, address.available, address.used];
        let recorded = [DESCRIPTORS, AVAILABLE, USED].map(|offset| self.load(offset));
        if self.load(RUNNING) != 1 || self.load(ENTRIES) != u64::from(entries) || recorded != parts {
            return None;
        }
        let (published, publishing) = (self.load(PUBLISHED), self.load(PUBLISHING));
        let low = |count: u64| u16::try_from(count & 0xffff).expect("masked to 16 bits");
        // A ring without published chains has lost none, and equals a new one.
        if used == low(published) && published > 0 {
            self.store(PUBLISHING, published);
        } else if used == low(publishing) && publishing > 0 {
            for index in published..publishing {
                let head = u16::try_from(used_head(low(index))).ok().filter(|head| *head < entries)?;
                self.clear(head);
            }
            self.store(PUBLISHED, publishing);
        } else {
            return None;
        }
        let heads: Vec<u16> = self.marked().into_iter().map(|(_, head)| head).collect();
        let marked = heads.len() as u64;
        let last_avail_idx = used.wrapping_add(low(marked)).wrapping_add(low(self.load(SKIPPED)));
        Some(RecoveredRing { heads, published: self.load(PUBLISHED), last_avail_idx })
    }

    /// Marked heads with their sequence numbers, in this order.
    fn marked(&self) -> Vec<(u64, u16)> {
        let entries = u16::try_from(self.load(ENTRIES)).unwrap_or(RING_SIZE_MAX).min(RING_SIZE_MAX);
        let words = (0..entries).map(|head| (self.load(Self::word(head)), head));
        let mut marked: Vec<(u64, u16)> = words.filter(|(seq, _)| *seq != 0).collect();
        marked.sort_unstable();
        marked
    }

    /// Begins the record of a ring without chains in flight.
    pub(crate) fn begin(&self, entries: u16, address: &VringAddress, used: u16, last_avail_idx: u16) {
        self.end();
        (0..entries).for_each(|head| self.clear(head));
        self.store(ENTRIES, entries.into());
        self.store(PUBLISHED, used.into());
        self.store(PUBLISHING, used.into());
        self.store(SKIPPED, last_avail_idx.wrapping_sub(used).into());
        self.set_address(address);
        self.store(RUNNING, 1);
    }

    /// Records the addresses of the ring.
    pub(crate) fn set_address(&self, address: &VringAddress) {
        self.store(DESCRIPTORS, address.descriptors);
        self.store(AVAILABLE, address.available);
        self.store(USED, address.used);
    }

    /// Ends the record of a ring that was stopped, because the frontend knows its state.
    pub(crate) fn end(&self) {
        self.store(RUNNING, 0);
    }

    /// Records that a head was popped with this sequence number.
    pub(crate) fn mark(&self, head: u16, seq: u64) {
        self.store(Self::word(head), seq);
    }

    /// Records that the driver owns a head again.
    pub(crate) fn clear(&self, head: u16) {
        self.store(Self::word(head), 0);
    }

    /// Records that chains are about to be published. `published` is their total afterwards.
    pub(crate) fn begin_publish(&self, published: u64) {
        self.store(PUBLISHING, published);
    }

    /// Records that the chains are published and their heads cleared.
    pub(crate) fn end_publish(&self, published: u64) {
        self.store(PUBLISHED, published);
    }

    fn word(head: u16) -> usize {
        PAGE + 8 * usize::from(head)
    }

    fn load(&self, offset: usize) -> u64 {
        self.area.load_64(offset, Acquire)
    }

    /// Stores in program order: if a killed process has done one store, it has done all earlier ones.
    fn store(&self, offset: usize, value: u64) {
        #[cfg(test)]
        crate::crash_point::reach();
        self.area.store_64(offset, value, Release);
    }
}
