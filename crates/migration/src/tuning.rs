//! Limits that may change while a migration runs.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::lock::lock;

/// Limits changed during a migration, which replace the initial ones. Clones share them.
///
/// A rate holds from the next unit that is sent, a downtime from the next pass.
#[derive(Debug, Clone, Default)]
pub struct Tuning(Arc<Mutex<TuningLimits>>);

#[derive(Debug, Default)]
struct TuningLimits {
    /// `Some(None)`: unlimited.
    max_bandwidth: Option<Option<u64>>,
    downtime: Option<Duration>,
    changes: u64,
}

impl Tuning {
    /// Total bytes per second from here on, at least 1; `None`: unlimited.
    pub fn set_max_bandwidth(&self, bytes_per_second: Option<u64>) {
        let mut limits = lock(&self.0);
        limits.max_bandwidth = Some(bytes_per_second.map(|rate| rate.max(1)));
        limits.changes += 1;
    }

    /// Maximum time for which the guest may be stopped, from here on.
    pub fn set_downtime_limit(&self, limit: Duration) {
        let mut limits = lock(&self.0);
        limits.downtime = Some(limit);
        limits.changes += 1;
    }

    /// The rate, if it was changed: `Some(None)` is unlimited.
    pub fn max_bandwidth(&self) -> Option<Option<u64>> {
        lock(&self.0).max_bandwidth
    }

    /// The downtime, if it was changed.
    pub fn downtime_limit(&self) -> Option<Duration> {
        lock(&self.0).downtime
    }

    /// Number of changes; for forwarding them.
    pub fn changes(&self) -> u64 {
        lock(&self.0).changes
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
        // Not "unlimited".
        for (set, seen) in [(u64::MAX, u64::MAX), (0, 1)] {
            other.set_max_bandwidth(Some(set));
            assert_eq!(tuning.max_bandwidth(), Some(Some(seen)));
        }
    }
}
