//! A queue pair: a receive and a transmit ring with a queue of the tap, on one thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use towline_vhost_user::{
    AdaptivePoller, AnswerablePackets, BackendError, Next, PollFlags, PollSet, Queues, Worker,
};

use super::shared::Shared;
use crate::hold::HeldPair;
use crate::lock::lock;
use crate::pause::TapGate;
use crate::receive::Receiver;
use crate::statistics::{BatchCounters, Volume};
use crate::tap::{CarrierState, FrameFormat, TapContext, TapQueue};
use crate::timer::Timer;
use crate::transmit::Transmitter;
use crate::xdp::XdpTransmitter;

/// Index of a pair's ring from which the guest receives.
pub(crate) const RECEIVE: usize = 0;
/// Index of a pair's ring to which the guest sends.
pub(crate) const TRANSMIT: usize = 1;
/// Bytes in one direction and run above which the traffic is a stream, not requests and replies.
const REQUEST_BYTES_MAX: u64 = 16 << 10;

/// Time for which the queue of a receive ring that has stopped stays attached while frames are held.
const ATTACHED_WITHIN: Duration = Duration::from_secs(3);

/// The worker of a queue pair.
pub(crate) struct QueuePair {
    /// Number of this worker among all that the card has had.
    number: u64,
    index: usize,
    shared: Arc<Shared>,
    format: FrameFormat,
    receiver: Receiver,
    transmitter: Transmitter,
    /// Sends by AF_XDP, if the card has an interface for it.
    xdp: Option<XdpTransmitter>,
    counted: [BatchCounters; 2],
    /// True while the receive ring runs.
    receives: bool,
    poller: AdaptivePoller,
    traffic: AnswerablePackets,
    pinned: bool,
    /// Fires for frames of the guest's former host, and when there is room for held ones.
    timer: Arc<Timer>,
    /// Time at which the receive ring stopped, while its queue stays attached.
    stopped_at: Option<Instant>,
}

impl QueuePair {
    pub(crate) fn new(index: usize, shared: Arc<Shared>) -> Result<Self, BackendError> {
        let xdp = shared.xdp.clone().map(|xdp| XdpTransmitter::new(index, xdp, Arc::clone(&shared)));
        let poller = AdaptivePoller::new(shared.options.busy_poll);
        let (xdp, timer) = (xdp.transpose()?, Arc::new(Timer::new()?));
        if shared.workers.fetch_add(1, Relaxed) == 0 {
            shared.hold.forget();
        }
        Ok(Self {
            number: shared.next_worker.fetch_add(1, Relaxed),
            index,
            shared,
            format: FrameFormat { header_bytes: 12, mergeable: false },
            receiver: Receiver::new(),
            transmitter: Transmitter::new(),
            xdp,
            counted: Default::default(),
            receives: false,
            poller,
            traffic: AnswerablePackets::default(),
            pinned: false,
            timer,
            stopped_at: None,
        })
    }

    fn queue(&self) -> &TapQueue {
        &self.shared.taps.queues()[self.index]
    }

    /// Pins the current thread to its processor, if one is configured.
    fn pin_thread(&mut self) {
        self.pinned = true;
        let cpus = &self.shared.options.cpus;
        if cpus.is_empty() {
            return;
        }
        let cpu = cpus[self.index % cpus.len()];
        let mut set = CpuSet::new();
        set.set(cpu);
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::warn!(%error, cpu, pair = self.index, "cannot pin the queue pair's thread");
        }
    }

    /// Applies the negotiated features, and attaches or detaches the queue of the tap.
    fn apply_features(&mut self, queues: &mut Queues<'_>) {
        let receives = queues.ring(RECEIVE).is_some();
        let format = FrameFormat::of(self.shared.features.load(Relaxed));
        if format != self.format {
            self.format = format;
            self.receiver.reset();
        }
        // The first queue stays attached: see the module `tap`.
        let is_left_attached = self.index > 0 && !receives && self.queue().is_attached();
        let is_stopped = !receives && queues.started_ring(RECEIVE).is_none();
        if is_stopped && self.shared.pause.is_source() {
            // Not detached, which would discard its frames.
            if std::mem::take(&mut self.receives) {
                self.shared.pause.keep(self.index, self.receiver.undelivered());
                self.set_receiver(false);
            }
            self.stopped_at = None;
            return;
        }
        if is_stopped && self.stays_attached() {
            return;
        }
        if self.stopped_at.take().is_some() {
            self.timer.clear();
        }
        if std::mem::replace(&mut self.receives, receives) != receives || is_left_attached {
            self.attach(receives);
        }
    }

    /// Returns true if the queue of a receive ring that has stopped stays attached for now: detached, it would lose frames in the pause
    /// of each epoch.
    fn stays_attached(&mut self) -> bool {
        if std::mem::take(&mut self.receives) {
            self.set_receiver(false);
            self.stopped_at = Some(Instant::now());
        }
        let left = self.stopped_at.map(|at| ATTACHED_WITHIN.saturating_sub(at.elapsed()));
        let left = left.filter(|left| self.shared.hold.is_holding() && !left.is_zero());
        left.inspect(|left| self.timer.set(*left)).is_some()
    }

    /// Attaches or detaches the queue of the tap, unless the worker of another session already receives from
    /// it.
    fn attach(&self, receives: bool) {
        let is_own = self.set_receiver(receives);
        if is_own && self.index > 0 {
            self.queue().set_attached(receives);
        }
    }

    /// Notes whether this worker receives. Returns false if that of another session does.
    fn set_receiver(&self, receives: bool) -> bool {
        let mut receiver = lock(&self.shared.receivers[self.index]);
        if !receives && receiver.is_some_and(|receiver| receiver != self.number) {
            return false;
        }
        *receiver = receives.then_some(self.number);
        drop(receiver);
        if !receives {
            self.shared.pause.notify_stopped();
        }
        true
    }

    /// Notes that this worker has started the transmit ring, or that it has stopped it.
    fn set_transmitter(&self, worker: Option<u64>) {
        let mut transmitter = lock(&self.shared.transmitters[self.index]);
        if worker.is_some() || *transmitter == Some(self.number) {
            *transmitter = worker;
        }
    }

    /// Sends from the transmit ring, if it runs; completes what AF_XDP has in flight in any case.
    fn transmit(&mut self, shared: &Shared, queues: &mut Queues<'_>, tap: TapContext<'_>) -> (Next, Volume) {
        let counted = &mut self.counted[TRANSMIT];
        if std::mem::take(&mut self.transmitter.held_full) {
            self.timer.clear();
        }
        // Until the end of this run frames are held, or they are not.
        let _transmitter = lock(&shared.transmitters[self.index]);
        let held = HeldPair { hold: &shared.hold, pair: self.index, timer: Some(&self.timer) };
        let held = Some(held).filter(|held| held.hold.is_holding());
        let bypassed = held.is_some() || tap.link == CarrierState::Down;
        let is_stopped = queues.ring(TRANSMIT).is_none();
        if let Some(xdp) = self.xdp.as_mut().filter(|_| bypassed || is_stopped) {
            xdp.reap_while_stopped(queues.started_ring(TRANSMIT), counted);
        }
        let Some(ring) = queues.ring(TRANSMIT) else {
            // Without frames to send it does not wait for room in the tap, which is usually writable.
            self.transmitter.blocked = false;
            return (Next::Wait, Volume::default());
        };
        let next = match &mut self.xdp {
            Some(xdp) if !bypassed => xdp.run(ring, tap, counted, &mut self.transmitter),
            _ => self.transmitter.run(ring, tap, held, counted),
        };
        (next, counted.flush(ring, &shared.statistics[self.index][TRANSMIT]))
    }

    /// Receives into the receive ring, if it runs.
    fn receive(&mut self, queues: &mut Queues<'_>, tap: TapContext<'_>) -> (Next, Volume) {
        let Some(ring) = queues.ring(RECEIVE) else { return (Next::Wait, Volume::default()) };
        let counted = &mut self.counted[RECEIVE];
        let (pause, backlog) = (&self.shared.pause, &mut self.receiver.backlog);
        let features = self.shared.features.load(Relaxed);
        let gate = match pause.is_active() {
            true => pause.join(self.index, features, backlog, &self.timer),
            false => TapGate::Open,
        };
        let next = self.receiver.run(ring, tap, gate, counted);
        (next, counted.flush(ring, &self.shared.statistics[self.index][RECEIVE]))
    }

    /// Decides whether to busy-poll after a run that moved these volumes.
    fn poll_decision(&mut self, sent: Volume, received: Volume) -> Next {
        self.traffic.from_guest += sent.packets;
        self.traffic.to_guest += received.packets;
        if sent.bytes.max(received.bytes) > REQUEST_BYTES_MAX {
            self.poller.reset_on_bulk(self.traffic);
            return Next::Wait;
        }
        if self.poller.should_poll(self.traffic, Instant::now) { Next::Again } else { Next::Wait }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let mut receiver = lock(&self.shared.receivers[self.index]);
        if *receiver == Some(self.number) {
            *receiver = None;
        }
        self.set_transmitter(None);
        self.shared.workers.fetch_sub(1, Relaxed);
    }
}

impl Worker for QueuePair {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if !self.pinned {
            self.pin_thread();
        }
        self.apply_features(queues);
        let shared = Arc::clone(&self.shared);
        let queue = &shared.taps.queues()[self.index];
        let tap = TapContext { queue, format: self.format, link: shared.link() };
        let (transmits, sent) = self.transmit(&shared, queues, tap);
        if sent.packets > 0 && shared.pause.is_active() {
            shared.pause.announce();
        }
        let (receives, received) = self.receive(queues, tap);
        let polls = self.poll_decision(sent, received);
        if [transmits, receives].contains(&Next::Again) { Next::Again } else { polls }
    }

    fn started(&mut self, queue: usize, _: bool) {
        if queue == TRANSMIT {
            self.set_transmitter(Some(self.number));
        }
    }

    fn stopped(&mut self, queue: usize) {
        if queue == TRANSMIT {
            self.set_transmitter(None);
        }
    }

    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        let queue = self.queue();
        let mut events = PollFlags::empty();
        // While the link is down, frames are discarded, which needs no receive buffers.
        let discards = self.shared.link() == CarrierState::Down;
        let has_buffers = discards || !self.receiver.buffers_exhausted;
        if self.receives && has_buffers && !self.receiver.tap_failed && queue.is_attached() {
            events |= PollFlags::IN;
        }
        if self.transmitter.blocked {
            events |= PollFlags::OUT;
        }
        if !events.is_empty() {
            fds.add(queue, events);
        }
        if self.shared.pause.is_active() || self.transmitter.held_full || self.stopped_at.is_some() {
            fds.add(&*self.timer, PollFlags::IN);
        }
        if let Some(timer) = self.xdp.as_ref().and_then(XdpTransmitter::timer) {
            fds.add(timer, PollFlags::IN);
        }
    }

    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        match self.xdp.as_mut().filter(|_| queue == TRANSMIT) {
            Some(xdp) => xdp.drain(queues.started_ring(TRANSMIT), &mut self.counted[TRANSMIT], deadline),
            None => Ok(()),
        }
    }

    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), BackendError> {
        self.receiver.release_memory();
        self.transmitter.release_memory();
        match &mut self.xdp {
            Some(xdp) => xdp.release(queues.started_ring(TRANSMIT), &mut self.counted[TRANSMIT], deadline),
            None => Ok(()),
        }
    }
}
