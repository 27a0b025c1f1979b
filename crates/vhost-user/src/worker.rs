//! Threads that serve queues, and how the session speaks to them.
//!
//! ```text
//!   session ── order ──► mailbox + eventfd ─┐
//!   guest ─── kick ────────────────────────┼─► poll ─► orders ─► Worker::run ─► publish ─► arm ─┐
//!   tap, sockets ──────────────────────────┘    ▲                                               │
//!                                               └───────────────────────────────────────────────┘
//! ```
//! A thread takes an order between two batches and only then answers it, so when the session has the answer, no ring
//! uses the old memory, the old log or the old state of the log's switch. A ring with a fault is named, its error
//! eventfd is raised, and it rests until the frontend stops it; the others go on.

mod queues;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use towline_channel::Cancel;

use crate::device::{Device, Next, Refusal, Worker};
use crate::hangup::Hangup;
use crate::kick::{self, Kick};
use crate::log::DirtyLog;
use crate::mailbox::{self, Wake as _};
use crate::memory::Memory;
use crate::message::VringAddress;
use crate::record::{QueueRecord, Record};
use crate::ring::{Batch, Ring, RingFault, RingSetup};
use crate::session::{Rings, SessionError, Stopped};
use crate::sys;

pub use queues::Queues;

/// How long a queue that is stopped may take for what is under way.
const DRAIN_WITHIN: Duration = Duration::from_secs(1);
/// How long a thread may take to end; one that waits in the kernel for somebody else's pages may never do so.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Between two looks whether the session is cancelled, while it waits for a thread.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// Chains that are completed unseen in one turn of a queue that is disabled.
const DISCARDED_A_TURN: usize = 256;

/// The place of a ring.
#[derive(Debug, Default)]
struct Slot {
    ring: Option<Ring>,
    kick: Option<Kick>,
    err: Option<OwnedFd>,
    enabled: bool,
    broken: bool,
    /// While it is disabled, what comes is completed and goes nowhere.
    discards: bool,
    epoch: u64,
    /// Where a ring stood whose memory was taken away.
    lost_at: Option<u16>,
    /// Where what it has in flight is written down.
    record: Option<QueueRecord>,
    keeps_order: bool,
}

impl Slot {
    fn runs(&self) -> bool {
        self.ring.is_some() && self.enabled && !self.broken
    }

    /// Whether its chains are taken, by the worker or to be discarded.
    fn takes(&self) -> bool {
        self.ring.is_some() && (self.enabled || self.discards) && !self.broken
    }
}

/// What the session says to a thread. Queues are counted within the thread.
enum Order {
    Start { queue: usize, setup: RingSetup, memory: Arc<Memory>, kick: OwnedFd, err: Option<OwnedFd> },
    Stop(usize),
    Enable(usize, bool),
    Kick(usize, OwnedFd),
    Call(usize, Option<OwnedFd>),
    Err(usize, Option<OwnedFd>),
    Address(usize, VringAddress),
    Memory(Arc<Memory>),
    Log(Option<Arc<DirtyLog>>),
    Settle,
}

/// What it answers.
enum Answer {
    Done,
    Stopped(Option<Stopped>),
    Fault(RingFault),
    InUse { ring: usize, reason: Refusal },
}

/// All threads of a device.
pub(crate) struct Crew {
    hands: Vec<Hand>,
    queues_per_worker: usize,
    cancel: Option<Cancel>,
}

struct Hand {
    /// `None` ends the thread.
    orders: Option<Sender<Order>>,
    answers: Receiver<Answer>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Crew {
    /// Starts the threads, which write down what their rings have in flight, if there is a record.
    pub(crate) fn new(
        device: &dyn Device,
        record: Option<&Record>,
        hangup: &Arc<Hangup>,
    ) -> Result<Self, SessionError> {
        let (count, each) = (device.queue_count(), device.queues_per_worker().max(1));
        let hand = |index: usize| {
            let worker = device.worker(index).map_err(|reason| SessionError::Worker { index, reason })?;
            let queues = each.min(count - index * each);
            let slots = index * each..index * each + queues;
            let slots = slots.map(|queue| {
                let (discards, record) = (device.discards(queue), record.map(|record| record.queue(queue)));
                Slot { discards, record, keeps_order: device.keeps_order(), ..Slot::default() }
            });
            let slots = slots.collect();
            let setup = ThreadSetup { index, first: index * each, slots, worker, hangup: Arc::clone(hangup) };
            Hand::new(device.name(), setup)
        };
        let hands = (0..count.div_ceil(each)).map(hand).collect::<Result<_, _>>()?;
        Ok(Self { hands, queues_per_worker: each, cancel: None })
    }

    fn order(&mut self, ring: usize, order: impl FnOnce(usize) -> Order) -> Result<Answer, SessionError> {
        let (hand, queue) = (ring / self.queues_per_worker, ring % self.queues_per_worker);
        self.hands[hand].order(order(queue), hand, self.cancel.as_ref())
    }

    /// To all, and then the answers of all.
    fn order_all(&mut self, order: impl Fn() -> Order) -> Result<(), SessionError> {
        for (index, hand) in self.hands.iter_mut().enumerate() {
            hand.say(order(), index)?;
        }
        for (index, hand) in self.hands.iter_mut().enumerate() {
            if let Answer::InUse { ring, reason } = hand.hear(index, self.cancel.as_ref())? {
                return Err(SessionError::InUse { ring, reason });
            }
        }
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // All of them end at the same time, and not each after the one before.
        for hand in &mut self.hands {
            hand.dismiss();
        }
    }
}

impl Rings for Crew {
    fn set_cancel(&mut self, cancel: &Cancel) {
        self.cancel = Some(cancel.clone());
    }

    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        memory: &Arc<Memory>,
        fds: (OwnedFd, Option<OwnedFd>),
    ) -> Result<Option<RingFault>, SessionError> {
        let (memory, (kick, err)) = (Arc::clone(memory), fds);
        match self.order(ring, |queue| Order::Start { queue, setup, memory, kick, err })? {
            Answer::Fault(fault) => Ok(Some(fault)),
            _ => Ok(None),
        }
    }

    fn stop(&mut self, ring: usize) -> Result<Option<Stopped>, SessionError> {
        match self.order(ring, Order::Stop)? {
            Answer::Stopped(stopped) => Ok(stopped),
            Answer::InUse { ring, reason } => Err(SessionError::InUse { ring, reason }),
            _ => Ok(None),
        }
    }

    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), SessionError> {
        self.order(ring, |queue| Order::Enable(queue, enabled)).map(drop)
    }

    fn set_kick(&mut self, ring: usize, fd: OwnedFd) -> Result<(), SessionError> {
        self.order(ring, |queue| Order::Kick(queue, fd)).map(drop)
    }

    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.order(ring, |queue| Order::Call(queue, fd)).map(drop)
    }

    fn set_err(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        self.order(ring, |queue| Order::Err(queue, fd)).map(drop)
    }

    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError> {
        self.order(ring, |queue| Order::Address(queue, address)).map(drop)
    }

    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), SessionError> {
        self.order_all(|| Order::Memory(Arc::clone(memory)))
    }

    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError> {
        self.order_all(|| Order::Log(log.cloned()))
    }

    fn settle(&mut self) -> Result<(), SessionError> {
        self.order_all(|| Order::Settle)
    }
}

impl Hand {
    fn new(name: &str, setup: ThreadSetup) -> Result<Self, SessionError> {
        let ThreadSetup { index, first, slots, worker, hangup } = setup;
        let failed = |source: std::io::Error| SessionError::Thread { index, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|errno| failed(errno.into()))?);
        let (orders, received) = channel();
        let (answer, answers) = channel();
        let thread = Thread {
            worker,
            slots,
            first,
            scrap: Batch::new(),
            orders: received,
            answer,
            wake: Arc::clone(&wake),
            running: true,
            hangup,
            faults_seen: sys::memory_faults(),
        };
        let thread = std::thread::Builder::new().name(format!("{name}-{index}")).spawn(|| thread.run());
        let thread = Some(thread.map_err(failed)?);
        Ok(Self { orders: Some(orders), answers, wake, thread })
    }

    fn order(&mut self, order: Order, index: usize, cancel: Option<&Cancel>) -> Result<Answer, SessionError> {
        self.say(order, index)?;
        self.hear(index, cancel)
    }

    /// Has the thread end, without waiting for it.
    fn dismiss(&mut self) {
        self.orders = None;
        self.wake.raise();
    }

    fn say(&mut self, order: Order, index: usize) -> Result<(), SessionError> {
        let orders = self.orders.as_ref();
        let sent = orders.is_some_and(|orders| mailbox::send(orders, &*self.wake, order));
        if sent { Ok(()) } else { Err(SessionError::Gone { index }) }
    }

    /// Waits for the answer, or until the process is to end: a thread may wait in the kernel for pages that never come.
    fn hear(&mut self, index: usize, cancel: Option<&Cancel>) -> Result<Answer, SessionError> {
        loop {
            match self.answers.recv_timeout(CANCEL_INTERVAL) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(SessionError::Gone { index }),
                Err(RecvTimeoutError::Timeout) if cancel.is_some_and(Cancel::is_cancelled) => {
                    return Err(SessionError::Cancelled { index });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.dismiss();
        let Some(thread) = self.thread.take() else { return };
        let until = Instant::now() + END_WITHIN;
        // Answers to commands that were given up come first.
        while let Ok(_) | Err(RecvTimeoutError::Timeout) =
            self.answers.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            if Instant::now() >= until {
                tracing::error!(
                    within = ?END_WITHIN,
                    "a worker does not end; it is left behind, with the memory that it uses"
                );
                return;
            }
        }
        if thread.join().is_err() {
            tracing::error!("a worker panicked");
        }
    }
}

/// What a thread is made of.
struct ThreadSetup {
    index: usize,
    first: usize,
    slots: Vec<Slot>,
    worker: Box<dyn Worker>,
    hangup: Arc<Hangup>,
}

struct Thread {
    worker: Box<dyn Worker>,
    slots: Vec<Slot>,
    first: usize,
    scrap: Batch,
    orders: Receiver<Order>,
    answer: Sender<Answer>,
    wake: Arc<OwnedFd>,
    running: bool,
    /// Ends the connection when the guest's memory is gone.
    hangup: Arc<Hangup>,
    /// How many faults of guest memory there were in this process when they were last looked at.
    faults_seen: u64,
}

impl Thread {
    fn run(mut self) {
        while self.running {
            let again = self.turn();
            self.check_memory();
            let raised = self.wait(again);
            self.obey(raised);
        }
        // What is under way when the connection is gone is not published: the frontend has counted already.
    }

    /// One turn of the device. True if there is more to do at once.
    fn turn(&mut self) -> bool {
        self.slots
            .iter_mut()
            .filter(|slot| slot.takes())
            .filter_map(|slot| slot.ring.as_mut())
            .for_each(Ring::disarm);
        let next = self.worker.run(&mut Queues { slots: &mut self.slots, first: self.first });
        let mut discards = false;
        for slot in &mut self.slots {
            let (runs, takes) = (slot.runs(), slot.takes());
            let Some(ring) = &mut slot.ring else { continue };
            if takes && !runs {
                discards |= discard(ring, &mut self.scrap);
            }
            ring.publish();
        }
        // Who looks again anyway needs no kick, which costs the driver a system call.
        let again = next == Next::Again || discards || self.arm();
        self.name_faults();
        again
    }

    /// Asks to be kicked. True if there is more to do at once.
    fn arm(&mut self) -> bool {
        let mut more = false;
        // All of them, whatever the first ones say.
        for ring in self.slots.iter_mut().filter(|slot| slot.takes()).filter_map(|slot| slot.ring.as_mut()) {
            more |= ring.arm();
        }
        more
    }

    fn name_faults(&mut self) {
        for (queue, slot) in self.slots.iter_mut().enumerate() {
            if let Some(fault) = slot.ring.as_ref().and_then(Ring::fault)
                && !slot.broken
            {
                broken(self.first + queue, fault);
                slot.broken = true;
                raise(slot.err.as_ref());
            }
        }
    }

    /// The only place where the thread waits. True if there are commands.
    fn wait(&mut self, again: bool) -> bool {
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let mut kicks = Vec::new();
        // How long the first of the kicks that are paused is not polled.
        let mut paused: Option<Duration> = None;
        for (queue, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.takes()) {
            match slot.kick.as_ref().map(|kick| kick.polled(Instant::now)) {
                Some(Ok(kick)) => {
                    kicks.push(queue);
                    fds.push(PollFd::new(kick, PollFlags::IN));
                }
                Some(Err(left)) => paused = Some(paused.map_or(left, |least| least.min(left))),
                None => {}
            }
        }
        self.worker.poll(&mut fds);
        let timeout = if again { Some(Duration::ZERO) } else { paused };
        let timeout = timeout.map(|left| Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => tracing::error!(%errno, "poll"),
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        self.worker.polled(&events[1 + kicks.len()..]);
        for (queue, events) in kicks.into_iter().zip(&events[1..]) {
            let slot = &mut self.slots[queue];
            if let Some(ring) = &slot.ring {
                kick::polled(&mut slot.kick, *events, ring.available_index(), self.first + queue);
            }
        }
        events[0].contains(PollFlags::IN)
    }

    /// A fault of guest memory ends the session of the guest whose memory it was.
    fn check_memory(&mut self) {
        let faults = sys::memory_faults();
        if std::mem::replace(&mut self.faults_seen, faults) == faults {
            return;
        }
        for (queue, slot) in self.slots.iter_mut().enumerate() {
            if slot.ring.as_ref().is_some_and(Ring::has_lost_memory) {
                // It may be broken already, by the zeros that it found.
                if !std::mem::replace(&mut slot.broken, true) {
                    broken(self.first + queue, &RingFault::MemoryLost);
                }
                self.hangup.memory_lost();
            }
        }
    }

    fn obey(&mut self, raised: bool) {
        let wake = Arc::clone(&self.wake);
        let mut orders = Vec::new();
        self.running = mailbox::process(&self.orders, raised.then_some(&*wake), |order| orders.push(order));
        for order in orders {
            let answer = self.execute(order);
            // A session that does not listen is gone, and the mailbox with it.
            let _ = self.answer.send(answer);
        }
    }

    fn execute(&mut self, order: Order) -> Answer {
        match order {
            Order::Start { queue, setup, memory, kick, err } => {
                return self.start(queue, setup, memory, (kick, err));
            }
            Order::Stop(queue) => return self.stop(queue),
            Order::Enable(queue, enabled) => self.slots[queue].enabled = enabled,
            Order::Kick(queue, fd) => self.slots[queue].kick = Some(Kick::new(fd)),
            Order::Err(queue, fd) => self.slots[queue].err = fd,
            Order::Call(queue, fd) => {
                if let Some(ring) = &mut self.slots[queue].ring {
                    ring.set_call(fd);
                }
            }
            Order::Address(queue, address) => self.settle(queue, None, Some(address)),
            Order::Memory(memory) => {
                let mut queues = Queues { slots: &mut self.slots, first: self.first };
                let released = self.worker.release(&mut queues, Instant::now() + DRAIN_WITHIN);
                self.scrap.clear();
                if let Err(reason) = released {
                    return self.leave(0, reason);
                }
                (0..self.slots.len()).for_each(|queue| self.settle(queue, Some(&memory), None));
            }
            Order::Log(log) => {
                let rings = self.slots.iter_mut().filter_map(|slot| slot.ring.as_mut());
                rings.for_each(|ring| ring.set_log(log.clone()));
            }
            Order::Settle => {}
        }
        Answer::Done
    }

    fn start(
        &mut self,
        queue: usize,
        setup: RingSetup,
        memory: Arc<Memory>,
        (kick, err): (OwnedFd, Option<OwnedFd>),
    ) -> Answer {
        let slot = &mut self.slots[queue];
        slot.epoch += 1;
        (slot.kick, slot.err, slot.broken) = (Some(Kick::new(kick)), err, false);
        // A chain of another ring is told by it as well.
        let epoch = (self.first + queue) as u64 | slot.epoch << 16;
        match Ring::new(setup, memory, epoch) {
            Ok(mut ring) => {
                let known = slot.record.clone().and_then(|record| ring.go_on(record, slot.keeps_order));
                if let Some(chains @ 1..) = known {
                    tracing::info!(
                        ring = self.first + queue,
                        chains,
                        "taken again: they were under way before"
                    );
                }
                // The process before this one may have died between a batch and its notification.
                ring.call();
                self.worker.started(queue, ring.is_new());
                slot.ring = Some(ring);
                Answer::Done
            }
            Err(fault) => {
                broken(self.first + queue, &fault);
                raise(slot.err.as_ref());
                Answer::Fault(fault)
            }
        }
    }

    fn stop(&mut self, queue: usize) -> Answer {
        let slot = &self.slots[queue];
        // A ring that lost its places does not tell what it had in flight.
        if slot.lost_at.is_some() || slot.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0) {
            let mut queues = Queues { slots: &mut self.slots, first: self.first };
            if let Err(reason) = self.worker.drain(queue, &mut queues, Instant::now() + DRAIN_WITHIN) {
                return self.leave(queue, reason);
            }
        }
        let slot = &mut self.slots[queue];
        let (kick, err) = (slot.kick.take().map(Kick::into_fd), slot.err.take());
        let Some(ring) = slot.ring.take() else {
            let lost = slot.lost_at.take();
            return Answer::Stopped(lost.map(|base| Stopped { base, kick, call: None, err }));
        };
        let (base, left, call) = ring.stop();
        if left > 0 {
            tracing::warn!(
                ring = self.first + queue,
                left,
                "stopped with chains under way; they go back empty"
            );
        }
        Answer::Stopped(Some(Stopped { base, kick, call, err }))
    }

    /// Somebody else may still access chains of this ring: nothing goes back to the guest, and the connection ends.
    fn leave(&mut self, queue: usize, reason: Refusal) -> Answer {
        // Not stopped: their records and used indices say what is in flight.
        self.slots.iter_mut().for_each(|slot| slot.ring = None);
        Answer::InUse { ring: self.first + queue, reason }
    }

    fn settle(&mut self, queue: usize, memory: Option<&Arc<Memory>>, address: Option<VringAddress>) {
        let slot = &mut self.slots[queue];
        let Some(ring) = &mut slot.ring else { return };
        let memory = memory.unwrap_or(ring.memory());
        let address = address.unwrap_or(ring.address());
        if let Err(fault) = ring.settle(Arc::clone(memory), address) {
            broken(self.first + queue, &fault);
            raise(slot.err.as_ref());
            slot.lost_at = slot.ring.take().map(Ring::lose);
        }
    }
}

/// Completes some of what there is, unread. True if there may be more.
fn discard(ring: &mut Ring, batch: &mut Batch) -> bool {
    ring.listen(true);
    let taken = ring.pop(batch, DISCARDED_A_TURN);
    for chain in batch.chains() {
        ring.complete(chain, 0);
    }
    let more = taken == DISCARDED_A_TURN || batch.is_full();
    // Nothing of it is used again, and the memory may go.
    batch.clear();
    more
}

fn broken(ring: usize, fault: &RingFault) {
    tracing::error!(ring, %fault, "this ring is broken and stays so until its driver is reset");
}

fn raise(err: Option<&OwnedFd>) {
    if let Some(err) = err {
        // Nobody hears of it then; the log says so above.
        let _ = rustix::io::write(err, &1u64.to_ne_bytes());
    }
}
