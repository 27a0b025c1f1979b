//! The connections of one guest: the meaning of its packets, and the packets to send to it. No I/O and no
//! payload, only lengths.
//!
//! ```text
//!   header from the guest ─► receive_from_guest ─► Inbound: action of the engine
//!   events of the host ─► open, established, forwarded, shutdown, reset ─► control queue ─► next_control ─► header for the guest
//! ```
//! Pending control packets are flags of their connection, which is in the control queue at most once, so the
//! queue is bounded by the table no matter what guest and host do. Resets of unknown connections wait in a
//! separate short queue ([`PENDING_RESETS_MAX`]); while it is full, no packet of the guest is processed.

mod control;
mod memory;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

pub use self::control::DataHeaders;
use self::memory::MemoryBudget;
use crate::connection::{
    ClosedBy, Connection, ConnectionId, ConnectionKey, ConnectionLimits, ConnectionState, ControlPackets,
    Inbound, Initiator, PacketAction, TableStatistics,
};
use crate::credit::{CreditNeed, PeerCredit, ReceiveWindow};
use crate::packet::{Operation, PacketHeader, ShutdownFlags, SocketType};

/// Maximum number of resets of unknown connections that wait for buffers in the guest's ring.
pub const PENDING_RESETS_MAX: usize = 1024;
/// Ephemeral ports of the host: above those that applications choose.
const HOST_PORTS: std::ops::RangeInclusive<u32> = 1 << 30..=(1 << 31) - 1;

/// Bit 63 of a [`ConnectionId`] as a `u64` is reserved for callers (epoll tags).
const GENERATION_MAX: u32 = u32::MAX >> 1;

/// The connections of one guest.
#[derive(Debug)]
pub struct ConnectionTable {
    cid: u64,
    limits: ConnectionLimits,
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_key: HashMap<ConnectionKey, ConnectionId>,
    control_queue: VecDeque<ConnectionId>,
    pending_resets: VecDeque<PacketHeader>,
    next_port: u32,
    pub(crate) memory: MemoryBudget,
    /// Connections that peers initiated, by CID.
    connections_initiated_by: HashMap<u64, usize>,
    packet_limit: PacketLimit,
    pub(crate) statistics: TableStatistics,
}

/// Limit of the packets that the guest has not read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum PacketLimit {
    /// [`PACKET_CHARGE`](crate::credit::PACKET_CHARGE) applies, and the driver answers credit requests.
    #[default]
    Kept,
    /// The charge may apply, until the driver leaves a credit request unanswered. Linux answers since 5.13.
    Probed,
    /// None: Windows and older Linux charge only bytes, and send credit updates only by bytes.
    None,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

impl ConnectionTable {
    /// Creates a table for the guest with this CID. Ephemeral ports begin at `seed` modulo their number.
    pub fn new(cid: u64, limits: ConnectionLimits, seed: u32) -> Self {
        let span = HOST_PORTS.end() - HOST_PORTS.start() + 1;
        Self {
            cid,
            limits,
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            control_queue: VecDeque::new(),
            pending_resets: VecDeque::new(),
            next_port: HOST_PORTS.start() + seed % span,
            memory: MemoryBudget::new(limits.memory),
            connections_initiated_by: HashMap::new(),
            packet_limit: PacketLimit::default(),
            statistics: TableStatistics::default(),
        }
    }

    /// Sets the limit of unread packets, of a new driver.
    pub(crate) fn set_packet_limit(&mut self, limit: PacketLimit) {
        self.packet_limit = limit;
    }

    /// Returns the guest's CID.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Returns true if there is no connection.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Returns a connection, if it still exists.
    pub fn get(&self, id: ConnectionId) -> Option<&Connection> {
        self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?.connection.as_ref()
    }

    fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        Self::connection(&mut self.slots, id)
    }

    fn connection(slots: &mut [Slot], id: ConnectionId) -> Option<&mut Connection> {
        let slot = slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        slot.connection.as_mut()
    }

    /// Returns true if a connection still exists.
    pub fn contains(&self, id: ConnectionId) -> bool {
        self.get(id).is_some()
    }

    /// Returns all connections.
    pub fn ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.by_key.values().copied()
    }

    /// Returns the counters.
    pub fn statistics(&self) -> TableStatistics {
        self.statistics
    }

    /// Returns the next ephemeral port of the host.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Sets the next ephemeral port, to continue after those of another process.
    pub fn set_next_port(&mut self, port: u32) {
        self.next_port = if HOST_PORTS.contains(&port) { port } else { *HOST_PORTS.start() };
    }

    /// Processes a packet of the guest that has `payload` bytes after its header.
    pub fn receive_from_guest(&mut self, header: &PacketHeader, payload: u32) -> Inbound {
        if header.source_cid != self.cid {
            self.statistics.dropped += 1;
            return Inbound::Nothing;
        }
        let key = ConnectionKey {
            guest_port: header.source_port,
            peer_cid: header.destination_cid,
            peer_port: header.destination_port,
        };
        let operation = Operation::from_number(header.operation);
        let kind = SocketType::from_number(header.kind);
        match (self.by_key.get(&key).copied(), operation, kind) {
            (Some(id), Some(operation), Some(kind)) => self.on_packet(id, operation, kind, header, payload),
            (Some(id), ..) => self.violation(id),
            (None, Some(Operation::Reset), _) => Inbound::Nothing,
            (None, Some(Operation::Request), Some(kind)) => self.request(key, kind, header),
            (None, ..) => self.refuse_packet(header),
        }
    }

    fn request(&mut self, key: ConnectionKey, kind: SocketType, header: &PacketHeader) -> Inbound {
        self.statistics.requests_from_guest += 1;
        let Some((id, connection)) = self.add(key, kind, Initiator::Guest) else {
            self.statistics.refused_by_limit += 1;
            return self.refuse_packet(header);
        };
        // Nothing was sent yet, so a request with a `fwd_cnt` is a violation.
        match connection.peer_credit.update(header.buf_alloc, header.fwd_cnt) {
            Ok(()) => Inbound::Connect(id),
            Err(_) => self.violation(id),
        }
    }

    fn on_packet(
        &mut self,
        id: ConnectionId,
        operation: Operation,
        kind: SocketType,
        header: &PacketHeader,
        payload: u32,
    ) -> Inbound {
        self.statistics.resets_received += u64::from(operation == Operation::Reset);
        let Some(connection) = self.get_mut(id) else { return Inbound::Nothing };
        let action = connection.state.on_packet(operation);
        match action {
            PacketAction::Ignore => return Inbound::Nothing,
            PacketAction::Refuse => return self.refuse_packet(header),
            PacketAction::Close => return self.close_by_guest(id),
            PacketAction::Remove => {
                self.remove(id);
                return Inbound::Closed(id, ClosedBy::Guest);
            }
            _ => {}
        }
        let credit = connection.peer_credit.update(header.buf_alloc, header.fwd_cnt);
        if credit.is_err() || connection.kind != kind {
            return self.violation(id);
        }
        match action {
            PacketAction::Accept => {
                connection.state = ConnectionState::Established;
                Inbound::Accepted(id)
            }
            PacketAction::Forward => match connection.receive(header, payload) {
                Ok(flags) => {
                    self.advertise_credit(id);
                    Inbound::Payload(id, flags)
                }
                Err(_) => self.violation(id),
            },
            PacketAction::UpdateCredit => {
                connection.is_request_unanswered = false;
                self.statistics.credit_updates_received += 1;
                Inbound::Credit(id)
            }
            PacketAction::SendCredit => {
                self.queue_control(id, ControlPackets::CREDIT_UPDATE);
                Inbound::Credit(id)
            }
            PacketAction::Shutdown => {
                connection.guest_shutdown |= ShutdownFlags::from_bits_truncate(header.flags);
                Inbound::Shutdown(id)
            }
            _ => self.violation(id),
        }
    }

    /// Processes a RST. A guest that has closed a connection waits some seconds for the device and then
    /// resets it; payload from before the close is forwarded nevertheless.
    fn close_by_guest(&mut self, id: ConnectionId) -> Inbound {
        let Some(connection) = self.get_mut(id) else { return Inbound::Nothing };
        let has_ended = connection.guest_shutdown.contains(ShutdownFlags::SEND);
        if has_ended && connection.receive_window.unforwarded() > 0 {
            connection.state = ConnectionState::Draining;
            connection.guest_shutdown = ShutdownFlags::all();
            connection.control = ControlPackets::empty();
            return Inbound::Shutdown(id);
        }
        self.remove(id);
        Inbound::Closed(id, ClosedBy::Guest)
    }

    fn violation(&mut self, id: ConnectionId) -> Inbound {
        self.statistics.violations += 1;
        self.reset(id);
        Inbound::Closed(id, ClosedBy::Violation)
    }

    /// Opens a connection from `peer_cid` to a port of the guest. `None` beyond the limits.
    pub fn open(&mut self, guest_port: u32, kind: SocketType, peer_cid: u64) -> Option<ConnectionId> {
        self.statistics.requests_to_guest += 1;
        let mut key = ConnectionKey { guest_port, peer_cid, peer_port: self.allocate_port() };
        // There are more ports than connections, so one is free.
        while self.by_key.contains_key(&key) {
            key.peer_port = self.allocate_port();
        }
        let Some((id, _)) = self.add(key, kind, Initiator::Peer) else {
            self.statistics.refused_by_limit += 1;
            return None;
        };
        *self.connections_initiated_by.entry(peer_cid).or_default() += 1;
        self.queue_control(id, ControlPackets::REQUEST);
        Some(id)
    }

    /// Returns the number of connections that this peer initiated.
    pub fn connections_initiated_by(&self, peer_cid: u64) -> usize {
        self.connections_initiated_by.get(&peer_cid).copied().unwrap_or(0)
    }

    /// Returns the reserved memory in bytes, at most [`ConnectionLimits::memory`] and one message.
    pub fn reserved(&self) -> u64 {
        self.memory.reserved
    }

    /// Returns the window of a connection in bytes.
    pub fn window(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.receive_window.buf_alloc())
    }

    fn allocate_port(&mut self) -> u32 {
        let port = self.next_port;
        self.next_port = if port == *HOST_PORTS.end() { *HOST_PORTS.start() } else { port + 1 };
        port
    }

    fn add(
        &mut self,
        key: ConnectionKey,
        kind: SocketType,
        initiator: Initiator,
    ) -> Option<(ConnectionId, &mut Connection)> {
        if self.by_key.len() >= self.limits.connections {
            return None;
        }
        let window = self.memory.reserve_window(self.limits.buf_alloc, kind)?;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).expect("limited by `ConnectionLimits::connections`")
        });
        let slot = &mut self.slots[index as usize];
        let id = ConnectionId { index, generation: slot.generation };
        self.by_key.insert(key, id);
        let connection = slot.connection.insert(Connection {
            key,
            kind,
            state: match initiator {
                Initiator::Guest => ConnectionState::Connecting,
                Initiator::Peer => ConnectionState::RequestSent,
            },
            guest_shutdown: ShutdownFlags::empty(),
            host_shutdown: ShutdownFlags::empty(),
            peer_credit: PeerCredit::default(),
            is_request_unanswered: false,
            receive_window: ReceiveWindow::new(window),
            control: ControlPackets::empty(),
            in_control_queue: false,
            initiator,
        });
        Some((id, connection))
    }

    fn remove(&mut self, id: ConnectionId) {
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation);
        let Some(slot) = slot else { return };
        let Some(connection) = slot.connection.take() else { return };
        slot.generation = slot.generation.wrapping_add(1) & GENERATION_MAX;
        self.memory.free_window(connection.receive_window.buf_alloc(), connection.kind);
        if connection.initiator == Initiator::Peer
            && let Entry::Occupied(mut count) = self.connections_initiated_by.entry(connection.key.peer_cid)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.by_key.remove(&connection.key);
        self.free.push(id.index);
    }

    /// The host's socket is connected: queues the response.
    pub fn established(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id)
            && connection.state == ConnectionState::Connecting
        {
            connection.state = ConnectionState::Established;
            self.queue_control(id, ControlPackets::RESPONSE);
        }
    }

    /// Accounts for `bytes` that reached the host's socket.
    pub fn forwarded(&mut self, id: ConnectionId, bytes: u32) {
        if let Some(connection) = self.get_mut(id) {
            connection.receive_window.forward(bytes);
            self.advertise_credit(id);
        }
    }

    /// Queues a credit update, if one is needed, and grows the window of a stream.
    fn advertise_credit(&mut self, id: ConnectionId) {
        let most = self.limits.buf_alloc;
        let Some(connection) = Self::connection(&mut self.slots, id) else { return };
        let window = &mut connection.receive_window;
        let needs_update = window.needs_update(connection.peer_credit.buf_alloc(), connection.kind);
        if !needs_update || connection.guest_shutdown.contains(ShutdownFlags::SEND) {
            return;
        }
        // A message has to fit into the send buffer of the host's socket, so its window does not grow.
        if connection.kind == SocketType::Stream {
            let present = window.buf_alloc();
            let desired = window.desired().min(most).max(present);
            if self.memory.grow_window(present, desired) {
                window.grow(desired);
            }
        }
        self.queue_control(id, ControlPackets::CREDIT_UPDATE);
    }

    /// Records that the host's socket was full.
    pub fn mark_congested(&mut self, id: ConnectionId) {
        if let Some(connection) = self.get_mut(id) {
            connection.receive_window.mark_congested();
        }
    }

    /// Returns the number of bytes that may be sent to the guest.
    pub fn peer_credit(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.peer_credit.available())
    }

    /// Returns the number of packets that may be sent to the guest.
    pub(crate) fn available_packets(&self, id: ConnectionId) -> u32 {
        match (self.get(id), self.packet_limit) {
            (None, _) => 0,
            (Some(_), PacketLimit::None) => u32::MAX,
            (Some(connection), _) => connection.peer_credit.available_packets(),
        }
    }

    /// Returns true if the guest has this credit.
    pub(crate) fn admits(&self, id: ConnectionId, need: CreditNeed) -> bool {
        self.get(id).is_some_and(|connection| {
            let credit = &connection.peer_credit;
            need.bytes <= credit.available()
                && (self.packet_limit == PacketLimit::None || credit.admits_packets(need.packets))
        })
    }

    /// Requests credit before packets reach their limit.
    pub(crate) fn request_credit_early(&mut self, id: ConnectionId) {
        let is_limited = self.packet_limit != PacketLimit::None;
        if is_limited && self.get_mut(id).is_some_and(|connection| connection.peer_credit.needs_request()) {
            self.request_credit(id);
        }
    }

    /// Ends the limit of packets, if a credit request of this connection is unanswered by a driver that may
    /// have none.
    pub(crate) fn end_packet_limit(&mut self, id: ConnectionId) {
        let is_unanswered = self.get(id).is_some_and(|connection| connection.is_request_unanswered);
        if is_unanswered && self.packet_limit == PacketLimit::Probed {
            self.packet_limit = PacketLimit::None;
        }
    }

    /// Queues a credit request: the guest's credit is used up, and no update has come for a while.
    pub fn request_credit(&mut self, id: ConnectionId) {
        self.queue_control(id, ControlPackets::CREDIT_REQUEST);
    }

    /// Ends directions of the host's side. The packet is sent after all payload so far.
    pub fn shutdown(&mut self, id: ConnectionId, directions: ShutdownFlags) {
        let Some(connection) = self.get_mut(id) else { return };
        if connection.state == ConnectionState::Established && !connection.host_shutdown.contains(directions)
        {
            connection.host_shutdown |= directions;
            self.queue_control(id, ControlPackets::SHUTDOWN);
        }
    }

    /// Both directions have ended and the host's socket is closed. The guest confirms that with a RST.
    pub fn close(&mut self, id: ConnectionId) {
        let established = self.get_mut(id).filter(|it| it.state == ConnectionState::Established);
        let Some(connection) = established else { return };
        connection.state = ConnectionState::Closing;
        if !connection.host_shutdown.is_all() {
            connection.host_shutdown = ShutdownFlags::all();
            self.queue_control(id, ControlPackets::SHUTDOWN);
        }
    }

    /// Queues a RST, which removes the connection when it is sent.
    pub fn reset(&mut self, id: ConnectionId) {
        let Some(connection) = self.get_mut(id) else { return };
        let before = std::mem::replace(&mut connection.state, ConnectionState::Resetting);
        if before == ConnectionState::Draining || connection.control.contains(ControlPackets::REQUEST) {
            // The guest has reset it, or has not received the request. Its entry in the control queue is
            // skipped.
            self.remove(id);
            return;
        }
        connection.control = ControlPackets::empty();
        self.queue_control(id, ControlPackets::RESET);
    }

    /// Returns true if the guest has not received the request of a connection: no driver knows of it.
    pub(crate) fn is_unsent(&self, id: ConnectionId) -> bool {
        self.get(id).is_some_and(|connection| connection.control.contains(ControlPackets::REQUEST))
    }

    /// Removes all connections without notifying the guest.
    pub fn clear(&mut self) {
        for id in self.ids().collect::<Vec<ConnectionId>>() {
            self.remove(id);
        }
        self.control_queue.clear();
        self.pending_resets.clear();
    }

    /// Removes the connections that the guest knows of, without notifying it, because its driver is another
    /// one.
    pub(crate) fn remove_sent(&mut self) {
        let ids: Vec<ConnectionId> = self.ids().filter(|id| !self.is_unsent(*id)).collect();
        ids.into_iter().for_each(|id| self.remove(id));
        self.pending_resets.clear();
    }

    /// Returns the number of bytes from the guest that have not reached the host's socket.
    pub fn unforwarded(&self, id: ConnectionId) -> u32 {
        self.get(id).map_or(0, |connection| connection.receive_window.unforwarded())
    }
}

#[cfg(test)]
mod tests {
    use super::ConnectionState::{Closing, Connecting, Draining, Established, RequestSent, Resetting};
    use super::*;

    #[test]
    fn every_event_of_the_host_is_legal_or_ignored_in_every_state() {
        type Event = fn(&mut ConnectionTable, ConnectionId);
        let states = [RequestSent, Connecting, Established, Closing, Draining, Resetting].map(Some);
        let mut connected = states;
        connected[1] = Some(Established);
        let mut closed = states;
        closed[2] = Some(Closing);
        // The guest has reset a connection that is drained: it is removed.
        let mut reset = [Some(Resetting); 6];
        reset[4] = None;
        let shutdown: Event = |table, id| table.shutdown(id, ShutdownFlags::SEND);
        let events: [(&str, Event, _); 4] = [
            ("connected", ConnectionTable::established, connected),
            ("shutdown", shutdown, states),
            ("closed", ConnectionTable::close, closed),
            ("reset", ConnectionTable::reset, reset),
        ];
        for (name, event, results) in events {
            for (state, result) in states.into_iter().flatten().zip(results) {
                let mut table = ConnectionTable::new(3, ConnectionLimits::default(), 0);
                let id = table.open(1, SocketType::Stream, 2).unwrap();
                assert!(table.next_control().is_some(), "the request");
                table.get_mut(id).unwrap().state = state;
                event(&mut table, id);
                assert_eq!(table.get(id).map(|connection| connection.state), result, "{name} in {state:?}");
                let ends = table.get(id).is_some_and(|connection| !connection.host_shutdown.is_empty());
                assert_eq!(ends, state == Established && ["shutdown", "closed"].contains(&name), "{name}");
            }
        }
    }
}
