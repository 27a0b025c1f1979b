//! One pass over the memory, in units that lanes take one by one.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::lock::lock;
use crate::{Guest, Result, Session, Tuning};

/// A unit's size and alignment: an image's checksums and a host's huge pages are of this size.
const UNIT_BYTES: u64 = 2 << 20;
/// Interval at which a throttled sender checks whether the migration failed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs of memory to be sent.
#[derive(Debug, Default)]
pub(crate) struct Pass {
    runs: Vec<(PageRef, u64)>,
    next: Mutex<Position>,
}

#[derive(Debug, Default)]
struct Position {
    run: usize,
    done: u64,
}

impl Pass {
    /// All memory that the destination does not have.
    pub(crate) fn full(guest: &dyn Guest) -> Self {
        let whole = |(index, ram): (usize, &RamBlock)| {
            let block = BlockIndex(u32::try_from(index).expect("bounded by BLOCKS_MAX"));
            (!guest.is_present(block)).then_some((PageRef { block, offset: 0 }, ram.length))
        };
        Self { runs: guest.blocks().iter().enumerate().filter_map(whole).collect(), next: Mutex::default() }
    }

    /// The pages that the guest wrote since the last harvest, but for memory that the destination has.
    pub(crate) fn harvested(guest: &dyn Guest) -> Result<Self> {
        let mut runs = Vec::new();
        guest.harvest_dirty(&mut |page, length| {
            if !guest.is_present(page.block) {
                runs.push((page, length));
            }
        })?;
        Ok(Self { runs, next: Mutex::default() })
    }

    /// Adds another pass's runs; pages in both are sent once.
    pub(crate) fn merge(&mut self, other: Self) {
        self.runs.extend(other.runs);
        self.runs.sort_unstable();
        self.runs.dedup_by(|next, run| {
            let ((page, length), (next, next_length)) = (*run, *next);
            let touches = page.block == next.block && next.offset <= page.offset + length;
            if touches {
                run.1 = length.max(next.offset + next_length - page.offset);
            }
            touches
        });
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|(_, length)| length).sum()
    }

    /// The next unit: at most 2 MiB, not across a multiple of that.
    pub(crate) fn next(&self) -> Option<(PageRef, u64)> {
        let mut next = lock(&self.next);
        let &(page, length) = self.runs.get(next.run)?;
        let offset = page.offset + next.done;
        let unit = (UNIT_BYTES - offset % UNIT_BYTES).min(length - next.done);
        next.done += unit;
        if next.done == length {
            *next = Position { run: next.run + 1, done: 0 };
        }
        Some((PageRef { offset, ..page }, unit))
    }
}

/// Limits the rate of all lanes together.
#[derive(Debug)]
pub(crate) struct Limiter {
    bytes_per_second: Option<u64>,
    reserved: Mutex<Reservation>,
}

#[derive(Debug)]
struct Reservation {
    /// Time at which the bytes reserved so far are sent.
    free: Instant,
    /// Rate of the reservation.
    rate: Option<u64>,
    /// Number of changes of the rate up to the reservation.
    changes: u64,
}

impl Limiter {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        let reserved = Reservation { free: Instant::now(), rate: bytes_per_second, changes: 0 };
        Self { bytes_per_second, reserved: Mutex::new(reserved) }
    }

    /// Waits until `bytes` more may be sent. A rate that changes meanwhile holds from that moment.
    pub(crate) fn reserve(&self, bytes: u64, session: &Session) -> Result<()> {
        loop {
            let Some((due, changes)) = self.due(bytes, session.tuning()) else { return Ok(()) };
            loop {
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                session.check()?;
                std::thread::sleep(left.min(POLL_INTERVAL));
                if session.tuning().changes() != changes {
                    break;
                }
            }
        }
    }

    /// When `bytes` more may be sent, and at which rate that is; `None`: at once.
    fn due(&self, bytes: u64, tuning: &Tuning) -> Option<(Instant, u64)> {
        let mut reserved = lock(&self.reserved);
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

    #[test]
    fn units_cover_every_run_and_respect_their_alignment() {
        let page = |offset| PageRef { block: BlockIndex(0), offset };
        let pass = Pass {
            runs: vec![(page(0x1000), UNIT_BYTES), (page(8 * UNIT_BYTES), 0x2000)],
            next: Mutex::default(),
        };
        let units: Vec<_> = std::iter::from_fn(|| pass.next()).collect();
        let expected =
            [(page(0x1000), UNIT_BYTES - 0x1000), (page(UNIT_BYTES), 0x1000), (page(8 * UNIT_BYTES), 0x2000)];
        assert_eq!(units, expected);
    }

    #[test]
    fn pages_in_two_passes_are_sent_once() {
        let page = |block, offset| PageRef { block: BlockIndex(block), offset };
        let pass = |runs| Pass { runs, next: Mutex::default() };
        let mut left = pass(vec![(page(0, 0x1000), 0x3000), (page(1, 0), 0x1000)]);
        left.merge(pass(vec![
            (page(0, 0x2000), 0x1000),
            (page(0, 0x3000), 0x3000),
            (page(1, 0x2000), 0x1000),
        ]));
        let expected = [(page(0, 0x1000), 0x5000), (page(1, 0), 0x1000), (page(1, 0x2000), 0x1000)];
        assert_eq!(left.runs, expected);
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
