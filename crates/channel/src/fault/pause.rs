//! A sleep that a shutdown ends.

use crate::lock::lock;
use std::net::Shutdown;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Interruptible sleep of a layer's threads. Once a direction is shut down, its sleeps return at once.
#[derive(Debug, Default)]
pub(super) struct Pause {
    /// True if sending, whether receiving has ended.
    ended: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Pause {
    /// Sleeps until `end`, or until the direction is shut down.
    pub(super) fn until(&self, end: Instant, direction: super::Direction) {
        let mut ended = lock(&self.ended);
        loop {
            let is_over = match direction {
                super::Direction::Send => ended.0,
                super::Direction::Recv => ended.1,
            };
            let left = end.saturating_duration_since(Instant::now());
            if is_over || left == Duration::ZERO {
                return;
            }
            ended = self.changed.wait_timeout(ended, left).expect("no panic while it is held").0;
        }
    }

    /// Wakes the sleepers of the directions that are shut down.
    pub(super) fn end(&self, how: Shutdown) {
        let mut ended = lock(&self.ended);
        ended.0 |= how != Shutdown::Read;
        ended.1 |= how != Shutdown::Write;
        self.changed.notify_all();
    }
}
