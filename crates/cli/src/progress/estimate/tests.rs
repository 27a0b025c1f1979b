//! Series of figures as `query-migrate` reports them, at the interval at which QEMU renews them.

use super::*;

const MIB: u64 = 1 << 20;
/// Interval of the samples.
const INTERVAL: Duration = Duration::from_millis(250);

/// Figures of one reply; rates are in MiB per second, sizes in MiB.
#[derive(Debug, Clone, Copy)]
struct Figures {
    pass: u64,
    remaining: f64,
    rate: u64,
    dirty_rate: u64,
    downtime: u64,
}

/// Evaluates replies that follow each other at [`INTERVAL`], with a downtime limit of 300 ms.
fn estimates(series: &[Figures]) -> Vec<Estimate> {
    let mut estimator = Estimator::default();
    let evaluate = |(index, figures): (usize, &Figures)| {
        let progress = Progress {
            pass: Some(figures.pass),
            rate: Some(figures.rate * MIB),
            dirty_rate: Some(figures.dirty_rate * MIB),
            remaining: Some((figures.remaining * MIB as f64) as u64),
            expected_downtime: Some(Duration::from_millis(figures.downtime)),
            downtime_limit: Some(Duration::from_millis(300)),
            ..Progress::default()
        };
        estimator.observe(INTERVAL * index as u32, &progress)
    };
    series.iter().enumerate().map(evaluate).collect()
}

/// A pass of `size` MiB that is sent at `rate`, while the guest writes `dirty_rate`.
fn pass(pass: u64, size: f64, rate: u64, dirty_rate: u64) -> Vec<Figures> {
    let step = rate as f64 * INTERVAL.as_secs_f64();
    let count = (size / step).ceil() as usize;
    let figures = |index: usize| {
        let remaining = (size - step * index as f64).max(0.0);
        // As QEMU computes it: the remainder by the bandwidth.
        let downtime = (remaining / rate as f64 * 1000.0) as u64;
        Figures { pass, remaining, rate, dirty_rate, downtime }
    };
    (0..count.max(1)).map(figures).collect()
}

#[test]
fn the_first_pass_has_a_remaining_time_and_no_outlook() {
    let series = estimates(&pass(1, 1000.0, 100, 0));
    assert_eq!(series[0].time_left, None, "one sample has no speed");
    for (index, estimate) in series.iter().enumerate().skip(2) {
        assert_eq!(estimate.outlook, Outlook::Unknown);
        assert_eq!(estimate.pass_bytes, 1000 * MIB);
        // 10 seconds in all.
        let expected = 10.0 - index as f64 * 0.25;
        let left = estimate.time_left.map(|time| time.as_secs_f64());
        assert!(left.is_some_and(|left| (left - expected).abs() < 0.05), "{index}: {left:?}");
    }
}

/// Zero pages are fast: the speed is that of the window, not of the whole pass.
#[test]
fn the_remaining_time_follows_the_present_speed() {
    let mut figures = pass(1, 4000.0, 2000, 0);
    figures.truncate(4);
    let left = 4000.0 - 2000.0;
    figures.extend(pass(1, left, 100, 0).into_iter().take(24));
    let series = estimates(&figures);
    let last = series.last().and_then(|estimate| estimate.time_left).map(|time| time.as_secs_f64());
    let expected = (left - 100.0 * 23.0 * 0.25) / 100.0;
    assert!(last.is_some_and(|last| (last - expected).abs() < 1.0), "{last:?}, expected {expected}");
}

#[test]
fn shorter_passes_converge_and_their_time_counts_down() {
    let sizes = [1000.0, 300.0, 90.0, 27.0];
    let figures: Vec<_> = (1..).zip(sizes).flat_map(|(index, size)| pass(index, size, 100, 30)).collect();
    let series = estimates(&figures);
    let late: Vec<_> = series.iter().filter(|estimate| estimate.pass >= OUTLOOK_PASS_MIN).collect();
    assert!(!late.is_empty() && late.iter().all(|estimate| estimate.outlook == Outlook::Converging));
    for pair in late.windows(2).filter(|pair| pair[0].pass == pair[1].pass) {
        assert!(pair[1].time_left <= pair[0].time_left, "{pair:?}");
    }
    let second = series.iter().find(|estimate| estimate.pass == 2);
    assert_eq!(second.map(|estimate| estimate.outlook), Some(Outlook::Unknown));
}

#[test]
fn a_guest_that_writes_as_fast_as_it_is_sent_does_not_converge() {
    let figures: Vec<_> = (1..9).flat_map(|index| pass(index, 500.0, 100, 98)).collect();
    let series = estimates(&figures);
    for estimate in series.iter().filter(|estimate| estimate.pass >= OUTLOOK_PASS_MIN) {
        assert_eq!(estimate.outlook, Outlook::NotConverging, "{estimate:?}");
        assert_eq!(estimate.time_left, None, "{estimate:?}");
    }
    // Near the end of a pass what remains would fit into the downtime.
    assert!(series.iter().any(|estimate| estimate.downtime.is_some_and(|_| {
        estimate.pass >= OUTLOOK_PASS_MIN && estimate.downtime <= estimate.downtime_limit
    })));
}

/// Returns the outlooks of a series, without repetitions.
fn outlooks(series: &[Figures]) -> Vec<Outlook> {
    let mut outlooks: Vec<_> = estimates(series).iter().map(|estimate| estimate.outlook).collect();
    outlooks.dedup();
    outlooks
}

/// With lanes QEMU's rate jumps between samples.
#[test]
fn the_outlook_does_not_follow_the_samples_of_the_rate() {
    for (dirty_rate, expected) in
        [(15, Outlook::Converging), (24, Outlook::NotConverging), (28, Outlook::NotConverging)]
    {
        let mut figures: Vec<_> = (1..9).flat_map(|index| pass(index, 60.0, 22, dirty_rate)).collect();
        for (index, figures) in figures.iter_mut().enumerate() {
            figures.rate = if index % 3 == 0 { 15 } else { 29 };
        }
        assert_eq!(outlooks(&figures), [Outlook::Unknown, expected], "{dirty_rate}");
    }
}

#[test]
fn a_guest_that_did_not_converge_must_do_so_clearly_or_for_two_passes() {
    let stuck = (1..5).flat_map(|index| pass(index, 500.0, 100, 98));
    let just = |passes: u64| (5..5 + passes).flat_map(|index| pass(index, 500.0, 100, 90));
    let before = [Outlook::Unknown, Outlook::NotConverging];
    let after = [Outlook::Unknown, Outlook::NotConverging, Outlook::Converging];
    assert_eq!(outlooks(&stuck.clone().chain(just(2)).collect::<Vec<_>>()), before);
    assert_eq!(outlooks(&stuck.clone().chain(just(4)).collect::<Vec<_>>()), after);
    let clear = pass(5, 500.0, 100, 70);
    assert_eq!(outlooks(&stuck.chain(clear).collect::<Vec<_>>()), after);
}

#[test]
fn a_throttled_guest_begins_to_converge() {
    let mut figures: Vec<_> = (1..5).flat_map(|index| pass(index, 500.0, 100, 120)).collect();
    let before = figures.len();
    figures.extend((5..8).flat_map(|index| pass(index, 500.0, 100, 40)));
    let series = estimates(&figures);
    assert_eq!(series[before - 3].outlook, Outlook::NotConverging);
    assert!(series[before..].iter().all(|estimate| estimate.outlook == Outlook::Converging));
    assert!(series[before].time_left.is_some());
}

#[test]
fn a_stalled_link_has_no_remaining_time_of_the_first_pass() {
    let mut figures = pass(1, 1000.0, 100, 0);
    figures.truncate(8);
    let stopped = Figures { rate: 0, ..figures[7] };
    figures.extend([stopped; 20]);
    let last = estimates(&figures).pop().map(|estimate| (estimate.time_left, estimate.rate));
    assert_eq!(last, Some((None, Some(0))));
}
