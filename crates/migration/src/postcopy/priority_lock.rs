//! A lock for a channel that faults and the background share: a fault goes first, for any number of waiting
//! threads.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::lock::lock;

/// A value with two classes of writers.
#[derive(Debug)]
pub(super) struct PriorityLock<T> {
    /// A thread that panics while it writes fails the session, which ends with its channel.
    value: Mutex<T>,
    urgent: Mutex<usize>,
    changed: Condvar,
}

impl<T> PriorityLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), urgent: Mutex::new(0), changed: Condvar::new() }
    }

    /// For a fault: waits for the current writer, and for other faults.
    pub(super) fn urgent<R>(&self, write: impl FnOnce(&mut T) -> R) -> R {
        *lock(&self.urgent) += 1;
        let _waits = Waits { urgent: &self.urgent, changed: &self.changed };
        write(&mut lock(&self.value))
    }

    /// For the background: lets every fault that waits go first.
    pub(super) fn background<R>(&self, write: impl FnOnce(&mut T) -> R) -> R {
        let mut urgent = lock(&self.urgent);
        while *urgent > 0 {
            urgent = self.changed.wait(urgent).unwrap_or_else(PoisonError::into_inner);
        }
        drop(urgent);
        write(&mut lock(&self.value))
    }

    pub(super) fn into_inner(self) -> T {
        self.value.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pending urgent writer, until it is dropped.
struct Waits<'a> {
    urgent: &'a Mutex<usize>,
    changed: &'a Condvar,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        *lock(self.urgent) -= 1;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn urgent_writers_go_before_the_background() {
        let (shared, both) = (PriorityLock::new(Vec::new()), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                shared.urgent(|order| {
                    both.wait();
                    order.push("urgent");
                });
            });
            both.wait();
            shared.background(|order| order.push("background"));
        });
        assert_eq!(shared.into_inner(), ["urgent", "background"]);
    }
}
