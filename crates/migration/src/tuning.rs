//! Limits that may change while a migration runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Value of a limit that has not been changed.
const UNCHANGED: u64 = u64::MAX;
/// Value for "unlimited".
const UNLIMITED: u64 = 0;

/// Limits changed during a migration, which replace the initial ones. Clones share them.
///
/// A rate holds from the next unit that is sent, a downtime from the next pass.
#[derive(Debug, Clone, Default)]
pub struct Tuning(Arc<TuningLimits>);

#[derive(Debug)]
struct TuningLimits {
    max_bandwidth: AtomicU64,
    downtime_ms: AtomicU64,
    changes: AtomicU64,
}

impl Default for TuningLimits {
    fn default() -> Self {
        let unchanged = || AtomicU64::new(UNCHANGED);
        Self { max_bandwidth: unchanged(), downtime_ms: unchanged(), changes: AtomicU64::new(0) }
    }
}

impl Tuning {
    /// Total bytes per second from here on; `None`: unlimited.
    pub fn set_max_bandwidth(&self, bytes_per_second: Option<u64>) {
        let value = bytes_per_second.map_or(UNLIMITED, |rate| rate.clamp(1, UNCHANGED - 1));
        self.0.max_bandwidth.store(value, Ordering::Relaxed);
        self.0.changes.fetch_add(1, Ordering::Release);
    }

    /// Maximum time for which the guest may be stopped, from here on; in whole milliseconds.
    pub fn set_downtime_limit(&self, limit: Duration) {
        let value = u64::try_from(limit.as_millis()).unwrap_or(UNCHANGED).min(UNCHANGED - 1);
        self.0.downtime_ms.store(value, Ordering::Relaxed);
        self.0.changes.fetch_add(1, Ordering::Release);
    }

    /// The rate, if it was changed: `Some(None)` is unlimited.
    pub fn max_bandwidth(&self) -> Option<Option<u64>> {
        match self.0.max_bandwidth.load(Ordering::Relaxed) {
            UNCHANGED => None,
            UNLIMITED => Some(None),
            rate => Some(Some(rate)),
        }
    }

    /// The downtime, if it was changed.
    pub fn downtime_limit(&self) -> Option<Duration> {
        Some(self.0.downtime_ms.load(Ordering::Relaxed))
            .filter(|&ms| ms != UNCHANGED)
            .map(Duration::from_millis)
    }

    /// Number of changes; for forwarding them.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_visible_to_all_clones() {
        let tuning = Tuning::default();
        let other = tuning.clone();
        assert_eq!((tuning.max_bandwidth(), tuning.downtime_limit(), tuning.changes()), (None, None, 0));
        other.set_max_bandwidth(Some(5));
        other.set_downtime_limit(Duration::from_millis(20));
        let seen = (tuning.max_bandwidth(), tuning.downtime_limit(), tuning.changes());
        assert_eq!(seen, (Some(Some(5)), Some(Duration::from_millis(20)), 2));
        other.set_max_bandwidth(None);
        assert_eq!(tuning.max_bandwidth(), Some(None));
        // Neither "unchanged" nor "unlimited".
        for (set, seen) in [(u64::MAX, u64::MAX - 1), (0, 1)] {
            other.set_max_bandwidth(Some(set));
            assert_eq!(tuning.max_bandwidth(), Some(Some(seen)));
        }
    }
}
