//! CPU time that a worker may use and still be scheduled promptly.
//!
//! A thread that wakes up while others compute waits for the end of a time slice, unless its own one is
//! shorter. So a worker has a short slice while it uses little: it is delayed neither by the workers of other
//! guests that use much, nor by other programs. Its share of the CPU does not depend on its slice. A worker
//! above its budget has the default slice, which suits large batches.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::sys;

/// Slice of a worker within its budget. The scheduler's minimum is 0.1 ms.
const SHORT_SLICE: Duration = Duration::from_micros(300);
/// The budget is a quarter of a CPU.
const BUDGET_DIVISOR: u32 = 4;
/// Minimum time over which the use is measured.
const INTERVAL: Duration = Duration::from_millis(20);
/// Number of runs between two reads of the clock.
const RUNS: u32 = 16;

/// Relation of a worker to its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BudgetUse {
    Within,
    Above,
}

/// Start of an interval.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    /// CPU time of the thread.
    used: Duration,
}

impl Reading {
    fn now() -> Self {
        let used = clock_gettime(ClockId::ThreadCPUTime);
        let used = Duration::new(used.tv_sec.unsigned_abs(), u32::try_from(used.tv_nsec).unwrap_or(0));
        Self { at: Instant::now(), used }
    }
}

/// Budget of the thread that has it.
#[derive(Debug)]
pub(super) struct CpuBudget {
    since: Reading,
    load: BudgetUse,
    runs: u32,
}

impl CpuBudget {
    /// Starts measuring, and gives the calling thread a short slice.
    pub(super) fn new() -> Self {
        let budget = Self { since: Reading::now(), load: BudgetUse::Within, runs: 0 };
        budget.apply();
        budget
    }

    /// To be called after each run of the worker.
    pub(super) fn count_run(&mut self) {
        self.runs += 1;
        if self.runs < RUNS {
            return;
        }
        self.runs = 0;
        if self.since.at.elapsed() >= INTERVAL && self.measure(Reading::now()) {
            self.apply();
        }
    }

    /// Ends an interval. Returns true if the load has changed.
    fn measure(&mut self, now: Reading) -> bool {
        let (elapsed, used) = (now.at - self.since.at, now.used.saturating_sub(self.since.used));
        let load = if used * BUDGET_DIVISOR > elapsed { BudgetUse::Above } else { BudgetUse::Within };
        self.since = now;
        std::mem::replace(&mut self.load, load) != load
    }

    fn apply(&self) {
        let slice = if self.load == BudgetUse::Within { SHORT_SLICE } else { Duration::ZERO };
        if let Err(error) = sys::set_time_slice(slice) {
            tracing::debug!(%error, ?slice, "cannot set a worker's time slice");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_a_cpu_is_within_the_budget() {
        let mut now = Reading::now();
        let mut budget = CpuBudget { since: now, load: BudgetUse::Within, runs: 0 };
        let mut measure = |elapsed, used| {
            now.at += Duration::from_millis(elapsed);
            now.used += Duration::from_millis(used);
            let changed = budget.measure(now);
            (budget.load, changed)
        };
        assert_eq!(measure(40, 10), (BudgetUse::Within, false));
        assert_eq!(measure(40, 11), (BudgetUse::Above, true));
        assert_eq!(measure(20, 20), (BudgetUse::Above, false));
        // Only the last interval counts.
        assert_eq!(measure(1000, 250), (BudgetUse::Within, true));
    }

    #[test]
    fn an_idle_thread_returns_to_its_budget() {
        let mut budget = CpuBudget { load: BudgetUse::Above, ..CpuBudget::new() };
        let deadline = Instant::now() + Duration::from_secs(60);
        while budget.load == BudgetUse::Above {
            assert!(Instant::now() < deadline, "{budget:?}");
            std::thread::sleep(Duration::from_millis(2));
            budget.count_run();
        }
    }
}
