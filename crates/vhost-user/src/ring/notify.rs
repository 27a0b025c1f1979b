//! Notification suppression: when the device is kicked, and when the driver is interrupted.
//!
//! ```text
//!   device, before it sleeps                          driver, when it has published
//!     store what wakes it (event index or flags)        store the available index
//!     full fence                                        full fence
//!     load the available index: moved? run again        load what wakes the device: kick?
//! ```
//! One of the two sees the other's store, whatever the order. The other direction (used index, interrupt) is the same with the
//! roles exchanged. The functions are generic over the words, and this file uses nothing else of the
//! crate, so that `tests/model` can check this very code under loom.

/// In the available ring's flags, and in the used ring's: do not notify.
pub(crate) const NO_NOTIFICATION: u16 = 1;

/// The words of a ring by which both sides suppress notifications.
pub(crate) trait NotificationWords {
    /// Whether `VIRTIO_RING_F_EVENT_IDX` was negotiated: event indices are used, else flags.
    fn has_event_index(&self) -> bool;
    /// The driver's available index; acquire.
    fn available_index(&self) -> u16;
    /// What the driver wants to be interrupted by: `used_event`, or the available ring's flags.
    fn driver_wish(&self) -> u16;
    /// What the device wants to be kicked by: `avail_event`, or the used ring's flags.
    fn device_wish(&self) -> u16;
    fn set_device_wish(&self, wish: u16);
    /// Sequentially consistent.
    fn full_fence(&self);
}

/// What [`arm`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Armed {
    /// The driver's available index moved since it was last reported.
    pub(crate) moved: bool,
    /// The device's wish was written.
    pub(crate) stored: bool,
}

/// Enables kicks, then loads the available index once more. `reported` is the value that the device has had, and is updated: each
/// value is reported once, and the driver kicks for the next one.
pub(crate) fn arm(words: &impl NotificationWords, reported: &mut u16) -> Armed {
    let wish = if words.has_event_index() { *reported } else { 0 };
    let stored = words.device_wish() != wish;
    if stored {
        words.set_device_wish(wish);
    }
    words.full_fence();
    let found = words.available_index();
    Armed { moved: std::mem::replace(reported, found) != found, stored }
}

/// After the used index was moved from `signalled`, for which the driver was last considered, to `used`: whether it wants an
/// interrupt.
pub(crate) fn wants_call(words: &impl NotificationWords, signalled: u16, used: u16) -> bool {
    words.full_fence();
    let wish = words.driver_wish();
    if words.has_event_index() { needs_event(wish, used, signalled) } else { wish & NO_NOTIFICATION == 0 }
}

/// Whether the step from `old` to `new` passed the entry behind `event` (`vring_need_event` of the standard).
pub(crate) fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_needed_when_it_was_passed() {
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
