//! A connection in the table: its identity, its state by the packets that were exchanged, and limits.
//!
//! ```text
//!   host connects    RequestSent ── RESPONSE ──┐                   ┌── both directions ended ──► Closing ── RST ──► removed
//!                                              ├──► Established ───┤
//!   guest connects   Connecting ── connected ──┘                   └── RST, payload buffered ──► Draining ────────► removed
//!   any state ── violation, timeout, error of the socket ──► Resetting ── RST sent or received ──► removed
//! ```

use crate::credit::{CreditViolation, PeerCredit, ReceiveWindow};
use crate::packet::{Operation, PAYLOAD_BYTES_MAX, PacketHeader, SeqFlags, ShutdownFlags, SocketType};

/// Limits of one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum number of connections.
    pub connections: usize,
    /// Maximum window of one connection, in bytes.
    pub buf_alloc: u32,
    /// Maximum memory of all connections together, in bytes, including their bookkeeping
    /// ([`ConnectionLimits::cost`]).
    pub memory: u64,
    /// Maximum number of accepted sockets that have not sent `CONNECT` yet, and the capacity of the accept
    /// queue.
    pub handshakes: usize,
}

/// Descriptors that a process reserves for itself: logs, signals, control sockets and their clients.
const DESCRIPTORS_OF_PROCESS: u64 = 64;
/// Descriptors of a guest beside those of connections: its frontend, rings, memory, listeners.
const DESCRIPTORS_OF_GUEST: u64 = 64;

/// Memory of a connection beside its window, in bytes: its entries in tables and queues, and those of its
/// payload.
const CONNECTION_BYTES: u64 = 4096;

impl ConnectionLimits {
    /// Returns these limits, lowered to a guest's share of the process's `descriptors` if `guests` guests
    /// share them. Three quarters of a share are for connections, so a guest that uses its whole share leaves
    /// the others theirs.
    #[must_use]
    pub fn within_descriptors(self, descriptors: u64, guests: usize) -> Self {
        let guests = u64::try_from(guests.max(1)).unwrap_or(u64::MAX);
        let share = descriptors.saturating_sub(DESCRIPTORS_OF_PROCESS) / guests;
        let free = usize::try_from(share.saturating_sub(DESCRIPTORS_OF_GUEST)).unwrap_or(usize::MAX);
        let (connections, handshakes) = ((free - free / 4).max(1), (free / 8).max(1));
        Self {
            connections: self.connections.min(connections),
            handshakes: self.handshakes.min(handshakes),
            ..self
        }
    }

    /// Returns the maximum memory of a connection with this window: its buffered payload, chunks that are
    /// partly sent or partly empty, for messages two bits per byte that mark their ends, and the connection
    /// itself. The buffers of its socket are the kernel's and not included.
    pub fn cost(window: u32, kind: SocketType) -> u64 {
        let window = u64::from(window);
        let marks = match kind {
            SocketType::Stream => 0,
            SocketType::Seqpacket => window / 4,
        };
        window + window / 4 + marks + CONNECTION_BYTES
    }
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { connections: 16384, buf_alloc: 1 << 20, memory: 512 << 20, handshakes: 1024 }
    }
}

/// The 4-tuple of a connection, without the guest's own CID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    /// Port of the guest.
    pub guest_port: u32,
    /// CID of the peer: the host or another guest.
    pub peer_cid: u64,
    /// Port of the peer.
    pub peer_port: u32,
}

/// Handle of a connection: a slot of the table and its generation. It is never reused for another connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    /// Index of the slot.
    pub index: u32,
    /// Number of connections that used the slot before.
    pub generation: u32,
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectionState {
    /// The host connects; the guest has not responded yet.
    RequestSent,
    /// The guest connects; the host's socket is not connected yet.
    Connecting,
    /// Both ends are connected.
    Established,
    /// Both directions have ended; the guest has not confirmed it with a RST.
    Closing,
    /// The guest has sent a RST, and payload from before it is still being forwarded.
    Draining,
    /// A RST is queued; it removes the connection.
    Resetting,
}

/// Action of the table on a packet of a known connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketAction {
    /// Drop the packet: a RST is on its way, or was received before.
    Ignore,
    /// Answer with a RST, as for an unknown connection.
    Refuse,
    /// The guest resets the connection.
    Close,
    /// Forget the connection.
    Remove,
    /// The guest accepts the connection.
    Accept,
    /// Forward the payload.
    Forward,
    /// Only the header's credit counts.
    UpdateCredit,
    /// Send a credit update.
    SendCredit,
    /// The guest ends one or both directions.
    Shutdown,
    /// No driver may send this now: reset the connection.
    Violation,
}

impl ConnectionState {
    /// Returns the action on a packet with this operation.
    pub(crate) fn on_packet(self, operation: Operation) -> PacketAction {
        use Operation as Op;
        match (self, operation) {
            (Self::Resetting, Op::Reset) => PacketAction::Remove,
            (Self::Draining, Op::Reset) | (Self::Resetting, _) => PacketAction::Ignore,
            (Self::Draining, _) => PacketAction::Refuse,
            (_, Op::Reset) => PacketAction::Close,
            (Self::RequestSent, Op::Response) => PacketAction::Accept,
            (Self::Connecting | Self::Established | Self::Closing, Op::CreditUpdate) => {
                PacketAction::UpdateCredit
            }
            (Self::Connecting | Self::Established | Self::Closing, Op::Shutdown) => PacketAction::Shutdown,
            (Self::Established | Self::Closing, Op::ReadWrite) => PacketAction::Forward,
            (Self::Established | Self::Closing, Op::CreditRequest) => PacketAction::SendCredit,
            _ => PacketAction::Violation,
        }
    }

    /// Returns true if the connection is reset unless it leaves the state in time.
    pub(crate) fn has_timeout(self) -> bool {
        matches!(self, Self::RequestSent | Self::Connecting | Self::Closing)
    }

    /// Returns the name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RequestSent => "request-sent",
            Self::Connecting => "connecting",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Draining => "draining",
            Self::Resetting => "resetting",
        }
    }
}

bitflags::bitflags! {
    /// Packets without payload that are queued for the guest, in the order in which they are sent.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct ControlPackets: u8 {
        const REQUEST = 1;
        const RESPONSE = 2;
        const CREDIT_UPDATE = 4;
        const CREDIT_REQUEST = 8;
        const SHUTDOWN = 16;
        const RESET = 32;
    }
}

/// End that initiated a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Initiator {
    Guest,
    Peer,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// The connection's 4-tuple.
    pub key: ConnectionKey,
    /// Stream or messages.
    pub kind: SocketType,
    /// State of the connection.
    pub state: ConnectionState,
    /// Directions that the guest has ended.
    pub guest_shutdown: ShutdownFlags,
    /// Directions that the host has ended, as sent to the guest or queued for it.
    pub host_shutdown: ShutdownFlags,
    pub(crate) peer_credit: PeerCredit,
    /// Credit requests were sent since the guest last sent a credit update.
    pub(crate) is_request_unanswered: bool,
    pub(crate) receive_window: ReceiveWindow,
    pub(crate) control: ControlPackets,
    /// True if its id is in the table's control queue.
    pub(crate) in_control_queue: bool,
    pub(crate) initiator: Initiator,
}

impl Connection {
    /// Accounts for a data packet with `payload` bytes after its header.
    ///
    /// # Errors
    /// [`CreditViolation`] if the guest may not send it.
    pub(crate) fn receive(
        &mut self,
        header: &PacketHeader,
        payload: u32,
    ) -> Result<SeqFlags, CreditViolation> {
        let len = header.len;
        let is_valid = len <= payload && len <= PAYLOAD_BYTES_MAX;
        if !is_valid || self.guest_shutdown.contains(ShutdownFlags::SEND) {
            return Err(CreditViolation);
        }
        self.receive_window.receive(len)?;
        Ok(SeqFlags::from_bits_truncate(header.flags))
    }

    /// Returns the header of a packet for the guest with this CID. It advertises the connection's credit.
    pub(crate) fn header(&mut self, guest_cid: u64, operation: Operation) -> PacketHeader {
        let (buf_alloc, fwd_cnt) = self.receive_window.advertise();
        PacketHeader {
            source_cid: self.key.peer_cid,
            destination_cid: guest_cid,
            source_port: self.key.peer_port,
            destination_port: self.key.guest_port,
            len: 0,
            kind: self.kind.number(),
            operation: operation.number(),
            flags: 0,
            buf_alloc,
            fwd_cnt,
        }
    }
}

/// Cause of a connection's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedBy {
    /// The guest has reset it.
    Guest,
    /// The guest has sent a packet that no driver may send.
    Violation,
}

/// Action of the engine on a packet of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbound {
    /// None; an answer may be queued.
    Nothing,
    /// Connect to the destination of the connection's key.
    Connect(ConnectionId),
    /// The guest has accepted the connection.
    Accepted(ConnectionId),
    /// Forward the payload to the host's socket.
    Payload(ConnectionId, SeqFlags),
    /// The guest's credit may have grown.
    Credit(ConnectionId),
    /// The guest has ended one or both directions.
    Shutdown(ConnectionId),
    /// The connection is closed; close its socket too.
    Closed(ConnectionId, ClosedBy),
}

/// Counters of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableStatistics {
    /// Connections that the guest initiated.
    pub requests_from_guest: u64,
    /// Connections that the host or another guest initiated.
    pub requests_to_guest: u64,
    /// Connections refused because of a limit.
    pub refused_by_limit: u64,
    /// RST packets sent to the guest.
    pub resets_sent: u64,
    /// RST packets received from the guest.
    pub resets_received: u64,
    /// Packets that no driver may send; their connections are reset.
    pub violations: u64,
    /// Packets dropped because their source CID or length is wrong.
    pub dropped: u64,
    /// Credit update packets sent.
    pub credit_updates_sent: u64,
    /// Credit update packets received.
    pub credit_updates_received: u64,
}

#[cfg(test)]
mod tests {
    use super::ConnectionState::{Closing, Connecting, Draining, Established, RequestSent, Resetting};
    use super::*;

    const STATES: [ConnectionState; 6] = [RequestSent, Connecting, Established, Closing, Draining, Resetting];

    #[test]
    fn every_packet_has_an_action_in_every_state() {
        use PacketAction::{
            Accept, Close, Forward, Ignore, Refuse, Remove, SendCredit, Shutdown, UpdateCredit, Violation,
        };
        // In the order of STATES.
        let table = [
            (Operation::Request, [Violation, Violation, Violation, Violation, Refuse, Ignore]),
            (Operation::Response, [Accept, Violation, Violation, Violation, Refuse, Ignore]),
            (Operation::Reset, [Close, Close, Close, Close, Ignore, Remove]),
            (Operation::Shutdown, [Violation, Shutdown, Shutdown, Shutdown, Refuse, Ignore]),
            (Operation::ReadWrite, [Violation, Violation, Forward, Forward, Refuse, Ignore]),
            (Operation::CreditUpdate, [Violation, UpdateCredit, UpdateCredit, UpdateCredit, Refuse, Ignore]),
            (Operation::CreditRequest, [Violation, Violation, SendCredit, SendCredit, Refuse, Ignore]),
        ];
        for (operation, actions) in table {
            for (state, action) in STATES.into_iter().zip(actions) {
                assert_eq!(state.on_packet(operation), action, "{operation:?} in {state:?}");
            }
        }
    }

    #[test]
    fn states_that_wait_for_the_other_end_have_a_timeout() {
        assert_eq!(STATES.map(ConnectionState::has_timeout), [true, true, false, true, false, false]);
    }

    #[test]
    fn guests_share_the_descriptors_of_a_process() {
        let limits = ConnectionLimits::default();
        assert_eq!(limits.within_descriptors(1 << 20, 16), limits);
        for (descriptors, guests) in [(4096, 1), (4096, 16), (65536, 4), (65536, 100), (1 << 20, 1000)] {
            let each = limits.within_descriptors(descriptors, guests);
            let most = each.connections + 2 * each.handshakes + 64;
            assert!((most * guests) as u64 + 64 <= descriptors, "{descriptors} for {guests}: {each:?}");
            assert!(each.connections >= 80, "{descriptors} for {guests}: {each:?}");
        }
        let few = limits.within_descriptors(100, 16);
        assert_eq!((few.connections, few.handshakes), (1, 1));
    }
}
