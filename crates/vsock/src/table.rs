//! The connections of one guest: what a packet of its means, and what is to be said to it. No I/O and no payload, only
//! lengths.
//!
//! ```text
//!   header from the guest ─► from_guest ─► Inbound: what its engine shall do
//!   what happened on the host ─► open, established, forwarded, shut, reset ─► owed ─► next_control ─► header for the guest
//! ```
//! What is owed to the guest is kept as flags of its connection, which is in line at most once, so whatever a guest or
//! the host does, what waits is bounded by the table. Answers to packets of no connection wait in a short queue of their
//! own ([`PENDING_RESETS_MAX`]); while it is full, no more is taken from the guest.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::connection::{
    Connection, ConnectionId, ConnectionKey, ConnectionState, Inbound, Limits, Owed, TableStatistics,
};
use crate::credit::{PeerCredit, ReceiveWindow, WINDOW_FIRST_MAX, WINDOW_MIN};
use crate::packet::{Header, Kind, Operation, PAYLOAD_BYTES_MAX, SeqFlags, ShutdownFlags};

/// The most resets for unknown connections that wait for room in the guest's ring.
pub const PENDING_RESETS_MAX: usize = 1024;
/// Each connection is given this share of the memory that is left, so that windows get smaller.
const SHARE: u64 = 8192;
/// As long as less than a quarter is promised, a larger one: of the usual memory, a full first window.
const SHARE_FIRST: u64 = SHARE / 16;
/// Ports of the host side: above those that programs are given by name.
const HOST_PORTS: std::ops::RangeInclusive<u32> = 1 << 30..=(1 << 31) - 1;

/// An [`ConnectionId`] leaves the highest bit of 64 to whoever mixes it with other things.
const GENERATION_MAX: u32 = u32::MAX >> 1;

/// The connections of one guest.
#[derive(Debug)]
pub struct Table {
    cid: u64,
    limits: Limits,
    slots: Vec<Slot>,
    free: Vec<u32>,
    names: HashMap<ConnectionKey, ConnectionId>,
    line: VecDeque<ConnectionId>,
    strays: VecDeque<Header>,
    next_port: u32,
    /// Bytes of memory that are reserved: the cost of all windows, and messages on their way to the guest.
    promised: u64,
    /// Of `promised`, those of messages.
    messages: u64,
    /// Connections that other guests asked for, by their contexts.
    incoming: HashMap<u64, usize>,
    statistics: TableStatistics,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

impl Table {
    /// A table for the guest with this context. Ports of the host side begin at `seed` modulo their number.
    pub fn new(cid: u64, limits: Limits, seed: u32) -> Self {
        let span = HOST_PORTS.end() - HOST_PORTS.start() + 1;
        Self {
            cid,
            limits,
            slots: Vec::new(),
            free: Vec::new(),
            names: HashMap::new(),
            line: VecDeque::new(),
            strays: VecDeque::new(),
            next_port: HOST_PORTS.start() + seed % span,
            promised: 0,
            messages: 0,
            incoming: HashMap::new(),
            statistics: TableStatistics::default(),
        }
    }

    /// The guest's context.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// A connection, if it is still there.
    pub fn get(&self, id: ConnectionId) -> Option<&Connection> {
        self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?.connection.as_ref()
    }

    fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.slots
            .get_mut(id.index as usize)
            .filter(|slot| slot.generation == id.generation)?
            .connection
            .as_mut()
    }

    /// All of them.
    pub fn ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.names.values().copied()
    }

    /// What was counted.
    pub fn statistics(&self) -> TableStatistics {
        self.statistics
    }

    /// Whether the table can take what any packet of the guest's may lead to.
    pub fn takes(&self) -> bool {
        self.strays.len() < PENDING_RESETS_MAX
    }

    /// The port that comes next on the host side.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Which port comes next, where another process has used those before.
    pub fn set_next_port(&mut self, port: u32) {
        self.next_port = if HOST_PORTS.contains(&port) { port } else { *HOST_PORTS.start() };
    }

    /// Resets that wait are forgotten: the guest takes none, and waits itself for us to go on.
    pub fn forget_strays(&mut self) -> usize {
        std::mem::take(&mut self.strays).len()
    }

    /// A packet of the guest's, with so many bytes behind its header.
    pub fn from_guest(&mut self, header: &Header, payload: u32) -> Inbound {
        let operation = Operation::from_number(header.operation.get());
        if header.source_cid.get() != self.cid {
            self.statistics.dropped += 1;
            return Inbound::Nothing;
        }
        let key = ConnectionKey {
            guest_port: header.source_port.get(),
            peer_cid: header.destination_cid.get(),
            peer_port: header.destination_port.get(),
        };
        let known = self.names.get(&key).copied();
        let kind = Kind::from_number(header.kind.get());
        match (known, operation, kind) {
            (Some(id), Some(operation), Some(kind)) => self.known(id, operation, kind, header, payload),
            (Some(id), ..) => self.violation(id),
            (None, Some(Operation::Reset), _) => Inbound::Nothing,
            (None, Some(Operation::Request), Some(kind)) => self.request(key, kind, header),
            (None, ..) => self.stray(header),
        }
    }

    fn stray(&mut self, header: &Header) -> Inbound {
        if self.takes() {
            self.strays.push_back(header.reset());
        }
        Inbound::Nothing
    }

    fn request(&mut self, key: ConnectionKey, kind: Kind, header: &Header) -> Inbound {
        self.statistics.requests_from_guest += 1;
        let Some(id) = self.add(key, kind, ConnectionState::Connecting) else {
            self.statistics.refused_by_limit += 1;
            return self.stray(header);
        };
        // A request's credit is where all begins: nothing was sent, so nothing can have been taken.
        let connection = self.get_mut(id).expect("it was added just now");
        match connection.to_guest.hear(header.buf_alloc.get(), header.fwd_cnt.get()) {
            Ok(()) => Inbound::Connect(id),
            Err(_) => self.violation(id),
        }
    }

    fn known(
        &mut self,
        id: ConnectionId,
        operation: Operation,
        kind: Kind,
        header: &Header,
        payload: u32,
    ) -> Inbound {
        if operation == Operation::Reset {
            return self.reset_by_guest(id);
        }
        let connection = self.get_mut(id).expect("names lead to connections");
        match connection.state {
            ConnectionState::Resetting => return Inbound::Nothing,
            ConnectionState::Draining => return self.stray(header),
            _ => {}
        }
        let heard = connection.to_guest.hear(header.buf_alloc.get(), header.fwd_cnt.get());
        if heard.is_err() || connection.kind != kind {
            return self.violation(id);
        }
        let connected = matches!(connection.state, ConnectionState::Established | ConnectionState::Closing);
        match operation {
            Operation::Response if connection.state == ConnectionState::RequestSent => {
                connection.state = ConnectionState::Established;
                Inbound::Accepted(id)
            }
            Operation::ReadWrite if connected => self.payload(id, header, payload),
            Operation::CreditUpdate if connection.state != ConnectionState::RequestSent => {
                self.statistics.credit_updates_received += 1;
                Inbound::Credit(id)
            }
            Operation::CreditRequest if connected => {
                self.owe(id, Owed::CREDIT);
                Inbound::Credit(id)
            }
            Operation::Shutdown if connection.state != ConnectionState::RequestSent => {
                connection.guest_shut |= ShutdownFlags::from_bits_truncate(header.flags.get());
                Inbound::Shutdown(id)
            }
            _ => self.violation(id),
        }
    }

    /// A guest that has closed a connection waits some seconds for us and then resets it; what it sent before it closed is
    /// for the host side all the same.
    fn reset_by_guest(&mut self, id: ConnectionId) -> Inbound {
        self.statistics.resets_received += 1;
        let connection = self.get_mut(id).expect("names lead to connections");
        if connection.guest_shut.contains(ShutdownFlags::SEND) && connection.from_guest.kept() > 0 {
            connection.state = ConnectionState::Draining;
            connection.guest_shut = ShutdownFlags::all();
            connection.owed = Owed::empty();
            return Inbound::Shutdown(id);
        }
        self.remove(id);
        Inbound::Gone(id, true)
    }

    fn payload(&mut self, id: ConnectionId, header: &Header, payload: u32) -> Inbound {
        let connection = self.get_mut(id).expect("the caller has looked");
        let len = header.len.get();
        let told = len <= payload
            && len <= PAYLOAD_BYTES_MAX
            && !connection.guest_shut.contains(ShutdownFlags::SEND);
        if !told || connection.from_guest.receive(len).is_err() {
            return self.violation(id);
        }
        self.tell_credit(id);
        Inbound::Payload(id, SeqFlags::from_bits_truncate(header.flags.get()))
    }

    fn violation(&mut self, id: ConnectionId) -> Inbound {
        self.statistics.violations += 1;
        self.reset(id);
        Inbound::Gone(id, false)
    }

    /// The host side asks for a port of the guest's, in the name of `peer_cid`. `None` beyond the limits.
    pub fn open(&mut self, guest_port: u32, kind: Kind, peer_cid: u64) -> Option<ConnectionId> {
        self.statistics.requests_to_guest += 1;
        let mut key = ConnectionKey { guest_port, peer_cid, peer_port: self.take_port() };
        // There are more ports than connections, so one is free.
        while self.names.contains_key(&key) {
            key.peer_port = self.take_port();
        }
        let id = self.add(key, kind, ConnectionState::RequestSent);
        match id {
            Some(id) => {
                if let Some(connection) = self.get_mut(id) {
                    connection.incoming = true;
                }
                *self.incoming.entry(peer_cid).or_default() += 1;
                self.owe(id, Owed::REQUEST);
            }
            None => self.statistics.refused_by_limit += 1,
        }
        id
    }

    /// How many connections there are that this peer asked for.
    pub fn incoming(&self, peer_cid: u64) -> usize {
        self.incoming.get(&peer_cid).copied().unwrap_or(0)
    }

    /// A connection was refused before it came here.
    pub(crate) fn refuse(&mut self) {
        self.statistics.refused_by_limit += 1;
    }

    /// Bytes of memory that are reserved, of [`Limits::memory`].
    pub fn reserved(&self) -> u64 {
        self.promised
    }

    /// Reserves memory for a message on its way to the guest. Without room for it there is still one at a time, so that
    /// messages go on.
    pub fn reserve(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.limits.memory.saturating_sub(self.promised);
        if !fits && self.messages > 0 {
            return false;
        }
        self.promised += bytes;
        self.messages += bytes;
        true
    }

    /// Gives memory back that was [reserved](Table::reserve).
    pub fn release(&mut self, bytes: u64) {
        self.promised -= bytes;
        self.messages -= bytes;
    }

    /// The window of a connection, in bytes.
    pub fn window(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.from_guest.window())
    }

    fn take_port(&mut self) -> u32 {
        let port = self.next_port;
        self.next_port = if port == *HOST_PORTS.end() { *HOST_PORTS.start() } else { port + 1 };
        port
    }

    fn add(&mut self, key: ConnectionKey, kind: Kind, phase: ConnectionState) -> Option<ConnectionId> {
        let left = self.limits.memory.saturating_sub(self.promised);
        let least = WINDOW_MIN.min(self.limits.buf_alloc);
        if self.names.len() >= self.limits.connections || left < Limits::cost(least, kind) {
            return None;
        }
        let share = if self.promised < self.limits.memory / 4 { SHARE_FIRST } else { SHARE };
        let fair = u32::try_from(left / share).unwrap_or(u32::MAX).clamp(WINDOW_MIN, WINDOW_FIRST_MAX);
        let window = fair.min(self.limits.buf_alloc);
        self.promised += Limits::cost(window, kind);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).expect("limited by `Limits::connections`")
        });
        let slot = &mut self.slots[index as usize];
        slot.connection = Some(Connection {
            key,
            kind,
            state: phase,
            guest_shut: ShutdownFlags::empty(),
            host_shut: ShutdownFlags::empty(),
            to_guest: PeerCredit::default(),
            from_guest: ReceiveWindow::new(window),
            owed: Owed::empty(),
            in_line: false,
            incoming: false,
        });
        let id = ConnectionId { index, generation: slot.generation };
        self.names.insert(key, id);
        Some(id)
    }

    fn remove(&mut self, id: ConnectionId) {
        let slot = &mut self.slots[id.index as usize];
        let connection = slot.connection.take().expect("the caller has looked");
        slot.generation = slot.generation.wrapping_add(1) & GENERATION_MAX;
        self.promised -= Limits::cost(connection.from_guest.window(), connection.kind);
        if connection.incoming
            && let Entry::Occupied(mut count) = self.incoming.entry(connection.key.peer_cid)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.names.remove(&connection.key);
        self.free.push(id.index);
    }

    fn owe(&mut self, id: ConnectionId, owed: Owed) {
        let Some(connection) = self.get_mut(id) else { return };
        connection.owed |= owed;
        if std::mem::replace(&mut connection.in_line, true) {
            return;
        }
        // A guest that takes nothing can have connections come and go, whose places in the line are left.
        if self.line.len() > 2 * self.names.len() {
            let mut line = std::mem::take(&mut self.line);
            line.retain(|id| self.get(*id).is_some());
            self.line = line;
        }
        self.line.push_back(id);
    }

    /// The host side is there: the guest will be told so.
    pub fn established(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id)
            && connection.state == ConnectionState::Connecting
        {
            connection.state = ConnectionState::Established;
            self.owe(id, Owed::RESPONSE);
        }
    }

    /// So many bytes have reached the host side.
    pub fn forwarded(&mut self, id: ConnectionId, bytes: u32) {
        if let Some(connection) = self.get_mut(id) {
            connection.from_guest.forward(bytes);
            self.tell_credit(id);
        }
    }

    /// Tells the guest of its credit, if that is due.
    fn tell_credit(&mut self, id: ConnectionId) {
        let (most, left) = (self.limits.buf_alloc, self.limits.memory.saturating_sub(self.promised));
        let Some(connection) = self.get_mut(id) else { return };
        let own = connection.to_guest.alloc();
        let is_due = connection.from_guest.is_due(own, connection.kind == Kind::Seqpacket);
        if !is_due || connection.guest_shut.contains(ShutdownFlags::SEND) {
            return;
        }
        // A message has to fit into what a socket of the host takes at once, so there the window stays.
        if connection.kind == Kind::Stream {
            let (window, wanted) = (connection.from_guest.window(), connection.from_guest.wanted().min(most));
            let wanted = wanted.max(window);
            let more = Limits::cost(wanted, Kind::Stream) - Limits::cost(window, Kind::Stream);
            if more <= left / 2 {
                connection.from_guest.widen(wanted);
                self.promised += more;
            }
        }
        self.owe(id, Owed::CREDIT);
    }

    /// The host side takes no more for now.
    pub fn fell_behind(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id) {
            connection.from_guest.fall_behind();
        }
    }

    /// How many bytes may go to the guest.
    pub fn room(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.to_guest.room())
    }

    /// The most that the guest ever takes at once; a longer message will never fit.
    pub fn room_at_most(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.to_guest.alloc())
    }

    /// The guest has no credit left and has not said so for a while: asks it.
    pub fn ask_credit(&mut self, id: ConnectionId) {
        self.owe(id, Owed::ASK_CREDIT);
    }

    /// The host will not send, or not receive, any more. Said behind all that was sent before.
    pub fn shut(&mut self, id: ConnectionId, what: ShutdownFlags) {
        let Some(connection) = self.get_mut(id) else { return };
        if connection.state == ConnectionState::Established && !connection.host_shut.contains(what) {
            connection.host_shut |= what;
            self.owe(id, Owed::SHUTDOWN);
        }
    }

    /// Both ways are over and the host side is closed. The guest is told, and confirms with a reset.
    pub fn over(&mut self, id: ConnectionId) {
        let Some(connection) = self.get_mut(id) else { return };
        connection.state = ConnectionState::Closing;
        if !connection.host_shut.is_all() {
            connection.host_shut = ShutdownFlags::all();
            self.owe(id, Owed::SHUTDOWN);
        }
    }

    /// The connection ends: the guest is told, and then it is gone.
    pub fn reset(&mut self, id: ConnectionId) {
        let Some(connection) = self.get_mut(id) else { return };
        let lingers =
            std::mem::replace(&mut connection.state, ConnectionState::Resetting) == ConnectionState::Draining;
        if lingers || connection.owed.contains(Owed::REQUEST) {
            // The guest knows, or has never heard of it. Its place in the line is skipped.
            self.remove(id);
            return;
        }
        connection.owed = Owed::empty();
        self.owe(id, Owed::RESET);
    }

    /// All connections end, and the guest is not told: it is another one.
    pub fn clear(&mut self) {
        let ids: Vec<ConnectionId> = self.ids().collect();
        for id in ids {
            self.remove(id);
        }
        self.line.clear();
        self.strays.clear();
    }

    /// A reset for a connection that somebody else had and that the guest may still believe in.
    pub fn reset_pair(&mut self, key: ConnectionKey, kind: Kind) {
        if self.names.contains_key(&key) {
            return;
        }
        let header = Header {
            source_cid: self.cid.into(),
            destination_cid: key.peer_cid.into(),
            source_port: key.guest_port.into(),
            destination_port: key.peer_port.into(),
            kind: kind.number().into(),
            ..Header::default()
        };
        self.strays.push_back(header.reset());
    }

    /// How many headers without payload wait for the guest, at least.
    pub fn control_len(&self) -> usize {
        self.line.len() + self.strays.len()
    }

    /// How many bytes of the guest's have not reached the host side.
    pub fn kept(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.from_guest.kept())
    }

    /// A packet too short to have a sender.
    pub fn drop_packet(&mut self) {
        self.statistics.dropped += 1;
    }

    /// The next header without payload for the guest. Whoever takes it, sends it.
    pub fn next_control(&mut self) -> Option<Header> {
        while let Some(id) = self.line.pop_front() {
            let Some(connection) = self.get_mut(id) else { continue };
            connection.in_line = false;
            let mut each = connection.owed.iter();
            let Some(owed) = each.next() else { continue };
            let more = each.next().is_some();
            connection.owed.remove(owed);
            let operation = match owed {
                Owed::REQUEST => Operation::Request,
                Owed::RESPONSE => Operation::Response,
                Owed::CREDIT => Operation::CreditUpdate,
                Owed::ASK_CREDIT => Operation::CreditRequest,
                Owed::SHUTDOWN => Operation::Shutdown,
                _ => Operation::Reset,
            };
            if more {
                connection.in_line = true;
                self.line.push_front(id);
            }
            let mut header = self.header(id, operation)?;
            match operation {
                Operation::Shutdown => {
                    let shut = self.get(id).map_or(0, |connection| connection.host_shut.bits());
                    header.flags = shut.into();
                }
                Operation::CreditUpdate => self.statistics.credit_updates_sent += 1,
                Operation::Reset => {
                    self.statistics.resets_sent += 1;
                    self.remove(id);
                }
                _ => {}
            }
            return Some(header);
        }
        let reset = self.strays.pop_front();
        self.statistics.resets_sent += u64::from(reset.is_some());
        reset
    }

    /// The header of a packet with payload, which counts from now on. Tells the credit too, so that is no longer owed.
    ///
    /// # Panics
    /// If the connection is not there.
    pub fn data(&mut self, id: ConnectionId, len: u32, ends: SeqFlags) -> Header {
        let connection = self.get_mut(id).expect("who sends has looked");
        debug_assert!(len <= connection.to_guest.room(), "more than the guest has room for");
        connection.to_guest.send(len);
        connection.owed.remove(Owed::CREDIT);
        let mut header = self.header(id, Operation::ReadWrite).expect("it is there");
        (header.len, header.flags) = (len.into(), ends.bits().into());
        header
    }

    fn header(&mut self, id: ConnectionId, operation: Operation) -> Option<Header> {
        let cid = self.cid;
        let connection = self.get_mut(id)?;
        let (window, forwarded) = connection.from_guest.say();
        Some(Header {
            source_cid: connection.key.peer_cid.into(),
            destination_cid: cid.into(),
            source_port: connection.key.peer_port.into(),
            destination_port: connection.key.guest_port.into(),
            len: 0.into(),
            kind: connection.kind.number().into(),
            operation: operation.number().into(),
            flags: 0.into(),
            buf_alloc: window.into(),
            fwd_cnt: forwarded.into(),
        })
    }
}
