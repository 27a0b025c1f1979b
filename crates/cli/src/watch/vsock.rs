//! A guest's vsock, watched.

use std::sync::Arc;

use towline_compat::facts;
use towline_control::device::ManagedDevice;
use towline_control::statistics::{Metric, StatsObject};
use towline_vhost_user::{Device, RING_SIZE_MAX};
use towline_vsock::{ConnectionReport, ConnectionStatistics, Report, STATE_VERSION, Vsock};

/// See the module.
struct Guest {
    cid: u64,
    device: Arc<Vsock>,
    /// Made when the process started.
    version: Result<String, String>,
}

/// A guest's device to be watched.
pub(crate) fn guest(cid: u64, device: &Arc<Vsock>) -> Box<dyn ManagedDevice> {
    let version = device.migration_version().map_err(|refusal| refusal.to_string());
    Box::new(Guest { cid, device: Arc::clone(device), version })
}

impl Guest {
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

impl ManagedDevice for Guest {
    fn name(&self) -> String {
        self.cid.to_string()
    }

    fn facts(&self) -> facts::Device {
        facts::Device {
            device_type: self.device.name().into(),
            features: ["VIRTIO_VSOCK_F_SEQPACKET".to_owned()].into(),
            queues: 1,
            ring_size_max: RING_SIZE_MAX,
            state_version: STATE_VERSION,
            state_version_min: STATE_VERSION,
            migration_version: self.version.clone().ok(),
            unmigratable: self.version.clone().err(),
            ..facts::Device::default()
        }
    }

    fn is_running(&self) -> bool {
        self.device.is_served()
    }

    fn accepts(&self, version: &str) -> Result<(), String> {
        self.device.accepts(version).map_err(|refusal| refusal.to_string())
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
        Err("a vsock has no link".into())
    }
}

fn metrics(report: &Report) -> Vec<Metric> {
    let (all, table) = (&report.statistics, &report.statistics.table);
    let mut metrics = vec![
        Metric::gauge("connections", "connections that there are", all.connections),
        Metric::gauge("connections-peak", "the most that there were at a time", all.connections_peak),
        Metric::gauge(
            "buffered-bytes",
            "bytes kept for sockets that do not take them",
            report.buffered_bytes as u64,
        )
        .in_bytes(),
        Metric::gauge(
            "memory-reserved-bytes",
            "memory that connections are given, of --memory-limit",
            all.memory_reserved,
        )
        .in_bytes(),
        Metric::counter(
            "memory-waits",
            "times that a message for the guest waited for memory",
            all.memory_waits,
        ),
        Metric::gauge(
            "zero-copy-in-flight",
            "packets that the kernel reads in the guest's memory",
            all.zero_copy_in_flight,
        ),
        Metric::counter(
            "zero-copy-resets",
            "connections reset because it still did when the ring stopped",
            all.zero_copy_resets,
        ),
        Metric::counter(
            "requests-from-guest",
            "connections that the guest asked for",
            table.requests_from_guest,
        ),
        Metric::counter(
            "requests-to-guest",
            "connections that the host side asked for",
            table.requests_to_guest,
        ),
        Metric::counter("refused-by-limit", "connections refused because of a limit", table.refused_by_limit),
        Metric::counter("resets-sent", "resets told to the guest", table.resets_sent),
        Metric::counter("resets-received", "resets that the guest sent", table.resets_received),
        Metric::counter("violations", "packets that no driver may send", table.violations),
        Metric::counter("dropped", "packets without a sender or a known form", table.dropped),
        Metric::counter("credit-updates-sent", "packets of nothing but credit", table.credit_updates_sent),
        Metric::counter("credit-updates-received", "such of the guest", table.credit_updates_received),
        Metric::counter("sends", "calls that sent to sockets", all.sends),
        Metric::counter("receives", "calls that received from sockets", all.receives),
        Metric::counter("socket-full", "times that a socket took less than there was", all.socket_full),
        Metric::counter("out-of-credit", "times that the guest had no credit", all.out_of_credit),
        Metric::counter("rx-ring-empty", "times that the guest's ring had no buffer", all.rx_ring_empty),
    ];
    metrics.extend(line(&all.totals));
    metrics
}

/// What went over connections.
fn line(line: &ConnectionStatistics) -> [Metric; 6] {
    [
        Metric::byte_counter("to-host-bytes", "to the host side", line.bytes_to_host),
        Metric::byte_counter("to-guest-bytes", "to the guest", line.bytes_to_guest),
        Metric::byte_counter("copied-bytes", "copied because a side was behind", line.bytes_copied),
        Metric::byte_counter(
            "zero-copy-bytes",
            "to the host side, read in the guest's memory",
            line.bytes_zero_copy,
        ),
        Metric::counter("from-guest-packets", "packets from the guest", line.packets_from_guest),
        Metric::counter("to-guest-packets", "packets to the guest", line.packets_to_guest),
    ]
}
