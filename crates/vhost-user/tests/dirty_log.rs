//! The dirty log over the orders of requests that QEMU sends: random sequences of starts and stops, the log
//! on and off, before and after the start of a ring, of other sizes, memory tables, connections that break,
//! one pair of queues or two, while the device writes to each buffer as soon as it has it. The frontend
//! copies each page that it finds marked, as a migration does; at the end its copy equals guest memory, page
//! by page.
//!
//! ```text
//!   start, for each pair:  ENABLE ×2, SET_FEATURES, [pair 0: SET_MEM_TABLE], {NUM BASE ADDR KICK CALL} ×2, [pair 0: SET_LOG_BASE]
//!   log on while running:  SET_LOG_BASE, then for each pair SET_FEATURES, ADDR ×2
//!   stop:                  GET_VRING_BASE of all; QEMU reads its log a last time, and releases it
//! ```
//! `TOWLINE_SOAK_LOG_ORDERS` is the number of orders.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_channel::UnixChannel;
use towline_frontend::wire::{RequestCode, encode_u32_pair, encode_u64s, feature, protocol};
use towline_frontend::{Frontend, GUEST_BASE, MemoryArena, Queue, QueueBuffer, QueueOptions, wait_any};
use towline_vhost_user::{BackendError, Batch, Cancel, Device, Next, Queues, Worker, serve};

const PAGE: u64 = 4096;
const REGION_BYTES: u64 = 1 << 20;
const RING_SIZE: u16 = 16;
const BUFFERS: u64 = 12;
/// Each buffer begins in separate pages.
const BUFFER_PAGES: u64 = 3;
const EVENTS: usize = 10;
const WITHIN: Duration = Duration::from_secs(60);
/// Time that a frontend waits, at some of its starts, for a device that works before it has its log.
const EARLY_WITHIN: Duration = Duration::from_micros(300);

/// A network card whose tap is never empty: it fills each receive buffer, and leaves some of them in the ring
/// again.
#[derive(Default)]
struct Flooded {
    frames: AtomicU64,
}

struct FloodedPair(Arc<Flooded>);

impl Flooded {
    fn fill(&self, ring: &mut towline_vhost_user::Ring) {
        let mut batch = Batch::new();
        while ring.pop(&mut batch, 4) > 0 {
            let frame = self.frames.fetch_add(1, Ordering::Relaxed);
            // As a frame that needs more buffers than there are.
            let kept = if frame.is_multiple_of(5) { batch.len() - 1 } else { batch.len() };
            for (index, chain) in batch.chains().enumerate() {
                let bytes: Vec<u8> = frame.to_le_bytes().repeat(chain.writable_bytes() as usize / 8);
                let written = u32::try_from(chain.write_at(0, &bytes)).unwrap();
                if index < kept {
                    ring.complete(chain, written);
                } else {
                    ring.mark_written(chain, written);
                }
            }
            ring.rewind(&mut batch, kept);
            ring.publish();
        }
    }
}

struct Card(Arc<Flooded>);

impl Device for Card {
    fn name(&self) -> &str {
        "flooded"
    }

    fn queue_count(&self) -> usize {
        4
    }

    fn queues_per_worker(&self) -> usize {
        2
    }

    fn drops_while_disabled(&self, queue: usize) -> bool {
        queue % 2 == 1
    }

    fn features(&self) -> u64 {
        0
    }

    fn worker(&self, _: usize) -> Result<Box<dyn Worker>, BackendError> {
        Ok(Box::new(FloodedPair(Arc::clone(&self.0))))
    }
}

impl Worker for FloodedPair {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if let Some(ring) = queues.ring(0) {
            self.0.fill(ring);
        }
        if let Some(ring) = queues.ring(1) {
            let mut batch = Batch::new();
            while ring.pop(&mut batch, 8) > 0 {
                batch.chains().for_each(|chain| ring.complete(chain, 0));
            }
        }
        Next::Wait
    }
}

/// A queue of the guest's driver, with its buffers.
struct DriverQueue {
    queue: Queue,
    buffers: u64,
    /// By buffer: the device may have written it before a connection broke and not completed it since. The
    /// driver does not read it.
    torn: [bool; BUFFERS as usize],
    /// Where the ring resumes.
    base: u16,
}

impl DriverQueue {
    fn is_receiving(&self) -> bool {
        self.queue.index().is_multiple_of(2)
    }

    fn add(&mut self, buffer: u64, random: &mut fastrand::Rng) {
        let len = u32::try_from(random.u64(1..=BUFFER_PAGES * PAGE / 8) * 8).unwrap();
        let described = [QueueBuffer { guest: self.buffers + buffer * BUFFER_PAGES * PAGE, len }];
        let (out, back) = if self.is_receiving() {
            ([].as_slice(), &described[..])
        } else {
            (&described[..], [].as_slice())
        };
        assert!(self.queue.add(out, back, buffer));
    }

    /// Takes used buffers back, and makes them available again. Returns their number.
    fn turn(&mut self, random: &mut fastrand::Rng) -> usize {
        let used: Vec<u64> =
            std::iter::from_fn(|| self.queue.pop_used().unwrap()).map(|used| used.token).collect();
        for buffer in &used {
            self.torn[usize::try_from(*buffer).unwrap()] = false;
            self.add(*buffer, random);
        }
        self.queue.publish();
        used.len()
    }
}

/// The card's process: its thread ends with the connection.
struct Served(JoinHandle<()>);

fn connect(card: &Arc<Flooded>) -> (Frontend, Served) {
    let (near, far) = UnixStream::pair().unwrap();
    let device: Arc<dyn Device> = Arc::new(Card(Arc::clone(card)));
    let serve = move || {
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        serve(&channel, &device, &Cancel::new().unwrap()).unwrap();
    };
    (Frontend::new(near).unwrap(), Served(std::thread::spawn(serve)))
}

/// State of the card in QEMU, and the copy of the guest at the destination.
struct Qemu {
    card: Arc<Flooded>,
    connection: Option<(Frontend, Served)>,
    memory: Arc<MemoryArena>,
    features: u64,
    queues: Vec<DriverQueue>,
    running: bool,
    /// A migration is under way.
    logs: bool,
    /// Released with the last ring.
    log: Option<MemoryArena>,
    log_pages_more: u64,
    copy: Vec<u8>,
    random: fastrand::Rng,
}

/// A change by the guest, its user, or a migration.
#[derive(Debug, Clone, Copy)]
enum Event {
    StartOrStop,
    LogOnOrOff,
    Traffic,
    Copy,
    MemoryTable,
    LongerLog,
    ShorterLog,
    Enable,
    Reconnect,
}

impl Qemu {
    fn new(pairs: u32, mut random: fastrand::Rng) -> Self {
        let card = Arc::new(Flooded::default());
        let (mut frontend, served) = connect(&card);
        let memory = Arc::new(MemoryArena::with_regions(REGION_BYTES, 2).unwrap());
        let wanted = if random.bool() { feature::EVENT_IDX } else { 0 };
        let features = negotiate(&mut frontend, wanted);
        let mut queues: Vec<_> = (0..2 * pairs)
            .map(|index| DriverQueue {
                queue: Queue::new(&memory, index, QueueOptions { size: RING_SIZE, features }).unwrap(),
                buffers: memory.alloc(BUFFERS * BUFFER_PAGES * PAGE, PAGE),
                torn: [false; BUFFERS as usize],
                base: 0,
            })
            .collect();
        for driver in &mut queues {
            (0..BUFFERS).for_each(|buffer| driver.add(buffer, &mut random));
            driver.queue.publish();
        }
        let copy = vec![0; usize::try_from(2 * REGION_BYTES).unwrap()];
        let connection = Some((frontend, served));
        Self {
            card,
            connection,
            memory,
            features,
            queues,
            running: false,
            logs: false,
            log: None,
            log_pages_more: 0,
            copy,
            random,
        }
    }

    fn frontend(&mut self) -> &mut Frontend {
        &mut self.connection.as_mut().unwrap().0
    }

    fn request(&mut self, code: RequestCode, payload: &[u8]) {
        self.frontend().request(code, payload, &[]).unwrap();
    }

    fn set_features(&mut self) {
        let features = self.features | if self.logs { feature::LOG_ALL } else { 0 };
        self.frontend().set_features(features).unwrap();
    }

    fn set_address(&mut self, index: usize) {
        let Self { connection, queues, logs, .. } = self;
        connection.as_mut().unwrap().0.set_vring_addr(&queues[index].queue, *logs).unwrap();
    }

    /// Sends a log of the present size; returns the former one.
    fn set_log(&mut self) -> Option<MemoryArena> {
        let log = MemoryArena::new((GUEST_BASE + 2 * REGION_BYTES) / PAGE / 8 + self.log_pages_more * PAGE)
            .unwrap();
        self.frontend().set_log(&log).unwrap();
        self.log.replace(log)
    }

    fn set_mem_table(&mut self) {
        let memory = Arc::clone(&self.memory);
        self.frontend().set_mem_table(Some(&memory)).unwrap();
    }

    /// `vhost_net_start`.
    fn start(&mut self) {
        // Another frontend may send the log first.
        let log_first = self.logs && self.random.u8(..8) == 0;
        for pair in 0..self.queues.len() / 2 {
            for index in [2 * pair, 2 * pair + 1] {
                self.request(
                    RequestCode::SET_VRING_ENABLE,
                    &encode_u32_pair(u32::try_from(index).unwrap(), 1),
                );
            }
            self.set_features();
            if pair == 0 {
                self.set_mem_table();
                if log_first {
                    self.set_log();
                }
            }
            for index in [2 * pair, 2 * pair + 1] {
                self.start_ring(index);
            }
            if pair == 0 && self.logs && !log_first {
                if self.random.bool() {
                    self.wait_for_early_frames();
                }
                self.set_log();
            }
        }
        self.running = true;
    }

    fn start_ring(&mut self, index: usize) {
        let ring = u32::try_from(index).unwrap();
        let base = self.queues[index].base;
        self.request(RequestCode::SET_VRING_NUM, &encode_u32_pair(ring, RING_SIZE.into()));
        self.request(RequestCode::SET_VRING_BASE, &encode_u32_pair(ring, base.into()));
        self.set_address(index);
        let Self { connection, queues, .. } = self;
        let (frontend, queue) = (&mut connection.as_mut().unwrap().0, &queues[index].queue);
        let payload = encode_u64s(&[ring.into()]);
        frontend.request(RequestCode::SET_VRING_ERR, &payload, &[queue.err_fd()]).unwrap();
        frontend.request(RequestCode::SET_VRING_KICK, &payload, &[queue.kick_fd()]).unwrap();
        frontend.request(RequestCode::SET_VRING_CALL, &payload, &[queue.call_fd()]).unwrap();
    }

    fn wait_for_early_frames(&mut self) {
        let used = |driver: &DriverQueue| {
            driver.queue.memory().load_le16(driver.queue.addresses().used + 2, Ordering::Acquire)
        };
        let (until, before) = (Instant::now() + EARLY_WITHIN, used(&self.queues[0]));
        while used(&self.queues[0]) == before && Instant::now() < until {
            std::thread::yield_now();
        }
    }

    /// `vhost_net_stop`.
    fn stop(&mut self) {
        for index in 0..self.queues.len() {
            let base = self.frontend().stop(u32::try_from(index).unwrap()).unwrap();
            self.queues[index].base = base;
        }
        self.release_log();
        self.running = false;
    }

    fn release_log(&mut self) {
        self.copy_marked();
        self.log = None;
    }

    /// `vhost_migration_log`. A migration copies all pages first.
    fn switch_log(&mut self) {
        self.logs = !self.logs;
        if self.running {
            if self.logs {
                self.set_log();
            }
            for pair in 0..self.queues.len() / 2 {
                self.set_features();
                [2 * pair, 2 * pair + 1].into_iter().for_each(|index| self.set_address(index));
            }
            if !self.logs {
                self.log = None;
            }
        }
        if self.logs {
            self.copy_pages(0..2 * REGION_BYTES / PAGE);
        }
    }

    /// `vhost_commit`: a longer log comes before the table, a shorter one after it; the former one is read
    /// again.
    fn resize_log(&mut self, pages_more: u64) {
        let grows = pages_more > self.log_pages_more;
        if !grows {
            self.set_mem_table();
        }
        self.log_pages_more = pages_more;
        if let Some(former) = self.set_log() {
            let current = self.log.replace(former);
            self.copy_marked();
            self.log = current;
        }
        if grows {
            self.set_mem_table();
        }
    }

    /// The card's process is replaced: QEMU takes its used index as the base, and logs the used rings itself.
    fn reconnect(&mut self) {
        let (frontend, served) = self.connection.take().unwrap();
        drop(frontend);
        served.0.join().unwrap();
        for index in 0..self.queues.len() {
            let driver = &mut self.queues[index];
            let used = driver.queue.addresses().used;
            driver.base = driver.queue.memory().load_le16(used + 2, Ordering::Acquire);
            driver.torn = [true; BUFFERS as usize];
            if self.running {
                self.copy_pages((used - GUEST_BASE) / PAGE..(used - GUEST_BASE) / PAGE + 1);
            }
        }
        // What was completed is not torn.
        self.take_used();
        self.release_log();
        let (mut frontend, served) = connect(&self.card);
        negotiate(&mut frontend, self.features & feature::EVENT_IDX);
        self.connection = Some((frontend, served));
        if self.running {
            self.start();
        }
    }

    fn take_used(&mut self) -> usize {
        let Self { queues, random, .. } = self;
        queues.iter_mut().map(|driver| driver.turn(random)).sum()
    }

    /// The guest sends and receives.
    fn traffic(&mut self) {
        let until = Instant::now() + EARLY_WITHIN;
        while self.take_used() == 0 && self.running && Instant::now() < until {
            std::thread::yield_now();
        }
    }

    /// Reads and clears the log, and then copies the pages.
    fn copy_marked(&mut self) {
        let marked = self.log.as_ref().map(MemoryArena::take_dirty_pages).unwrap_or_default();
        for page in marked {
            let page = page - GUEST_BASE / PAGE;
            self.copy_pages(page..page + 1);
        }
    }

    /// Copies pages, counted from the beginning of memory.
    fn copy_pages(&mut self, pages: std::ops::Range<u64>) {
        let at = |page: u64| usize::try_from(page * PAGE).unwrap();
        self.memory.read(GUEST_BASE + pages.start * PAGE, &mut self.copy[at(pages.start)..at(pages.end)]);
    }

    /// The first page that the device wrote and that differs from its copy.
    fn first_lost_page(&self) -> Option<String> {
        let differs = |page: u64| {
            let at = usize::try_from(page * PAGE).unwrap();
            self.memory.bytes(GUEST_BASE + page * PAGE, PAGE as usize) != self.copy[at..at + PAGE as usize]
        };
        self.queues.iter().find_map(|driver| {
            let ring = driver.queue.index();
            let used = (driver.queue.addresses().used - GUEST_BASE) / PAGE;
            let first = (driver.buffers - GUEST_BASE) / PAGE;
            let read = |page: &u64| !driver.torn[usize::try_from(page / BUFFER_PAGES).unwrap()];
            let of_buffers = (0..BUFFERS * BUFFER_PAGES).filter(read).find(|page| differs(first + page));
            let of_ring = differs(used).then(|| format!("the used ring {ring}"));
            of_ring.or_else(|| Some(format!("page {} of the buffers of ring {ring}", of_buffers?)))
        })
    }

    fn execute(&mut self, event: Event) {
        match event {
            Event::StartOrStop if self.running => self.stop(),
            Event::StartOrStop => self.start(),
            Event::LogOnOrOff => self.switch_log(),
            Event::Traffic => self.traffic(),
            Event::Copy => self.copy_marked(),
            Event::MemoryTable if self.running => self.set_mem_table(),
            Event::LongerLog if self.log.is_some() => self.resize_log(self.log_pages_more + 1),
            Event::ShorterLog if self.log.is_some() && self.log_pages_more > 0 => {
                self.resize_log(self.log_pages_more - 1);
            }
            Event::Enable if self.running => {
                let ring = u32::try_from(self.random.usize(..self.queues.len())).unwrap();
                let enabled = self.random.bool();
                self.request(RequestCode::SET_VRING_ENABLE, &encode_u32_pair(ring, enabled.into()));
            }
            Event::Reconnect => self.reconnect(),
            _ => {}
        }
    }
}

fn negotiate(frontend: &mut Frontend, wanted: u64) -> u64 {
    frontend.negotiate(0, wanted, protocol::LOG_SHMFD | protocol::REPLY_ACK | protocol::MQ).unwrap().features
}

/// Executes one order.
fn run(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut events: Vec<Event> = (0..EVENTS)
        .map(|_| {
            use Event::*;
            let weighted = [
                StartOrStop,
                StartOrStop,
                StartOrStop,
                LogOnOrOff,
                Traffic,
                Traffic,
                Copy,
                MemoryTable,
                LongerLog,
                ShorterLog,
                Enable,
                Reconnect,
            ];
            weighted[random.usize(..weighted.len())]
        })
        .collect();
    events.splice(0..0, [Event::StartOrStop, Event::LogOnOrOff]);
    let mut qemu = Qemu::new(random.u32(1..=2), random);
    for event in &events {
        qemu.execute(*event);
    }
    if qemu.running {
        qemu.stop();
    }
    let lost = if qemu.logs { qemu.first_lost_page() } else { None };
    let errors: Vec<_> = qemu.queues.iter().map(|driver| driver.queue.err_fd()).collect();
    let broken = wait_any(&errors, Duration::ZERO).unwrap();
    let Qemu { connection, .. } = qemu;
    let (frontend, served) = connection.unwrap();
    drop(frontend);
    served.0.join().unwrap();
    assert_eq!(lost, None, "written and not marked; seed {seed}, {events:?}");
    assert!(!broken, "a ring is broken; seed {seed}, {events:?}");
}

/// A frontend may keep its log when it stops its rings, so a ring does not wait for another one forever.
#[test]
fn a_ring_that_waited_in_vain_marks_the_former_log_and_the_next_one() {
    let mut qemu = Qemu::new(1, fastrand::Rng::with_seed(0));
    qemu.execute(Event::StartOrStop);
    qemu.execute(Event::LogOnOrOff);
    qemu.copy_marked();
    let former = qemu.log.take().unwrap();
    qemu.stop();
    qemu.queues.iter_mut().for_each(|driver| driver.queue.disable_callback());
    qemu.set_mem_table();
    qemu.take_used();
    qemu.copy_pages(0..2 * REGION_BYTES / PAGE);
    let _ = former.take_dirty_pages();
    [0, 1].into_iter().for_each(|ring| qemu.start_ring(ring));
    qemu.queues[0].queue.drain_call();
    qemu.queues[0].queue.wait(WITHIN).unwrap();
    qemu.running = true;
    qemu.set_log();
    qemu.stop();
    assert_eq!(qemu.first_lost_page(), None, "in the log that came later");
    assert!(former.take_dirty_pages().len() > 10, "the frontend may have kept its log");
}

#[test]
fn no_page_is_lost_in_any_order_of_requests() {
    let orders = std::env::var("TOWLINE_SOAK_LOG_ORDERS").map_or(300, |orders| orders.parse().unwrap());
    (0..orders).for_each(run);
}
