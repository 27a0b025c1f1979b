//! Timer for the next poll of the completion ring, which has no event: soon while completions arrive, later
//! and later while they do not; or at a given time.

use std::io;
use std::time::{Duration, Instant};

use crate::timer::Timer;

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(10);

/// Completions since the timer was armed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompletionProgress {
    Some,
    None,
}

/// A timer whose interval adapts to the completions.
#[derive(Debug)]
pub(super) struct CompletionTimer {
    timer: Timer,
    interval: Duration,
    armed: bool,
}

impl CompletionTimer {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: Timer::new()?, interval: SHORTEST, armed: false })
    }

    /// Lets the timer fire once.
    pub(super) fn arm(&mut self, progress: CompletionProgress) {
        self.interval = match progress {
            CompletionProgress::Some => SHORTEST,
            CompletionProgress::None => (self.interval * 2).min(LONGEST),
        };
        self.set(self.interval);
    }

    /// Lets the timer fire once at this time, or soon if that has passed.
    pub(super) fn arm_at(&mut self, time: Instant) {
        self.set(time.saturating_duration_since(Instant::now()).max(SHORTEST));
    }

    fn set(&mut self, delay: Duration) {
        self.timer.set(delay);
        self.armed = true;
    }

    /// Drains the timer and marks it as not armed.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.timer.clear();
        }
    }

    /// The timer, if it is armed.
    pub(super) fn armed(&self) -> Option<&Timer> {
        self.armed.then_some(&self.timer)
    }
}
