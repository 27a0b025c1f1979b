//! Parameters and memory of a ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{DESCRIPTOR_BYTES, ENTRIES, RING_SIZE_MAX, RingFault, USED_BYTES};
use crate::features;
use crate::log::{DirtyLog, LogSwitch};
use crate::memory::GuestMemory;
use crate::message::VringAddress;
use crate::sys::{Area, FileRange};

/// Parameters of a ring.
#[derive(Debug)]
pub struct RingSetup {
    /// Number of entries; a power of two.
    pub size: u32,
    /// Addresses of its parts.
    pub address: VringAddress,
    /// Index of the first available entry to read (`last_avail_idx`).
    pub base: u16,
    /// Negotiated features.
    pub features: u64,
    /// Eventfd that notifies the driver; `None` if the driver polls.
    pub call: Option<OwnedFd>,
    /// True while writes are logged.
    pub switch: LogSwitch,
    /// The dirty log.
    pub log: Option<Arc<DirtyLog>>,
}

/// Counters of a ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingStatistics {
    /// Chains completed.
    pub chains: u64,
    /// Updates of the used index.
    pub batches: u64,
    /// Notifications of the driver.
    pub notifications: u64,
    /// Notifications that the driver suppressed.
    pub notifications_suppressed: u64,
    /// Notifications by the driver.
    pub kicks: u64,
}

/// Result of [`Ring::stop`](super::Ring::stop).
#[derive(Debug)]
pub(crate) struct RingStop {
    /// Index of the next available entry.
    pub(crate) base: u16,
    /// Number of chains in flight that were returned with length 0.
    pub(crate) incomplete: usize,
}

/// The mapped parts of a ring.
#[derive(Debug)]
pub(super) struct RingParts {
    pub(super) table: Area,
    pub(super) available: Area,
    pub(super) used: Area,
}

/// Positions of a ring's parts that one side writes and the other one reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingExtent {
    available: FileRange,
    used: FileRange,
}

impl RingExtent {
    /// Finds a ring with these features; `None` if it has a fault, which is reported when it starts.
    pub(crate) fn find(
        memory: &GuestMemory,
        address: &VringAddress,
        size: u32,
        features: u64,
    ) -> Option<Self> {
        let event_index = features & features::EVENT_IDX != 0;
        let parts = RingParts::find(memory, address, ring_size(size).ok()?, event_index).ok()?;
        Some(Self { available: parts.available.file_range(), used: parts.used.file_range() })
    }

    /// Returns true if a completion in this ring may make a chain of the other ring available.
    pub(crate) fn feeds(&self, other: &Self) -> bool {
        self.used.overlaps(&other.available)
    }
}

/// Checks the size of a ring.
pub(super) fn ring_size(found: u32) -> Result<u16, RingFault> {
    let size = u16::try_from(found).ok().filter(|size| size.is_power_of_two() && *size <= RING_SIZE_MAX);
    size.ok_or(RingFault::Size { found })
}

impl RingParts {
    /// Finds the parts of a ring with `size` entries in guest memory.
    pub(super) fn find(
        memory: &GuestMemory,
        address: &VringAddress,
        size: u16,
        event_index: bool,
    ) -> Result<Self, RingFault> {
        let event = if event_index { 2 } else { 0 };
        let size = usize::from(size);
        let find = |part, user: u64, len, align| {
            let fault = RingFault::Unmapped { part, user, len, align };
            memory.user_area(user, len, align).ok_or(fault)
        };
        let (available, used) = (ENTRIES + 2 * size + event, ENTRIES + USED_BYTES * size + event);
        let parts = Self {
            table: find("descriptor table", address.descriptors, DESCRIPTOR_BYTES * size, 16)?,
            available: find("available ring", address.available, available, 2)?,
            used: find("used ring", address.used, used, 4)?,
        };
        if parts.used.file_range().overlaps(&parts.available.file_range()) {
            return Err(RingFault::Overlap { available: address.available, used: address.used });
        }
        Ok(parts)
    }
}
