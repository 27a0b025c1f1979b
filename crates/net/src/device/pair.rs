//! A queue pair: a receive and a transmit ring with a queue of the tap, on one thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};
use towline_vhost_user::{
    AdaptivePoller, AnswerablePackets, BackendError, Next, PollFlags, PollSet, Queues, Worker,
};

use super::shared::Shared;
use crate::features;
use crate::lock::lock;
use crate::receive::Receiver;
use crate::statistics::{BatchCounters, Volume};
use crate::tap::{CarrierState, FrameFormat, TapContext, TapQueue};
use crate::transmit::Transmitter;
use crate::xdp::XdpTransmitter;

/// Index of a pair's ring from which the guest receives.
pub(crate) const RECEIVE: usize = 0;
/// Index of a pair's ring to which the guest sends.
pub(crate) const TRANSMIT: usize = 1;
/// Bytes in one direction and run above which the traffic is a stream, not requests and replies.
const REQUEST_BYTES_MAX: u64 = 16 << 10;

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
}

impl QueuePair {
    pub(crate) fn new(index: usize, shared: Arc<Shared>) -> io::Result<Self> {
        let xdp = shared.xdp.is_some().then(|| XdpTransmitter::new(index, Arc::clone(&shared)));
        let poller = AdaptivePoller::new(shared.options.busy_poll);
        Ok(Self {
            number: shared.next_worker.fetch_add(1, Relaxed),
            index,
            shared,
            format: FrameFormat { header_bytes: 12, mergeable: false },
            receiver: Receiver::new(),
            transmitter: Transmitter::new(),
            xdp: xdp.transpose()?,
            counted: Default::default(),
            receives: false,
            poller,
            traffic: AnswerablePackets::default(),
            pinned: false,
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
    fn apply_features(&mut self, receives: bool) {
        let negotiated = self.shared.features.load(Relaxed);
        let (header_bytes, mergeable) =
            (features::header_bytes(negotiated), negotiated & features::MRG_RXBUF != 0);
        let format = FrameFormat { header_bytes, mergeable };
        if format != self.format {
            self.format = format;
            self.receiver.reset();
        }
        // The first queue stays attached: see the module `tap`.
        let is_left_attached = self.index > 0 && !receives && self.queue().is_attached();
        if std::mem::replace(&mut self.receives, receives) != receives || is_left_attached {
            self.attach(receives);
        }
    }

    /// Attaches or detaches the queue of the tap, unless the worker of another session already receives from
    /// it.
    fn attach(&self, receives: bool) {
        let mut receiver = lock(&self.shared.receivers[self.index]);
        if receives {
            *receiver = Some(self.number);
        } else if receiver.is_some_and(|receiver| receiver != self.number) {
            return;
        } else {
            *receiver = None;
        }
        if self.index > 0 {
            self.queue().set_attached(receives);
        }
    }

    /// Sends from the transmit ring, if it runs; completes what AF_XDP has in flight in any case.
    fn transmit(&mut self, queues: &mut Queues<'_>, tap: TapContext<'_>) -> (Next, Volume) {
        let counted = &mut self.counted[TRANSMIT];
        if let (Some(xdp), CarrierState::Down) = (&mut self.xdp, tap.link) {
            xdp.reap_while_stopped(queues.started_ring(TRANSMIT), counted);
        }
        let Some(ring) = queues.ring(TRANSMIT) else {
            // Without frames to send it does not wait for room in the tap, which is usually writable.
            self.transmitter.blocked = false;
            if let Some(xdp) = &mut self.xdp {
                xdp.reap_while_stopped(queues.started_ring(TRANSMIT), counted);
            }
            return (Next::Wait, Volume::default());
        };
        let next = match &mut self.xdp {
            Some(xdp) if tap.link == CarrierState::Up => xdp.run(ring, tap, counted, &mut self.transmitter),
            _ => self.transmitter.run(ring, tap, counted),
        };
        (next, counted.flush(ring, &self.shared.counters[self.index][TRANSMIT]))
    }

    /// Receives into the receive ring, if it runs.
    fn receive(&mut self, queues: &mut Queues<'_>, tap: TapContext<'_>) -> (Next, Volume) {
        let Some(ring) = queues.ring(RECEIVE) else { return (Next::Wait, Volume::default()) };
        let counted = &mut self.counted[RECEIVE];
        let next = self.receiver.run(ring, tap, counted);
        (next, counted.flush(ring, &self.shared.counters[self.index][RECEIVE]))
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
    }
}

impl Worker for QueuePair {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if !self.pinned {
            self.pin_thread();
        }
        self.apply_features(queues.ring(RECEIVE).is_some());
        let shared = Arc::clone(&self.shared);
        let queue = &shared.taps.queues()[self.index];
        let tap = TapContext { queue, format: self.format, link: shared.link() };
        let (transmits, sent) = self.transmit(queues, tap);
        let (receives, received) = self.receive(queues, tap);
        let polls = self.poll_decision(sent, received);
        if [transmits, receives].contains(&Next::Again) { Next::Again } else { polls }
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
        if let Some(timer) = self.xdp.as_ref().and_then(XdpTransmitter::timer) {
            fds.add_borrowed(timer, PollFlags::IN);
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
