//! The clock of leases: time since the host's start, suspended time included.

use std::time::Duration;

use futures_util::future::BoxFuture;
use rustix::time::{ClockId, clock_gettime};

#[cfg(test)]
use super::simulation::Actor;

/// Where time comes from.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// `CLOCK_BOOTTIME`: a host that was suspended for an hour is an hour older, which `CLOCK_MONOTONIC` does not count.
    System,
    /// The clock of a simulated participant.
    #[cfg(test)]
    Simulated(Actor),
}

impl Clock {
    /// Time since the start of the host.
    pub(super) fn now(&self) -> Duration {
        match self {
            Self::System => {
                let time = clock_gettime(ClockId::Boottime);
                // Neither is ever negative on Linux.
                Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
            }
            #[cfg(test)]
            Self::Simulated(actor) => actor.boot_time(),
        }
    }

    /// Ends after `time`; suspended time does not count here.
    pub(super) fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        match self {
            Self::System => Box::pin(tokio::time::sleep(time)),
            #[cfg(test)]
            Self::Simulated(actor) => Box::pin(actor.sleep(time)),
        }
    }
}
