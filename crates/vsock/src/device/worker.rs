//! The worker of a device.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use towline_vhost_user::{AdaptivePoller, BackendError, Next, PollFlags, PollSet, Queues, Worker};

use super::unconnected::Unconnected;
use crate::connection::ConnectionLimits;
use crate::engine::{Engine, TICK_INTERVAL};
use crate::host::{Host, SocketEvent};
use crate::local_guests::IncomingConnection;
use crate::lock::lock;
use crate::packet::HOST_CID;
use crate::report::SharedReport;
use crate::sockets::{CloseMode, Sockets as _};
use crate::state::State;
use crate::statistics::VsockReport;
use crate::table::PacketLimit;
use crate::transport_reset::TransportReset;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// Maximum number of passes over sockets and rings in a row while the worker busy-polls, before its thread
/// handles everything else.
const POLLED_PASSES_MAX: usize = 64;

/// Updates of the vhost-user session for the worker.
#[derive(Debug)]
pub(super) struct SessionUpdates {
    /// State of a migrated guest that was loaded and not applied yet.
    pub(super) loaded: Mutex<Option<State>>,
    /// The driver has read its CID.
    pub(super) config_read: AtomicBool,
    /// The driver has accepted `VIRTIO_VSOCK_F_SEQPACKET`.
    pub(super) has_seqpacket: AtomicBool,
    /// The worker while no frontend is connected.
    pub(super) unconnected: Unconnected<VsockWorker>,
}

impl SessionUpdates {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            loaded: Mutex::default(),
            config_read: AtomicBool::default(),
            has_seqpacket: AtomicBool::default(),
            unconnected: Unconnected::new()?,
        })
    }
}

/// Start of a data queue, and what it shows about a change of the driver.
#[derive(Debug, Clone, Copy, Default)]
struct QueueStart {
    /// The queue was started before.
    was_started: bool,
    /// A new driver has started the queue, and not the other one yet.
    is_first_of_driver: bool,
}

/// The worker of the three queues.
pub(super) struct VsockWorker {
    engine: Engine<Host>,
    limits: ConnectionLimits,
    report: Arc<SharedReport>,
    updates: Arc<SessionUpdates>,
    transport_reset: TransportReset,
    /// Connections that are opened after the transport reset.
    deferred: VecDeque<IncomingConnection>,
    /// Of the receive and the transmit queue.
    queue_starts: [QueueStart; 2],
    poller: AdaptivePoller,
    /// epoll has events of the host's side.
    host_is_ready: bool,
    /// A session has the worker.
    is_connected: bool,
}

impl Drop for VsockWorker {
    fn drop(&mut self) {
        if self.is_connected {
            self.publish_report();
            self.report.remove_worker();
            self.updates.unconnected.vacate();
        }
    }
}

impl AsFd for VsockWorker {
    /// Returns the descriptor that is readable when the host's side has events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.engine.sockets().as_fd()
    }
}

impl VsockWorker {
    pub(super) fn new(
        engine: Engine<Host>,
        limits: ConnectionLimits,
        busy_poll: Duration,
        report: Arc<SharedReport>,
        updates: Arc<SessionUpdates>,
    ) -> Self {
        Self {
            engine,
            limits,
            report,
            updates,
            transport_reset: TransportReset::default(),
            deferred: VecDeque::new(),
            queue_starts: [QueueStart::default(); 2],
            poller: AdaptivePoller::new(busy_poll),
            host_is_ready: true,
            is_connected: false,
        }
    }

    /// Returns the worker for a session.
    pub(super) fn connected(mut self) -> Self {
        self.report.add_worker();
        self.is_connected = true;
        self
    }

    /// Serves the host's side while there are no queues.
    pub(super) fn run_unconnected(&mut self) {
        self.host_is_ready = true;
        self.run(&mut Queues::none());
    }

    fn publish_report(&self) {
        self.report.publish(VsockReport {
            statistics: self.engine.statistics(),
            buffered_bytes: self.engine.buffered_bytes(),
            keys: self.engine.keys(),
            next_port: self.engine.table().next_port(),
            connections: self.engine.connections().collect(),
        });
    }

    /// Opens a connection that a peer requests, or defers it until the transport reset is done.
    fn admit(&mut self, incoming: IncomingConnection) {
        if self.transport_reset.is_done() {
            self.open(incoming);
        } else if self.deferred.len() < self.limits.handshakes {
            self.deferred.push_back(incoming);
        }
    }

    fn open(&mut self, IncomingConnection { port, cid, socket }: IncomingConnection) {
        let connections = self.limits.connections;
        let share = || self.engine.sockets().share_of_peer(connections);
        if cid != HOST_CID && self.engine.table().connections_initiated_by(cid) >= share() {
            self.engine.refuse(socket);
            return;
        }
        if let Err(socket) = self.engine.open(port, socket.kind(), cid, socket) {
            self.engine.sockets_mut().close(socket, CloseMode::Reset);
        }
    }

    /// Advances a transport reset, and opens the deferred connections when it is done.
    fn advance_transport_reset(&mut self, queues: &mut Queues<'_>) {
        if self.transport_reset.is_done() {
            return;
        }
        let now_ms = self.engine.sockets().now_ms();
        self.transport_reset.advance(queues.ring(EVENT), &self.updates.config_read, now_ms);
        if self.transport_reset.is_done() {
            for incoming in std::mem::take(&mut self.deferred) {
                self.open(incoming);
            }
        }
    }

    fn begin_transport_reset(&mut self) {
        let since_ms = self.engine.sockets_mut().read_clock();
        self.transport_reset = TransportReset::Pending { since_ms };
    }

    fn process_host_events(&mut self) {
        let now_ms = self.engine.sockets_mut().read_clock();
        self.engine.tick(now_ms);
        if std::mem::take(&mut self.host_is_ready) {
            self.engine.sockets_mut().poll();
        }
        while let Some(event) = self.engine.sockets_mut().next_event() {
            match event {
                SocketEvent::Readable(id, readiness) => self.engine.readable(id, readiness),
                SocketEvent::Writable(id) => self.engine.writable(id),
                SocketEvent::Connected(id, socket) => self.engine.connected(id, socket),
                SocketEvent::Incoming(incoming) => self.admit(incoming),
            }
        }
    }

    /// While the worker busy-polls for the guest's response, checks the ring for it first, which takes no
    /// system call. Returns true if there was one; then it is the host's turn in the next pass.
    fn has_response(&mut self, queues: &mut Queues<'_>) -> bool {
        if !self.poller.awaits_guest() {
            return false;
        }
        let packets = self.engine.traffic().from_guest;
        if let Some(ring) = queues.ring(TRANSMIT) {
            self.engine.process_tx(ring);
        }
        self.engine.traffic().from_guest != packets
    }

    /// Processes events of the host and both rings once. Returns what the thread does next, or `None` while the
    /// worker busy-polls: another pass follows.
    fn pass(&mut self, queues: &mut Queues<'_>) -> Option<Next> {
        if !self.has_response(queues) {
            self.process_host_events();
        }
        self.advance_transport_reset(queues);
        let is_reset_done = self.transport_reset.is_done();
        let mut again = false;
        if let Some(ring) = queues.ring(EVENT) {
            // New buffers matter only while an event waits to be sent.
            ring.set_notification(!is_reset_done);
        }
        if let Some(ring) = queues.ring(TRANSMIT) {
            again |= self.engine.process_tx(ring) == Next::Again;
        }
        let was_full = !self.engine.table().accepts_packets();
        if let Some(ring) = queues.ring(RECEIVE) {
            again |= self.engine.process_rx(ring) == Next::Again;
        }
        // Packets that waited for space for resets can be processed now.
        again |= was_full && self.engine.table().accepts_packets();
        if self.report.accept_request() {
            self.publish_report();
        }
        let interval = self.engine.tick_interval().or((!is_reset_done).then_some(TICK_INTERVAL));
        self.engine.sockets_mut().set_timer(interval);
        let polls = self.poller.should_poll(self.engine.traffic(), Instant::now);
        if polls && !again {
            return None;
        }
        self.engine.sockets_mut().watch_handshakes();
        Some(if again { Next::Again } else { Next::Wait })
    }
}

impl Worker for VsockWorker {
    fn run(&mut self, queues: &mut Queues<'_>) -> Next {
        for _ in 0..POLLED_PASSES_MAX {
            let packets = self.engine.traffic().to_guest;
            if let Some(next) = self.pass(queues) {
                return next;
            }
            if let Some(ring) = queues.ring(TRANSMIT) {
                ring.publish();
            }
            // The guest is not interrupted for the ends of connections alone: while the worker busy-polls, a
            // packet that a program waits for follows at once, or the thread notifies the guest.
            let is_awaited = self.engine.traffic().to_guest != packets;
            match queues.ring(RECEIVE) {
                Some(ring) if is_awaited => {
                    ring.publish();
                }
                Some(ring) => ring.publish_quietly(),
                None => {}
            }
            // A call to epoll costs less than the thread's own wait for all descriptors.
            self.host_is_ready = true;
        }
        self.engine.sockets_mut().watch_handshakes();
        Next::Again
    }

    fn started(&mut self, queue: usize, fresh: bool) {
        let loaded = lock(&self.updates.loaded).take();
        if let Some(State { next_port, connections, .. }) = loaded {
            tracing::info!(connections = connections.len(), "took over a migrated guest");
            self.engine.reset_all_connections(next_port, &connections);
            self.begin_transport_reset();
            return;
        }
        if queue != RECEIVE && queue != TRANSMIT {
            return;
        }
        // A driver that continues where another device has stopped has connections that no longer exist.
        let was_started = std::mem::replace(&mut self.queue_starts[queue].was_started, true);
        if fresh || !was_started {
            // Linux has had seqpacket for longer than a limit of packets, and without it some frontends do
            // not offer it.
            let has_seqpacket = self.updates.has_seqpacket.load(Ordering::Relaxed);
            self.engine.set_packet_limit(if has_seqpacket { PacketLimit::Kept } else { PacketLimit::Probed });
        }
        if !was_started && !fresh && self.transport_reset.is_done() {
            self.begin_transport_reset();
        }
        // A new driver starts both queues, one after the other; connections that are opened in between are
        // its own.
        let other = &mut self.queue_starts[TRANSMIT - queue];
        let is_second = std::mem::take(&mut other.is_first_of_driver);
        let is_first = fresh && !is_second;
        self.queue_starts[queue].is_first_of_driver = is_first;
        if is_first {
            let closed = self.engine.drop_connections_of_former_driver();
            if closed > 0 {
                tracing::info!(closed, "closed all connections: the guest has a new driver");
            }
        }
    }

    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        fds.add(self.engine.sockets(), PollFlags::IN);
    }

    fn on_ready(&mut self, events: &[PollFlags]) {
        self.host_is_ready = events.iter().any(|events| !events.is_empty());
    }

    fn drain(&mut self, queue: usize, queues: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        if queue == TRANSMIT {
            self.engine.complete_retained(queues.ring(TRANSMIT));
        }
        Ok(())
    }

    fn release(&mut self, queues: &mut Queues<'_>, _: Instant) -> Result<(), BackendError> {
        self.engine.complete_retained(queues.started_ring(TRANSMIT));
        self.engine.drop_idle_batches();
        Ok(())
    }
}
