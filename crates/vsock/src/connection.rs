//! One connection as the table has it, and what packets of the guest's come to.

use crate::credit::{FromGuest, ToGuest};
use crate::packet::{Ends, Kind, Shut};

/// What a guest may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes that one connection may have us keep.
    pub buf_alloc: u32,
    /// Bytes that all connections together may have us keep.
    pub memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 16384, buf_alloc: 1 << 20, memory: 512 << 20 }
    }
}

/// A connection's name between us and the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The guest's port.
    pub guest_port: u32,
    /// Whom it is connected with: the host or another guest.
    pub peer_cid: u64,
    /// Port there.
    pub peer_port: u32,
}

/// A place in the table, and which of its connections. Never means another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id {
    /// The place.
    pub index: u32,
    /// How often it was used before.
    pub generation: u32,
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The host side has asked, the guest has not answered.
    Asked,
    /// The guest has asked, the host side is not there yet.
    Connecting,
    /// Both are there.
    Open,
    /// Both ways are over; the guest has not confirmed it.
    Over,
    /// The guest is through with it, but not all that it sent has reached the host side.
    Lingering,
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
    pub key: Key,
    /// Bytes or messages.
    pub kind: Kind,
    /// How far it is.
    pub phase: Phase,
    /// What the guest said that it will not do any more.
    pub guest_shut: Shut,
    /// What the guest was told, or will be, that the host will not do any more.
    pub host_shut: Shut,
    pub(crate) to_guest: ToGuest,
    pub(crate) from_guest: FromGuest,
    pub(crate) owed: Owed,
    pub(crate) in_line: bool,
}

/// What a packet of the guest's asks of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbound {
    /// Nothing, or nothing but an answer that is owed now.
    Nothing,
    /// To be connected with the host side that its key names.
    Connect(Id),
    /// The guest has accepted.
    Accepted(Id),
    /// Payload for the host side.
    Payload(Id, Ends),
    /// There may be credit where there was none.
    Credit(Id),
    /// The guest said that it will not send or receive any more.
    Shut(Id),
    /// The connection is gone from the table; so is its host side to be. `true` if the guest wished so.
    Gone(Id, bool),
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
