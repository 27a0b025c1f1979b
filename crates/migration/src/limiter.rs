//! The bandwidth limit of a migration: one for its lanes and its main channel.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::session::POLL_INTERVAL;
use crate::{Result, Session, Tuning};

/// Limits the rate of all connections of a migration together.
#[derive(Debug)]
pub(crate) struct Limiter {
    bytes_per_second: Option<u64>,
    reserved: Mutex<Reservation>,
    is_lifted: Condvar,
}

#[derive(Debug)]
struct Reservation {
    /// Time at which the bytes reserved so far are sent.
    free: Instant,
    /// Rate of the reservation.
    rate: Option<u64>,
    /// Number of changes of the rate up to the reservation.
    changes: u64,
    /// The limit is lifted for good.
    lifted: bool,
}

impl Limiter {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        let reserved =
            Reservation { free: Instant::now(), rate: bytes_per_second, changes: 0, lifted: false };
        Self { bytes_per_second, reserved: Mutex::new(reserved), is_lifted: Condvar::new() }
    }

    /// Lifts the limit from now on, also for waiting senders.
    pub(crate) fn lift(&self) {
        lock(&self.reserved).lifted = true;
        self.is_lifted.notify_all();
    }

    /// Waits until `bytes` more may be sent. A new rate applies at once, also to a waiting call.
    pub(crate) fn reserve(&self, bytes: u64, session: &Session) -> Result<()> {
        loop {
            let Some((due, changes)) = self.due(bytes, session.tuning()) else { return Ok(()) };
            loop {
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                session.check()?;
                let reserved = lock(&self.reserved);
                let waited =
                    self.is_lifted.wait_timeout_while(reserved, left.min(POLL_INTERVAL), |r| !r.lifted);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
                if session.tuning().changes() != changes || lock(&self.reserved).lifted {
                    break;
                }
            }
        }
    }

    /// Time at which `bytes` more may be sent, and the rate used; `None`: at once.
    fn due(&self, bytes: u64, tuning: &Tuning) -> Option<(Instant, u64)> {
        let mut reserved = lock(&self.reserved);
        if reserved.lifted {
            return None;
        }
        let (now, changes) = (Instant::now(), tuning.changes());
        if std::mem::replace(&mut reserved.changes, changes) != changes {
            // Bytes reserved at another rate do not count in this one.
            reserved.free = now;
        }
        reserved.rate = tuning.max_bandwidth().unwrap_or(self.bytes_per_second);
        let rate = reserved.rate?;
        // Time that passed unused is not made up for.
        let due = reserved.free.max(now);
        reserved.free = due + time_of(bytes, rate);
        Some((due, changes))
    }

    /// Returns `bytes` that were taken and not sent: those of zero pages, and savings of compression.
    pub(crate) fn refund(&self, bytes: u64) {
        let mut reserved = lock(&self.reserved);
        let Some(rate) = reserved.rate else { return };
        reserved.free = reserved.free.checked_sub(time_of(bytes, rate)).unwrap_or(reserved.free);
    }
}

fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At a byte a second the second one would wait for an hour.
    #[test]
    fn raising_the_rate_wakes_a_throttled_sender() {
        let (limiter, session, tuning) = (Limiter::new(Some(1)), Session::default(), Tuning::default());
        session.set_tuning(&tuning);
        limiter.reserve(3600, &session).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| limiter.reserve(3600, &session));
            tuning.set_max_bandwidth(Some(1 << 40));
            waits.join().unwrap().unwrap();
        });
        tuning.set_max_bandwidth(None);
        limiter.reserve(u64::MAX, &session).unwrap();
    }

    /// As for the last pass of a stopped guest.
    #[test]
    fn a_lifted_limit_wakes_who_waits() {
        let (limiter, session) = (Limiter::new(Some(1)), Session::default());
        limiter.reserve(3600, &session).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| limiter.reserve(3600, &session));
            limiter.lift();
            waits.join().unwrap().unwrap();
        });
        limiter.reserve(u64::MAX, &session).unwrap();
    }

    #[test]
    fn zero_pages_do_not_count_against_the_rate() {
        let (limiter, session) = (Limiter::new(Some(1)), Session::default());
        for _ in 0..1000 {
            limiter.reserve(3600, &session).unwrap();
            limiter.refund(3600);
        }
        session.fail(crate::Error::LaneEnded);
        limiter.reserve(3600, &session).unwrap();
        assert!(matches!(limiter.reserve(1, &session), Err(crate::Error::Cancelled)));
    }
}
