//! Statistics of the guest's faults: number, latency and addresses.

use std::sync::Mutex;
use std::time::Duration;

use crate::lock::lock;
use towline_protocol::PageRef;

/// Steps within a doubling: a percentile has a resolution of one eighth.
const STEPS: u32 = 8;
/// Doublings, from 1 ns on: the last step ends beyond ten minutes.
const DOUBLINGS: u32 = 40;
/// Doubling of the first range of a [`LatencyHistogram`]: to 2 µs.
const HISTOGRAM_FIRST: u32 = 10;
/// Number of ranges of the histogram: the last one begins at 8.6 s.
const HISTOGRAM_RANGES: usize = 24;
/// Pages of a working set that are remembered.
const DEMANDED_MAX: usize = 1 << 18;

/// Counters of the request path; every thread adds to them.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<FaultRecord>);

#[derive(Debug, Default)]
struct FaultRecord {
    /// Those that are no latencies.
    counts: FaultCounts,
    /// Latencies by their step, up to the longest so far.
    times: Vec<u64>,
    demanded: Vec<PageRef>,
}

/// The request path at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Requests for pages received.
    pub requests: u64,
    /// Pages that were sent for one.
    pub served: u64,
    /// Requests for pages that were already sent.
    pub late: u64,
    /// Median time from a request's arrival until its pages left.
    pub latency_p50: Option<Duration>,
    /// All but one in a hundred did.
    pub latency_p99: Option<Duration>,
    /// All of these times.
    pub latencies: LatencyHistogram,
}

/// Histogram of latencies, in which each range ends at twice the end of the previous one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    counts: [u64; HISTOGRAM_RANGES],
}

/// Range of a [`LatencyHistogram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatencyRange {
    /// Smallest latency of the range.
    pub from: Duration,
    /// End of the range, which is not part of it. The last range has all longer latencies too.
    pub to: Duration,
    /// Number of latencies.
    pub count: u64,
}

impl LatencyHistogram {
    /// Returns the ranges from the first to the last one that has a latency.
    pub fn ranges(&self) -> Vec<LatencyRange> {
        let has_latency = |count: &u64| *count > 0;
        let Some(first) = self.counts.iter().position(has_latency) else { return Vec::new() };
        let last = self.counts.iter().rposition(has_latency).unwrap_or(first);
        let end = |index: usize| Duration::from_nanos(2 << (HISTOGRAM_FIRST as usize + index));
        let range = |index: usize| {
            let from = if index == 0 { Duration::ZERO } else { end(index - 1) };
            LatencyRange { from, to: end(index), count: self.counts[index] }
        };
        (first..=last).map(range).collect()
    }

    fn add(&mut self, doubling: u32, count: u64) {
        let index = doubling.saturating_sub(HISTOGRAM_FIRST) as usize;
        self.counts[index.min(HISTOGRAM_RANGES - 1)] += count;
    }
}

impl Faults {
    pub(super) fn request(&self, page: PageRef) {
        let mut record = lock(&self.0);
        record.counts.requests += 1;
        if record.demanded.len() < DEMANDED_MAX {
            record.demanded.push(page);
        }
    }

    pub(super) fn served(&self, after: Duration) {
        let (mut record, step) = (lock(&self.0), step(after));
        record.counts.served += 1;
        if record.times.len() <= step {
            record.times.resize(step + 1, 0);
        }
        record.times[step] += 1;
    }

    pub(super) fn late(&self) {
        lock(&self.0).counts.late += 1;
    }

    /// The requested pages, in order.
    pub(super) fn demanded(&self) -> Vec<PageRef> {
        lock(&self.0).demanded.clone()
    }

    pub(super) fn counts(&self) -> FaultCounts {
        let record = lock(&self.0);
        let (latency_p50, latency_p99) = (record.percentile(50), record.percentile(99));
        FaultCounts { latency_p50, latency_p99, latencies: record.histogram(), ..record.counts }
    }
}

impl FaultRecord {
    fn histogram(&self) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::default();
        for (step, &times) in (0..).zip(&self.times) {
            histogram.add(step / STEPS, times);
        }
        histogram
    }

    /// End of the step below which this percentage lies.
    fn percentile(&self, percent: u64) -> Option<Duration> {
        let all: u64 = self.times.iter().sum();
        let wanted = (all * percent).div_ceil(100).max(1);
        let mut below = 0;
        let at = self.times.iter().position(|&times| {
            below += times;
            below >= wanted
        })?;
        Some(end_of(u32::try_from(at).ok()?))
    }
}

fn step(after: Duration) -> usize {
    let nanoseconds = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX).max(1);
    let doubling = nanoseconds.ilog2().min(DOUBLINGS - 1);
    let within = (u128::from(nanoseconds - (1 << doubling)) * u128::from(STEPS)) >> doubling;
    let within = u32::try_from(within).unwrap_or(STEPS).min(STEPS - 1);
    (doubling * STEPS + within) as usize
}

fn end_of(step: u32) -> Duration {
    let (start, within) = (1_u64 << (step / STEPS), u64::from(step % STEPS) + 1);
    Duration::from_nanos(start + ((u128::from(start) * u128::from(within)) / u128::from(STEPS)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_an_eighth() {
        let faults = Faults::default();
        assert_eq!(faults.counts().latency_p50, None);
        (1..=1000).for_each(|time| faults.served(Duration::from_micros(time)));
        let counts = faults.counts();
        for (found, wanted) in [(counts.latency_p50, 500.0), (counts.latency_p99, 990.0)] {
            let found = found.unwrap().as_secs_f64() * 1e6;
            assert!((wanted..=wanted * 1.126).contains(&found), "{found} for {wanted}");
        }
        assert_eq!(counts.served, 1000);
    }

    #[test]
    fn a_histogram_has_every_latency_in_its_range() {
        assert_eq!(LatencyHistogram::default().ranges(), []);
        let faults = Faults::default();
        let times = [Duration::from_nanos(1), Duration::from_micros(3), Duration::from_micros(4)];
        times.into_iter().chain([Duration::from_secs(1 << 40)]).for_each(|time| faults.served(time));
        let ranges = faults.counts().latencies.ranges();
        assert_eq!((ranges[0].from, ranges[0].count), (Duration::ZERO, 1));
        assert!(ranges[1..].iter().all(|range| range.from < range.to && range.to == range.from * 2));
        let of = |time: Duration| ranges.iter().find(|range| (range.from..range.to).contains(&time)).unwrap();
        assert_eq!(of(times[1]).count, 2, "2.048 to 4.096 µs");
        assert_eq!((ranges.last().unwrap().count, ranges.len()), (1, HISTOGRAM_RANGES));
    }

    #[test]
    fn no_time_is_beyond_the_last_step() {
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 40)] {
            assert!(step(time) < (STEPS * DOUBLINGS) as usize);
        }
    }
}
