//! A vsock device behind vhost-user: connections between a guest and sockets of its host.
//!
//! ```text
//!   guest ── rings ── Server (a thread for each guest) ── epoll ── sockets of the host
//!                       └ Engine: Table (names, credit, what is owed) + lines (what is on the way)
//! ```
//! What it is: stream and seqpacket, both directions ended each on its own, Firecracker's convention over Unix sockets,
//! rules for TCP and others, several guests in one process. [`Table`] is free of I/O, [`Engine`] of time and of sockets
//! ([`Sockets`] are what it needs of them), so both can be run in virtual time.
//!
//! What it is not: datagrams. The kernel's own vhost-vsock.
//!
//! Limits: [`Limits`] of connections and memory for each guest; packets of [`PAYLOAD_BYTES_MAX`](packet::PAYLOAD_BYTES_MAX)
//! bytes; [`PENDING_RESETS_MAX`] answers to packets of no connection. For users: `docs/vsock.md`.

mod connection;
pub mod credit;
mod device;
mod engine;
mod gate;
mod host;
mod local_guests;
pub mod packet;
mod report;
mod rules;
mod sockets;
mod state;
mod sys;
mod table;

pub use connection::{
    Connection, ConnectionId, ConnectionKey, ConnectionState, Inbound, Limits, TableStatistics,
};
pub use device::{DeviceError, QUEUES, Settings, Vsock, raise_descriptor_limit};
pub use engine::{CONNECT_TIMEOUT_MS, ConnectionStatistics, Engine, Readiness, Statistics};
pub use local_guests::LocalGuests;
pub use report::{ConnectionReport, Report};
pub use rules::{HostAddress, Rule, RuleError, guest_cid};
pub use sockets::{ConnectOutcome, Peeked, Received, Sockets};
pub use state::STATE_VERSION;
pub use table::{PENDING_RESETS_MAX, Table};
pub use towline_channel::ZeroCopySend;
