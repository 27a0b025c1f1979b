//! Memory of a guest's connections: the cost of each window, and messages in transit to the guest, are
//! reserved within a limit.

use crate::connection::ConnectionLimits;
use crate::credit::{WINDOW_FIRST_MAX, WINDOW_MIN};
use crate::packet::SocketType;

/// Share of the remaining memory that a new connection gets, so windows become smaller.
const SHARE: u64 = 8192;
/// Larger share while less than a quarter is reserved: with the default limit a full initial window.
const SHARE_FIRST: u64 = SHARE / 16;

/// See the module.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: u64,
    pub(super) reserved: u64,
    /// Part of `reserved` for messages.
    messages: u64,
}

impl MemoryBudget {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, reserved: 0, messages: 0 }
    }

    fn left(&self) -> u64 {
        self.limit.saturating_sub(self.reserved)
    }

    /// Reserves the window of a new connection, of at most `buf_alloc` bytes. Returns its size, or `None` if
    /// memory for the smallest one is lacking.
    pub(super) fn reserve_window(&mut self, buf_alloc: u32, kind: SocketType) -> Option<u32> {
        let left = self.left();
        if left < ConnectionLimits::cost(WINDOW_MIN.min(buf_alloc), kind) {
            return None;
        }
        let share = if self.reserved < self.limit / 4 { SHARE_FIRST } else { SHARE };
        let fair = u32::try_from(left / share).unwrap_or(u32::MAX).clamp(WINDOW_MIN, WINDOW_FIRST_MAX);
        let window = fair.min(buf_alloc);
        self.reserved += ConnectionLimits::cost(window, kind);
        Some(window)
    }

    /// Reserves the growth of a stream's window. Returns false if it needs more than half of the remaining
    /// memory.
    pub(super) fn grow_window(&mut self, present: u32, desired: u32) -> bool {
        let more = ConnectionLimits::cost(desired, SocketType::Stream)
            - ConnectionLimits::cost(present, SocketType::Stream);
        let fits = more <= self.left() / 2;
        if fits {
            self.reserved += more;
        }
        fits
    }

    pub(super) fn free_window(&mut self, window: u32, kind: SocketType) {
        self.reserved -= ConnectionLimits::cost(window, kind);
    }

    /// Reserves memory for a message in transit to the guest. Returns false if there is none. One message at a
    /// time is always admitted, so messages make progress.
    pub(crate) fn reserve_message(&mut self, bytes: u64) -> bool {
        if bytes > self.left() && self.messages > 0 {
            return false;
        }
        self.reserved += bytes;
        self.messages += bytes;
        true
    }

    pub(crate) fn free_message(&mut self, bytes: u64) {
        self.reserved -= bytes;
        self.messages -= bytes;
    }
}
