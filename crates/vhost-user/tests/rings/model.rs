//! Any order of events between a conforming driver and a conforming device: no chain and no notification is
//! lost.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;
use towline_vhost_user::{Batch, Ring, features};

use crate::driver::Driver;

/// Next event.
#[derive(Debug, Clone)]
enum Step {
    /// The driver makes a chain available.
    Add { readable: Vec<u32>, writable: Vec<u32>, indirect: bool },
    /// The device pops at most `most` chains, keeps at most `keep` of them, and rewinds the others.
    Pop { most: usize, keep: usize },
    /// The device completes one of its chains.
    Complete { which: usize, written: u32 },
    /// The device publishes its completed chains.
    Publish,
    /// The same, and the next publication notifies the driver.
    PublishQuietly,
    /// The device enables notifications, to wait.
    EnableNotification,
    /// The driver pops all used entries, and requests a notification after `more` further ones.
    PopUsed { more: u16 },
}

fn steps() -> impl Strategy<Value = Step> {
    let lengths = || vec(1..=64u32, 0..4);
    prop_oneof![
        4 => (lengths(), lengths(), any::<bool>())
            .prop_map(|(readable, writable, indirect)| Step::Add { readable, writable, indirect }),
        3 => (0..6usize, 0..6usize).prop_map(|(most, keep)| Step::Pop { most, keep }),
        4 => (any::<usize>(), 0..200u32).prop_map(|(which, written)| Step::Complete { which, written }),
        2 => Just(Step::Publish),
        1 => Just(Step::PublishQuietly),
        1 => Just(Step::EnableNotification),
        2 => (0..4u16).prop_map(|more| Step::PopUsed { more }),
    ]
}

struct Model {
    driver: Driver,
    ring: Ring,
    features: u64,
    /// Chains that are available: head, readable and writable lengths.
    available: VecDeque<(u16, Vec<u32>, Vec<u32>)>,
    batches: Vec<Batch>,
    /// Chains in flight: number of the batch, of the chain in it, head, writable bytes.
    in_flight: Vec<(usize, usize, u16, u32)>,
    completed: VecDeque<(u16, u32)>,
    published: VecDeque<(u16, u32)>,
    /// Used index up to which the driver was notified, or did not want to be.
    signalled: u16,
    /// True if the device waits, and the driver has to kick it for a new chain.
    waits: bool,
    /// Used entry after which the driver requests a notification.
    used_event: u16,
}

impl Model {
    fn new(size: u16, features: u64) -> Self {
        let driver = Driver::new(size);
        let ring = driver.ring(features).unwrap();
        let (available, completed, published) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (batches, in_flight) = (Vec::new(), Vec::new());
        Self {
            driver,
            ring,
            features,
            available,
            batches,
            in_flight,
            completed,
            published,
            signalled: 0,
            waits: false,
            used_event: 0,
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Add { readable, writable, indirect } => self.add(readable, writable, *indirect),
            Step::Pop { most, keep } => self.pop(*most, *keep),
            Step::Complete { which, written } => self.complete(*which, *written),
            Step::Publish => self.publish(),
            Step::PublishQuietly => {
                self.ring.publish_quietly();
                self.published.append(&mut self.completed);
            }
            Step::EnableNotification => {
                let more = self.ring.enable_notification_and_recheck();
                assert!(!more || !self.available.is_empty(), "no chain is available");
                self.waits = !more;
            }
            Step::PopUsed { more } => self.pop_used(*more),
        }
        assert_eq!(self.ring.fault(), None);
        assert_eq!(usize::from(self.ring.in_flight()), self.in_flight.len());
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
        // The first buffer has the head's number.
        self.driver.put(Driver::buffer(head), &[u8::try_from(head).unwrap()]);
        self.available.push_back((head, readable.to_vec(), writable.to_vec()));
        if self.waits {
            assert!(
                self.driver.must_kick(before, self.features),
                "the device waits and the driver does not kick it"
            );
            self.waits = false;
        }
    }

    fn pop(&mut self, most: usize, keep: usize) {
        let mut batch = Batch::new();
        let count = self.ring.pop(&mut batch, most);
        assert_eq!(count, most.min(self.available.len()), "all available chains can be popped");
        let keep = keep.min(count);
        for (at, chain) in batch.chains().enumerate() {
            let (head, readable, writable) = &self.available[at];
            let lengths: Vec<usize> = chain.readable().map(|buf| buf.len()).collect();
            assert!(lengths.iter().eq(readable.iter().map(|len| *len as usize).collect::<Vec<_>>().iter()));
            let lengths: Vec<usize> = chain.writable().map(|buf| buf.len()).collect();
            assert!(lengths.iter().eq(writable.iter().map(|len| *len as usize).collect::<Vec<_>>().iter()));
            if !readable.is_empty() {
                let mut first = [0];
                assert_eq!((chain.read_at(0, &mut first), u16::from(first[0])), (1, *head));
            }
            if at < keep {
                self.in_flight.push((self.batches.len(), at, *head, chain.writable_bytes()));
            }
        }
        self.available.drain(..keep);
        self.ring.rewind(&mut batch, keep);
        self.batches.push(batch);
    }

    fn complete(&mut self, which: usize, written: u32) {
        if self.in_flight.is_empty() {
            return;
        }
        let (batch, chain, head, writable) = self.in_flight.swap_remove(which % self.in_flight.len());
        let chain = self.batches[batch].chain(chain);
        let written = written.min(writable);
        let bytes = vec![0xa5; written as usize];
        assert_eq!(chain.write_at(0, &bytes), bytes.len());
        if written == 0 {
            let head = chain.head();
            self.ring.complete_head(head);
        } else {
            self.ring.complete(chain, written);
        }
        self.completed.push_back((head, written));
    }

    fn publish(&mut self) {
        let before = self.driver.word(crate::driver::USED + 2);
        let notified = self.ring.publish();
        let after = self.driver.word(crate::driver::USED + 2);
        assert_eq!(usize::from(after.wrapping_sub(before)), self.completed.len());
        self.published.append(&mut self.completed);
        let before = std::mem::replace(&mut self.signalled, after);
        let passed = (before..after).contains(&self.used_event);
        let wanted = if self.features & features::EVENT_IDX == 0 { after != before } else { passed };
        assert_eq!(notified, wanted, "{before}..{after}, used_event is {}", self.used_event);
    }

    fn pop_used(&mut self, more: u16) {
        while let Some(used) = self.driver.pop_used() {
            assert_eq!(Some(used), self.published.pop_front());
        }
        assert!(self.published.is_empty());
        self.used_event = self.driver.used + more;
        self.driver.set_used_event(self.used_event);
    }

    /// The device completes all chains.
    fn finish(mut self) {
        self.step(&Step::Pop { most: usize::MAX, keep: usize::MAX });
        while !self.in_flight.is_empty() {
            self.step(&Step::Complete { which: 0, written: 1 });
        }
        self.step(&Step::Publish);
        self.step(&Step::PopUsed { more: 0 });
        assert!(self.available.is_empty());
        assert_eq!((self.driver.heads_in_flight(), self.driver.unexpected_heads), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_chain_and_no_notification_is_lost(
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
fn indices_wrap_around() {
    let mut model = Model::new(4, features::EVENT_IDX);
    for _ in 0..70_000 {
        model.step(&Step::Add { readable: vec![1], writable: vec![], indirect: false });
        let mut batch = Batch::new();
        assert_eq!(model.ring.pop(&mut batch, 8), 1);
        model.available.clear();
        model.ring.complete(batch.chain(0), 0);
        model.ring.publish();
        assert!(model.driver.pop_used().is_some());
    }
}
