//! Any order of events between a driver and a device that both behave: nothing is lost, changed or slept through.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;
use towline_vhost_user::{Batch, Ring, features};

use crate::driver::Driver;

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    /// The driver makes a chain available: buffers to read, buffers to write, in a table of its own.
    Add { readable: Vec<u32>, writable: Vec<u32>, indirect: bool },
    /// The device takes at most so many and keeps at most so many of them; the rest it gives back.
    Pop { most: usize, keep: usize },
    /// The device is done with one of those that it has.
    Complete { which: usize, written: u32 },
    /// What is done is shown.
    Publish,
    /// The device wants to wait.
    Arm,
    /// The driver takes what was used, and wants to be woken after so many more.
    Take { more: u16 },
}

fn steps() -> impl Strategy<Value = Step> {
    let lengths = || vec(1..=64u32, 0..4);
    prop_oneof![
        4 => (lengths(), lengths(), any::<bool>())
            .prop_map(|(readable, writable, indirect)| Step::Add { readable, writable, indirect }),
        3 => (0..6usize, 0..6usize).prop_map(|(most, keep)| Step::Pop { most, keep }),
        4 => (any::<usize>(), 0..200u32).prop_map(|(which, written)| Step::Complete { which, written }),
        2 => Just(Step::Publish),
        1 => Just(Step::Arm),
        2 => (0..4u16).prop_map(|more| Step::Take { more }),
    ]
}

struct Model {
    driver: Driver,
    ring: Ring,
    features: u64,
    /// Made available and not taken: head, readable and writable lengths.
    offered: VecDeque<(u16, Vec<u32>, Vec<u32>)>,
    batches: Vec<Batch>,
    /// Taken: which batch, which chain of it, its head, its room.
    held: Vec<(usize, usize, u16, u32)>,
    done: VecDeque<(u16, u32)>,
    shown: VecDeque<(u16, u32)>,
    /// The device waits, and was promised a kick for anything new.
    waits: bool,
    /// The used entry behind which the driver wants to be woken.
    wants: u16,
}

impl Model {
    fn new(size: u16, features: u64) -> Self {
        let driver = Driver::new(size);
        let ring = driver.ring(features).unwrap();
        let (offered, done, shown) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (batches, held) = (Vec::new(), Vec::new());
        Self { driver, ring, features, offered, batches, held, done, shown, waits: false, wants: 0 }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Add { readable, writable, indirect } => self.add(readable, writable, *indirect),
            Step::Pop { most, keep } => self.pop(*most, *keep),
            Step::Complete { which, written } => self.complete(*which, *written),
            Step::Publish => self.publish(),
            Step::Arm => {
                let more = self.ring.arm();
                assert!(!more || !self.offered.is_empty(), "work where there is none");
                self.waits = !more;
            }
            Step::Take { more } => self.take(*more),
        }
        assert_eq!(self.ring.fault(), None);
        assert_eq!(usize::from(self.ring.in_flight()), self.held.len());
    }

    fn add(&mut self, readable: &[u32], writable: &[u32], indirect: bool) {
        let all = readable.iter().map(|len| (*len, false)).chain(writable.iter().map(|len| (*len, true)));
        let buffers: Vec<(u32, bool)> = all.collect();
        let indirect = indirect && self.features & features::INDIRECT_DESC != 0;
        let before = self.driver.available;
        if buffers.is_empty() {
            return;
        }
        let Some(head) = self.driver.add(&buffers, indirect) else { return };
        // The first buffer says whose it is.
        self.driver.put(Driver::buffer(head), &[u8::try_from(head).unwrap()]);
        self.offered.push_back((head, readable.to_vec(), writable.to_vec()));
        if self.waits {
            assert!(self.driver.must_kick(before, self.features), "the device waits and is not kicked");
            self.waits = false;
        }
    }

    fn pop(&mut self, most: usize, keep: usize) {
        let mut batch = Batch::new();
        let count = self.ring.pop(&mut batch, most);
        assert_eq!(count, most.min(self.offered.len()), "everything that was offered can be taken");
        let keep = keep.min(count);
        for (at, chain) in batch.chains().enumerate() {
            let (head, readable, writable) = &self.offered[at];
            let lengths: Vec<usize> = chain.readable().map(|buf| buf.len()).collect();
            assert!(lengths.iter().eq(readable.iter().map(|len| *len as usize).collect::<Vec<_>>().iter()));
            let lengths: Vec<usize> = chain.writable().map(|buf| buf.len()).collect();
            assert!(lengths.iter().eq(writable.iter().map(|len| *len as usize).collect::<Vec<_>>().iter()));
            if !readable.is_empty() {
                let mut first = [0];
                assert_eq!((chain.read_at(0, &mut first), u16::from(first[0])), (1, *head));
            }
            if at < keep {
                self.held.push((self.batches.len(), at, *head, chain.writable_bytes()));
            }
        }
        self.offered.drain(..keep);
        self.ring.give_back(&mut batch, keep);
        self.batches.push(batch);
    }

    fn complete(&mut self, which: usize, written: u32) {
        if self.held.is_empty() {
            return;
        }
        let (batch, chain, head, room) = self.held.swap_remove(which % self.held.len());
        let chain = self.batches[batch].chain(chain);
        let written = written.min(room);
        let bytes = vec![0xa5; written as usize];
        assert_eq!(chain.write_at(0, &bytes), bytes.len());
        if written == 0 {
            let head = chain.head();
            self.ring.complete_head(head);
        } else {
            self.ring.complete(chain, written);
        }
        self.done.push_back((head, written));
    }

    fn publish(&mut self) {
        let before = self.driver.word(crate::driver::USED + 2);
        let woken = self.ring.publish();
        let after = self.driver.word(crate::driver::USED + 2);
        assert_eq!(usize::from(after.wrapping_sub(before)), self.done.len());
        self.shown.append(&mut self.done);
        let passed = (before..after).contains(&self.wants);
        let wanted = if self.features & features::EVENT_IDX == 0 { after != before } else { passed };
        assert_eq!(woken, wanted, "{before}..{after}, wanted behind {}", self.wants);
    }

    fn take(&mut self, more: u16) {
        while let Some(used) = self.driver.take() {
            assert_eq!(Some(used), self.shown.pop_front());
        }
        assert!(self.shown.is_empty());
        self.wants = self.driver.used + more;
        self.driver.want(self.wants);
    }

    /// The device does all that is left.
    fn finish(mut self) {
        self.step(&Step::Pop { most: usize::MAX, keep: usize::MAX });
        while !self.held.is_empty() {
            self.step(&Step::Complete { which: 0, written: 1 });
        }
        self.step(&Step::Publish);
        self.step(&Step::Take { more: 0 });
        assert!(self.offered.is_empty());
        assert_eq!((self.driver.away(), self.driver.strange), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_or_slept_through(
        size in 0..5u32, event_index in any::<bool>(), indirect in any::<bool>(), steps in vec(steps(), 1..120)
    ) {
        let event_index = if event_index { features::EVENT_IDX } else { 0 };
        let indirect = if indirect { features::INDIRECT_DESC } else { 0 };
        let mut model = Model::new(1 << size, event_index | indirect);
        steps.iter().for_each(|step| model.step(step));
        model.finish();
    }
}

#[test]
fn indices_go_round() {
    let mut model = Model::new(4, features::EVENT_IDX);
    for _ in 0..70_000 {
        model.step(&Step::Add { readable: vec![1], writable: vec![], indirect: false });
        let mut batch = Batch::new();
        assert_eq!(model.ring.pop(&mut batch, 8), 1);
        model.offered.clear();
        model.ring.complete(batch.chain(0), 0);
        model.ring.publish();
        assert!(model.driver.take().is_some());
    }
}
