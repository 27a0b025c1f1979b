//! Binds the table of connections to the rings and to the host's sockets.
//!
//! ```text
//!   transmit ring ─► take: headers to the table, payload to lines ─► one send for each connection and batch ─► socket
//!   receive ring  ◄─ fill: what is owed, then turn by turn ◄───────── one receive into many buffers ◄───────── socket
//! ```
//! No payload is copied, but for what must be kept: a packet that the host side does not take is held in the guest's ring
//! as long as that has room for it, and copied otherwise; small packets that are copied are merged. How much a guest can
//! have us keep is what it was promised in credit. Large packets may be lent to the kernel, which then reads them in the
//! guest's memory when it needs them (`loans`).
//!
//! It waits for nothing, and knows the time only by what [`Engine::tick`] is told, so that it can be run in virtual time
//! with sockets of a model.

mod chunk;
mod line;
mod loans;
mod queue;
mod to_guest;
mod to_host;

pub use line::ConnectionStatistics;
use line::{Line, Shelf};
use loans::Parting;
use queue::LiveQueue;
use towline_vhost_user::{Batch, Ring, Traffic};

use crate::connection::{ConnectionId, ConnectionKey, ConnectionState, Limits, TableStatistics};
use crate::packet::{HEADER_BYTES, Kind, ShutdownFlags};
use crate::sockets::{ConnectOutcome, Sockets};
use crate::table::Table;

/// Where payload begins in a chain.
const SKIP: usize = HEADER_BYTES;
/// How long a connection may take to come about, or its end to be confirmed.
pub const CONNECT_TIMEOUT_MS: u64 = 10_000;
/// How long a guest may be without credit before it is asked.
const STALL_MS: u64 = 1_000;

/// What an engine has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Of the table.
    pub table: TableStatistics,
    /// Of all connections, also those that are gone.
    pub totals: ConnectionStatistics,
    /// Calls that sent to sockets.
    pub sends: u64,
    /// Calls that received from sockets.
    pub receives: u64,
    /// Times that a socket took less than there was.
    pub socket_full: u64,
    /// Times that the guest had no credit for what there was.
    pub out_of_credit: u64,
    /// Times that the guest's ring had no buffer for what there was.
    pub rx_ring_empty: u64,
    /// Connections now.
    pub connections: u64,
    /// The most connections at a time.
    pub connections_peak: u64,
    /// Packets that the kernel still reads in the guest's memory, now.
    pub zero_copy_in_flight: u64,
    /// Connections that were reset because it did not stop to in time.
    pub zero_copy_resets: u64,
    /// Bytes of memory that connections are given now, of [`Limits::memory`]: windows, their bookkeeping, and messages on
    /// their way to the guest.
    pub memory_reserved: u64,
    /// Times that a message for the guest waited for memory.
    pub memory_waits: u64,
}

/// What is new of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// There is something to receive.
    Readable,
    /// There is urgent data, at whose mark a read stops.
    Urgent,
    /// Its other end sends no more.
    ReadClosed,
    /// Its other end neither sends nor receives any more.
    Closed,
}

/// All connections of one guest. See the module's head.
pub struct Engine<S: Sockets> {
    table: Table,
    sockets: S,
    lines: Vec<Option<Line<S::Socket>>>,
    /// Connections with something for the guest, round-robin.
    ready: LiveQueue<ConnectionId>,
    /// Connections whose next message for the guest waits for memory.
    waiting: LiveQueue<ConnectionId>,
    /// Bytes of memory of messages on their way to the guest.
    messages: u64,
    /// Who got something of the guest's with this batch.
    touched: Vec<ConnectionId>,
    shelf: Shelf,
    /// Sockets that have lent something when their connections ended.
    parting: Vec<Parting<S::Socket>>,
    buffers: Batch,
    now_ms: u64,
    deadlines: LiveQueue<(u64, ConnectionId)>,
    stalls: LiveQueue<(u64, ConnectionId)>,
    /// Since when the guest has left no room for answers.
    full_since: Option<u64>,
    /// Without packets that carry something to the guest: those are counted below.
    traffic: Traffic,
    statistics: Statistics,
}

impl<S: Sockets> Engine<S> {
    /// An engine without connections.
    pub fn new(cid: u64, limits: Limits, seed: u32, sockets: S) -> Self {
        Self {
            table: Table::new(cid, limits, seed),
            sockets,
            lines: Vec::new(),
            ready: LiveQueue::default(),
            waiting: LiveQueue::default(),
            messages: 0,
            touched: Vec::new(),
            shelf: Shelf::default(),
            parting: Vec::new(),
            buffers: Batch::new(),
            now_ms: 0,
            deadlines: LiveQueue::default(),
            stalls: LiveQueue::default(),
            full_since: None,
            traffic: Traffic::default(),
            statistics: Statistics::default(),
        }
    }

    /// The host's side.
    pub fn sockets(&self) -> &S {
        &self.sockets
    }

    /// The host's side, to be changed.
    pub fn sockets_mut(&mut self) -> &mut S {
        &mut self.sockets
    }

    /// The connections by name.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// What came and went so far, but for what only tells credit.
    pub(crate) fn traffic(&self) -> Traffic {
        let to_guest = self.traffic.to_guest + self.statistics.totals.packets_to_guest;
        Traffic { to_guest, ..self.traffic }
    }

    /// What was counted so far.
    pub fn statistics(&self) -> Statistics {
        let (connections, zero_copy_in_flight) = (self.table.len() as u64, self.lent() as u64);
        let memory_reserved = self.table.reserved();
        Statistics {
            table: self.table.statistics(),
            connections,
            zero_copy_in_flight,
            memory_reserved,
            ..self.statistics
        }
    }

    /// Each connection and what it has moved.
    pub fn connections(
        &self,
    ) -> impl Iterator<Item = (ConnectionKey, Kind, ConnectionState, ConnectionStatistics)> + '_ {
        self.lines.iter().flatten().filter_map(|line| {
            let connection = self.table.get(line.id)?;
            Some((connection.key, connection.kind, connection.state, line.statistics))
        })
    }

    /// The names of all connections, also of those whose host side has gone already.
    pub fn names(&self) -> Vec<(ConnectionKey, Kind)> {
        let connections = self.table.ids().filter_map(|id| self.table.get(id));
        connections.map(|connection| (connection.key, connection.kind)).collect()
    }

    /// The guest has come from elsewhere, with connections that are not here: it will hear so of each.
    pub fn arrive(&mut self, next_port: u32, connections: &[(ConnectionKey, Kind)]) {
        self.restart();
        self.table.set_next_port(next_port);
        for (key, kind) in connections {
            self.table.reset_pair(*key, *kind);
        }
    }

    /// Bytes that are kept for sockets that do not take them.
    pub fn kept(&self) -> usize {
        self.lines.iter().flatten().map(|line| line.kept).sum()
    }

    /// Bytes of memory that connections take in this process, beside their sockets: never more than
    /// [`Statistics::memory_reserved`].
    pub fn footprint(&self) -> u64 {
        let lines = self.lines.iter().flatten().map(|line| line.footprint() as u64);
        lines.sum::<u64>() + self.messages
    }

    /// Entries of all lists that wait for something, whose connections may be gone.
    pub fn backlog(&self) -> usize {
        self.ready.len() + self.waiting.len() + self.deadlines.len() + self.stalls.len()
    }

    /// Pieces of guest memory that are described in batches which connections hold.
    pub fn pieces(&self) -> usize {
        self.shelf.pieces()
    }

    /// Drops idle batches, which refer to the guest's memory as it was.
    pub fn clear_idle(&mut self) {
        self.shelf.clear_idle();
        self.buffers = Batch::new();
    }

    /// A socket of the host's asks for a port of the guest's. It comes back if there are too many already.
    ///
    /// # Errors
    /// The socket.
    pub fn open(
        &mut self,
        guest_port: u32,
        kind: Kind,
        peer_cid: u64,
        socket: S::Socket,
    ) -> Result<ConnectionId, S::Socket> {
        let Some(id) = self.table.open(guest_port, kind, peer_cid) else { return Err(socket) };
        self.sockets.opened(id, &socket);
        self.put(Line::new(id, kind, Some(socket)));
        self.end_later(id);
        Ok(id)
    }

    /// A socket that asks for a port of the guest's is refused before it comes to the table.
    pub fn refuse(&mut self, socket: S::Socket) {
        self.table.refuse();
        self.sockets.close(socket, true);
    }

    /// A connection that was to come later is there, or will not be.
    pub fn connected(&mut self, id: ConnectionId, socket: Option<S::Socket>) {
        let asked =
            self.table.get(id).is_some_and(|connection| connection.state == ConnectionState::Connecting);
        match (socket, self.line(id)) {
            (Some(socket), Some(line)) if asked => {
                line.socket = Some(socket);
                self.table.established(id);
                self.line_up(id);
                self.settle(id);
            }
            (Some(socket), _) => self.sockets.close(socket, false),
            (None, _) => self.end(id, true),
        }
    }

    /// A socket has something new for the guest, or has ended.
    pub fn readable(&mut self, id: ConnectionId, news: Readiness) {
        let Some(line) = self.line(id) else { return };
        line.readable = true;
        line.urgent |= news == Readiness::Urgent;
        line.ending |= matches!(news, Readiness::ReadClosed | Readiness::Closed);
        line.hung_up |= news == Readiness::Closed;
        if news == Readiness::Closed && line.ended && !line.deaf && !line.write_shut {
            // Its end was told already, when only that was known.
            self.deafen(id);
        }
        self.line_up(id);
    }

    /// A socket that was full takes more.
    pub fn writable(&mut self, id: ConnectionId) {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        if std::mem::take(&mut line.blocked)
            && let Some(socket) = &line.socket
        {
            self.sockets.watch_writable(id, socket, false);
        }
        self.flush(id);
    }

    /// What the time is, on any clock that only goes forward. SeqFlags what takes too long.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        while self.deadlines.front().is_some_and(|(at, _)| *at <= now_ms) {
            let Some((_, id)) = self.deadlines.pop() else { return };
            let late = [ConnectionState::RequestSent, ConnectionState::Connecting, ConnectionState::Closing];
            if self.table.get(id).is_some_and(|connection| late.contains(&connection.state)) {
                self.end(id, true);
            }
        }
        while self.stalls.front().is_some_and(|(at, _)| *at <= now_ms) {
            let Some((_, id)) = self.stalls.pop() else { return };
            let Some(line) = self.line(id) else { continue };
            line.stall_noted = false;
            if line.stalled {
                self.table.ask_credit(id);
            }
        }
        if self.table.takes() {
            self.full_since = None;
        } else if now_ms - *self.full_since.get_or_insert(now_ms) >= STALL_MS {
            let forgotten = self.table.forget_strays();
            tracing::debug!(forgotten, "resets that the guest did not take");
        }
    }

    /// Whether [`Engine::tick`] is waited for.
    pub fn needs_time(&self) -> bool {
        !self.deadlines.is_empty() || !self.stalls.is_empty() || !self.table.takes()
    }

    /// The transmit ring stops: nothing of it is held any more. What is lent comes back by [`Engine::freed`], or is taken
    /// back.
    pub fn let_go(&mut self, ring: Option<&mut Ring>) {
        for index in 0..self.lines.len() {
            if let Some(id) = self.lines[index].as_ref().map(|line| line.id) {
                self.copy_out(id);
            }
        }
        if let Some(ring) = ring {
            self.give_back(ring);
        }
    }

    /// There is another driver, or another guest: no connection of before exists.
    pub fn restart(&mut self) {
        for index in 0..self.lines.len() {
            if let Some(line) = self.lines[index].take() {
                self.drop_line(line, true);
            }
        }
        self.table.clear();
        (self.ready, self.waiting, self.deadlines, self.stalls) = Default::default();
    }

    fn line(&mut self, id: ConnectionId) -> Option<&mut Line<S::Socket>> {
        Self::line_of(&mut self.lines, id)
    }

    fn line_of(lines: &mut [Option<Line<S::Socket>>], id: ConnectionId) -> Option<&mut Line<S::Socket>> {
        lines.get_mut(id.index as usize)?.as_mut().filter(|line| line.id == id)
    }

    fn put(&mut self, line: Line<S::Socket>) {
        let index = line.id.index as usize;
        if self.lines.len() <= index {
            self.lines.resize_with(index + 1, || None);
        }
        debug_assert!(self.lines[index].is_none(), "a line whose connection is gone");
        self.lines[index] = Some(line);
        self.statistics.connections_peak = self.statistics.connections_peak.max(self.table.len() as u64);
    }

    /// The host side goes, and nothing is said of it.
    fn hang_up(&mut self, id: ConnectionId, reset: bool) {
        if self.line(id).is_some()
            && let Some(line) = self.lines[id.index as usize].take()
        {
            self.drop_line(line, reset);
        }
    }

    /// The connection ends now, for both.
    fn end(&mut self, id: ConnectionId, reset: bool) {
        self.hang_up(id, reset);
        self.table.reset(id);
    }

    /// Puts a connection in line to be read, if there is reason to.
    fn line_up(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let open = connection.state == ConnectionState::Established
            && !connection.guest_shut.contains(ShutdownFlags::RECEIVE);
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        let something = line.readable || line.message.is_some();
        if open && something && !line.stalled && !line.ended && !line.in_line {
            line.in_line = true;
            self.ready.push(id, |id| self.table.get(*id).is_some());
        }
    }

    /// SeqFlags a connection whose other end has not confirmed its current state by then.
    fn end_later(&mut self, id: ConnectionId) {
        self.deadlines.push((self.now_ms + CONNECT_TIMEOUT_MS, id), |(_, id)| self.table.get(*id).is_some());
    }

    /// A message is on its way to the guest no more; others may have its memory.
    fn free_message(&mut self, message: &Vec<u8>) {
        let bytes = message.capacity() as u64;
        self.messages -= bytes;
        self.table.release(bytes);
        while let Some(id) = self.waiting.pop() {
            self.ready.push(id, |id| self.table.get(*id).is_some());
        }
    }

    /// After anything that may have been the last: ends what has ended.
    fn settle(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let (phase, guest) = (connection.state, connection.guest_shut);
        let Some(line) = Self::line_of(&mut self.lines, id) else {
            if phase == ConnectionState::Closing && guest.is_all() {
                self.table.reset(id);
            }
            return;
        };
        let Some(socket) = &line.socket else {
            // Nobody is there yet, and the guest does not want it any more.
            if guest.is_all() {
                self.end(id, false);
            }
            return;
        };
        let through = guest.contains(ShutdownFlags::SEND) && line.out.is_empty();
        if through && guest.contains(ShutdownFlags::RECEIVE) {
            // At once: whoever sees the two ways end one after the other takes the first for all that there is.
            self.end(id, false);
            return;
        }
        if guest.contains(ShutdownFlags::RECEIVE) && !line.read_shut {
            line.read_shut = true;
            self.sockets.shutdown(socket, ShutdownFlags::RECEIVE);
        }
        if through && !line.write_shut {
            line.write_shut = true;
            self.sockets.shutdown(socket, ShutdownFlags::SEND);
        }
        if line.ended && (through || line.deaf) {
            self.hang_up(id, false);
            self.table.over(id);
            self.end_later(id);
        }
    }

    /// Chains that nobody needs go back.
    fn give_back(&mut self, ring: &mut Ring) {
        for head in self.shelf.done.drain(..) {
            ring.complete_head(head);
        }
    }

    fn connect(&mut self, id: ConnectionId) {
        let Some(connection) = self.table.get(id) else { return };
        let (key, kind) = (connection.key, connection.kind);
        match self.sockets.connect(id, key, kind) {
            ConnectOutcome::Connected(socket) => {
                self.put(Line::new(id, kind, Some(socket)));
                self.table.established(id);
            }
            ConnectOutcome::InProgress => {
                self.put(Line::new(id, kind, None));
                self.end_later(id);
            }
            ConnectOutcome::Refused => self.table.reset(id),
        }
    }
}
