//! The fields of a ring in guest memory that suppress notifications.

use std::sync::atomic::{Ordering, fence};

use super::notify::NotificationWords;
use super::{ENTRIES, INDEX, USED_BYTES};
use crate::sys::Area;

/// Fields of a ring.
pub(super) struct SuppressionWords<'a> {
    pub(super) available: &'a Area,
    pub(super) used: &'a Area,
    pub(super) size: u16,
    pub(super) event_index: bool,
}

impl SuppressionWords<'_> {
    /// Offset of `avail_event` in the used ring.
    pub(super) fn event_offset(size: u16) -> usize {
        ENTRIES + USED_BYTES * usize::from(size)
    }

    /// Offset of `avail_event` or of the flags in the used ring.
    fn device_offset(&self) -> usize {
        if self.event_index { Self::event_offset(self.size) } else { 0 }
    }
}

impl NotificationWords for SuppressionWords<'_> {
    fn has_event_index(&self) -> bool {
        self.event_index
    }

    fn load_avail_idx(&self) -> u16 {
        self.available.load_le16(INDEX, Ordering::Acquire)
    }

    fn driver_suppression(&self) -> u16 {
        let offset = if self.event_index { ENTRIES + 2 * usize::from(self.size) } else { 0 };
        self.available.load_le16(offset, Ordering::Relaxed)
    }

    fn device_suppression(&self) -> u16 {
        self.used.load_le16(self.device_offset(), Ordering::Relaxed)
    }

    fn set_device_suppression(&self, value: u16) {
        self.used.store_le16(self.device_offset(), value, Ordering::Relaxed);
    }

    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
}
