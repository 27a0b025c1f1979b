//! Idle or abandoned rings cost no processor time and no memory, and affect no other guest.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_channel::UnixChannel;
use towline_frontend::wire::{RegionInfo, RequestCode, encode_u32_pair, encode_u64s, feature, protocol};
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions, wait_any};
use towline_vhost_user::{BackendError, Cancel, Device, Next, Queues, ServeError, Worker, serve};

use crate::backend::{Log, Pair, WITHIN};

/// Behaviour of a worker.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    /// Pops no chains, without suppressing kicks.
    Ignores,
    /// Pops one chain in each run.
    PopsOne,
    /// Pops all chains, and never completes them because hardware reads them.
    NeverCompletes,
}

/// A device of one queue that counts the runs of its worker.
struct Counted {
    habit: Habit,
    runs: Arc<AtomicU64>,
    /// Chains that hardware reads, even if their ring is gone.
    in_use: usize,
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

    fn drops_while_disabled(&self, _: usize) -> bool {
        true
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(Self { habit: self.habit, runs: Arc::clone(&self.runs), in_use: 0 }))
    }
}

impl Worker for Counted {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        self.runs.fetch_add(1, Ordering::Relaxed);
        if self.habit == Habit::Ignores {
            return Next::Wait;
        }
        if self.habit == Habit::NeverCompletes {
            let ring = queues.ring(0);
            self.in_use += ring.map_or(0, |ring| ring.pop(&mut towline_vhost_user::Batch::new(), 256));
            return Next::Wait;
        }
        let mut batch = towline_vhost_user::Batch::new();
        let Some(ring) = queues.ring(0) else { return Next::Wait };
        let taken = ring.pop(&mut batch, 1);
        batch.chains().for_each(|chain| ring.complete(chain, 0));
        if taken == 0 { Next::Wait } else { Next::Again }
    }

    fn drain(&mut self, _: usize, _: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        if self.in_use == 0 {
            return Ok(());
        }
        Err(BackendError::new(format!("a card reads {} of its chains", self.in_use)))
    }

    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), BackendError> {
        self.drain(0, queues, deadline)
    }
}

struct Served {
    frontend: Frontend,
    memory: Arc<MemoryArena>,
    queue: Queue,
    runs: Arc<AtomicU64>,
    backend: std::thread::JoinHandle<Result<(), ServeError>>,
}

impl Served {
    fn start(habit: Habit, wished: u64) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        let runs = Arc::<AtomicU64>::default();
        let device: Arc<dyn Device> = Arc::new(Counted { habit, runs: Arc::clone(&runs), in_use: 0 });
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        let backend = std::thread::spawn(move || serve(&channel, &device, &Cancel::new().unwrap()));
        let mut frontend = Frontend::new(near).unwrap();
        let features = frontend.negotiate(0, wished, protocol::REPLY_ACK).unwrap().features;
        let memory = Arc::new(MemoryArena::new(4 << 20).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let queue = Queue::new(&memory, 0, QueueOptions { size: 1024, features }).unwrap();
        frontend.start(&queue, 0).unwrap();
        Self { frontend, memory, queue, runs, backend }
    }

    fn add(&mut self) {
        let buffer = QueueBuffer { guest: self.memory.alloc(8, 8), len: 8 };
        assert!(self.queue.add(&[], &[buffer], 0));
        self.queue.publish();
    }

    /// The worker runs at most `most` times in each 300 ms.
    #[track_caller]
    fn assert_idle(&self, most: u64) {
        // Earlier requests have replies, so the thread has executed them.
        let (before, begun) = (self.runs.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(Duration::from_millis(300));
        let runs = self.runs.load(Ordering::Relaxed) - before;
        // A busy host resumes this thread late.
        let took = begun.elapsed();
        let most = most * u64::try_from(took.as_millis()).unwrap().div_ceil(300);
        assert!(runs <= most, "{runs} runs in {took:?}, expected at most {most}");
    }

    #[track_caller]
    fn wait_for_run(&self, after: u64) {
        let until = Instant::now() + WITHIN;
        while self.runs.load(Ordering::Relaxed) <= after {
            assert!(Instant::now() < until, "the worker does not run");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        self.frontend.stream().shutdown(std::net::Shutdown::Both).unwrap();
        self.backend.join().unwrap().unwrap();
    }
}

#[test]
fn a_ring_that_its_worker_ignores_costs_nothing() {
    let _log = Log::new();
    for wished in [feature::EVENT_IDX, 0] {
        let mut served = Served::start(Habit::Ignores, wished);
        for _ in 0..3 {
            let before = served.runs.load(Ordering::Relaxed);
            served.add();
            // Each new chain causes a run, after which the worker is idle.
            served.wait_for_run(before);
            served.assert_idle(4);
        }
        served.end();
    }
}

#[test]
fn endless_kicks_are_polled_at_intervals() {
    let log = Log::new();
    let mut served = Served::start(Habit::PopsOne, feature::EVENT_IDX);
    let file = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let semaphore = eventfd(u32::MAX, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).unwrap();
    let (closed, _) = std::io::pipe().unwrap();
    let ring = encode_u64s(&[0]);
    // This one ends after it was paused.
    let ends = eventfd(300, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).unwrap();
    let kicks = [ends, semaphore, file("/dev/zero"), file("/dev/null"), file("/dev/urandom"), closed.into()];
    for (reported, kick) in (1..).zip(kicks) {
        served.frontend.request(RequestCode::SET_VRING_KICK, &ring, &[kick.as_fd()]).unwrap();
        // The first events of such a descriptor count as kicks.
        let until = Instant::now() + WITHIN;
        while log.count("is not a readable eventfd") + log.count("spurious kicks") < reported {
            assert!(Instant::now() < until, "descriptor {reported} is not reported");
            std::thread::yield_now();
        }
        served.assert_idle(60);
    }
    assert_eq!(log.count("is not a readable eventfd"), 3);
    assert_eq!(log.count("spurious kicks"), 3);
    // With an eventfd the ring works again.
    let kick = served.queue.kick_fd().try_clone_to_owned().unwrap();
    served.frontend.request(RequestCode::SET_VRING_KICK, &ring, &[kick.as_fd()]).unwrap();
    served.add();
    served.queue.force_kick();
    served.queue.wait(WITHIN).unwrap();
    served.end();
}

#[test]
fn a_disabled_queue_drops_its_chains_in_slices() {
    let _log = Log::new();
    let mut served = Served::start(Habit::PopsOne, feature::EVENT_IDX | feature::INDIRECT);
    served.frontend.enable(0, false).unwrap();
    // More chains than are dropped in one run; one kick is enough for all.
    let mut added = 0;
    while served.queue.free_descriptors() > 0 {
        let buffer = QueueBuffer { guest: served.memory.alloc(8, 8), len: 8 };
        assert!(served.queue.add(&[], &[buffer], 0));
        added += 1;
    }
    served.queue.publish();
    let until = Instant::now() + WITHIN;
    let mut returned = 0;
    while returned < added {
        if served.queue.pop_used().unwrap().is_some() {
            returned += 1;
        }
        assert!(Instant::now() < until, "{returned} of {added} were returned");
    }
    served.assert_idle(4);
    served.end();
}

#[test]
fn chains_in_use_are_not_returned() {
    let _log = Log::new();
    // When the ring is stopped, and when its memory is replaced: the chains stay in flight, and the
    // connection ends.
    for stops in [true, false] {
        let mut served = Served::start(Habit::NeverCompletes, feature::EVENT_IDX);
        let before = served.runs.load(Ordering::Relaxed);
        served.add();
        served.wait_for_run(before);
        let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
        let reply = if stops {
            served.frontend.stop(0).map(drop)
        } else {
            served.frontend.set_mem_table(Some(&memory)).map(drop)
        };
        assert!(reply.is_err(), "the frontend would reuse the memory");
        let error = served.backend.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("ring 0 cannot be stopped: a card reads 1 of its chains"), "{error}");
        assert_eq!(served.queue.pop_used().unwrap().map(|used| used.token), None);
    }
}

#[test]
fn an_abandoned_ring_is_drained_when_it_is_stopped() {
    let _log = Log::new();
    let mut served = Served::start(Habit::NeverCompletes, feature::EVENT_IDX);
    let before = served.runs.load(Ordering::Relaxed);
    served.add();
    served.wait_for_run(before);
    let payload = [encode_u32_pair(0, 0), encode_u64s(&[0x7000_0000; 3]), encode_u64s(&[0])].concat();
    served.frontend.request(RequestCode::SET_VRING_ADDR, &payload, &[]).unwrap();
    assert!(wait_any(&[served.queue.err_fd()], WITHIN).unwrap(), "the fault is not reported");
    assert!(served.frontend.stop(0).is_err(), "the frontend would reuse the memory");
    let error = served.backend.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("ring 0 cannot be stopped: a card reads 1 of its chains"), "{error}");
}

/// Number of mappings of a memfd with this name.
fn mappings_of(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("memfd:{name} "))).count()
}

#[test]
fn removed_memory_is_unmapped() {
    let _log = Log::new();
    let mut pair = Pair::start();
    let other = memfd_create("hotplugged", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 1 << 20).unwrap();
    let region =
        RegionInfo { guest_address: 0x8000_0000, size: 1 << 20, user_address: 0x1000_0000, mmap_offset: 0 };
    let payload = [encode_u64s(&[0]), region.encode()].concat();
    for _ in 0..3 {
        pair.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[other.as_fd()]).unwrap();
        assert_eq!(mappings_of("hotplugged"), 1);
        // Both rings use the memory with the region.
        pair.echo(0);
        pair.other_echoes();
        pair.frontend.request(RequestCode::REM_MEM_REG, &payload, &[]).unwrap();
        assert_eq!(mappings_of("hotplugged"), 0, "unmapped before the reply");
        pair.echo(0);
    }
    pair.end().unwrap();
}

#[test]
fn truncated_memory_ends_only_its_session() {
    let log = Log::new();
    let mut other = Pair::start();
    other.echo(0);
    for round in 1..=3 {
        let mut pair = Pair::start();
        pair.echo(0);
        pair.echo(1);
        ftruncate(pair.memory.fd(), 0).unwrap();
        pair.rings[0].force_kick();
        let error = pair.wait_closed_by_backend().unwrap_err();
        assert!(matches!(error, ServeError::Session { .. }), "{error}");
        assert!(error.to_string().contains("can no longer be accessed (SIGBUS)"), "{error}");
        assert!(log.count("is broken") >= round);
        // Another guest of this process continues, and a new one can be served.
        other.echo(0);
        other.other_echoes();
    }
    other.end().unwrap();
}

#[test]
fn a_truncated_dirty_log_ends_only_its_session() {
    let _log = Log::new();
    let mut other = Pair::start();
    let mut pair = Pair::start();
    let log = MemoryArena::new(1 << 20).unwrap();
    pair.frontend.set_log(&log).unwrap();
    pair.frontend.set_features(pair.features | feature::LOG_ALL).unwrap();
    pair.echo(0);
    assert!(!log.take_dirty_pages().is_empty());
    ftruncate(log.fd(), 0).unwrap();
    let out = QueueBuffer { guest: pair.memory.alloc(8, 8), len: 8 };
    assert!(pair.rings[0].add(&[out], &[out], 1));
    pair.rings[0].publish();
    let error = pair.wait_closed_by_backend().unwrap_err();
    assert!(error.to_string().contains("can no longer be accessed (SIGBUS)"), "{error}");
    other.echo(0);
    other.end().unwrap();
}

#[test]
fn a_ring_in_missing_huge_pages_ends_only_its_session() {
    let name = "a_ring_in_missing_huge_pages_ends_only_its_session";
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
    let region =
        RegionInfo { guest_address: 0x8000_0000, size: 2 << 20, user_address: 0x1000_0000, mmap_offset: 0 };
    let payload = [encode_u64s(&[0]), region.encode()].concat();
    pair.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[huge.as_fd()]).unwrap();
    let addresses = [region.user_address, region.user_address + 0x2000, region.user_address + 0x1000];
    let payload = [encode_u32_pair(0, 0), encode_u64s(&addresses), encode_u64s(&[0])].concat();
    pair.frontend.request(RequestCode::SET_VRING_ADDR, &payload, &[]).unwrap();
    pair.frontend
        .send_unacked(RequestCode::SET_VRING_KICK, &encode_u64s(&[0]), &[pair.rings[0].kick_fd()])
        .unwrap();
    let error = pair.wait_closed_by_backend().unwrap_err();
    assert!(error.to_string().contains("can no longer be accessed (SIGBUS)"), "{error}");
    other.echo(0);
    other.end().unwrap();
}
