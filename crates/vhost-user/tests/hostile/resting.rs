//! What a guest or a frontend leaves behind costs no processor time, no memory and no other guest.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_channel::UnixChannel;
use towline_frontend::wire::{Code, RegionInfo, feature, halves, protocol, words};
use towline_frontend::{Buffer, Error, Frontend, Memory, Queue, QueueOptions, wait_any};
use towline_vhost_user::{Cancel, Device, Next, PollFd, Queues, Refusal, ServeError, Worker, serve};

use crate::backend::{Log, Pair, WITHIN};

/// What a worker does with its ring.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    /// Nothing: it wants none of it, and does not say so.
    Leaves,
    /// It takes one chain in a turn.
    TakesOne,
    /// It takes all, and somebody else never lets go of them.
    Lends,
}

/// A device of one queue that counts its turns.
struct Counted {
    habit: Habit,
    turns: Arc<AtomicU64>,
    /// Chains that somebody else has, whatever becomes of their ring.
    lent: usize,
}

impl Device for Counted {
    fn name(&self) -> &str {
        "counted"
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        0
    }

    fn discards(&self, _: usize) -> bool {
        true
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, Refusal> {
        Ok(Box::new(Self { habit: self.habit, turns: Arc::clone(&self.turns), lent: 0 }))
    }
}

impl Worker for Counted {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        self.turns.fetch_add(1, Ordering::Relaxed);
        if self.habit == Habit::Leaves {
            return Next::Wait;
        }
        if self.habit == Habit::Lends {
            let ring = queues.ring(0);
            self.lent += ring.map_or(0, |ring| ring.pop(&mut towline_vhost_user::Batch::new(), 256));
            return Next::Wait;
        }
        let mut batch = towline_vhost_user::Batch::new();
        let Some(ring) = queues.ring(0) else { return Next::Wait };
        let taken = ring.pop(&mut batch, 1);
        batch.chains().for_each(|chain| ring.complete(chain, 0));
        if taken == 0 { Next::Wait } else { Next::Again }
    }

    fn poll<'w>(&'w self, _: &mut Vec<PollFd<'w>>) {}

    fn drain(&mut self, _: usize, _: &mut Queues<'_>, _: Instant) -> Result<(), Refusal> {
        let left = self.lent;
        if left == 0 { Ok(()) } else { Err(Refusal::new(format!("a card reads {left} of its chains"))) }
    }

    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), Refusal> {
        self.drain(0, queues, deadline)
    }
}

struct Served {
    frontend: Frontend,
    memory: Arc<Memory>,
    queue: Queue,
    turns: Arc<AtomicU64>,
    backend: std::thread::JoinHandle<Result<(), ServeError>>,
}

impl Served {
    fn start(habit: Habit, wished: u64) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        let turns = Arc::<AtomicU64>::default();
        let device: Arc<dyn Device> = Arc::new(Counted { habit, turns: Arc::clone(&turns), lent: 0 });
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        let backend = std::thread::spawn(move || serve(&channel, &device, &Cancel::new().unwrap()));
        let mut frontend = Frontend::new(near).unwrap();
        let features = frontend.negotiate(0, wished, protocol::REPLY_ACK).unwrap().features;
        let memory = Arc::new(Memory::new(1 << 20).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let queue = Queue::new(&memory, 0, QueueOptions { size: 256, features }).unwrap();
        frontend.start(&queue, 0).unwrap();
        Self { frontend, memory, queue, turns, backend }
    }

    fn add(&mut self) {
        let buffer = Buffer { guest: self.memory.alloc(8, 8), len: 8 };
        assert!(self.queue.add(&[], &[buffer], 0));
        self.queue.publish();
    }

    /// In 300 ms the worker has at most so many turns.
    #[track_caller]
    fn rests(&self, most: u64) {
        // What was sent before has an answer, so the thread is past it; whatever it does then, it may do once more.
        let before = self.turns.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(300));
        let turns = self.turns.load(Ordering::Relaxed) - before;
        assert!(turns <= most, "{turns} turns in 300 ms, at most {most} were to be expected");
    }

    #[track_caller]
    fn waits_for_turns(&self, more_than: u64) {
        let until = Instant::now() + WITHIN;
        while self.turns.load(Ordering::Relaxed) <= more_than {
            assert!(Instant::now() < until, "the worker has no turn");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        self.frontend.stream().shutdown(std::net::Shutdown::Both).unwrap();
        self.backend.join().unwrap().unwrap();
    }
}

#[test]
fn a_ring_that_its_worker_leaves_alone_costs_nothing() {
    let _log = Log::new();
    for wished in [feature::EVENT_IDX, 0] {
        let mut served = Served::start(Habit::Leaves, wished);
        for _ in 0..3 {
            let before = served.turns.load(Ordering::Relaxed);
            served.add();
            // Each time that there is more it has a turn, and then rests.
            served.waits_for_turns(before);
            served.rests(4);
        }
        served.end();
    }
}

#[test]
fn kicks_that_never_end_are_polled_at_intervals() {
    let log = Log::new();
    let mut served = Served::start(Habit::TakesOne, feature::EVENT_IDX);
    let file = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let semaphore = eventfd(u32::MAX, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).unwrap();
    let (closed, _) = std::io::pipe().unwrap();
    let ring = words(&[0]);
    // This one falls silent after it was paused: then there is nothing to look at any more.
    let ends = eventfd(300, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).unwrap();
    for kick in [ends, semaphore, file("/dev/zero"), file("/dev/null"), file("/dev/urandom"), closed.into()] {
        served.frontend.request(Code::SET_VRING_KICK, &ring, &[kick.as_fd()]).unwrap();
        // The first kicks of such a descriptor are taken for kicks.
        std::thread::sleep(Duration::from_millis(100));
        served.rests(60);
    }
    assert_eq!(log.count("is no eventfd that can be read"), 3);
    assert_eq!(log.count("is kicked again and again"), 3);
    // With a kick that is one the ring goes on.
    let kick = served.queue.kick().try_clone_to_owned().unwrap();
    served.frontend.request(Code::SET_VRING_KICK, &ring, &[kick.as_fd()]).unwrap();
    served.add();
    served.queue.force_kick();
    served.queue.wait(WITHIN).unwrap();
    served.end();
}

#[test]
fn what_a_disabled_queue_is_given_goes_in_slices() {
    let _log = Log::new();
    let mut served = Served::start(Habit::TakesOne, feature::EVENT_IDX | feature::INDIRECT);
    served.frontend.enable(0, false).unwrap();
    // More than is discarded in one turn: all of it comes back by one kick.
    let mut served_size = 0;
    while served.queue.free_descriptors() > 0 {
        let buffer = Buffer { guest: served.memory.alloc(8, 8), len: 8 };
        assert!(served.queue.add(&[], &[buffer], 0));
        served_size += 1;
    }
    served.queue.publish();
    let until = Instant::now() + WITHIN;
    let mut back = 0;
    while back < served_size {
        if served.queue.pop_used().unwrap().is_some() {
            back += 1;
        }
        assert!(Instant::now() < until, "{back} of {served_size} came back");
    }
    served.rests(4);
    served.end();
}

#[test]
fn chains_that_are_still_in_use_do_not_go_back() {
    let _log = Log::new();
    // When the ring is to stop, and when its memory is to go: whatever is lent then stays so, and the connection ends.
    for stops in [true, false] {
        let mut served = Served::start(Habit::Lends, feature::EVENT_IDX);
        let before = served.turns.load(Ordering::Relaxed);
        served.add();
        served.waits_for_turns(before);
        let memory = Arc::new(Memory::new(1 << 20).unwrap());
        let answered = if stops {
            served.frontend.stop(0).map(drop)
        } else {
            served.frontend.set_mem_table(Some(&memory)).map(drop)
        };
        assert!(answered.is_err(), "the frontend takes the memory for free");
        let error = served.backend.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("ring 0 cannot be stopped: a card reads 1 of its chains"), "{error}");
        assert_eq!(served.queue.pop_used().unwrap().map(|used| used.token), None);
    }
}

#[test]
fn a_ring_that_lost_its_places_is_drained_before_its_stop_is_answered() {
    let _log = Log::new();
    let mut served = Served::start(Habit::Lends, feature::EVENT_IDX);
    let before = served.turns.load(Ordering::Relaxed);
    served.add();
    served.waits_for_turns(before);
    let payload = [halves(0, 0), words(&[0x7000_0000; 3]), words(&[0])].concat();
    served.frontend.request(Code::SET_VRING_ADDR, &payload, &[]).unwrap();
    assert!(wait_any(&[served.queue.err()], WITHIN).unwrap(), "the ring is not broken");
    assert!(served.frontend.stop(0).is_err(), "the frontend takes the memory for free");
    let error = served.backend.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("ring 0 cannot be stopped: a card reads 1 of its chains"), "{error}");
}

/// How many mappings of a memfd with this name the process has.
fn mapped(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("memfd:{name} "))).count()
}

#[test]
fn memory_that_was_taken_away_is_unmapped() {
    let _log = Log::new();
    let mut pair = Pair::start();
    let other = memfd_create("hotplugged", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 1 << 20).unwrap();
    let region = RegionInfo { guest: 0x8000_0000, size: 1 << 20, user: 0x1000_0000, offset: 0 };
    let payload = [words(&[0]), region.encode()].concat();
    for _ in 0..3 {
        pair.frontend.request(Code::ADD_MEM_REG, &payload, &[other.as_fd()]).unwrap();
        assert_eq!(mapped("hotplugged"), 1);
        // Both rings use the memory with the region in it, and what is discarded too.
        pair.echo(0);
        pair.other_echoes();
        pair.frontend.request(Code::REM_MEM_REG, &payload, &[]).unwrap();
        assert_eq!(mapped("hotplugged"), 0, "the answer comes when it is unmapped");
        pair.echo(0);
    }
    pair.end().unwrap();
}

#[test]
fn a_frontend_that_truncates_its_memory_ends_alone() {
    let log = Log::new();
    let mut other = Pair::start();
    other.echo(0);
    for round in 1..=3 {
        let mut pair = Pair::start();
        pair.echo(0);
        pair.echo(1);
        ftruncate(pair.memory.fd(), 0).unwrap();
        pair.rings[0].force_kick();
        let error = pair.end_by_itself().unwrap_err();
        assert!(matches!(error, ServeError::Session { .. }), "{error}");
        assert!(error.to_string().contains("cannot be accessed any more (SIGBUS)"), "{error}");
        assert!(log.count("is broken") >= round);
        // Another guest of this process goes on, and a new one can be served.
        other.echo(0);
        other.other_echoes();
    }
    other.end().unwrap();
}

#[test]
fn a_dirty_log_that_is_truncated_ends_its_session_alone() {
    let _log = Log::new();
    let mut other = Pair::start();
    let mut pair = Pair::start();
    let log = Memory::new(1 << 20).unwrap();
    pair.frontend.set_log(&log).unwrap();
    pair.frontend.set_features(pair.features | feature::LOG_ALL).unwrap();
    pair.echo(0);
    assert!(!log.take_marked().is_empty());
    ftruncate(log.fd(), 0).unwrap();
    let out = Buffer { guest: pair.memory.alloc(8, 8), len: 8 };
    assert!(pair.rings[0].add(&[out], &[out], 1));
    pair.rings[0].publish();
    let error = pair.end_by_itself().unwrap_err();
    assert!(error.to_string().contains("cannot be accessed any more (SIGBUS)"), "{error}");
    other.echo(0);
    other.end().unwrap();
}

#[test]
fn a_ring_in_huge_pages_that_there_are_none_of_ends_its_session_alone() {
    let name = "a_ring_in_huge_pages_that_there_are_none_of_ends_its_session_alone";
    let _log = Log::new();
    let free = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    let Ok(huge) = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
        return towline_lab::skip(name, "this kernel has no hugetlbfs");
    };
    if free.trim() != "0" || ftruncate(&huge, 2 << 20).is_err() {
        return towline_lab::skip(name, "this machine has huge pages");
    }
    let mut other = Pair::start();
    let mut pair = Pair::start();
    pair.frontend.stop(0).unwrap();
    let region = RegionInfo { guest: 0x8000_0000, size: 2 << 20, user: 0x1000_0000, offset: 0 };
    let payload = [words(&[0]), region.encode()].concat();
    pair.frontend.request(Code::ADD_MEM_REG, &payload, &[huge.as_fd()]).unwrap();
    let places = [region.user, region.user + 0x2000, region.user + 0x1000];
    let payload = [halves(0, 0), words(&places), words(&[0])].concat();
    pair.frontend.request(Code::SET_VRING_ADDR, &payload, &[]).unwrap();
    pair.frontend.send_unacked(Code::SET_VRING_KICK, &words(&[0]), &[pair.rings[0].kick()]).unwrap();
    let error = pair.end_by_itself().unwrap_err();
    assert!(error.to_string().contains("cannot be accessed any more (SIGBUS)"), "{error}");
    other.echo(0);
    other.end().unwrap();
}

#[test]
fn a_worker_that_waits_for_its_frontends_pages_does_not_keep_the_process() {
    // A descriptor that the frontend makes blocking again, and full, after it was handed over.
    let _log = Log::new();
    let (near, far) = UnixStream::pair().unwrap();
    let cancel = Cancel::new().unwrap();
    let token = cancel.clone();
    let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
    let backend = std::thread::spawn(move || {
        let device: Arc<dyn Device> = Arc::new(crate::harness::Echo);
        serve(&channel, &device, &token)
    });
    let mut frontend = Frontend::new(near).unwrap();
    let features = frontend.negotiate(0, 0, protocol::REPLY_ACK).unwrap().features;
    let memory = Arc::new(Memory::new(1 << 20).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut queue = Queue::new(&memory, 0, QueueOptions { size: 16, features }).unwrap();
    frontend.start(&queue, 0).unwrap();
    // One less than the most that it can count: the next call would wait.
    rustix::io::write(queue.call(), &(u64::MAX - 2).to_ne_bytes()).unwrap();
    while rustix::io::write(queue.call(), &1u64.to_ne_bytes()).is_ok() {}
    rustix::io::ioctl_fionbio(queue.call(), false).unwrap();
    queue.enable_callback(1);
    let buffer = Buffer { guest: memory.alloc(8, 8), len: 8 };
    assert!(queue.add(&[buffer], &[], 0));
    queue.publish();
    frontend.send_unacked(Code::GET_VRING_BASE, &halves(0, 0), &[]).unwrap();
    cancel.cancel();
    let begun = Instant::now();
    let error = backend.join().unwrap().unwrap_err();
    assert!(begun.elapsed() < WITHIN, "{:?}", begun.elapsed());
    assert!(!matches!(error, ServeError::Queues { .. }), "{error}");
    // It is let go: nothing is left behind by this test.
    rustix::io::read(queue.call(), &mut [0; 8]).unwrap();
    let _: Option<Error> = frontend.stop(0).err();
}
