//! Connects in progress.

use super::socket::HostSocket;
use crate::packet::SocketType;
use crate::rules::HostAddress;

/// A connect in progress.
pub(super) enum PendingConnect {
    /// To an address.
    Address(HostSocket),
    /// To a listener whose backlog is full; it is retried.
    Retry(HostAddress, SocketType),
    /// To the device of another guest, which expects `CONNECT` with this port.
    PeerGuest(HostSocket, u32),
    /// To another guest, whose device sends `OK` when the guest accepts.
    AwaitingOk(HostSocket),
}
