use proptest::prelude::*;

use super::*;

const COMPARISON_FRAMES: u32 = TURN_FRAMES * TURNS.len() as u32;

/// A guest and a card in which each method has its price.
#[derive(Debug, Clone, Copy)]
struct Prices {
    /// Nanoseconds of a frame.
    copy: u64,
    reference: u64,
    /// Frames per kick.
    copies_per_kick: u64,
    references_per_kick: u64,
}

const EQUAL: Prices = Prices { copy: 300, reference: 300, copies_per_kick: 8, references_per_kick: 8 };

/// Decisions of a policy for frames of one length.
#[derive(Debug, Default)]
struct Sent {
    copies: u64,
    references: u64,
    nanoseconds: u64,
    measured: u64,
    notified: Notifications,
}

impl Sent {
    fn send(&mut self, policy: &mut SendPolicy, frames: u32, bytes: usize, prices: Prices) {
        for _ in 0..frames {
            let (count, price, per_kick) = match policy.method(bytes) {
                SendMethod::Copy => (&mut self.copies, prices.copy, prices.copies_per_kick),
                SendMethod::Reference => (&mut self.references, prices.reference, prices.references_per_kick),
            };
            *count += 1;
            let kicks = u64::from((*count).is_multiple_of(per_kick));
            self.notified.kicks += kicks;
            self.nanoseconds += price;
            let cost = policy.measures(bytes).then_some(Duration::from_nanos(price));
            self.measured += u64::from(cost.is_some());
            policy.sent(bytes, cost);
            policy.notified(self.notified);
        }
    }
}

fn run(frames: u32, bytes: usize, prices: Prices) -> (SendPolicy, Sent) {
    let (mut policy, mut sent) = (SendPolicy::new(ZeroCopySend::Auto), Sent::default());
    sent.send(&mut policy, frames, bytes, prices);
    (policy, sent)
}

#[test]
fn fixed_settings_are_kept_and_nothing_is_measured() {
    let settings = [
        (SendPolicy::new(ZeroCopySend::On), SendMethod::Reference),
        (SendPolicy::new(ZeroCopySend::Off), SendMethod::Copy),
        (SendPolicy::of_copy_mode(), SendMethod::Reference),
    ];
    for (mut policy, method) in settings {
        let mut sent = Sent::default();
        sent.send(&mut policy, 10_000, 1500, Prices { reference: 1, ..EQUAL });
        assert_eq!((policy.method(1500), policy.method(60_000), sent.measured), (method, method, 0));
        assert!(policy.is_fixed());
    }
}

#[test]
fn each_class_gets_the_cheaper_method() {
    for bytes in [257, SHORT_BYTES, SHORT_BYTES + 1, 65_000] {
        let cheap_reference = Prices { reference: 200, ..EQUAL };
        assert_eq!(run(COMPARISON_FRAMES, bytes, cheap_reference).0.method(bytes), SendMethod::Reference);
        let cheap_copy = Prices { copy: 200, ..EQUAL };
        assert_eq!(run(COMPARISON_FRAMES, bytes, cheap_copy).0.method(bytes), SendMethod::Copy);
    }
    let (policy, _) = run(COMPARISON_FRAMES, 1500, Prices { reference: 200, ..EQUAL });
    let undecided = SendPolicy::new(ZeroCopySend::Auto).method(60_000);
    assert_eq!(policy.method(60_000), undecided, "the other class is not decided");
}

/// The weakness of the first zero-copy transmission in Linux: the copies cost less than the kicks.
#[test]
fn short_frames_are_copied_if_references_cost_kicks() {
    let kicks = Prices { reference: 100, references_per_kick: 4, ..EQUAL };
    assert_eq!(run(COMPARISON_FRAMES, 1500, kicks).0.method(1500), SendMethod::Copy);
    assert_eq!(run(COMPARISON_FRAMES, 9000, kicks).0.method(9000), SendMethod::Reference);
    let fewer = Prices { references_per_kick: 16, ..kicks };
    assert_eq!(run(COMPARISON_FRAMES, 1500, fewer).0.method(1500), SendMethod::Reference);
}

#[test]
fn without_a_difference_the_preferred_method_is_chosen() {
    for slightly_less in [300, 290] {
        let prices = Prices { reference: slightly_less, ..EQUAL };
        assert_eq!(run(COMPARISON_FRAMES, 1500, prices).0.method(1500), SendMethod::Copy);
        let prices = Prices { copy: slightly_less, ..EQUAL };
        assert_eq!(run(COMPARISON_FRAMES, 9000, prices).0.method(9000), SendMethod::Reference);
    }
}

#[test]
fn a_decision_is_reconsidered_and_less_often_while_it_remains() {
    let (mut policy, mut sent) = run(COMPARISON_FRAMES, 1500, EQUAL);
    for interval in [INTERVAL_MIN, 2 * INTERVAL_MIN, 4 * INTERVAL_MIN] {
        let (before, copies) = (sent.references, sent.copies);
        sent.send(&mut policy, interval, 1500, EQUAL);
        assert_eq!((sent.references, sent.copies), (before, copies + u64::from(interval)));
        sent.send(&mut policy, COMPARISON_FRAMES, 1500, EQUAL);
        assert_eq!(sent.references, before + u64::from(COMPARISON_FRAMES) / 2);
    }
    let cheap = Prices { reference: 100, ..EQUAL };
    sent.send(&mut policy, 8 * INTERVAL_MIN + COMPARISON_FRAMES, 1500, cheap);
    assert_eq!(policy.method(1500), SendMethod::Reference);
    // A decision that changed is reconsidered soon.
    sent.send(&mut policy, INTERVAL_MIN + COMPARISON_FRAMES, 1500, EQUAL);
    assert_eq!(policy.method(1500), SendMethod::Copy);
}

/// Frames that were interrupted do not decide.
#[test]
fn a_quarter_of_the_measurements_may_be_disturbed() {
    let mut policy = SendPolicy::new(ZeroCopySend::Auto);
    for index in 0..COMPARISON_FRAMES {
        let disturbed = (index / MEASURE).is_multiple_of(5);
        let nanoseconds = match policy.method(1500) {
            _ if disturbed => 1_000_000,
            SendMethod::Copy => 400,
            SendMethod::Reference => 300,
        };
        let cost = policy.measures(1500).then_some(Duration::from_nanos(nanoseconds));
        policy.sent(1500, cost);
    }
    assert_eq!(policy.method(1500), SendMethod::Reference);
}

#[test]
fn a_ring_that_starts_again_begins_the_comparison_again() {
    let (mut policy, mut sent) = run(COMPARISON_FRAMES - 1, 1500, Prices { reference: 100, ..EQUAL });
    policy.notified(Notifications::default());
    sent.notified = Notifications::default();
    sent.send(&mut policy, COMPARISON_FRAMES - 1, 1500, EQUAL);
    sent.send(&mut policy, 1, 1500, EQUAL);
    assert_eq!(policy.method(1500), SendMethod::Copy);
}

proptest! {
    /// With any prices: short frames never cost more CPU time or kicks than with copies alone, but for the comparisons.
    #[test]
    fn short_frames_lose_at_most_the_comparisons(
        copy in 50u64..5000, reference in 50u64..5000, copies_per_kick in 1u64..40, references_per_kick in 1u64..40,
        bytes in 257..=SHORT_BYTES,
    ) {
        let prices = Prices { copy, reference, copies_per_kick, references_per_kick };
        let frames = 4 * INTERVAL_MIN;
        let (_, sent) = run(frames, bytes, prices);
        // Comparisons at the begin, after INTERVAL_MIN and after 2 * INTERVAL_MIN; half of their frames are referenced.
        let probes = u64::from(COMPARISON_FRAMES) / 2 * 3;
        prop_assert!(sent.nanoseconds <= u64::from(frames) * copy + probes * reference);
        let kicks = u64::from(frames).div_ceil(copies_per_kick) + probes.div_ceil(references_per_kick);
        // A turn has a fraction of a kick more or less.
        prop_assert!(sent.notified.kicks <= kicks + kicks / 20 + 8, "{sent:?}");
        prop_assert!(sent.measured <= 3 * u64::from(COMPARISON_FRAMES) / u64::from(MEASURE));
    }
}
