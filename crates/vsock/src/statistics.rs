//! Counters of a device and of its connections, and the report that contains them.

use std::fmt;

use crate::connection::{ConnectionKey, ConnectionState, TableStatistics};
use crate::packet::SocketType;

/// Counters of one connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionStatistics {
    /// Bytes sent to the host's socket.
    pub bytes_to_host: u64,
    /// Bytes sent to the guest.
    pub bytes_to_guest: u64,
    /// Data packets from the guest.
    pub packets_from_guest: u64,
    /// Data packets to the guest.
    pub packets_to_guest: u64,
    /// Bytes copied because the receiving end was full.
    pub bytes_copied: u64,
    /// Bytes of `bytes_to_host` that were sent with `MSG_ZEROCOPY`.
    pub bytes_zero_copy: u64,
}

/// Counters of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Counters of the table.
    pub table: TableStatistics,
    /// Sums over all connections, including closed ones.
    pub totals: ConnectionStatistics,
    /// Send calls to sockets.
    pub sends: u64,
    /// Receive calls to sockets.
    pub receives: u64,
    /// Times that a socket's send buffer was full.
    pub socket_full: u64,
    /// Times that the guest had no credit for data of a socket.
    pub out_of_credit: u64,
    /// Times that the guest's receive ring was empty.
    pub rx_ring_empty: u64,
    /// Present connections.
    pub connections: u64,
    /// Maximum number of simultaneous connections so far.
    pub connections_peak: u64,
    /// Packets that the kernel still reads in guest memory.
    pub zero_copy_in_flight: u64,
    /// Connections that were reset because their zero-copy sends had not completed in time.
    pub zero_copy_resets: u64,
    /// Reserved bytes of [`ConnectionLimits::memory`](crate::ConnectionLimits::memory): windows, their bookkeeping, and messages in transit to the
    /// guest.
    pub memory_reserved: u64,
    /// Times that a message to the guest waited for memory.
    pub memory_waits: u64,
}

/// Statistics of a device since its guest was last connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VsockReport {
    /// Counters of all connections together.
    pub statistics: Statistics,
    /// Bytes buffered for sockets that are full.
    pub buffered_bytes: usize,
    /// All connections, including those whose socket is closed.
    pub(crate) keys: Vec<(ConnectionKey, SocketType)>,
    /// Next ephemeral port of the host.
    pub(crate) next_port: u32,
    /// Present connections.
    pub connections: Vec<ConnectionReport>,
}

/// Statistics of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionReport {
    /// `stream` or `seqpacket`.
    pub kind: &'static str,
    /// Port of the guest.
    pub guest_port: u32,
    /// CID of the peer: the host or another guest.
    pub peer_cid: u64,
    /// Port of the peer.
    pub peer_port: u32,
    /// State, such as `established`.
    pub state: &'static str,
    /// Counters.
    pub statistics: ConnectionStatistics,
}

impl ConnectionReport {
    pub(crate) fn new(
        key: ConnectionKey,
        kind: SocketType,
        state: ConnectionState,
        statistics: ConnectionStatistics,
    ) -> Self {
        let kind = match kind {
            SocketType::Stream => "stream",
            SocketType::Seqpacket => "seqpacket",
        };
        let ConnectionKey { guest_port, peer_cid, peer_port } = key;
        Self { kind, guest_port, peer_cid, peer_port, state: state.name(), statistics }
    }
}

impl fmt::Display for VsockReport {
    /// Writes a line for the device and one for each connection.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Statistics {
            table,
            totals,
            sends,
            receives,
            socket_full,
            out_of_credit,
            rx_ring_empty,
            connections,
            connections_peak,
            zero_copy_in_flight,
            zero_copy_resets,
            memory_reserved,
            memory_waits,
        } = self.statistics;
        write!(
            f,
            "connections={connections} peak={connections_peak} from_guest={} to_guest={} refused_by_limit={} \
             bytes_to_host={} bytes_to_guest={} packets_from_guest={} packets_to_guest={} bytes_copied={} \
             bytes_zero_copy={} zero_copy_in_flight={zero_copy_in_flight} zero_copy_resets={zero_copy_resets} \
             buffered_bytes={} memory_reserved={memory_reserved} memory_waits={memory_waits} \
             sends={sends} receives={receives} socket_full={socket_full} out_of_credit={out_of_credit} \
             rx_ring_empty={rx_ring_empty} resets_sent={} resets_received={} violations={} dropped={} \
             credit_updates_sent={} credit_updates_received={}",
            table.requests_from_guest,
            table.requests_to_guest,
            table.refused_by_limit,
            totals.bytes_to_host,
            totals.bytes_to_guest,
            totals.packets_from_guest,
            totals.packets_to_guest,
            totals.bytes_copied,
            totals.bytes_zero_copy,
            self.buffered_bytes,
            table.resets_sent,
            table.resets_received,
            table.violations,
            table.dropped,
            table.credit_updates_sent,
            table.credit_updates_received,
        )?;
        for ConnectionReport { kind, guest_port, peer_cid, peer_port, state, statistics } in &self.connections
        {
            write!(
                f,
                "\n  {kind} guest:{guest_port} {peer_cid}:{peer_port} {state} bytes_to_host={} \
                 bytes_to_guest={} bytes_copied={} bytes_zero_copy={}",
                statistics.bytes_to_host,
                statistics.bytes_to_guest,
                statistics.bytes_copied,
                statistics.bytes_zero_copy
            )?;
        }
        Ok(())
    }
}
