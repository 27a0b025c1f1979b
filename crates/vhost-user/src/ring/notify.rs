//! Notification suppression: decides when the driver kicks the device, and when the device interrupts the
//! driver.
//!
//! ```text
//!   device, before it sleeps                          driver, after it has published
//!     store its suppression (event index or flags)      store the available index
//!     full fence                                        full fence
//!     load the available index: moved? run again        load the device's suppression: kick?
//! ```
//! In any order one of the two sees the other's store. The opposite direction (used index, interrupt) is the
//! same with the roles exchanged. The functions are generic over the fields, and this file uses nothing else
//! of the crate, so `tests/model` checks this very code under loom.

/// In the flags of the available ring (`VIRTQ_AVAIL_F_NO_INTERRUPT`) and of the used ring
/// (`VIRTQ_USED_F_NO_NOTIFY`).
pub(crate) const NO_NOTIFY: u16 = 1;

/// The fields of a ring with which both sides suppress notifications.
pub(crate) trait NotificationWords {
    /// Returns true if `VIRTIO_RING_F_EVENT_IDX` was negotiated: event indices are used, otherwise flags.
    fn has_event_index(&self) -> bool;
    /// The driver's available index; acquire.
    fn load_avail_idx(&self) -> u16;
    /// The driver's event suppression: `used_event`, or the flags of the available ring.
    fn driver_suppression(&self) -> u16;
    /// The device's event suppression: `avail_event`, or the flags of the used ring.
    fn device_suppression(&self) -> u16;
    fn set_device_suppression(&self, value: u16);
    /// Sequentially consistent.
    fn full_fence(&self);
}

/// Result of [`enable_and_recheck`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recheck {
    /// The driver's available index moved since it was last reported.
    pub(crate) moved: bool,
    /// The device's event suppression was written.
    pub(crate) stored: bool,
}

/// Enables kicks, then loads the available index again. `reported` is the last value that the device has
/// processed, and is updated: each value is reported once, and the driver kicks for the next one.
pub(crate) fn enable_and_recheck(words: &impl NotificationWords, reported: &mut u16) -> Recheck {
    let value = if words.has_event_index() { *reported } else { 0 };
    let stored = words.device_suppression() != value;
    if stored {
        words.set_device_suppression(value);
    }
    words.full_fence();
    let found = words.load_avail_idx();
    Recheck { moved: std::mem::replace(reported, found) != found, stored }
}

/// Returns true if the driver wants an interrupt after the used index moved from `signalled_used`, the value
/// of the last decision, to `used`.
pub(crate) fn wants_call(words: &impl NotificationWords, signalled_used: u16, used: u16) -> bool {
    words.full_fence();
    let value = words.driver_suppression();
    if words.has_event_index() { needs_event(value, used, signalled_used) } else { value & NO_NOTIFY == 0 }
}

/// Returns true if the step from `old` to `new` passed the entry after `event` (`vring_need_event` of the
/// specification).
pub(crate) fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_needed_if_its_index_was_passed() {
        for (event, new, old, needed) in [
            (0, 1, 0, true),
            (1, 1, 0, false),
            (5, 5, 3, false),
            (4, 5, 3, true),
            (0xffff, 0, 0xfffe, true),
            (2, 9, 3, false),
        ] {
            assert_eq!(needs_event(event, new, old), needed, "{event} {new} {old}");
        }
    }
}
