//! The threads that write to a synthetic guest, at a given rate, until they are stopped.

use std::sync::{PoisonError, RwLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::pattern::{PAGE_BYTES, mix};
use crate::shape::Shape;

/// Maximum lag that a thread makes up for; writes lost beyond that, on a busy machine, are lost.
const BEHIND_MAX: Duration = Duration::from_millis(10);
/// Interval in which a thread that has nothing to write looks whether it is to write, or to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Stops and starts the threads.
pub(crate) struct LoadThreads {
    threads: usize,
    /// Locked for reading while a page is written.
    mode: RwLock<Mode>,
}

/// State of the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Runs,
    Stopped,
    Over,
}

/// Ends the threads when it is dropped.
pub(crate) struct Over<'a>(pub(crate) &'a LoadThreads);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.set(Mode::Over);
    }
}

impl LoadThreads {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, mode: RwLock::new(Mode::Runs) }
    }

    /// Lets them write, or stops or ends them; then nothing writes to the memory after it returns.
    pub(crate) fn set(&self, mode: Mode) {
        // A mode is right at any time.
        *self.mode.write().unwrap_or_else(PoisonError::into_inner) = mode;
    }

    /// Calls `rewrite` for pages at `thread`'s part of the rate: those whose number is `thread` modulo the
    /// number of threads.
    pub(crate) fn run(&self, shape: &Shape, thread: usize, rewrite: impl Fn(usize, &mut [u8; PAGE_BYTES])) {
        let own = shape.pages().saturating_sub(thread).div_ceil(self.threads) as u64;
        if own == 0 {
            return;
        }
        let rate = shape.dirty_rate as f64 / self.threads as f64;
        let page_time = Duration::from_secs_f64(PAGE_BYTES as f64 / rate);
        let (mut content, mut written, base) = ([0; PAGE_BYTES], 0_u64, mix(shape.seed ^ thread as u64));
        let mut due = Instant::now();
        loop {
            let mode = self.mode.read().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let pause = match *mode {
                Mode::Over => return,
                Mode::Stopped => LOOK_INTERVAL,
                Mode::Runs => due.saturating_duration_since(now).min(LOOK_INTERVAL),
            };
            if !pause.is_zero() {
                drop(mode);
                sleep(pause);
                continue;
            }
            due = due.max(now.checked_sub(BEHIND_MAX).unwrap_or(due)) + page_time;
            written += 1;
            let page = mix(base.wrapping_add(written)) % own;
            rewrite(page as usize * self.threads + thread, &mut content);
        }
    }
}
