//! Adaptive busy-polling. In request/response traffic most of the latency is falling asleep and waking up, so
//! a worker polls for a moment while packets alternate between the directions. In bulk traffic it sleeps, and
//! finds larger batches when it wakes up.
//!
//! A poll that times out halves the frequency of further polls, so a queue whose interval exceeds the limit
//! costs little. The poller yields to runnable threads, and on a machine with one processor nothing is
//! polled.

use std::time::{Duration, Instant};

use rustix::thread::sched_yield;

/// Consecutive changes of direction before the first poll.
const CHANGES_MIN: u32 = 2;
/// Consecutive changes of direction before a poll, after many polls that timed out.
const CHANGES_MAX: u32 = 256;

/// Packets that may be answered, by direction. Packets without an answer, such as credit updates, do not
/// count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerablePackets {
    /// From the guest.
    pub from_guest: u64,
    /// To the guest.
    pub to_guest: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PacketDirection {
    FromGuest,
    ToGuest,
}

/// Decides after each run of a worker to poll or to sleep.
#[derive(Debug)]
pub struct AdaptivePoller {
    /// Maximum duration of one poll.
    limit: Duration,
    seen: AnswerablePackets,
    last: Option<PacketDirection>,
    /// Consecutive runs whose direction differed from the one before.
    direction_changes: u32,
    /// Value of `direction_changes` from which on it polls; doubled by each poll that times out.
    changes_required: u32,
    polling_since: Option<Instant>,
}

impl AdaptivePoller {
    /// A poller with this maximum duration of a poll. Zero, or a machine with one processor, disables
    /// polling.
    pub fn new(limit: Duration) -> Self {
        let single = std::thread::available_parallelism().is_ok_and(|count| count.get() < 2);
        let limit = if single { Duration::ZERO } else { limit };
        Self {
            limit,
            seen: AnswerablePackets::default(),
            last: None,
            direction_changes: 0,
            changes_required: CHANGES_MIN,
            polling_since: None,
        }
    }

    /// Ends polling after a run with bulk traffic, which is neither a request nor a response.
    pub fn reset_on_bulk(&mut self, traffic: AnswerablePackets) {
        self.seen = traffic;
        self.last = None;
        self.polling_since = None;
        self.direction_changes = 0;
    }

    /// Returns true while it polls for the guest's response to the packets that were sent last.
    pub fn awaits_guest(&self) -> bool {
        self.polling_since.is_some() && self.last == Some(PacketDirection::ToGuest)
    }

    /// Returns true if the worker should run again at once. `traffic` is the total so far.
    pub fn should_poll(&mut self, traffic: AnswerablePackets, now: impl FnOnce() -> Instant) -> bool {
        let AnswerablePackets { from_guest, to_guest } = self.seen;
        self.seen = traffic;
        let direction = match (traffic.from_guest != from_guest, traffic.to_guest != to_guest) {
            (false, false) => return self.keep_polling(now),
            (true, true) => None,
            (true, false) => Some(PacketDirection::FromGuest),
            (false, true) => Some(PacketDirection::ToGuest),
        };
        if self.polling_since.take().is_some() {
            self.changes_required = CHANGES_MIN;
        }
        match (direction, self.last) {
            (Some(direction), Some(last)) if direction != last => {
                self.direction_changes = self.direction_changes.saturating_add(1);
            }
            (Some(_), Some(_)) => self.direction_changes = 0,
            _ => {}
        }
        self.last = direction.or(self.last);
        let polls = !self.limit.is_zero() && self.direction_changes >= self.changes_required;
        self.polling_since = polls.then(now);
        polls
    }

    fn keep_polling(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let Some(since) = self.polling_since else { return false };
        if now().duration_since(since) < self.limit {
            // The sender of the awaited packet may need this very processor.
            sched_yield();
            return true;
        }
        self.polling_since = None;
        self.direction_changes = 0;
        self.changes_required = (2 * self.changes_required).min(CHANGES_MAX);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    /// A poller with simulated traffic and time.
    struct Simulation {
        poller: AdaptivePoller,
        traffic: AnswerablePackets,
        now: Instant,
    }

    impl Simulation {
        fn new(limit: Duration) -> Self {
            let mut poller = AdaptivePoller::new(LIMIT);
            // Also on a machine with one processor.
            poller.limit = limit;
            Self { poller, traffic: AnswerablePackets::default(), now: Instant::now() }
        }

        fn run(&mut self, from_guest: u64, to_guest: u64) -> bool {
            self.traffic.from_guest += from_guest;
            self.traffic.to_guest += to_guest;
            let now = self.now;
            self.poller.should_poll(self.traffic, || now)
        }

        fn run_after(&mut self, time: Duration) -> bool {
            self.now += time;
            self.run(0, 0)
        }
    }

    #[test]
    fn alternating_traffic_is_polled_for() {
        let mut simulation = Simulation::new(LIMIT);
        assert!(!simulation.run(0, 1));
        assert!(!simulation.run(1, 0));
        assert!(!simulation.poller.awaits_guest());
        assert!(simulation.run(0, 1));
        assert!(simulation.poller.awaits_guest());
        assert!(simulation.run_after(LIMIT / 2));
        assert!(simulation.run(1, 0));
        assert!(!simulation.poller.awaits_guest(), "it polls for the host");
        assert!(!simulation.run_after(LIMIT));
        assert!(!simulation.run_after(Duration::ZERO), "one timeout ends the poll");
    }

    #[test]
    fn traffic_in_one_direction_is_not_polled_for() {
        let mut simulation = Simulation::new(LIMIT);
        for _ in 0..10 {
            assert!(!simulation.run(16, 0));
        }
        assert!(!simulation.run(0, 3));
        assert!(simulation.run(2, 0));
        assert!(!simulation.run(2, 0));
    }

    #[test]
    fn bulk_traffic_ends_polling() {
        let mut simulation = Simulation::new(LIMIT);
        assert!((0..10).any(|run| simulation.run(run % 2, 1 - run % 2)));
        simulation.poller.reset_on_bulk(simulation.traffic);
        assert!(!simulation.run_after(Duration::ZERO));
        assert!(!simulation.run(0, 1));
    }

    #[test]
    fn polls_become_rare_after_timeouts() {
        let mut simulation = Simulation::new(LIMIT);
        let mut polls = 0;
        for _ in 0..4 * CHANGES_MAX {
            polls += u32::from(simulation.run(0, 1)) + u32::from(simulation.run(1, 0));
            simulation.run_after(LIMIT);
        }
        assert!((1..20).contains(&polls), "{polls}");
        assert!(!Simulation::new(Duration::ZERO).run(1, 1));
    }

    #[test]
    fn a_limit_of_zero_disables_polling() {
        let mut simulation = Simulation::new(Duration::ZERO);
        assert!((0..100).all(|_| !simulation.run(0, 1) && !simulation.run(1, 0)));
    }
}
