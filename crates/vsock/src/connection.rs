//! One connection as the table has it, and what packets of the guest's come to.

use crate::credit::{PeerCredit, ReceiveWindow};
use crate::packet::{Kind, SeqFlags, ShutdownFlags};

/// What a guest may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes that one connection may have us keep.
    pub buf_alloc: u32,
    /// Bytes of memory that all connections together may take, with their bookkeeping ([`Limits::cost`]).
    pub memory: u64,
    /// Connections that were accepted and have not said `CONNECT` yet, and as many that wait for something else.
    pub handshakes: usize,
}

/// Descriptors that a process keeps for itself: logs, signals, control sockets and their clients.
const DESCRIPTORS_OF_PROCESS: u64 = 64;
/// Descriptors of a guest beside those of connections: its frontend, rings, memory, listeners.
const DESCRIPTORS_OF_GUEST: u64 = 64;

/// Bytes that a connection takes beside its window: its entries in tables and lists, and those of the pieces of what waits.
const CONNECTION_BYTES: u64 = 4096;

impl Limits {
    /// These limits, as far as a guest's share of the descriptors of this process allows: `descriptors` for `guests` guests.
    /// Three quarters of a share are for connections, so that a guest which has all of them leaves the others theirs.
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

    /// The most bytes of memory that a connection with this window can take: what waits, chunks of it that are partly sent
    /// or partly empty, for messages two bits for each byte that say where they end, and the connection itself. Not its
    /// socket's buffers, which are the kernel's.
    pub fn cost(window: u32, kind: Kind) -> u64 {
        let window = u64::from(window);
        let marks = match kind {
            Kind::Stream => 0,
            Kind::Seqpacket => window / 4,
        };
        window + window / 4 + marks + CONNECTION_BYTES
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 16384, buf_alloc: 1 << 20, memory: 512 << 20, handshakes: 1024 }
    }
}

/// A connection's name between us and the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    /// The guest's port.
    pub guest_port: u32,
    /// Whom it is connected with: the host or another guest.
    pub peer_cid: u64,
    /// Port there.
    pub peer_port: u32,
}

/// A place in the table, and which of its connections. Never means another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    /// The place.
    pub index: u32,
    /// How often it was used before.
    pub generation: u32,
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionState {
    /// The host side has asked, the guest has not answered.
    RequestSent,
    /// The guest has asked, the host side is not there yet.
    Connecting,
    /// Both are there.
    Established,
    /// Both ways are over; the guest has not confirmed it.
    Closing,
    /// The guest is through with it, but not all that it sent has reached the host side.
    Draining,
    /// It goes with the reset that is owed.
    Resetting,
}

bitflags::bitflags! {
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(crate) struct Owed: u8 {
        const REQUEST = 1;
        const RESPONSE = 2;
        const CREDIT = 4;
        const ASK_CREDIT = 8;
        const SHUTDOWN = 16;
        const RESET = 32;
    }
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    /// Its name.
    pub key: ConnectionKey,
    /// Bytes or messages.
    pub kind: Kind,
    /// How far it is.
    pub state: ConnectionState,
    /// What the guest said that it will not do any more.
    pub guest_shut: ShutdownFlags,
    /// What the guest was told, or will be, that the host will not do any more.
    pub host_shut: ShutdownFlags,
    pub(crate) to_guest: PeerCredit,
    pub(crate) from_guest: ReceiveWindow,
    pub(crate) owed: Owed,
    pub(crate) in_line: bool,
    /// The peer asked for it, not the guest.
    pub(crate) incoming: bool,
}

/// What a packet of the guest's asks of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbound {
    /// Nothing, or nothing but an answer that is owed now.
    Nothing,
    /// To be connected with the host side that its key names.
    Connect(ConnectionId),
    /// The guest has accepted.
    Accepted(ConnectionId),
    /// Payload for the host side.
    Payload(ConnectionId, SeqFlags),
    /// There may be credit where there was none.
    Credit(ConnectionId),
    /// The guest said that it will not send or receive any more.
    Shutdown(ConnectionId),
    /// The connection is gone from the table; so is its host side to be. `true` if the guest wished so.
    Gone(ConnectionId, bool),
}

/// What the table has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableStatistics {
    /// Connections that the guest asked for.
    pub requests_from_guest: u64,
    /// Connections that the host side asked for.
    pub requests_to_guest: u64,
    /// Connections refused because of a limit.
    pub refused_by_limit: u64,
    /// Resets that were told to the guest.
    pub resets_sent: u64,
    /// Resets that the guest sent.
    pub resets_received: u64,
    /// Packets that no driver may send; their connections are reset.
    pub violations: u64,
    /// Packets without a sender or a known form, dropped.
    pub dropped: u64,
    /// Packets that told nothing but credit.
    pub credit_updates_sent: u64,
    /// Such of the guest.
    pub credit_updates_received: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_share_the_descriptors_of_a_process() {
        let limits = Limits::default();
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
