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
    /// Reserved bytes of [`ConnectionLimits::memory`](crate::ConnectionLimits::memory): windows, their
    /// bookkeeping, and messages in transit to the guest.
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
    /// Writes a line for the device and one for each connection, with the counters that are not 0.
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
            memory_reserved,
            memory_waits,
        } = self.statistics;
        let counters = [
            ("connections", connections),
            ("peak", connections_peak),
            ("from_guest", table.requests_from_guest),
            ("to_guest", table.requests_to_guest),
            ("refused_by_limit", table.refused_by_limit),
            ("bytes_to_host", totals.bytes_to_host),
            ("bytes_to_guest", totals.bytes_to_guest),
            ("packets_from_guest", totals.packets_from_guest),
            ("packets_to_guest", totals.packets_to_guest),
            ("bytes_copied", totals.bytes_copied),
            ("buffered_bytes", self.buffered_bytes as u64),
            ("memory_reserved", memory_reserved),
            ("memory_waits", memory_waits),
            ("sends", sends),
            ("receives", receives),
            ("socket_full", socket_full),
            ("out_of_credit", out_of_credit),
            ("rx_ring_empty", rx_ring_empty),
            ("resets_sent", table.resets_sent),
            ("resets_received", table.resets_received),
            ("violations", table.violations),
            ("dropped", table.dropped),
            ("credit_updates_sent", table.credit_updates_sent),
            ("credit_updates_received", table.credit_updates_received),
        ];
        if counters.iter().all(|(_, value)| *value == 0) {
            f.write_str("no traffic")?;
        } else {
            f.write_str(nonzero(&counters).trim_start())?;
        }
        for ConnectionReport { kind, guest_port, peer_cid, peer_port, state, statistics } in &self.connections
        {
            let counters = [
                ("bytes_to_host", statistics.bytes_to_host),
                ("bytes_to_guest", statistics.bytes_to_guest),
                ("bytes_copied", statistics.bytes_copied),
            ];
            let counters = nonzero(&counters);
            write!(f, "\n  {kind} guest:{guest_port} {peer_cid}:{peer_port} {state}{counters}")?;
        }
        Ok(())
    }
}

/// Formats the counters above 0, each as ` sends=5`.
fn nonzero(counters: &[(&str, u64)]) -> String {
    let counters = counters.iter().filter(|(_, value)| *value > 0);
    counters.map(|(name, value)| format!(" {name}={value}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_report_has_no_counters_of_zero() {
        let mut report = VsockReport::default();
        assert_eq!(report.to_string(), "no traffic");
        report.statistics.connections = 1;
        report.statistics.totals.bytes_to_host = 5;
        let key = ConnectionKey { guest_port: 80, peer_cid: 2, peer_port: 1024 };
        let statistics = ConnectionStatistics { bytes_to_host: 5, ..ConnectionStatistics::default() };
        report.connections.push(ConnectionReport::new(
            key,
            SocketType::Stream,
            ConnectionState::Established,
            statistics,
        ));
        assert_eq!(
            report.to_string(),
            "connections=1 bytes_to_host=5\n  stream guest:80 2:1024 established bytes_to_host=5"
        );
    }
}
