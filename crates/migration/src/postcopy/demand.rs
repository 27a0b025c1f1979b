//! The guest's waits for pages, to which the background gives way.
//!
//! Where a page is far away, in an object store, the background would take most of what the store delivers,
//! and each fault would queue behind it. A guest that starts makes one fault after the other, so the pause
//! extends over the time between two of them. It ends after [`YIELD_TIME_MAX`] in any case: a guest that
//! never stops needs all its memory too.

use std::time::{Duration, Instant};

/// Condition for preparing memory that no fault waits for and no earlier restore needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Background {
    /// From the beginning, beside the guest's faults: its pages are close by.
    AtOnce,
    /// While the guest starts, only when it has made no request for a time: its pages are far away, and share
    /// one connection.
    AfterFaults,
}

/// Time without requests after which the background is prepared: longer than a starting guest computes
/// between two faults.
pub(super) const QUIET_TIME: Duration = Duration::from_millis(100);
/// Time from the start of a connection during which the background gives way.
const YIELD_TIME_MAX: Duration = Duration::from_secs(2);

/// Requests that are being served, and the time since the last one.
#[derive(Debug)]
pub(super) struct Demand {
    /// From here on the background no longer gives way.
    yields_until: Instant,
    serving: usize,
    quiet_since: Instant,
}

impl Demand {
    pub(super) fn new(background: Background, now: Instant) -> Self {
        let yields = match background {
            Background::AtOnce => Duration::ZERO,
            Background::AfterFaults => YIELD_TIME_MAX,
        };
        Self { yields_until: now + yields, serving: 0, quiet_since: now }
    }

    /// A request is being served.
    pub(super) fn begin(&mut self) {
        self.serving += 1;
    }

    /// A request was served.
    pub(super) fn end(&mut self, now: Instant) {
        self.serving = self.serving.saturating_sub(1);
        self.quiet_since = now;
    }

    /// Memory was prepared that an earlier restore needed: the guest continues with it, to what it needs
    /// next.
    pub(super) fn prepared_needed(&mut self, now: Instant) {
        self.quiet_since = now;
    }

    /// Minimum time for which the background must wait; `None`: none.
    pub(super) fn pause(&self, now: Instant) -> Option<Duration> {
        let quiet_from = if self.serving > 0 { now } else { self.quiet_since };
        let until = self.yields_until.min(quiet_from + QUIET_TIME);
        until.checked_duration_since(now).filter(|pause| !pause.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_background_waits_for_a_time_without_requests_and_not_for_ever() {
        let begun = Instant::now();
        let at = |milliseconds| begun + Duration::from_millis(milliseconds);
        let mut demand = Demand::new(Background::AfterFaults, begun);
        assert_eq!(demand.pause(at(40)), Some(Duration::from_millis(60)));
        demand.begin();
        demand.begin();
        demand.end(at(150));
        assert_eq!(demand.pause(at(400)), Some(QUIET_TIME), "one is still being served");
        demand.end(at(500));
        assert_eq!(demand.pause(at(530)), Some(Duration::from_millis(70)));
        assert_eq!(demand.pause(at(600)), None);
        demand.prepared_needed(at(610));
        assert_eq!(demand.pause(at(620)), Some(Duration::from_millis(90)));
        demand.begin();
        assert_eq!(demand.pause(at(1950)), Some(Duration::from_millis(50)));
        assert_eq!(demand.pause(at(2000)), None);
    }

    #[test]
    fn a_background_that_does_not_give_way_never_waits() {
        let begun = Instant::now();
        let mut demand = Demand::new(Background::AtOnce, begun);
        demand.begin();
        assert_eq!(demand.pause(begun), None);
    }
}
