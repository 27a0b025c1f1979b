//! The threads that write to a synthetic guest, at a given rate, until they are stopped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use towline_channel::lock::lock;

use crate::pattern::{PAGE_BYTES, mix};
use crate::shape::Shape;

/// Maximum lag that a thread makes up for; writes lost beyond that, on a busy machine, are lost.
const BEHIND_MAX: Duration = Duration::from_millis(10);

/// Stops and starts the threads.
pub(crate) struct LoadThreads {
    threads: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// `state.mode` is not [`Mode::Runs`]; read before every page.
    is_wanted: AtomicBool,
}

struct State {
    mode: Mode,
    /// Threads that write or may begin to.
    running: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Runs,
    Stopped,
    Over,
}

impl LoadThreads {
    pub(crate) fn new(threads: usize) -> Self {
        let state = Mutex::new(State { mode: Mode::Runs, running: 0 });
        Self { threads, state, changed: Condvar::new(), is_wanted: AtomicBool::new(false) }
    }

    /// Stops the threads; after it returns nothing writes to the memory.
    pub(crate) fn stop(&self) {
        let mut state = self.set(Mode::Stopped);
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets them write again.
    pub(crate) fn start(&self) {
        drop(self.set(Mode::Runs));
    }

    /// Ends the threads when it is dropped.
    pub(crate) fn ended_on_drop(&self) -> impl Drop + '_ {
        struct Over<'a>(&'a LoadThreads);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                drop(self.0.set(Mode::Over));
            }
        }
        Over(self)
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
        while let Some(_running) = self.may_run() {
            while !self.is_wanted.load(Ordering::Relaxed) {
                let now = Instant::now();
                if due > now {
                    self.wait_until(due);
                    continue;
                }
                due = due.max(now.checked_sub(BEHIND_MAX).unwrap_or(due)) + page_time;
                written += 1;
                let page = mix(base.wrapping_add(written)) % own;
                rewrite(page as usize * self.threads + thread, &mut content);
            }
        }
    }

    /// Waits until it may write; `None` when it is over.
    fn may_run(&self) -> Option<LoadThread<'_>> {
        let mut state = self.lock();
        while state.mode == Mode::Stopped {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.mode == Mode::Over {
            return None;
        }
        state.running += 1;
        Some(LoadThread(self))
    }

    /// Waits until then, or until the state changes.
    fn wait_until(&self, due: Instant) {
        let state = self.lock();
        if state.mode == Mode::Runs {
            drop(self.changed.wait_timeout(state, due.saturating_duration_since(Instant::now())));
        }
    }

    fn set(&self, mode: Mode) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.mode = mode;
        self.is_wanted.store(mode != Mode::Runs, Ordering::Relaxed);
        self.changed.notify_all();
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A mode and a count, both right at each step.
        lock(&self.state)
    }
}

/// A thread that writes or may begin to; unregistered even on a panic.
struct LoadThread<'a>(&'a LoadThreads);

impl Drop for LoadThread<'_> {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
        self.0.changed.notify_all();
    }
}
