//! A receive and a transmit queue with a queue of the tap, on one thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};
use towline_vhost_user::{AdaptivePoller, BackendError, Next, PollFlags, PollSet, Queues, Traffic, Worker};

use crate::device::Shared;
use crate::features;
use crate::receive::{Format, Line, Receiver};
use crate::statistics::{Moved, Tally};
use crate::tap::Tap;
use crate::transmit::Transmitter;
use crate::xdp::Sender;

/// Of the queues of a pair: the one that the guest receives from.
pub(crate) const RECEIVE: usize = 0;
/// And the one that it sends to.
pub(crate) const TRANSMIT: usize = 1;
/// More than this in one turn and one way is a stream.
const REQUEST_BYTES_MAX: u64 = 16 << 10;

/// See the module.
pub(crate) struct Pair {
    index: usize,
    shared: Arc<Shared>,
    format: Format,
    receiver: Receiver,
    transmitter: Transmitter,
    /// Sends by AF_XDP, where that is wanted.
    sender: Option<Sender>,
    tallies: [Tally; 2],
    /// Whether the guest's queue to receive from runs.
    receives: bool,
    pulse: AdaptivePoller,
    traffic: Traffic,
    begun: bool,
}

impl Pair {
    pub(crate) fn new(index: usize, shared: Arc<Shared>) -> io::Result<Self> {
        let sender = shared.xdp.is_some().then(|| Sender::new(index, Arc::clone(&shared)));
        let pulse = AdaptivePoller::new(shared.options.poll);
        Ok(Self {
            index,
            shared,
            format: Format { header_bytes: 12, mergeable: false },
            receiver: Receiver::new(),
            transmitter: Transmitter::new(),
            sender: sender.transpose()?,
            tallies: Default::default(),
            receives: false,
            pulse,
            traffic: Traffic::default(),
            begun: false,
        })
    }

    fn tap(&self) -> &Tap {
        &self.shared.taps.queues()[self.index]
    }

    /// What is for the thread itself.
    fn begin(&mut self) {
        self.begun = true;
        let cpus = &self.shared.options.cpus;
        if cpus.is_empty() {
            return;
        }
        let cpu = cpus[self.index % cpus.len()];
        let mut set = CpuSet::new();
        set.set(cpu);
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::warn!(%error, cpu, pair = self.index, "its thread cannot be pinned");
        }
    }

    /// Takes over what was negotiated, and what the frontend enabled.
    fn follow(&mut self, receives: bool) {
        let taken = self.shared.features.load(Relaxed);
        let (header_bytes, mergeable) = (features::header_bytes(taken), taken & features::MRG_RXBUF != 0);
        let format = Format { header_bytes, mergeable };
        if format != self.format {
            self.format = format;
            self.receiver.forget();
        }
        self.receives = receives;
        self.shared.in_use[self.index].store(receives, Relaxed);
        // The first stays: see the head of `tap`.
        if self.index > 0 {
            self.tap().attach(receives);
        }
    }

    /// Whether to look again, after a turn in which this went each way.
    fn goes_on(&mut self, sent: Moved, received: Moved) -> Next {
        self.traffic.from_guest += sent.packets;
        self.traffic.to_guest += received.packets;
        if sent.bytes.max(received.bytes) > REQUEST_BYTES_MAX {
            self.pulse.reset_on_bulk(self.traffic);
            return Next::Wait;
        }
        if self.pulse.should_poll(self.traffic, Instant::now) { Next::Again } else { Next::Wait }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.shared.in_use[self.index].store(false, Relaxed);
    }
}

impl Worker for Pair {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        if !self.begun {
            self.begin();
        }
        self.follow(queues.ring(RECEIVE).is_some());
        let shared = Arc::clone(&self.shared);
        let linked = shared.linked.load(Relaxed);
        let line = Line { tap: &shared.taps.queues()[self.index], format: self.format, linked };
        let counters = &shared.counters[self.index];
        let (mut more, mut sent, mut received) = (false, Moved::default(), Moved::default());
        let tallies = &mut self.tallies;
        if let (Some(sender), false) = (&mut self.sender, linked) {
            sender.rest(queues.started_ring(TRANSMIT), &mut tallies[TRANSMIT]);
        }
        if let Some(ring) = queues.ring(TRANSMIT) {
            let tally = &mut tallies[TRANSMIT];
            more |= match &mut self.sender {
                Some(sender) if linked => sender.run(ring, line, tally, &mut self.transmitter),
                _ => self.transmitter.run(ring, line, tally),
            };
            sent = tally.settle(ring, &counters[TRANSMIT]);
        } else {
            // With nothing to send nobody waits for room in the tap, which there is most of the time.
            self.transmitter.blocked = false;
            if let Some(sender) = &mut self.sender {
                sender.rest(queues.started_ring(TRANSMIT), &mut tallies[TRANSMIT]);
            }
        }
        if let Some(ring) = queues.ring(RECEIVE) {
            let tally = &mut tallies[RECEIVE];
            more |= self.receiver.run(ring, line, tally);
            received = tally.settle(ring, &counters[RECEIVE]);
        }
        let next = self.goes_on(sent, received);
        if more { Next::Again } else { next }
    }

    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        let tap = self.tap();
        let mut events = PollFlags::empty();
        // While the link is down, what comes needs none of the guest's buffers.
        let has_room = !self.receiver.starved || !self.shared.linked.load(Relaxed);
        if self.receives && has_room && !self.receiver.gone && tap.is_attached() {
            events |= PollFlags::IN;
        }
        if self.transmitter.blocked {
            events |= PollFlags::OUT;
        }
        if !events.is_empty() {
            fds.add(tap, events);
        }
        if let Some(timer) = self.sender.as_ref().and_then(Sender::waits_for) {
            fds.add_borrowed(timer, PollFlags::IN);
        }
    }

    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        match self.sender.as_mut().filter(|_| queue == TRANSMIT) {
            Some(sender) => {
                sender.drain(queues.started_ring(TRANSMIT), &mut self.tallies[TRANSMIT], deadline)
            }
            None => Ok(()),
        }
    }

    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), BackendError> {
        self.receiver.release();
        self.transmitter.release();
        match &mut self.sender {
            Some(sender) => {
                sender.release(queues.started_ring(TRANSMIT), &mut self.tallies[TRANSMIT], deadline)
            }
            None => Ok(()),
        }
    }
}
