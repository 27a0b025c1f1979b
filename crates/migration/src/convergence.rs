//! Convergence policy: decides when to stop a guest that writes while it is sent, and when to report that it
//! will not converge.
//!
//! ```text
//!   after each pass ──► Observation ──► Policy ──► Continue        what is left takes too long, but it becomes less
//!   a query of QEMU ──► Sampler ─┘             ├─► SwitchOver      what is left fits into the downtime
//!                                              └─► CannotConverge  it does not become less: figures, and ways out
//! ```
//!
//! Pure: its input is times and bytes, and it has no clock. The remainder of each pass becomes a downtime, by
//! the lower of the latest rate and that of the last three passes together. Progress is judged in windows,
//! each of several passes *and* seconds, by the lowest downtime of each: after two consecutive windows no
//! better than the one before, or six without a new lowest, the guest will not converge. So a burst of
//! writing or a link that stalls costs a window, not the migration; and a guest that oscillates is not waited
//! for indefinitely.
//!
//! Out of scope: slowing the guest down, and the decision when it cannot converge.

use std::fmt;
use std::time::Duration;

use towline_protocol::ram::PAGE_SIZE;

/// Number of passes whose common rate bounds the latest one's: a pass that socket buffers absorbed seems
/// fast.
const RATE_PASSES: usize = 3;
/// Part of a window's lowest downtime by which that of the next window must be lower.
const IMPROVEMENT: u32 = 10;
/// Windows in a row no better than the one before.
const WINDOWS_STUCK_MAX: u32 = 2;
/// Windows without a new lowest.
const WINDOWS_IDLE_MAX: u32 = 6;
/// Passes after which a window ends even if no time goes by.
const WINDOW_PASSES_MAX: u32 = 1000;
/// A shorter pass yields no rate.
const PASS_TIME_MIN: Duration = Duration::from_micros(1);

/// Limits of the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum downtime.
    pub downtime: Duration,
    /// The part of it for everything but memory: device state, switchover.
    pub switchover_cost: Duration,
    /// Time to look before it is given up.
    pub min_window: MinWindow,
}

/// Minimum length of a window. A guest that cannot converge is reported after three or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinWindow {
    /// In passes, 1 to 1000; other values are clamped.
    pub passes: u32,
    /// In time, but with at most 1000 passes.
    pub time: Duration,
}

impl Default for MinWindow {
    fn default() -> Self {
        Self { passes: 5, time: Duration::from_secs(5) }
    }
}

/// Result of one pass, or of several since the last sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observation {
    /// Duration of the pass.
    pub time: Duration,
    /// Bytes of page contents sent per second; 0 if no page had any, which says nothing about the link.
    pub rate: f64,
    /// Bytes of pages that the guest wrote per second, each page counted once per pass.
    pub dirty_rate: f64,
    /// Bytes of pages to be sent again.
    pub left: u64,
    /// QEMU's own estimate; the longer of it and the policy's is used.
    pub expected_downtime: Option<Duration>,
}

impl Observation {
    /// A pass that sent `sent` bytes of page contents (zero pages have none), while the guest wrote `dirtied`
    /// bytes of pages, which are left.
    pub fn of_pass(time: Duration, sent: u64, dirtied: u64) -> Self {
        let time = time.max(PASS_TIME_MIN);
        let per_second = |bytes: u64| bytes as f64 / time.as_secs_f64();
        let (rate, dirty_rate) = (per_second(sent), per_second(dirtied));
        Self { time, rate, dirty_rate, left: dirtied, expected_downtime: None }
    }
}

/// Figures of `query-migrate` at a source that is QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Time of the sample, since any fixed moment.
    pub at: Duration,
    /// `dirty-sync-count`: passes begun.
    pub dirty_sync_count: u64,
    /// `transferred`, in bytes.
    pub transferred: u64,
    /// `remaining`, in bytes.
    pub remaining: u64,
    /// `dirty-pages-rate`: pages written a second.
    pub dirty_pages_rate: u64,
    /// `page-size`; 0 (an unknown one) is taken as 4096.
    pub page_size: u64,
    /// `expected-downtime`.
    pub expected_downtime: Option<Duration>,
}

/// Turns samples into observations, one whenever a further pass has begun. QEMU itself decides when to stop
/// its guest: [`PassDecision::SwitchOver`] only means that it should soon.
#[derive(Debug, Default)]
pub struct Sampler {
    /// The first sample of the pass.
    begun: Option<Sample>,
}

impl Sampler {
    /// Adds a sample (any interval). Returns `None` unless it completes a pass.
    pub fn observe(&mut self, sample: Sample) -> Option<Observation> {
        let Some(begun) = self.begun else {
            self.begun = Some(sample);
            return None;
        };
        let time = sample.at.saturating_sub(begun.at);
        if sample.dirty_sync_count <= begun.dirty_sync_count || time.is_zero() {
            return None;
        }
        self.begun = Some(sample);
        let page_size = if sample.page_size == 0 { PAGE_SIZE } else { sample.page_size };
        Some(Observation {
            time,
            rate: sample.transferred.saturating_sub(begun.transferred) as f64 / time.as_secs_f64(),
            dirty_rate: sample.dirty_pages_rate as f64 * page_size as f64,
            left: sample.remaining,
            expected_downtime: sample.expected_downtime,
        })
    }
}

/// The next step.
#[derive(Debug, Clone, PartialEq)]
pub enum PassDecision {
    /// One more pass.
    Continue,
    /// Stop the guest and send what is left.
    SwitchOver,
    /// The migration does not converge. Reported again after the same time if it continues.
    CannotConverge(CannotConverge),
}

/// Reason why a guest cannot be moved within its downtime, in figures of the last window.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub struct CannotConverge {
    /// Bytes of pages that the guest writes per second.
    pub dirty_rate: f64,
    /// Bytes of page contents that are sent per second.
    pub rate: f64,
    /// Bytes that were left at best.
    pub left: u64,
    /// Downtime that these would take; `Duration::MAX` if nothing can be sent.
    pub expected_downtime: Duration,
    /// Limit of the downtime.
    pub downtime_limit: Duration,
    /// Number of passes observed.
    pub passes: u64,
    /// Duration of these passes.
    pub time: Duration,
}

/// Decides after each pass of one migration.
#[derive(Debug)]
pub struct ConvergencePolicy {
    limits: Limits,
    recent: [Option<Observation>; RATE_PASSES],
    window: RateWindow,
    /// The lowest downtime of the previous window.
    previous: Option<Duration>,
    /// The lowest of all complete windows.
    lowest: Option<Duration>,
    windows_stuck: u32,
    windows_idle: u32,
    passes: u64,
    time: Duration,
}

#[derive(Debug, Default)]
struct RateWindow {
    passes: u32,
    time: Duration,
    sent: f64,
    dirtied: f64,
    /// The lowest downtime, and what was left then.
    best: Option<(Duration, u64)>,
}

impl ConvergencePolicy {
    /// A policy that has seen nothing.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            recent: [None; RATE_PASSES],
            window: RateWindow::default(),
            previous: None,
            lowest: None,
            windows_stuck: 0,
            windows_idle: 0,
            passes: 0,
            time: Duration::ZERO,
        }
    }

    /// Allows another downtime from now on.
    pub fn set_downtime(&mut self, limit: Duration) {
        self.limits.downtime = limit;
    }

    /// Evaluates the observation of a pass.
    ///
    /// Terminates for any input: after a bounded number of passes, [`PassDecision::Continue`] is only
    /// returned while the remaining downtime keeps falling by a tenth, which it can do a few hundred times.
    pub fn observe(&mut self, observation: &Observation) -> PassDecision {
        self.recent.rotate_right(1);
        self.recent[0] = Some(*observation);
        self.passes += 1;
        self.time = self.time.saturating_add(observation.time);
        let downtime = self.downtime(observation);
        self.window.add(observation, downtime);
        if downtime <= self.limits.downtime {
            return PassDecision::SwitchOver;
        }
        if self.window.is_complete(self.limits.min_window) { self.judge() } else { PassDecision::Continue }
    }

    /// Downtime if the guest were stopped now.
    fn downtime(&self, observation: &Observation) -> Duration {
        let memory = match (observation.left, self.rate(observation)) {
            (0, _) => Duration::ZERO,
            (left, Some(rate)) => Duration::try_from_secs_f64(left as f64 / rate).unwrap_or(Duration::MAX),
            // Only zero pages were sent so far, and the rest takes no longer than the last pass, which was as
            // long.
            (left, None) if self.recent[1].is_some_and(|before| left <= before.left) => observation.time,
            (_, None) => Duration::MAX,
        };
        memory
            .max(observation.expected_downtime.unwrap_or_default())
            .saturating_add(self.limits.switchover_cost)
    }

    /// The reliable rate of the link, if one of the last passes had pages with content.
    fn rate(&self, observation: &Observation) -> Option<f64> {
        let known = self.recent.iter().flatten().filter(|pass| pass.rate > 0.0);
        let (sent, time) = known.fold((0.0, 0.0), |(sent, time), pass| {
            let seconds = pass.time.as_secs_f64();
            (sent + pass.rate * seconds, time + seconds)
        });
        let latest = Some(observation.rate).filter(|&rate| rate > 0.0);
        let mean = Some(sent / time).filter(|_| time > 0.0);
        latest.into_iter().chain(mean).reduce(f64::min)
    }

    /// A window is complete.
    fn judge(&mut self) -> PassDecision {
        let window = std::mem::take(&mut self.window);
        let Some((best, left)) = window.best else { return PassDecision::Continue };
        let improves =
            |before: Option<Duration>| before.is_none_or(|before| best < before - before / IMPROVEMENT);
        self.windows_stuck = if improves(self.previous) { 0 } else { self.windows_stuck + 1 };
        self.windows_idle = if improves(self.lowest) { 0 } else { self.windows_idle + 1 };
        self.previous = Some(best);
        if self.windows_idle == 0 {
            self.lowest = Some(best);
        }
        if self.windows_stuck < WINDOWS_STUCK_MAX && self.windows_idle < WINDOWS_IDLE_MAX {
            return PassDecision::Continue;
        }
        (self.windows_stuck, self.windows_idle) = (0, 0);
        let per_second =
            |bytes: f64| if window.time.is_zero() { 0.0 } else { bytes / window.time.as_secs_f64() };
        PassDecision::CannotConverge(CannotConverge {
            dirty_rate: per_second(window.dirtied),
            rate: per_second(window.sent),
            left,
            expected_downtime: best,
            downtime_limit: self.limits.downtime,
            passes: self.passes,
            time: self.time,
        })
    }
}

impl RateWindow {
    fn add(&mut self, observation: &Observation, downtime: Duration) {
        let seconds = observation.time.as_secs_f64();
        self.passes += 1;
        self.time = self.time.saturating_add(observation.time);
        self.sent += observation.rate * seconds;
        self.dirtied += observation.dirty_rate * seconds;
        if self.best.is_none_or(|(best, _)| downtime < best) {
            self.best = Some((downtime, observation.left));
        }
    }

    fn is_complete(&self, min_window: MinWindow) -> bool {
        let passes = min_window.passes.clamp(1, WINDOW_PASSES_MAX);
        self.passes >= passes && (self.time >= min_window.time || self.passes >= WINDOW_PASSES_MAX)
    }
}

impl fmt::Display for CannotConverge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        write!(
            f,
            "the guest writes {:.1} MiB/s of pages while {:.1} MiB/s get through: after {} passes in {:.1} s at best {:.1} MiB were left",
            mib(self.dirty_rate),
            mib(self.rate),
            self.passes,
            self.time.as_secs_f64(),
            mib(self.left as f64),
        )?;
        match self.expected_downtime {
            Duration::MAX => write!(f, ", and nothing gets through"),
            downtime => write!(
                f,
                ", for which it would be stopped for {} ms, with {} ms allowed",
                downtime.as_millis(),
                self.downtime_limit.as_millis()
            ),
        }
    }
}
