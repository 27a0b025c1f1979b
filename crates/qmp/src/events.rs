//! The queue of unread events.

use std::collections::VecDeque;

use crate::codec::Event;

/// Default maximum number of unread events; beyond it the oldest is dropped.
pub const EVENTS_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Events {
    queue: VecDeque<Event>,
    max: usize,
    dropped: u64,
}

impl Events {
    pub(crate) fn new(max: usize) -> Self {
        Self { queue: VecDeque::new(), max: max.max(1), dropped: 0 }
    }

    pub(crate) fn push(&mut self, event: Event) {
        if self.queue.len() == self.max {
            self.dropped += 1;
            if let Some(oldest) = self.queue.pop_front() {
                tracing::warn!(
                    event = oldest.name,
                    max = self.max,
                    "QMP events unread; the oldest is dropped"
                );
            }
        }
        self.queue.push_back(event);
    }

    /// Removes the first event that `wanted` accepts and leaves the others in order.
    pub(crate) fn take(&mut self, mut wanted: impl FnMut(&Event) -> bool) -> Option<Event> {
        let at = self.queue.iter().position(&mut wanted)?;
        self.queue.remove(at)
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}
