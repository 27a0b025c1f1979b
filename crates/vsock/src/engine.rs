//! Engine of a device: connects the table of connections to the rings and to the host's sockets.
//!
//! ```text
//!   transmit ring ─► process_tx: headers to the table, payload to send queues ─► one send per connection and batch ─► socket
//!   receive ring  ◄─ process_rx: control packets, then round-robin ◄──────────── one receive into many buffers ◄───── socket
//! ```
//! Payload is not copied, with one exception: a packet that its socket does not take is retained in the
//! guest's ring while that has room for it, and copied otherwise; small packets that are copied are merged.
//! The buffered bytes are limited by the guest's credit.
//!
//! The engine never blocks, and its only clock is the argument of [`Engine::tick`], so it runs in virtual
//! time with model sockets too.

mod batch_pool;
mod chunk;
mod host_end;
mod lifecycle;
mod pruned_queue;
mod to_guest;
mod to_host;

use std::time::Duration;

use towline_vhost_user::{AnswerablePackets, Batch, Ring};

use self::batch_pool::BatchPool;
use self::host_end::{HostEnd, HostEnds, Queues};
use self::lifecycle::{Actions, LifecycleEvent, PeerState, ReceiveState, Transition};
use self::pruned_queue::PrunedQueue;
use crate::connection::{ConnectionId, ConnectionKey, ConnectionLimits, ConnectionState};
use crate::packet::{ShutdownFlags, SocketType};
use crate::sockets::{CloseMode, ConnectOutcome, Interest, Readiness, Sockets};
use crate::statistics::{ConnectionReport, Statistics};
use crate::table::{ConnectionTable, PacketLimit};

/// Time limit of a connect, and of the guest's confirmation that a connection has ended.
pub const CONNECT_TIMEOUT_MS: u64 = 10_000;
/// Interval at which a connection without credit is checked. The guest gets a credit request the first,
/// second, fourth, … time, and each sixteenth: a request that comes before its program reads is answered, and
/// what the program reads later may be too little for an update.
const CREDIT_INTERVAL_MS: u64 = 20;
/// Number of intervals in which a driver answers a credit request.
const ANSWER_INTERVALS: u32 = 50;
/// Time after which pending resets are dropped.
const RESETS_TIMEOUT_MS: u64 = 1_000;
/// Interval of [`Engine::tick`] without connections that wait for credit.
pub(crate) const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// All connections of one guest. See the module.
pub struct Engine<S: Sockets> {
    table: ConnectionTable,
    sockets: S,
    host_ends: HostEnds<S::Socket>,
    /// Connections with data for the guest, round-robin.
    ready: PrunedQueue<ConnectionId>,
    /// Connections whose next message to the guest waits for memory.
    waiting_for_memory: PrunedQueue<ConnectionId>,
    /// Memory of messages in transit to the guest, in bytes.
    message_bytes: u64,
    /// Connections that packets of the present batch belong to.
    flush_queue: Vec<ConnectionId>,
    pool: BatchPool,
    rx_batch: Batch,
    now_ms: u64,
    /// Connections that are reset if they are still in a state with a timeout then.
    timeouts: PrunedQueue<(u64, ConnectionId)>,
    credit_timers: PrunedQueue<(u64, ConnectionId)>,
    /// Time since when the queue of pending resets is full.
    full_since: Option<u64>,
    /// Packets that carry no payload; data packets to the guest are counted in `statistics`.
    traffic: AnswerablePackets,
    statistics: Statistics,
}

impl<S: Sockets> Engine<S> {
    /// Creates an engine without connections.
    pub fn new(cid: u64, limits: ConnectionLimits, seed: u32, sockets: S) -> Self {
        Self {
            table: ConnectionTable::new(cid, limits, seed),
            sockets,
            host_ends: HostEnds::default(),
            ready: PrunedQueue::default(),
            waiting_for_memory: PrunedQueue::default(),
            message_bytes: 0,
            flush_queue: Vec::new(),
            pool: BatchPool::default(),
            rx_batch: Batch::new(),
            now_ms: 0,
            timeouts: PrunedQueue::default(),
            credit_timers: PrunedQueue::default(),
            full_since: None,
            traffic: AnswerablePackets::default(),
            statistics: Statistics::default(),
        }
    }

    /// Sets the limit of packets that a new driver has not read.
    pub(crate) fn set_packet_limit(&mut self, limit: PacketLimit) {
        self.table.set_packet_limit(limit);
    }

    /// Returns the host's side.
    pub fn sockets(&self) -> &S {
        &self.sockets
    }

    /// Returns the host's side for changes.
    pub fn sockets_mut(&mut self) -> &mut S {
        &mut self.sockets
    }

    /// Returns the table of connections.
    pub fn table(&self) -> &ConnectionTable {
        &self.table
    }

    /// Returns the number of packets in both directions that may be answered: all but credit updates and the
    /// ends of connections. Those to the guest are also the ones for which one of its programs may wait.
    pub(crate) fn traffic(&self) -> AnswerablePackets {
        let to_guest = self.traffic.to_guest + self.statistics.totals.packets_to_guest;
        AnswerablePackets { to_guest, ..self.traffic }
    }

    /// Returns the counters.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            table: self.table.statistics(),
            connections: self.table.len() as u64,
            memory_reserved: self.table.reserved(),
            ..self.statistics
        }
    }

    /// Returns the statistics of each connection with a socket.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionReport> + '_ {
        self.host_ends.iter().filter_map(|end| {
            let connection = self.table.get(end.id)?;
            Some(ConnectionReport::new(connection.key, connection.kind, connection.state, end.statistics))
        })
    }

    /// Returns the keys of all connections, including those whose socket is closed.
    pub fn keys(&self) -> Vec<(ConnectionKey, SocketType)> {
        let connections = self.table.ids().filter_map(|id| self.table.get(id));
        connections.map(|connection| (connection.key, connection.kind)).collect()
    }

    /// Takes over a guest that was migrated with connections that do not exist here: each of them is reset.
    pub fn reset_all_connections(&mut self, next_port: u32, connections: &[(ConnectionKey, SocketType)]) {
        self.drop_all_connections();
        self.table.set_next_port(next_port);
        for (key, kind) in connections {
            self.table.queue_reset(*key, *kind);
        }
    }

    /// Returns the number of bytes that are buffered for sockets that are full.
    pub fn buffered_bytes(&self) -> usize {
        self.host_ends.iter().map(|end| end.buffered_bytes).sum()
    }

    /// Returns the memory of all connections in bytes, without their sockets. It never exceeds
    /// [`Statistics::memory_reserved`].
    pub fn footprint(&self) -> u64 {
        let ends = self.host_ends.iter().map(|end| end.footprint() as u64);
        ends.sum::<u64>() + self.message_bytes
    }

    /// Returns the number of entries in all queues, including those of closed connections.
    pub fn queued_entries(&self) -> usize {
        self.ready.len() + self.waiting_for_memory.len() + self.timeouts.len() + self.credit_timers.len()
    }

    /// Returns the number of segments of guest memory that are described by batches in use.
    pub fn segments(&self) -> usize {
        self.pool.segments()
    }

    /// Drops idle batches, which keep the guest's former memory mapped.
    pub fn drop_idle_batches(&mut self) {
        self.pool.drop_idle();
        self.rx_batch = Batch::new();
    }

    /// Opens a connection from a socket of the host to a port of the guest.
    ///
    /// # Errors
    /// The socket, if there are too many connections.
    pub fn open(
        &mut self,
        guest_port: u32,
        kind: SocketType,
        peer_cid: u64,
        socket: S::Socket,
    ) -> Result<ConnectionId, S::Socket> {
        let Some(id) = self.table.open(guest_port, kind, peer_cid) else { return Err(socket) };
        self.sockets.opened(id, &socket);
        self.insert(HostEnd::new(id, kind, Some(socket)));
        self.start_timeout(id);
        Ok(id)
    }

    /// Refuses a socket that requests a port of the guest.
    pub fn refuse(&mut self, socket: S::Socket) {
        self.table.statistics.refused_by_limit += 1;
        self.sockets.close(socket, CloseMode::Reset);
    }

    /// Completes a connect that was in progress; without a socket it has failed.
    pub fn connected(&mut self, id: ConnectionId, socket: Option<S::Socket>) {
        let state = self.table.get(id).map(|connection| connection.state);
        let Some(socket) = socket else {
            self.reset(id, CloseMode::Reset);
            return;
        };
        match self.host_ends.get_mut(id) {
            Some(end) if state == Some(ConnectionState::Connecting) => {
                end.socket = Some(socket);
                self.table.established(id);
                self.schedule_read(id);
                self.update(id);
            }
            _ => self.sockets.close(socket, CloseMode::Graceful),
        }
    }

    /// Processes an edge of a socket's readiness.
    pub fn readable(&mut self, id: ConnectionId, readiness: Readiness) {
        let Some(end) = self.host_ends.get_mut(id) else { return };
        end.has_urgent |= readiness == Readiness::Urgent;
        self.on_event(id, LifecycleEvent::Ready(readiness));
        self.schedule_read(id);
    }

    /// Sends queued data to a socket whose send buffer has space again.
    pub fn writable(&mut self, id: ConnectionId) {
        if self.host_ends.get_mut(id).is_some() {
            self.on_event(id, LifecycleEvent::Writable);
            self.flush(id);
        }
        // The program reads, and its buffer was smaller than what the guest sends in the meantime.
        if let Some(socket) = self.host_ends.get_mut(id).and_then(|end| end.socket.as_ref()) {
            self.sockets.enlarge_send_buffer(socket);
        }
    }

    /// Advances the clock, which is any monotonic one, and ends what has timed out.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        while self.timeouts.front().is_some_and(|(at, _)| *at <= now_ms) {
            let Some((_, id)) = self.timeouts.pop() else { return };
            if self.table.get(id).is_some_and(|connection| connection.state.has_timeout()) {
                self.reset(id, CloseMode::Reset);
            }
        }
        while self.credit_timers.front().is_some_and(|(at, _)| *at <= now_ms) {
            let Some((_, id)) = self.credit_timers.pop() else { return };
            self.poll_credit(id);
        }
        if self.table.accepts_packets() {
            self.full_since = None;
        } else if now_ms - *self.full_since.get_or_insert(now_ms) >= RESETS_TIMEOUT_MS {
            let dropped = self.table.drop_pending_resets();
            tracing::debug!(dropped, "dropped pending resets: the guest posts no buffers");
        }
    }

    /// Returns the interval at which [`Engine::tick`] must be called, if any.
    pub fn tick_interval(&self) -> Option<Duration> {
        if !self.credit_timers.is_empty() {
            return Some(Duration::from_millis(CREDIT_INTERVAL_MS));
        }
        (!self.timeouts.is_empty() || !self.table.accepts_packets()).then_some(TICK_INTERVAL)
    }

    /// Completes all chains that are retained in the transmit ring, after copying their payload.
    pub fn complete_retained(&mut self, ring: Option<&mut Ring>) {
        for id in self.host_ends.ids() {
            self.copy_all(id);
        }
        if let Some(ring) = ring {
            self.complete_chains(ring);
        }
    }

    /// Removes all connections without notifying the guest.
    pub fn drop_all_connections(&mut self) {
        for id in self.host_ends.ids() {
            self.close_socket(id, CloseMode::Reset);
        }
        self.table.clear();
        self.ready = PrunedQueue::default();
        self.waiting_for_memory = PrunedQueue::default();
        self.timeouts = PrunedQueue::default();
        self.credit_timers = PrunedQueue::default();
    }

    /// Removes the connections of a former driver without notifying the guest. Those whose request was not
    /// sent are kept: no driver knows of them, and the new one gets their requests. Returns the number of
    /// those that were removed.
    pub fn drop_connections_of_former_driver(&mut self) -> usize {
        let before = self.table.len();
        for id in self.host_ends.ids() {
            if !self.table.is_unsent(id) {
                self.close_socket(id, CloseMode::Reset);
            }
        }
        // Entries of removed connections are skipped in all queues.
        self.table.remove_sent();
        before - self.table.len()
    }

    fn insert(&mut self, end: HostEnd<S::Socket>) {
        self.host_ends.insert(end);
        self.statistics.connections_peak = self.statistics.connections_peak.max(self.table.len() as u64);
    }

    /// Closes the socket of a connection, whose entry in the table stays.
    fn close_socket(&mut self, id: ConnectionId, mode: CloseMode) {
        let Some(mut end) = self.host_ends.remove(id) else { return };
        end.discard(&mut self.pool);
        if let Some(message) = end.message.take() {
            self.free_message(&message.bytes);
        }
        match end.socket {
            None => self.sockets.cancel_connect(id),
            Some(socket) => self.sockets.close(socket, mode),
        }
    }

    /// Closes the socket of a connection and resets the guest's end.
    fn reset(&mut self, id: ConnectionId, mode: CloseMode) {
        self.close_socket(id, mode);
        self.table.reset(id);
    }

    /// Appends a connection to the queue of those to be read, if it can be read.
    fn schedule_read(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let receives = connection.state == ConnectionState::Established
            && !connection.guest_shutdown.contains(ShutdownFlags::RECEIVE);
        let Some(end) = self.host_ends.get_mut(id) else { return };
        let is_readable = end.lifecycle.receive == ReceiveState::Readable;
        if receives && is_readable && !end.queues.contains(Queues::READ) {
            end.queues.insert(Queues::READ);
            self.ready.push(id, |id| self.table.contains(*id));
        }
    }

    fn start_credit_timer(&mut self, id: ConnectionId) {
        let Some(end) = self.host_ends.get_mut(id) else { return };
        if !end.queues.contains(Queues::CREDIT_TIMER) {
            end.queues.insert(Queues::CREDIT_TIMER);
            let at_ms = self.now_ms + CREDIT_INTERVAL_MS;
            self.credit_timers.push((at_ms, id), |(_, id)| self.table.contains(*id));
        }
    }

    /// Requests credit for a connection that still has none.
    fn poll_credit(&mut self, id: ConnectionId) {
        let Some(end) = self.host_ends.get_mut(id) else { return };
        end.queues.remove(Queues::CREDIT_TIMER);
        if end.lifecycle.receive != ReceiveState::OutOfCredit {
            return;
        }
        end.credit_polls += 1;
        let polls = end.credit_polls;
        if polls >= ANSWER_INTERVALS {
            self.table.end_packet_limit(id);
        }
        if polls.is_power_of_two() || polls.is_multiple_of(16) {
            self.table.request_credit(id);
        }
        self.start_credit_timer(id);
        self.update_credit(id);
    }

    /// Starts the timeout of the present state of a connection.
    fn start_timeout(&mut self, id: ConnectionId) {
        self.timeouts.push((self.now_ms + CONNECT_TIMEOUT_MS, id), |(_, id)| self.table.contains(*id));
    }

    /// Frees the memory of a message to the guest, and retries the messages that wait for memory.
    fn free_message(&mut self, message: &Vec<u8>) {
        let bytes = message.capacity() as u64;
        self.message_bytes -= bytes;
        self.table.memory.free_message(bytes);
        while let Some(id) = self.waiting_for_memory.pop() {
            self.ready.push(id, |id| self.table.contains(*id));
        }
    }

    /// Ends directions, or the connection, once there is nothing left to do. Call it after every change of
    /// the guest's shutdown flags, of the send queue, or of the directions.
    fn update(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let (state, guest) = (connection.state, connection.guest_shutdown);
        match self.host_ends.get_mut(id) {
            Some(end) if end.socket.is_some() => {
                let all_sent = end.send_queue.is_empty();
                self.on_event(id, LifecycleEvent::Update { guest, all_sent });
            }
            // The guest has closed it before its socket was connected.
            Some(_) if guest.is_all() => self.reset(id, CloseMode::Graceful),
            None if guest.is_all() && state == ConnectionState::Closing => self.table.reset(id),
            _ => {}
        }
    }

    /// Makes the transition of a connection on an event.
    fn on_event(&mut self, id: ConnectionId, event: LifecycleEvent) {
        let Some(end) = self.host_ends.get_mut(id) else { return };
        let Some(Transition { next, actions }) = end.lifecycle.on(event) else {
            debug_assert!(false, "{event:?} is not legal in {:?}", end.lifecycle);
            return;
        };
        end.lifecycle = next;
        if !actions.is_empty() {
            self.act(id, actions);
        }
    }

    fn act(&mut self, id: ConnectionId, actions: Actions) {
        if actions.contains(Actions::CLOSE) {
            self.reset(id, CloseMode::Graceful);
            return;
        }
        let Some(end) = self.host_ends.get_mut(id) else { return };
        if let Some(socket) = &end.socket {
            let shutdowns = [
                (Actions::SHUTDOWN_RECEIVE, ShutdownFlags::RECEIVE),
                (Actions::SHUTDOWN_SEND, ShutdownFlags::SEND),
            ];
            for (_, direction) in shutdowns.into_iter().filter(|(action, _)| actions.contains(*action)) {
                self.sockets.shutdown(socket, direction);
            }
            if actions.contains(Actions::WATCH_WRITABLE) {
                self.sockets.set_interest(id, socket, Interest::ReadWrite);
            }
            if actions.contains(Actions::UNWATCH_WRITABLE) {
                self.sockets.set_interest(id, socket, Interest::Read);
            }
        }
        if actions.contains(Actions::DELIVER_EOF) {
            self.table.shutdown(id, ShutdownFlags::SEND);
        }
        if actions.contains(Actions::REFUSE_DATA) {
            end.discard(&mut self.pool);
            self.table.forwarded(id, self.table.unforwarded(id));
            self.table.shutdown(id, ShutdownFlags::RECEIVE);
        }
        if actions.contains(Actions::BEGIN_CLOSING) {
            self.close_socket(id, CloseMode::Graceful);
            self.table.close(id);
            self.start_timeout(id);
        } else if actions.intersects(Actions::DELIVER_EOF | Actions::REFUSE_DATA) {
            self.update(id);
        }
    }

    /// Completes the chains that are no longer in use.
    fn complete_chains(&mut self, ring: &mut Ring) {
        for head in self.pool.completed.drain(..) {
            ring.complete_head(head);
        }
    }

    /// Connects the socket of a connection that the guest has requested.
    fn connect(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let (key, kind) = (connection.key, connection.kind);
        match self.sockets.connect(id, key, kind) {
            ConnectOutcome::Connected(socket) => {
                self.insert(HostEnd::new(id, kind, Some(socket)));
                self.table.established(id);
            }
            ConnectOutcome::InProgress => {
                self.insert(HostEnd::new(id, kind, None));
                self.start_timeout(id);
            }
            ConnectOutcome::Refused => self.table.reset(id),
        }
    }

    /// Returns true if the peer of a socket sends no more.
    fn is_read_closed(&mut self, id: ConnectionId) -> bool {
        self.host_ends.get_mut(id).is_some_and(|end| end.lifecycle.peer != PeerState::Open)
    }
}
