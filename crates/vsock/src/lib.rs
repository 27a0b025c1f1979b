//! A vhost-user vsock device: connections between a guest and sockets of its host.
//!
//! ```text
//!   guest ── rings ── worker (a thread for each guest) ── epoll ── sockets of the host
//!                       └ Engine: Table (identities, credit, control packets) + payload in transit
//! ```
//! Features: stream and seqpacket sockets, half-closed connections, Firecracker's convention over Unix
//! sockets, forwarding rules for TCP and others, several guests in one process. [`ConnectionTable`] does no
//! I/O; [`Engine`] depends on neither time nor real sockets (its interface to them is [`Sockets`]), so both
//! run in virtual time too.
//!
//! Out of scope: datagrams, and the kernel's own vhost-vsock.
//!
//! Limits: [`ConnectionLimits`] of connections and memory for each guest; packets of
//! [`PAYLOAD_BYTES_MAX`](packet::PAYLOAD_BYTES_MAX) bytes; [`PENDING_RESETS_MAX`] resets for packets of
//! unknown connections. For users: `docs/vsock.md`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod connection;
pub mod credit;
mod device;
mod engine;
mod host;
mod local_guests;
pub mod packet;
mod report;
mod rules;
mod sockets;
mod state;
mod statistics;
mod sys;
mod table;
mod transport_reset;

use towline_channel::lock;

pub use connection::{
    ClosedBy, Connection, ConnectionId, ConnectionKey, ConnectionLimits, ConnectionState, Inbound,
    TableStatistics,
};
pub use device::{DeviceError, QUEUES, Settings, Vsock, raise_descriptor_limit};
pub use engine::{CONNECT_TIMEOUT_MS, Engine};
pub use local_guests::LocalGuests;
pub use rules::{ForwardingRule, HostAddress, RuleError, guest_cid};
pub use sockets::{CloseMode, ConnectOutcome, Interest, Peeked, Readiness, ReceiveOutcome, Sockets};
pub use state::STATE_VERSION;
pub use statistics::{ConnectionReport, ConnectionStatistics, Statistics, VsockReport};
pub use table::{ConnectionTable, DataHeaders, PENDING_RESETS_MAX};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
