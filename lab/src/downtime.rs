//! The time that a guest does not run when it continues in another QEMU, by the events of both.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use crate::Qmp;

/// Time limit for an event that has happened.
const WITHIN: Duration = Duration::from_secs(5);

/// Milliseconds from STOP at the old QEMU to RESUME at the new one.
///
/// # Panics
/// If one of the events is missing.
#[track_caller]
pub fn milliseconds(old: &Qmp, new: &Qmp) -> f64 {
    let stopped = old.wait_event("STOP", WITHIN).unwrap();
    let resumed = new.wait_event("RESUME", WITHIN).unwrap();
    time(&resumed) - time(&stopped)
}

fn time(event: &Value) -> f64 {
    let part = |name: &str| event["timestamp"][name].as_f64().unwrap();
    part("seconds") * 1e3 + part("microseconds") / 1e3
}

/// Times in milliseconds, as `p50 10.1 ms, p99 12.0 ms, 9.8 to 12.3 ms`.
#[derive(Debug, Default, Clone)]
pub struct Times(Vec<f64>);

impl Times {
    /// Adds one.
    pub fn push(&mut self, milliseconds: f64) {
        let at = self.0.partition_point(|other| *other < milliseconds);
        self.0.insert(at, milliseconds);
    }

    /// The smallest one that at least `percent` of them do not exceed.
    ///
    /// # Panics
    /// Without times.
    pub fn percentile(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent).div_ceil(100).max(1) - 1]
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p0, p50, p99, p100] = [0, 50, 99, 100].map(|percent| self.percentile(percent));
        write!(f, "p50 {p50:.1} ms, p99 {p99:.1} ms, {p0:.1} to {p100:.1} ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_of_the_list() {
        let mut times = Times::default();
        (1..=100).rev().for_each(|time| times.push(f64::from(time)));
        assert_eq!(times.to_string(), "p50 50.0 ms, p99 99.0 ms, 1.0 to 100.0 ms");
        let mut one = Times::default();
        one.push(2.5);
        assert_eq!(one.to_string(), "p50 2.5 ms, p99 2.5 ms, 2.5 to 2.5 ms");
    }
}
