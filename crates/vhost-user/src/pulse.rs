//! Whether to wait awake. Where requests and answers alternate, most of the time goes into falling asleep and being woken,
//! so a worker stays awake for a moment while they do; where bytes flow one way it sleeps, and finds more when it wakes.
//!
//! What it is not: polling. A wait in vain makes the next one rarer, so that a queue whose rhythm is slower than the limit
//! costs little, others that want the processor have it first, and where there is but one nobody waits awake.

use std::time::{Duration, Instant};

use rustix::thread::sched_yield;

/// Changes of direction in a row before anything is waited for awake.
const BEATS_MIN: u32 = 2;
/// The same after many waits in vain.
const BEATS_MAX: u32 = 256;

/// How many packets came and went that somebody may answer: none that only tell credit, for example.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the guest.
    pub from_guest: u64,
    /// To the guest.
    pub to_guest: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    FromGuest,
    ToGuest,
}

/// The rhythm of a guest's packets.
#[derive(Debug)]
pub struct Pulse {
    /// How long to wait awake.
    limit: Duration,
    seen: Traffic,
    last: Option<Way>,
    /// Changes of direction, one behind the other.
    beats: u32,
    /// How many are wanted now: twice as many each time that it was in vain.
    wanted: u32,
    since: Option<Instant>,
}

impl Pulse {
    /// Waits awake so long at most; never, if that is 0 or nobody else could work meanwhile.
    pub fn new(limit: Duration) -> Self {
        let alone = std::thread::available_parallelism().is_ok_and(|count| count.get() < 2);
        let limit = if alone { Duration::ZERO } else { limit };
        Self { limit, seen: Traffic::default(), last: None, beats: 0, wanted: BEATS_MIN, since: None }
    }

    /// After a turn in which much went one way: that is no request, and no answer to one.
    pub fn flows(&mut self, traffic: Traffic) {
        (self.seen, self.last, self.since, self.beats) = (traffic, None, None, 0);
    }

    /// After a turn, with all that came and went so far: whether to look again at once.
    pub fn goes_on(&mut self, traffic: Traffic, now: impl FnOnce() -> Instant) -> bool {
        let Traffic { from_guest, to_guest } = self.seen;
        self.seen = traffic;
        let way = match (traffic.from_guest != from_guest, traffic.to_guest != to_guest) {
            (false, false) => return self.waits_on(now),
            (true, true) => None,
            (true, false) => Some(Way::FromGuest),
            (false, true) => Some(Way::ToGuest),
        };
        if self.since.take().is_some() {
            self.wanted = BEATS_MIN;
        }
        match (way, self.last) {
            (Some(way), Some(last)) if way != last => self.beats = self.beats.saturating_add(1),
            (Some(_), Some(_)) => self.beats = 0,
            _ => {}
        }
        self.last = way.or(self.last);
        let goes_on = !self.limit.is_zero() && self.beats >= self.wanted;
        self.since = goes_on.then(now);
        goes_on
    }

    fn waits_on(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let Some(since) = self.since else { return false };
        if now().duration_since(since) < self.limit {
            // Who is waited for may be waiting for this very processor.
            sched_yield();
            return true;
        }
        self.since = None;
        self.beats = 0;
        self.wanted = (2 * self.wanted).min(BEATS_MAX);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    struct Clock(Pulse, Traffic, Instant);

    impl Clock {
        fn new(limit: Duration) -> Self {
            let mut pulse = Pulse::new(LIMIT);
            // Also on a machine with one processor.
            pulse.limit = limit;
            Self(pulse, Traffic::default(), Instant::now())
        }

        fn turn(&mut self, from_guest: u64, to_guest: u64) -> bool {
            self.1.from_guest += from_guest;
            self.1.to_guest += to_guest;
            let now = self.2;
            self.0.goes_on(self.1, || now)
        }

        fn pass(&mut self, part: Duration) -> bool {
            self.2 += part;
            self.turn(0, 0)
        }
    }

    #[test]
    fn requests_and_answers_are_waited_for() {
        let mut clock = Clock::new(LIMIT);
        assert!(!clock.turn(0, 1));
        assert!(!clock.turn(1, 0));
        assert!(clock.turn(0, 1));
        assert!(clock.pass(LIMIT / 2));
        assert!(clock.turn(1, 0));
        assert!(!clock.pass(LIMIT));
        assert!(!clock.pass(Duration::ZERO), "in vain once is enough");
    }

    #[test]
    fn who_only_sends_is_not() {
        let mut clock = Clock::new(LIMIT);
        for _ in 0..10 {
            assert!(!clock.turn(16, 0));
        }
        assert!(!clock.turn(0, 3));
        assert!(clock.turn(2, 0));
        assert!(!clock.turn(2, 0));
    }

    #[test]
    fn what_flows_is_not() {
        let mut clock = Clock::new(LIMIT);
        assert!((0..10).any(|turn| clock.turn(turn % 2, 1 - turn % 2)));
        clock.0.flows(clock.1);
        assert!(!clock.pass(Duration::ZERO));
        assert!(!clock.turn(0, 1));
    }

    #[test]
    fn what_is_in_vain_is_tried_less_often() {
        let mut clock = Clock::new(LIMIT);
        let mut tried = 0;
        for _ in 0..4 * BEATS_MAX {
            tried += u32::from(clock.turn(0, 1)) + u32::from(clock.turn(1, 0));
            clock.pass(LIMIT);
        }
        assert!((1..20).contains(&tried), "{tried}");
        assert!(!Clock::new(Duration::ZERO).turn(1, 1));
    }

    #[test]
    fn never_is_never() {
        let mut clock = Clock::new(Duration::ZERO);
        assert!((0..100).all(|_| !clock.turn(0, 1) && !clock.turn(1, 0)));
    }
}
