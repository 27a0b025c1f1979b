//! A device's view of its queues.

use super::slot::QueueSlot;
use crate::ring::Ring;

/// The queues of one worker.
#[derive(Debug)]
pub struct Queues<'a> {
    slots: &'a mut [QueueSlot],
}

impl<'a> Queues<'a> {
    /// No queues: for a worker that its device runs while no frontend is connected.
    pub fn none() -> Self {
        Self { slots: &mut [] }
    }

    pub(super) fn new(slots: &'a mut [QueueSlot]) -> Self {
        Self { slots }
    }

    /// Number of queues.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns true if there is no queue, as without a frontend ([`Queues::none`]).
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The ring of a queue, counted from 0. `None` if it is not to be processed: stopped, disabled, faulted,
    /// absent, or waiting for its dirty log.
    pub fn ring(&mut self, index: usize) -> Option<&mut Ring> {
        self.slots.get_mut(index).filter(|slot| slot.is_running())?.ring.as_mut()
    }

    /// The ring of a queue while it is started, even if it is disabled or faulted: to complete chains in
    /// flight.
    pub fn started_ring(&mut self, index: usize) -> Option<&mut Ring> {
        self.slots.get_mut(index)?.ring.as_mut()
    }
}
