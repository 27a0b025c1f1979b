//! A device that is killed before any of its stores, and its successor: every head is returned exactly once,
//! and what the driver finds in a buffer is already marked in the dirty log.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{Batch, ChainHead, Ring};
use crate::log::{DirtyLog, LOG_PAGE, LogMode};
use crate::record::InFlightRecord;
use crate::{crash_point, features};

#[allow(dead_code, reason = "shared with the tests outside of the crate")]
#[path = "../../tests/rings/driver.rs"]
mod driver;

use driver::Driver;

/// Next step of the device.
#[derive(Debug, Clone)]
enum Step {
    /// Pops `most` chains, completes `done` of them, keeps `keep`, and rewinds the others.
    Work {
        most: usize,
        done: usize,
        keep: usize,
    },
    /// Completes a chain that was kept.
    CompleteLate(usize),
    /// Takes the chains of the previous process, and keeps them.
    TakeResubmitted,
    Publish,
    /// The frontend stops the ring and starts it again.
    Stop,
}

/// A bit for each page up to the end of the driver's memory.
const LOG_BYTES: u64 = 64;

struct Bench {
    driver: Driver,
    record: File,
    log: File,
    durable: bool,
    ring: Option<Ring>,
    kept: Vec<ChainHead>,
    crashes: u64,
}

impl Bench {
    fn new(size: u16, durable: bool) -> Self {
        let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap().into();
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, LOG_BYTES).unwrap();
        let (driver, log) = (Driver::new(size), log.into());
        let mut bench = Self { driver, record, log, durable, ring: None, kept: Vec::new(), crashes: 0 };
        bench.start();
        bench
    }

    /// Starts the ring as QEMU does: with the used index as the base, because the previous process has died.
    fn start(&mut self) {
        let base = self.driver.word(driver::USED + 2);
        let log = DirtyLog::map(self.log.as_fd().try_clone_to_owned().unwrap(), 0, LOG_BYTES).unwrap();
        let log = Some(Arc::new(log));
        let setup = crate::RingSetup { base, log, ..self.driver.setup(features::EVENT_IDX) };
        setup.switch.set(LogMode::On);
        let mut ring = Ring::new(setup, self.driver.memory(), 1).unwrap();
        let record = if self.durable {
            InFlightRecord::open(self.record.as_fd().try_clone_to_owned().unwrap(), 1, "record")
        } else {
            InFlightRecord::new(1)
        };
        ring.resume(record.unwrap().queue(0), true);
        self.ring = Some(ring);
        self.kept.clear();
    }

    /// Executes a step, or crashes in it before its store number `stores`. Returns true if it crashed.
    fn execute(&mut self, step: &Step, stores: u64) -> bool {
        let (ring, kept) = (self.ring.take().unwrap(), &mut self.kept);
        let (mut ring, step) = (ring, step.clone());
        let ring = crash_point::run_until(stores, move || {
            match step {
                Step::Work { most, done, keep } => {
                    let mut batch = Batch::new();
                    let count = ring.pop(&mut batch, most);
                    let done = done.min(count);
                    batch.chains().take(done).for_each(|chain| ring.complete(chain, 1));
                    let keep = (done + keep).min(count);
                    kept.extend(batch.chains().take(keep).skip(done).map(|chain| chain.head()));
                    ring.rewind(&mut batch, keep);
                }
                Step::TakeResubmitted => kept.extend(ring.take_resubmitted()),
                Step::CompleteLate(_) if kept.is_empty() => {}
                Step::CompleteLate(which) => {
                    let head = kept.swap_remove(which % kept.len());
                    ring.complete_head(head);
                }
                Step::Publish => {
                    ring.publish();
                }
                Step::Stop => {
                    ring.stop();
                    return None;
                }
            }
            Some(ring)
        });
        let crashed = ring.is_none();
        self.ring = ring.flatten();
        self.crashes += u64::from(crashed);
        if self.ring.is_none() {
            self.start();
        }
        crashed
    }

    /// The driver reads the used ring, and makes all its descriptors available again.
    fn drive(&mut self) {
        while let Some((head, written)) = self.driver.pop_used() {
            let page = (driver::GUEST + Driver::buffer(head)) / LOG_PAGE;
            let mut byte = [0];
            self.log.read_exact_at(&mut byte, page / 8).unwrap();
            let marked = byte[0] & 1 << (page % 8) != 0;
            assert!(written == 0 || marked, "page {page} was returned before its mark");
        }
        assert_eq!(
            self.driver.unexpected_heads, 0,
            "a head was returned twice after {} crashes",
            self.crashes
        );
        while self.driver.add(&[(16, true)], false).is_some() {}
        assert_eq!(self.ring.as_ref().unwrap().fault(), None);
    }

    /// The device completes all chains: every head must be returned.
    fn finish(mut self) {
        while !self.kept.is_empty() {
            self.execute(&Step::CompleteLate(0), u64::MAX);
        }
        self.execute(&Step::Publish, u64::MAX);
        let everything = Step::Work { most: usize::MAX, done: usize::MAX, keep: 0 };
        self.execute(&everything, u64::MAX);
        self.execute(&Step::Publish, u64::MAX);
        while self.driver.pop_used().is_some() {}
        assert_eq!(self.ring.as_ref().unwrap().fault(), None);
        assert_eq!(
            self.driver.unexpected_heads, 0,
            "a head was returned twice after {} crashes",
            self.crashes
        );
        assert_eq!(self.driver.heads_in_flight(), 0, "a head was lost after {} crashes", self.crashes);
    }
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..9usize, 0..6usize, 0..4usize).prop_map(|(most, done, keep)| Step::Work { most, done, keep }),
        3 => any::<usize>().prop_map(Step::CompleteLate),
        3 => Just(Step::Publish),
        1 => Just(Step::TakeResubmitted),
        1 => Just(Step::Stop),
    ]
}

/// Executes a script in which the device crashes before some stores of some steps. Returns the number of
/// crashes.
fn run(size: u16, durable: bool, script: &[(Step, Option<u64>)]) -> u64 {
    let mut bench = Bench::new(size, durable);
    bench.drive();
    for (step, crashes_at) in script {
        bench.execute(step, crashes_at.unwrap_or(u64::MAX));
        bench.drive();
    }
    let crashes = bench.crashes;
    bench.finish();
    crashes
}

#[test]
fn a_crash_before_any_store_loses_no_head_and_returns_none_twice() {
    let work = |most, done, keep| Step::Work { most, done, keep };
    let script = [
        work(8, 3, 2),
        Step::Publish,
        work(8, 0, 8),
        Step::CompleteLate(2),
        Step::CompleteLate(0),
        Step::Publish,
        work(4, 4, 0),
        Step::Publish,
        Step::CompleteLate(1),
        Step::TakeResubmitted,
        Step::Publish,
        Step::Stop,
        work(8, 5, 1),
        Step::Publish,
    ];
    for durable in [true, false] {
        for at in 0..script.len() {
            for stores in 0.. {
                let crashing = script.iter().enumerate();
                let crashing = crashing.map(|(index, step)| (step.clone(), (index == at).then_some(stores)));
                let crashes = run(8, durable, &crashing.collect::<Vec<_>>());
                if crashes == 0 {
                    break;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn repeated_crashes_lose_no_head_and_return_none_twice(
        size in 0..5u32, durable in any::<bool>(),
        script in vec((steps(), proptest::option::weighted(0.3, 0..12u64)), 1..80)
    ) {
        run(1 << size, durable, &script);
    }
}
