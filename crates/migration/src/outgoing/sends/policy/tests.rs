use super::*;

const FULL: usize = 512 << 10;

/// A model of the kernel.
struct Kernel {
    copies: bool,
    /// Nanoseconds that a packet takes.
    plain: u64,
    zero_copy: u64,
    splice: u64,
    /// Interval in packets at which the kernel has no memory for one.
    hungry: Option<u64>,
    statistics: ZeroCopyStatistics,
    /// Packets by way.
    counts: [u64; 3],
}

impl Kernel {
    fn new(copies: bool, plain: u64, zero_copy: u64) -> Self {
        let (hungry, statistics, counts) = (None, ZeroCopyStatistics::default(), [0; 3]);
        Self { copies, plain, zero_copy, splice: 0, hungry, statistics, counts }
    }

    fn send(&mut self, policy: &mut SendPolicy, bytes: usize) -> SendMethod {
        if policy.needs_statistics() {
            policy.evaluate(self.statistics);
        }
        let (method, measures) = (policy.method(bytes), policy.measures(bytes));
        self.counts[method as usize] += 1;
        let cost = match method {
            SendMethod::Plain => self.plain,
            SendMethod::Splice => self.splice,
            SendMethod::ZeroCopy => {
                self.statistics.sends += 1;
                let finished =
                    if self.copies { &mut self.statistics.copied } else { &mut self.statistics.zero_copied };
                *finished += 1;
                let is_hungry = self.hungry.is_some_and(|every| self.statistics.sends.is_multiple_of(every));
                self.statistics.no_memory += u64::from(is_hungry);
                self.zero_copy
            }
        };
        policy.sent(bytes, method, measures.then(|| Duration::from_nanos(cost)));
        method
    }

    fn run(&mut self, policy: &mut SendPolicy, packets: u64) {
        for _ in 0..packets {
            self.send(policy, FULL);
        }
    }
}

fn auto() -> SendPolicy {
    SendPolicy::new(ZeroCopySend::Auto, Ok(()))
}

#[test]
fn on_and_off_are_what_they_say_whatever_happens() {
    for (asked, method) in [(ZeroCopySend::On, SendMethod::ZeroCopy), (ZeroCopySend::Off, SendMethod::Plain)]
    {
        let (mut policy, mut kernel) = (SendPolicy::new(asked, Ok(())), Kernel::new(true, 1, 1_000_000));
        kernel.hungry = Some(1);
        for bytes in [4096, FULL].into_iter().cycle().take(10_000) {
            assert_eq!(kernel.send(&mut policy, bytes), method);
        }
        assert_eq!(policy.state(), (method, SendReason::Asked));
        assert!(!policy.is_auto() && !policy.needs_statistics());
    }
    let mut policy = SendPolicy::new(ZeroCopySend::Auto, Err(SendReason::Unsupported));
    Kernel::new(false, 9, 1).run(&mut policy, 100);
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::Unsupported));
}

#[test]
fn rare_copies_on_a_copying_path_are_detected() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(true, 100_000, 150_000));
    kernel.run(&mut policy, 2);
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::Copied));
    assert_eq!(kernel.counts, [1, 1, 0]);
    kernel.run(&mut policy, 100_000);
    assert_eq!(policy.state().0, SendMethod::Plain);
    assert!((20..30).contains(&kernel.counts[1]), "{:?}", kernel.counts);
}

#[test]
fn the_cheaper_way_is_found_and_kept() {
    for (plain, zero_copy, expected) in [
        (100_000, 30_000, (SendMethod::ZeroCopy, SendReason::CostsLess)),
        (100_000, 99_000, (SendMethod::Plain, SendReason::CostsMore)),
        (30_000, 100_000, (SendMethod::Plain, SendReason::CostsMore)),
    ] {
        let (mut policy, mut kernel) = (auto(), Kernel::new(false, plain, zero_copy));
        kernel.run(&mut policy, 1 + 2 * SAMPLES as u64);
        assert_eq!(policy.state(), expected);
        assert_eq!(kernel.counts, [SAMPLES as u64, 1 + SAMPLES as u64, 0]);
        kernel.run(&mut policy, 100_000);
        let other = kernel.counts[1 - expected.0 as usize];
        assert!(other < 500, "{expected:?}: {:?}", kernel.counts);
    }
}

#[test]
fn splicing_is_chosen_where_it_costs_least() {
    for (copies, plain, zero_copy, splice, expected) in [
        (true, 100_000, 150_000, 60_000, (SendMethod::Splice, SendReason::SpliceCostsLess)),
        (true, 60_000, 10_000, 100_000, (SendMethod::Plain, SendReason::Copied)),
        (false, 100_000, 60_000, 30_000, (SendMethod::Splice, SendReason::SpliceCostsLess)),
        (false, 100_000, 30_000, 60_000, (SendMethod::ZeroCopy, SendReason::CostsLess)),
        (false, 30_000, 100_000, 60_000, (SendMethod::Plain, SendReason::CostsMore)),
    ] {
        let (mut policy, mut kernel) = (auto(), Kernel::new(copies, plain, zero_copy));
        policy.allow_splices();
        kernel.splice = splice;
        kernel.run(&mut policy, 2 + 3 * SAMPLES as u64);
        assert_eq!(policy.state(), expected, "{:?}", kernel.counts);
        kernel.run(&mut policy, 100_000);
        assert_eq!(policy.state().0, expected.0);
        let others: u64 = kernel.counts.iter().sum::<u64>() - kernel.counts[expected.0 as usize];
        assert!(others < 1000, "{expected:?}: {:?}", kernel.counts);
        // Another way becomes cheaper.
        (kernel.plain, kernel.zero_copy, kernel.splice) = (9_000, 20_000, 20_000);
        kernel.run(&mut policy, u64::from(RECONSIDER_AFTER_PACKETS) + 100);
        assert_eq!(policy.state().0, SendMethod::Plain);
    }
}

/// The contents may lie in memory although they could be spliced.
#[test]
fn a_comparison_ends_without_samples_of_splicing() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(true, 100_000, 150_000));
    policy.allow_splices();
    kernel.run(&mut policy, 2);
    for _ in 0..1000 {
        policy.sent(FULL, SendMethod::Plain, Some(Duration::from_nanos(100_000)));
    }
    let Phase::Compare(candidates) = &policy.phase else { panic!("{policy:?}") };
    assert!(candidates.iter().all(|candidate| candidate.samples.len() <= SAMPLES), "{policy:?}");
}

#[test]
fn a_way_whose_cost_changes_is_left_and_a_close_call_is_not() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(false, 100_000, 30_000));
    let again = u64::from(RECONSIDER_AFTER_PACKETS) + 100;
    kernel.run(&mut policy, again);
    assert_eq!(policy.state().0, SendMethod::ZeroCopy);
    kernel.plain = 29_000;
    kernel.run(&mut policy, again);
    assert_eq!(policy.state().0, SendMethod::ZeroCopy, "3 % are not worth it");
    kernel.plain = 20_000;
    kernel.run(&mut policy, again);
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::CostsMore));
}

#[test]
fn a_path_that_begins_to_copy_is_noticed_soon() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(false, 100_000, 30_000));
    kernel.run(&mut policy, 100);
    assert_eq!(policy.state().0, SendMethod::ZeroCopy);
    kernel.copies = true;
    kernel.run(&mut policy, 2 * u64::from(EVALUATE_EVERY_PACKETS));
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::Copied));
    // And one that stops copying: at the next probe.
    kernel.copies = false;
    kernel.run(&mut policy, u64::from(RECONSIDER_AFTER_PACKETS) + 100);
    assert_eq!(policy.state().0, SendMethod::ZeroCopy);
}

#[test]
fn a_kernel_without_memory_is_left_alone() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(false, 100_000, 30_000));
    kernel.hungry = Some(100);
    kernel.run(&mut policy, 1000);
    assert_eq!(policy.state().0, SendMethod::ZeroCopy, "rare failures are harmless");
    kernel.hungry = Some(2);
    kernel.run(&mut policy, 2 * u64::from(EVALUATE_EVERY_PACKETS));
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::NoMemory));
    let mut policy = auto();
    policy.starve();
    assert_eq!((policy.method(FULL), policy.state().1), (SendMethod::Plain, SendReason::NoMemory));
}

#[test]
fn short_packets_go_plain_and_teach_nothing() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(false, 100_000, 30_000));
    for _ in 0..10_000 {
        assert_eq!(kernel.send(&mut policy, LARGE_BYTES - 4096), SendMethod::Plain);
    }
    assert_eq!(policy.state(), (SendMethod::Plain, SendReason::Undecided));
    assert_eq!(kernel.send(&mut policy, LARGE_BYTES), SendMethod::ZeroCopy);
}

/// A completion may come much later, and a lost one must not stop the lane from sending.
#[test]
fn until_its_completion_is_there_a_probe_decides_nothing() {
    let (mut policy, mut kernel) = (auto(), Kernel::new(true, 100_000, 150_000));
    policy.sent(FULL, policy.method(FULL), None);
    for _ in 0..1000 {
        policy.evaluate(kernel.statistics);
        assert_eq!((policy.method(FULL), policy.state().1), (SendMethod::Plain, SendReason::Undecided));
        policy.sent(FULL, SendMethod::Plain, None);
    }
    kernel.statistics.copied = 1;
    policy.evaluate(kernel.statistics);
    assert_eq!(policy.state().1, SendReason::Copied);
}
