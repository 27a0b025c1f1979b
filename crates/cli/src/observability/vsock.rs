//! Facts and statistics of a guest's vsock device.

use std::sync::Arc;

use towline_compat::facts;
use towline_control::device::ManagedDevice;
use towline_control::statistics::{Metric, StatsObject};
use towline_vhost_user::{Device, RING_SIZE_MAX};
use towline_vsock::{ConnectionReport, ConnectionStatistics, STATE_VERSION, Vsock, VsockReport};

/// The vsock device of a guest.
struct GuestDevice {
    cid: u64,
    device: Arc<Vsock>,
    /// As of the start of the process.
    version: Result<String, String>,
}

/// Returns the device as an observed one.
pub(crate) fn guest(cid: u64, device: &Arc<Vsock>) -> Box<dyn ManagedDevice> {
    let version = device.migration_version().map_err(|error| error.to_string());
    Box::new(GuestDevice { cid, device: Arc::clone(device), version })
}

impl GuestDevice {
    fn connection(&self, connection: &ConnectionReport) -> StatsObject {
        let labels = vec![
            ("guest", self.cid.to_string()),
            ("kind", connection.kind.to_owned()),
            ("guest_port", connection.guest_port.to_string()),
            ("peer", connection.peer_cid.to_string()),
            ("peer_port", connection.peer_port.to_string()),
        ];
        StatsObject { kind: "vsock-connection", labels, metrics: line(&connection.statistics).into() }
    }
}

impl ManagedDevice for GuestDevice {
    fn name(&self) -> String {
        self.cid.to_string()
    }

    fn facts(&self) -> facts::DeviceFacts {
        facts::DeviceFacts {
            device_type: self.device.name().into(),
            features: ["VIRTIO_VSOCK_F_SEQPACKET".to_owned()].into(),
            queues: 1,
            ring_size_max: RING_SIZE_MAX,
            state_version: STATE_VERSION,
            state_version_min: STATE_VERSION,
            migration_version: self.version.clone().ok(),
            unmigratable: self.version.clone().err(),
            ..facts::DeviceFacts::default()
        }
    }

    fn is_running(&self) -> bool {
        self.device.is_served()
    }

    fn accepts(&self, version: &str) -> Result<(), String> {
        self.device.accepts(version).map_err(|error| error.to_string())
    }

    fn statistics(&self) -> Vec<StatsObject> {
        let report = self.device.report();
        let guest = StatsObject {
            kind: "vsock",
            labels: vec![("guest", self.cid.to_string())],
            metrics: metrics(&report),
        };
        std::iter::once(guest).chain(report.connections.iter().map(|one| self.connection(one))).collect()
    }

    fn set_link(&self, _: bool) -> Result<(), String> {
        Err("a vsock device has no link".into())
    }
}

fn metrics(report: &VsockReport) -> Vec<Metric> {
    let (all, table) = (&report.statistics, &report.statistics.table);
    let mut metrics = vec![
        Metric::gauge("connections", "open connections", all.connections),
        Metric::gauge("connections-peak", "maximum number of open connections", all.connections_peak),
        Metric::gauge(
            "buffered-bytes",
            "bytes buffered for sockets that are full",
            report.buffered_bytes as u64,
        )
        .in_bytes(),
        Metric::gauge(
            "memory-reserved-bytes",
            "memory reserved for connections, of --memory-limit",
            all.memory_reserved,
        )
        .in_bytes(),
        Metric::counter("memory-waits", "messages to the guest that waited for memory", all.memory_waits),
        Metric::counter(
            "requests-from-guest",
            "connections requested by the guest",
            table.requests_from_guest,
        ),
        Metric::counter("requests-to-guest", "connections requested by the host", table.requests_to_guest),
        Metric::counter("refused-by-limit", "connections refused by a limit", table.refused_by_limit),
        Metric::counter("resets-sent", "RST packets sent to the guest", table.resets_sent),
        Metric::counter("resets-received", "RST packets received from the guest", table.resets_received),
        Metric::counter("violations", "packets that violate the specification", table.violations),
        Metric::counter("dropped", "packets dropped as malformed or unrelated", table.dropped),
        Metric::counter("credit-updates-sent", "credit updates sent", table.credit_updates_sent),
        Metric::counter("credit-updates-received", "credit updates received", table.credit_updates_received),
        Metric::counter("sends", "send calls on sockets", all.sends),
        Metric::counter("receives", "receive calls on sockets", all.receives),
        Metric::counter("socket-full", "incomplete sends, as a socket was full", all.socket_full),
        Metric::counter("out-of-credit", "pauses for lack of the guest's credit", all.out_of_credit),
        Metric::counter("rx-ring-empty", "pauses for lack of receive buffers", all.rx_ring_empty),
    ];
    metrics.extend(line(&all.totals));
    metrics
}

/// Returns the counters of one or all connections.
fn line(line: &ConnectionStatistics) -> [Metric; 5] {
    [
        Metric::byte_counter("to-host-bytes", "to the host", line.bytes_to_host),
        Metric::byte_counter("to-guest-bytes", "to the guest", line.bytes_to_guest),
        Metric::byte_counter("copied-bytes", "copied into buffers, as a side was slow", line.bytes_copied),
        Metric::counter("from-guest-packets", "packets from the guest", line.packets_from_guest),
        Metric::counter("to-guest-packets", "packets to the guest", line.packets_to_guest),
    ]
}
