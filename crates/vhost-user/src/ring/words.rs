//! The words of a ring in guest memory by which notifications are suppressed.

use std::sync::atomic::{Ordering, fence};

use super::notify::NotificationWords;
use super::{ENTRIES, INDEX, USED_BYTES};
use crate::sys::Area;

/// Those of a ring in guest memory.
pub(super) struct Words<'a> {
    pub(super) available: &'a Area,
    pub(super) used: &'a Area,
    pub(super) size: u16,
    pub(super) event_index: bool,
}

impl Words<'_> {
    /// Of `avail_event`, in the used ring.
    pub(super) fn event_offset(size: u16) -> usize {
        ENTRIES + USED_BYTES * usize::from(size)
    }

    fn device_offset(&self) -> usize {
        if self.event_index { Self::event_offset(self.size) } else { 0 }
    }
}

impl NotificationWords for Words<'_> {
    fn has_event_index(&self) -> bool {
        self.event_index
    }

    fn available_index(&self) -> u16 {
        self.available.load_16(INDEX, Ordering::Acquire)
    }

    fn driver_wish(&self) -> u16 {
        let offset = if self.event_index { ENTRIES + 2 * usize::from(self.size) } else { 0 };
        self.available.load_16(offset, Ordering::Relaxed)
    }

    fn device_wish(&self) -> u16 {
        self.used.load_16(self.device_offset(), Ordering::Relaxed)
    }

    fn set_device_wish(&self, wish: u16) {
        self.used.store_16(self.device_offset(), wish, Ordering::Relaxed);
    }

    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
}
