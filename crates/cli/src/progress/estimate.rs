//! Estimates from the progress of a copy: rate, remaining time, and whether the passes become shorter.
//!
//! ```text
//!   Progress, several times a second ─► Estimator: samples of the last seconds ─► Estimate ─► line, event
//! ```
//! Pure: times are arguments. In the first pass the remaining time follows from the speed at which memory is processed,
//! because zero pages need no bandwidth; in later passes from the rate of the link less the rate at which the guest writes.

use std::collections::VecDeque;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::plan::Progress;
use towline_protocol::ram::PAGE_SIZE;

/// Time over which the speed is measured.
const WINDOW: Duration = Duration::from_secs(3);
/// Minimum time between the first and the last sample of a measurement.
const WINDOW_MIN: Duration = Duration::from_millis(400);
/// Part of the link's rate that a guest may write while its passes become shorter.
const DIRTY_SHARE_MAX: f64 = 0.95;
/// The same for a guest that has not converged so far; more than that counts only after [`CONVERGING_PASSES`].
const DIRTY_SHARE_CLEAR: f64 = 0.8;
/// Complete passes below [`DIRTY_SHARE_MAX`] after which a guest that has not converged does.
const CONVERGING_PASSES: u64 = 2;
/// Pass from which the outlook is known: the second one is the first to have a rate of writing.
const OUTLOOK_PASS_MIN: u64 = 3;
/// Deviation up to which a previous estimate of the remaining time is kept.
const TIME_DEVIATION_MAX: f64 = 0.3;

/// Development of the passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outlook {
    /// Too early to tell, or the guest does not run.
    Unknown,
    /// The passes become shorter.
    Converging,
    /// The guest writes as fast as its memory is sent.
    NotConverging,
}

/// Estimates at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Estimate {
    pub(crate) pass: u64,
    /// Bytes of the pass, and those of them that remain.
    pub(crate) pass_bytes: u64,
    pub(crate) remaining: u64,
    /// Rate of the link in bytes per second.
    pub(crate) rate: Option<u64>,
    /// Rate at which the guest writes its memory.
    pub(crate) dirty_rate: Option<u64>,
    pub(crate) downtime: Option<Duration>,
    pub(crate) downtime_limit: Option<Duration>,
    pub(crate) throttle_percent: Option<u64>,
    pub(crate) outlook: Outlook,
    /// Time until everything is sent; `None` if it is unknown or unlimited.
    pub(crate) time_left: Option<Duration>,
}

/// Collects samples of one copy.
#[derive(Debug, Default)]
pub(crate) struct Estimator {
    samples: VecDeque<ProgressSample>,
    pass_bytes: u64,
    /// Times and rates of the link within the window, across passes.
    rates: VecDeque<(Duration, u64)>,
    outlook: Option<Outlook>,
    /// Pass since which every sample was one of a guest that converges.
    converging_since: Option<u64>,
    /// The last estimate of the time at which everything is sent.
    end: Option<Duration>,
}

#[derive(Debug, Clone, Copy)]
struct ProgressSample {
    at: Duration,
    pass: u64,
    transferred: u64,
    remaining: u64,
}

impl Estimator {
    /// Evaluates the progress at the time `at` since the beginning.
    pub(crate) fn observe(&mut self, at: Duration, progress: &Progress) -> Estimate {
        let moved = &progress.moved;
        let processed = moved.normal.saturating_add(moved.duplicate).saturating_mul(PAGE_SIZE);
        let sample = ProgressSample {
            at,
            pass: progress.pass.unwrap_or(moved.dirty_sync_count).max(1),
            transferred: moved.transferred,
            remaining: progress.remaining.unwrap_or(moved.total.saturating_sub(processed)),
        };
        self.push(sample);
        let rate = progress.rate.filter(|rate| *rate > 0).or_else(|| self.rate(|sample| sample.transferred));
        let outlook = self.outlook(at, sample.pass, rate, progress);
        let time_left = self.time_left(sample, rate, progress.dirty_rate.unwrap_or(0));
        Estimate {
            pass: sample.pass,
            pass_bytes: self.pass_bytes,
            remaining: sample.remaining,
            rate,
            dirty_rate: progress.dirty_rate.filter(|rate| *rate > 0),
            downtime: progress.expected_downtime.filter(|_| sample.pass > 1),
            downtime_limit: progress.downtime_limit,
            throttle_percent: progress.throttle_percent.filter(|percent| *percent > 0),
            outlook,
            time_left: self.smoothed(at, time_left.filter(|_| outlook != Outlook::NotConverging)),
        }
    }

    fn push(&mut self, sample: ProgressSample) {
        if self.samples.back().is_none_or(|last| last.pass != sample.pass) {
            self.samples.clear();
            self.pass_bytes = sample.remaining;
        }
        // The remainder of a pass may grow, while QEMU looks for dirty pages.
        self.pass_bytes = self.pass_bytes.max(sample.remaining);
        self.samples.push_back(sample);
        while self.samples.len() > 2 && self.samples[1].at + WINDOW < sample.at {
            self.samples.pop_front();
        }
    }

    /// Judges by the mean rate of the window, as QEMU's differs between samples by a factor of two with lanes. A guest that
    /// did not converge must do so clearly, or for some passes.
    fn outlook(&mut self, at: Duration, pass: u64, rate: Option<u64>, progress: &Progress) -> Outlook {
        let (Some(rate), Some(dirty_rate)) = (rate, progress.dirty_rate) else { return Outlook::Unknown };
        let rate = self.mean_rate(at, rate);
        if pass < OUTLOOK_PASS_MIN {
            return Outlook::Unknown;
        }
        let fits = match (progress.expected_downtime, progress.downtime_limit) {
            (Some(downtime), Some(limit)) => downtime <= limit,
            _ => false,
        };
        let below = |share: f64| (dirty_rate as f64) < rate * share;
        self.converging_since = match self.converging_since {
            since if fits || below(DIRTY_SHARE_MAX) => since.or(Some(pass)),
            _ => None,
        };
        let is_converging = self.converging_since.is_some_and(|since| {
            self.outlook != Some(Outlook::NotConverging)
                || below(DIRTY_SHARE_CLEAR)
                // The first one may have begun before.
                || pass > since + CONVERGING_PASSES
        });
        let outlook = if is_converging { Outlook::Converging } else { Outlook::NotConverging };
        self.outlook = Some(outlook);
        outlook
    }

    fn mean_rate(&mut self, now: Duration, rate: u64) -> f64 {
        self.rates.push_back((now, rate));
        while self.rates.len() > 1 && self.rates[0].0 + WINDOW < now {
            self.rates.pop_front();
        }
        self.rates.iter().map(|(_, rate)| *rate as f64).sum::<f64>() / self.rates.len() as f64
    }

    /// Increase per second of a value over the window.
    fn rate(&self, value: impl Fn(&ProgressSample) -> u64) -> Option<u64> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let time = last.at.saturating_sub(first.at);
        let grown = value(last).saturating_sub(value(first));
        (time >= WINDOW_MIN).then(|| (grown as f64 / time.as_secs_f64()) as u64)
    }

    /// Time until the destination has everything, while the guest keeps writing.
    fn time_left(&self, sample: ProgressSample, rate: Option<u64>, dirty_rate: u64) -> Option<Duration> {
        let seconds = if sample.pass == 1 {
            let speed = self.rate(|sample| u64::MAX - sample.remaining).filter(|speed| *speed > 0)?;
            sample.remaining as f64 / speed as f64
        } else {
            let gained = rate?.checked_sub(dirty_rate).filter(|gained| *gained > 0)?;
            sample.remaining as f64 / gained as f64
        };
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Keeps the previous estimate, less the time that has passed, unless the new one is lower or very different.
    fn smoothed(&mut self, at: Duration, new: Option<Duration>) -> Option<Duration> {
        let new = new?;
        let expected = self.end.map(|end| end.saturating_sub(at));
        let left = match expected {
            Some(expected) if new.as_secs_f64() <= expected.as_secs_f64() * (1.0 + TIME_DEVIATION_MAX) => {
                new.min(expected)
            }
            _ => new,
        };
        self.end = Some(at.saturating_add(left));
        Some(left)
    }
}

#[cfg(test)]
mod tests;
