//! What a device sees of its queues.

use super::Slot;
use crate::ring::Ring;

/// The queues of one worker.
#[derive(Debug)]
pub struct Queues<'a> {
    pub(super) slots: &'a mut [Slot],
    pub(super) first: usize,
}

impl Queues<'_> {
    /// The number of the first of them among all of the device's.
    pub fn first(&self) -> usize {
        self.first
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Never, with workers of this crate.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// One of them, counted from 0; `None` if it does not run now: stopped, disabled, broken or not there.
    pub fn ring(&mut self, index: usize) -> Option<&mut Ring> {
        self.slots.get_mut(index).filter(|slot| slot.runs())?.ring.as_mut()
    }

    /// One of them as long as it is there, also if it is disabled or broken: to complete what was taken from it before.
    pub fn held(&mut self, index: usize) -> Option<&mut Ring> {
        self.slots.get_mut(index)?.ring.as_mut()
    }
}
