//! The clock of leases: time since boot, including suspended time.

use std::time::Duration;

use futures_util::future::BoxFuture;
use rustix::time::{ClockId, clock_gettime};

#[cfg(test)]
use super::simulation::Actor;

/// Source of time.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// `CLOCK_BOOTTIME`, which counts the time for which a host is suspended, unlike `CLOCK_MONOTONIC`.
    System,
    /// Clock of a simulated participant.
    #[cfg(test)]
    Simulated(Actor),
}

impl Clock {
    /// Time since boot.
    pub(super) fn now(&self) -> Duration {
        match self {
            Self::System => {
                let time = clock_gettime(ClockId::Boottime);
                // Never negative on Linux.
                Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
            }
            #[cfg(test)]
            Self::Simulated(actor) => actor.boot_time(),
        }
    }

    /// Waits for `time`, not counting suspended time.
    pub(super) fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        match self {
            Self::System => Box::pin(tokio::time::sleep(time)),
            #[cfg(test)]
            Self::Simulated(actor) => Box::pin(actor.sleep(time)),
        }
    }
}
