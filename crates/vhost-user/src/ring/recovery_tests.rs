//! A device that is killed before any of its stores, and one that comes after it: every head comes back exactly once.

use std::fs::File;
use std::os::fd::AsFd as _;

use proptest::collection::vec;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};

use super::{Batch, Head, Ring};
use crate::record::Record;
use crate::{features, fuse};

#[allow(dead_code, reason = "shared with the tests outside of the crate")]
#[path = "../../tests/rings/driver.rs"]
mod driver;

use driver::Driver;

/// What the device does next.
#[derive(Debug, Clone)]
enum Step {
    /// Takes so many, is done with some of them at once, and gives back what is left but for so many.
    Work {
        most: usize,
        done: usize,
        keep: usize,
    },
    /// Is done with one that it kept.
    Late(usize),
    Publish,
    /// The frontend stops the ring and starts it again.
    Stop,
}

struct Bench {
    driver: Driver,
    record: File,
    durable: bool,
    ring: Option<Ring>,
    kept: Vec<Head>,
    deaths: u64,
}

impl Bench {
    fn new(size: u16, durable: bool) -> Self {
        let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap().into();
        let mut bench =
            Self { driver: Driver::new(size), record, durable, ring: None, kept: Vec::new(), deaths: 0 };
        bench.start();
        bench
    }

    /// As QEMU does it: with the used index as the base when the process before has died.
    fn start(&mut self) {
        let base = self.driver.word(driver::USED + 2);
        let setup = crate::RingSetup { base, ..self.driver.setup(features::EVENT_IDX) };
        let mut ring = Ring::new(setup, self.driver.memory(), 1).unwrap();
        let record = match self.durable {
            true => Record::open(self.record.as_fd().try_clone_to_owned().unwrap(), 1, "record"),
            // What a process that died has left of it is nothing.
            false => Record::new(1),
        };
        ring.go_on(record.unwrap().queue(0), true);
        self.ring = Some(ring);
        self.kept.clear();
    }

    /// Does it, or dies in it before its store number `stores`; true if it died.
    fn act(&mut self, step: &Step, stores: u64) -> bool {
        let (ring, kept) = (self.ring.take().unwrap(), &mut self.kept);
        let (mut ring, step) = (ring, step.clone());
        let ring = fuse::with(stores, move || {
            match step {
                Step::Work { most, done, keep } => {
                    let mut batch = Batch::new();
                    let count = ring.pop(&mut batch, most);
                    let done = done.min(count);
                    batch.chains().take(done).for_each(|chain| ring.complete(chain, 1));
                    let keep = (done + keep).min(count);
                    kept.extend(batch.chains().take(keep).skip(done).map(|chain| chain.head()));
                    ring.give_back(&mut batch, keep);
                }
                Step::Late(_) if kept.is_empty() => {}
                Step::Late(which) => {
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
        let died = ring.is_none();
        self.ring = ring.flatten();
        self.deaths += u64::from(died);
        if self.ring.is_none() {
            self.start();
        }
        died
    }

    /// The driver takes what came back, and makes all that it has available again.
    fn drive(&mut self) {
        while self.driver.take().is_some() {}
        assert_eq!(self.driver.strange, 0, "a head came back twice after {} deaths", self.deaths);
        while self.driver.add(&[(16, true)], false).is_some() {}
        assert_eq!(self.ring.as_ref().unwrap().fault(), None);
    }

    /// The device does all that is left: everything has to come back.
    fn finish(mut self) {
        while !self.kept.is_empty() {
            self.act(&Step::Late(0), u64::MAX);
        }
        self.act(&Step::Publish, u64::MAX);
        let everything = Step::Work { most: usize::MAX, done: usize::MAX, keep: 0 };
        self.act(&everything, u64::MAX);
        self.act(&Step::Publish, u64::MAX);
        while self.driver.take().is_some() {}
        assert_eq!(self.ring.as_ref().unwrap().fault(), None);
        assert_eq!(self.driver.strange, 0, "a head came back twice after {} deaths", self.deaths);
        assert_eq!(self.driver.away(), 0, "a head was lost after {} deaths", self.deaths);
    }
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..9usize, 0..6usize, 0..4usize).prop_map(|(most, done, keep)| Step::Work { most, done, keep }),
        3 => any::<usize>().prop_map(Step::Late),
        3 => Just(Step::Publish),
        1 => Just(Step::Stop),
    ]
}

/// Plays a script, in which the device dies before some stores of some steps. How often it died.
fn run(size: u16, durable: bool, script: &[(Step, Option<u64>)]) -> u64 {
    let mut bench = Bench::new(size, durable);
    bench.drive();
    for (step, dies) in script {
        bench.act(step, dies.unwrap_or(u64::MAX));
        bench.drive();
    }
    let deaths = bench.deaths;
    bench.finish();
    deaths
}

#[test]
fn killed_before_any_store_it_loses_no_head_and_gives_none_back_twice() {
    let work = |most, done, keep| Step::Work { most, done, keep };
    let script = [
        work(8, 3, 2),
        Step::Publish,
        work(8, 0, 8),
        Step::Late(2),
        Step::Late(0),
        Step::Publish,
        work(4, 4, 0),
        Step::Publish,
        Step::Late(1),
        Step::Publish,
        Step::Stop,
        work(8, 5, 1),
        Step::Publish,
    ];
    for durable in [true, false] {
        for at in 0..script.len() {
            for stores in 0.. {
                let dying = script.iter().enumerate();
                let dying = dying.map(|(index, step)| (step.clone(), (index == at).then_some(stores)));
                let deaths = run(8, durable, &dying.collect::<Vec<_>>());
                if deaths == 0 {
                    break;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn however_often_it_is_killed(
        size in 0..5u32, durable in any::<bool>(),
        script in vec((steps(), proptest::option::weighted(0.3, 0..12u64)), 1..80)
    ) {
        run(1 << size, durable, &script);
    }
}
