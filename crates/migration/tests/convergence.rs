//! The convergence policy: invariants for any input, and decisions for typical guests.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use towline_migration::convergence::{
    CannotConverge, ConvergencePolicy, Limits, MinWindow, Observation, PassDecision, Sample, Sampler,
};

const MIB: u64 = 1 << 20;
/// Maximum number of passes for a guest's memory: windows of 1000 passes, each a tenth lower than one of the
/// six before it.
const PASSES_MAX: u64 = 1000 * 6 * 500;

fn limits(downtime_ms: u64) -> Limits {
    Limits {
        downtime: Duration::from_millis(downtime_ms),
        switchover_cost: Duration::ZERO,
        min_window: MinWindow::default(),
    }
}

/// A guest that writes at a rate within so much of its memory, sent at another rate.
#[derive(Debug, Clone, Copy)]
struct Model {
    memory: u64,
    hot: u64,
    dirty_rate: f64,
    rate: f64,
}

impl Model {
    /// Passes until the policy decides; `change` may alter the model before each pass.
    fn run(self, limits: Limits, mut change: impl FnMut(&mut Self, Duration)) -> (PassDecision, Duration) {
        let (mut model, mut policy) = (self, ConvergencePolicy::new(limits));
        let (mut left, mut elapsed) = (model.memory, Duration::ZERO);
        for _ in 0..10_000 {
            change(&mut model, elapsed);
            let time = Duration::from_secs_f64((left as f64 / model.rate).max(1e-4));
            // Distinct pages of random writes.
            let written = model.dirty_rate * time.as_secs_f64();
            let dirtied = (model.hot as f64 * (1.0 - (-written / model.hot as f64).exp())) as u64;
            elapsed += time;
            match policy.observe(&Observation::of_pass(time, left, dirtied)) {
                PassDecision::Continue => left = dirtied,
                decision => return (decision, elapsed),
            }
        }
        panic!("no decision: {model:?}");
    }
}

fn observation() -> impl Strategy<Value = Observation> {
    let time = prop_oneof![Just(0), 1..1_000_u64, 1..100_000_000_u64];
    let bytes = || prop_oneof![Just(0), 1..64 * MIB, 1..1_u64 << 44];
    let expected = proptest::option::weighted(0.2, 0..10_000_u64);
    (time, bytes(), bytes(), expected).prop_map(|(micros, sent, dirtied, expected)| Observation {
        expected_downtime: expected.map(Duration::from_millis),
        ..Observation::of_pass(Duration::from_micros(micros), sent, dirtied)
    })
}

proptest! {
    #[test]
    fn a_guest_is_never_stopped_for_longer_than_its_limit(
        observations in vec(observation(), 1..200), downtime in 0..10_000_u64, cost in 0..2_000_u64,
    ) {
        let switchover_cost = Duration::from_millis(cost);
        let limits = Limits { switchover_cost, ..limits(downtime) };
        let (mut policy, mut left_before) = (ConvergencePolicy::new(limits), None);
        for observation in observations {
            let before = left_before.replace(observation.left);
            if policy.observe(&observation) == PassDecision::SwitchOver {
                let memory = match observation.left {
                    0 => 0.0,
                    left if observation.rate > 0.0 => left as f64 / observation.rate,
                    // A pass of zero pages only: by an earlier rate, or as long as as much took.
                    left if before.is_some_and(|before| left > before) => continue,
                    _ => 0.0,
                };
                let downtime = memory + switchover_cost.as_secs_f64();
                prop_assert!(downtime <= limits.downtime.as_secs_f64() + 1e-9);
                let expected = observation.expected_downtime.unwrap_or_default();
                prop_assert!(expected + switchover_cost <= limits.downtime);
            }
        }
    }

    #[test]
    fn repeated_observations_are_decided_within_a_bound(cycle in vec(observation(), 1..40), downtime in 0..1_000_u64) {
        let mut policy = ConvergencePolicy::new(limits(downtime));
        let mut passes = 0_u64;
        while policy.observe(&cycle[passes as usize % cycle.len()]) == PassDecision::Continue {
            passes += 1;
            prop_assert!(passes < PASSES_MAX);
        }
    }

    #[test]
    fn a_longer_downtime_is_never_worse(
        observations in vec(observation(), 1..300), downtime in 0..10_000_u64, more in 0..10_000_u64,
    ) {
        let mut short = ConvergencePolicy::new(limits(downtime));
        let mut long = ConvergencePolicy::new(limits(downtime + more));
        for observation in observations {
            let (short, long) = (short.observe(&observation), long.observe(&observation));
            if short == PassDecision::SwitchOver {
                prop_assert_eq!(&long, &PassDecision::SwitchOver);
            }
            if let PassDecision::CannotConverge(_) = long {
                prop_assert!(matches!(short, PassDecision::CannotConverge(_)));
            }
            if short == PassDecision::SwitchOver || long != PassDecision::Continue {
                break;
            }
        }
    }

    #[test]
    fn a_guest_that_writes_clearly_less_than_is_sent_is_stopped_and_one_that_writes_more_is_not(
        memory in 64 * MIB..1 << 40, rate in 1e6..1e10_f64, share in prop_oneof![0.0..0.85_f64, 1.3..10.0],
    ) {
        let model = Model { memory, hot: memory, dirty_rate: rate * share, rate };
        let fits = (memory as f64) < rate;
        let (decision, _) = model.run(limits(300), |_, _| {});
        if share < 1.0 {
            prop_assert_eq!(decision, PassDecision::SwitchOver);
        } else if !fits {
            // Of random writes within all memory, hits on the same page are not counted twice.
            prop_assert!(matches!(decision, PassDecision::CannotConverge(_)), "{:?}", decision);
        }
    }

    #[test]
    fn samples_of_a_qemu_are_judged_like_passes(
        passes in vec((1..2_000_u64, 0..64 * MIB, 0..64 * MIB), 2..200),
    ) {
        let [mut told, mut sampled] = [ConvergencePolicy::new(limits(100)), ConvergencePolicy::new(limits(100))];
        let mut sampler = Sampler::default();
        let mut sample = Sample {
            at: Duration::ZERO, dirty_sync_count: 1, transferred: 0, remaining: 1 << 30,
            dirty_pages_rate: 0, page_size: 4096, expected_downtime: None,
        };
        prop_assert_eq!(sampler.observe(sample), None);
        for (millis, sent, left) in passes {
            let time = Duration::from_millis(millis);
            // Between two passes QEMU's figures change, and yield no observation.
            sample.at += time / 2;
            prop_assert_eq!(sampler.observe(Sample { remaining: 7, ..sample }), None);
            sample.at += time - time / 2;
            sample.dirty_sync_count += 1;
            sample.transferred += sent;
            sample.remaining = left;
            let observed = sampler.observe(sample).unwrap();
            let pass = Observation::of_pass(time, sent, left);
            prop_assert_eq!((observed.time, observed.left, observed.rate), (pass.time, pass.left, pass.rate));
            let (told, sampled) = (told.observe(&pass), sampled.observe(&observed));
            prop_assert_eq!(std::mem::discriminant(&told), std::mem::discriminant(&sampled));
        }
    }
}

fn verdict(decision: PassDecision) -> CannotConverge {
    match decision {
        PassDecision::CannotConverge(verdict) => verdict,
        decision => panic!("{decision:?}"),
    }
}

/// 4 GiB, of which 1 GiB is written over and over at 200 MB/s, on a link of 100 MB/s.
const HOT: Model = Model { memory: 4 << 30, hot: 1 << 30, dirty_rate: 200e6, rate: 100e6 };
/// The same, which writes less than the link takes.
const CALM: Model = Model { dirty_rate: 50e6, ..HOT };

#[test]
fn the_verdict_has_figures() {
    let (decision, elapsed) = HOT.run(limits(300), |_, _| {});
    let verdict = verdict(decision);
    assert!((90e6..110e6).contains(&verdict.rate), "{verdict:?}");
    assert!((70e6..200e6).contains(&verdict.dirty_rate), "{verdict:?}");
    assert!(verdict.expected_downtime > verdict.downtime_limit, "{verdict:?}");
    assert_eq!(verdict.time, elapsed);
    let text = verdict.to_string();
    let rate = format!("while {:.1} MiB/s get through", verdict.rate / f64::from(1 << 20));
    for part in [&rate, "with 300 ms allowed"] {
        assert!(text.contains(part), "{text}");
    }
    // The reported remainder takes the reported time on this link.
    let told = verdict.left as f64 / HOT.rate;
    assert!((verdict.expected_downtime.as_secs_f64() - told).abs() < 0.1 * told, "{verdict:?}");
}

#[test]
fn a_link_that_stalls_for_a_while_costs_time_and_nothing_else() {
    for stalled_at in [0, 20, 41, 60, 70] {
        let stall = Duration::from_secs(stalled_at)..Duration::from_secs(stalled_at + 30);
        let (decision, _) = CALM.run(limits(300), |model, now| {
            model.rate = if stall.contains(&now) { 5e6 } else { 100e6 };
        });
        assert_eq!(decision, PassDecision::SwitchOver, "stalled at {stalled_at} s");
    }
}

#[test]
fn a_guest_is_not_stopped_during_a_burst_of_writes() {
    for seconds in [1, 5, 20] {
        let burst = Duration::from_secs(42)..Duration::from_secs(42 + seconds);
        let (decision, _) = CALM.run(limits(300), |model, now| {
            model.dirty_rate = if burst.contains(&now) { 400e6 } else { 50e6 };
        });
        assert_eq!(decision, PassDecision::SwitchOver, "a burst of {seconds} s");
    }
}

#[test]
fn a_guest_whose_dirty_rate_oscillates_is_not_observed_for_ever() {
    for period in [1, 3, 8, 20] {
        let mut passes = 0_u32;
        let (decision, _) = HOT.run(limits(300), |model, _| {
            passes += 1;
            model.dirty_rate = if (passes / period).is_multiple_of(2) { 97e6 } else { 400e6 };
        });
        verdict(decision);
        assert!(passes < 200, "{passes} passes with a change after each {period}");
    }
}

#[test]
fn a_guest_that_is_slowed_down_in_steps_converges() {
    // As QEMU's auto-converge does it: 20 % at first, 10 % more each time, up to 99 %.
    let mut passes = 0;
    let (decision, _) = HOT.run(limits(300), |model, _| {
        passes += 1;
        let throttle = if passes < 3 { 0.0 } else { (0.2 + 0.05 * f64::from(passes - 3)).min(0.99) };
        model.dirty_rate = 200e6 * (1.0 - throttle);
    });
    assert_eq!(decision, PassDecision::SwitchOver);
}

#[test]
fn a_burst_into_socket_buffers_is_not_measured_as_bandwidth() {
    let mut policy = ConvergencePolicy::new(limits(100));
    let slow = Observation::of_pass(Duration::from_secs(10), 100 * MIB, 20 * MIB);
    assert_eq!(policy.observe(&slow), PassDecision::Continue);
    let swallowed = Observation::of_pass(Duration::from_millis(1), 20 * MIB, 10 * MIB);
    assert_eq!(policy.observe(&swallowed), PassDecision::Continue);
}

#[test]
fn another_limit_counts_from_the_next_pass_on() {
    let mut policy = ConvergencePolicy::new(limits(100));
    let pass = Observation::of_pass(Duration::from_secs(1), 100 * MIB, 50 * MIB);
    assert_eq!(policy.observe(&pass), PassDecision::Continue);
    policy.set_downtime(Duration::from_millis(501));
    assert_eq!(policy.observe(&pass), PassDecision::SwitchOver);
}

#[test]
fn qemus_own_estimate_counts_if_it_is_longer() {
    let mut policy = ConvergencePolicy::new(limits(300));
    let fits = Observation::of_pass(Duration::from_secs(1), 100 * MIB, MIB);
    let expects = |millis| Observation { expected_downtime: Some(Duration::from_millis(millis)), ..fits };
    assert_eq!(policy.observe(&expects(301)), PassDecision::Continue);
    assert_eq!(policy.observe(&expects(300)), PassDecision::SwitchOver);
}

#[test]
fn a_link_without_throughput_is_reported() {
    let mut policy = ConvergencePolicy::new(limits(300));
    let mut left = MIB;
    let decisions = std::iter::repeat_with(|| {
        left += MIB;
        policy.observe(&Observation::of_pass(Duration::from_secs(5), 0, left))
    });
    let decision = decisions.into_iter().find(|decision| *decision != PassDecision::Continue);
    let text = verdict(decision.unwrap()).to_string();
    assert!(text.contains("nothing gets through"), "{text}");
}

#[test]
fn a_guest_that_writes_zeros_is_stopped_too() {
    let mut policy = ConvergencePolicy::new(limits(300));
    let zeros = |millis, dirtied| Observation::of_pass(Duration::from_millis(millis), 0, dirtied);
    assert_eq!(policy.observe(&zeros(400, 8 * MIB)), PassDecision::Continue, "nothing is known of the link");
    assert_eq!(policy.observe(&zeros(1, 9 * MIB)), PassDecision::Continue, "more than took 1 ms");
    assert_eq!(policy.observe(&zeros(1, 9 * MIB)), PassDecision::SwitchOver);
    // Once something had content, that rate counts.
    let mut policy = ConvergencePolicy::new(limits(300));
    policy.observe(&Observation::of_pass(Duration::from_secs(1), 10 * MIB, 9 * MIB));
    assert_eq!(policy.observe(&zeros(1, 9 * MIB)), PassDecision::Continue);
    assert_eq!(policy.observe(&zeros(1, 2 * MIB)), PassDecision::SwitchOver);
}
