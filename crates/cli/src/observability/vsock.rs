//! Facts and statistics of a guest's vsock device.

use std::sync::Arc;

use towline_compat::facts;
use towline_control::device::Managed;
use towline_control::statistics::{Number, Subject};
use towline_vhost_user::{Device, RING_SIZE_MAX};
use towline_vsock::{ConnectionReport, LineStatistics, Report, STATE_VERSION, Vsock};

/// The vsock device of a guest.
struct Guest {
    cid: u64,
    device: Arc<Vsock>,
    /// As of the start of the process.
    version: Result<String, String>,
}

/// Returns the device as an observed one.
pub(crate) fn guest(cid: u64, device: &Arc<Vsock>) -> Box<dyn Managed> {
    let version = device.migration_version().map_err(|error| error.to_string());
    Box::new(Guest { cid, device: Arc::clone(device), version })
}

impl Guest {
    fn connection(&self, connection: &ConnectionReport) -> Subject {
        let labels = vec![
            ("guest", self.cid.to_string()),
            ("kind", connection.kind.to_owned()),
            ("guest_port", connection.guest_port.to_string()),
            ("peer", connection.peer_cid.to_string()),
            ("peer_port", connection.peer_port.to_string()),
        ];
        Subject { kind: "vsock-connection", labels, numbers: line(&connection.line).into() }
    }
}

impl Managed for Guest {
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
        self.device.accepts(version).map_err(|error| error.to_string())
    }

    fn statistics(&self) -> Vec<Subject> {
        let report = self.device.report();
        let guest = Subject {
            kind: "vsock",
            labels: vec![("guest", self.cid.to_string())],
            numbers: numbers(&report),
        };
        std::iter::once(guest).chain(report.connections().map(|one| self.connection(&one))).collect()
    }

    fn set_link(&self, _: bool) -> Result<(), String> {
        Err("a vsock device has no link".into())
    }
}

fn numbers(report: &Report) -> Vec<Number> {
    let (all, table) = (&report.statistics, &report.statistics.table);
    let mut numbers = vec![
        Number::level("connections", "open connections", all.connections),
        Number::level("connections-peak", "maximum number of open connections", all.connections_peak),
        Number::level("kept-bytes", "bytes buffered for sockets that are full", report.kept as u64)
            .in_bytes(),
        Number::level(
            "memory-reserved-bytes",
            "memory reserved for connections, of --memory-limit",
            all.memory_reserved,
        )
        .in_bytes(),
        Number::events("memory-waits", "messages to the guest that waited for memory", all.memory_waits),
        Number::level("lent", "packets of zero-copy sends in flight", all.lent),
        Number::events(
            "taken-back",
            "connections reset with zero-copy sends in flight when the ring stopped",
            all.taken_back,
        ),
        Number::events(
            "requests-from-guest",
            "connections requested by the guest",
            table.requests_from_guest,
        ),
        Number::events("requests-to-guest", "connections requested by the host", table.requests_to_guest),
        Number::events("refused-by-limit", "connections refused by a limit", table.refused_by_limit),
        Number::events("resets-sent", "RST packets sent to the guest", table.resets_sent),
        Number::events("resets-received", "RST packets received from the guest", table.resets_received),
        Number::events("violations", "packets that violate the specification", table.violations),
        Number::events("dropped", "packets dropped as malformed or unrelated", table.dropped),
        Number::events("credit-updates-sent", "credit updates sent", table.credit_updates_sent),
        Number::events("credit-updates-received", "credit updates received", table.credit_updates_received),
        Number::events("sends", "send calls on sockets", all.sends),
        Number::events("receives", "receive calls on sockets", all.receives),
        Number::events("blocked", "incomplete sends, as a socket was full", all.blocked),
        Number::events("stalled", "pauses for lack of the guest's credit", all.stalled),
        Number::events("starved", "pauses for lack of receive buffers", all.starved),
    ];
    numbers.extend(line(&all.lines));
    numbers
}

/// Returns the counters of one or all connections.
fn line(line: &LineStatistics) -> [Number; 6] {
    [
        Number::bytes("to-host-bytes", "to the host", line.bytes_to_host),
        Number::bytes("to-guest-bytes", "to the guest", line.bytes_to_guest),
        Number::bytes("copied-bytes", "copied into buffers, as a side was slow", line.bytes_copied),
        Number::bytes("lent-bytes", "to the host by zero-copy sends", line.bytes_lent),
        Number::events("from-guest-packets", "packets from the guest", line.packets_from_guest),
        Number::events("to-guest-packets", "packets to the guest", line.packets_to_guest),
    ]
}
