//! A guest's vsock, watched.

use std::sync::Arc;

use towline_compat::facts;
use towline_control::device::Managed;
use towline_control::statistics::{Number, Subject};
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
pub(crate) fn guest(cid: u64, device: &Arc<Vsock>) -> Box<dyn Managed> {
    let version = device.migration_version().map_err(|refusal| refusal.to_string());
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
        Subject { kind: "vsock-connection", labels, numbers: line(&connection.statistics).into() }
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
        self.device.accepts(version).map_err(|refusal| refusal.to_string())
    }

    fn statistics(&self) -> Vec<Subject> {
        let report = self.device.report();
        let guest = Subject {
            kind: "vsock",
            labels: vec![("guest", self.cid.to_string())],
            numbers: numbers(&report),
        };
        std::iter::once(guest).chain(report.connections.iter().map(|one| self.connection(one))).collect()
    }

    fn set_link(&self, _: bool) -> Result<(), String> {
        Err("a vsock has no link".into())
    }
}

fn numbers(report: &Report) -> Vec<Number> {
    let (all, table) = (&report.statistics, &report.statistics.table);
    let mut numbers = vec![
        Number::level("connections", "connections that there are", all.connections),
        Number::level("connections-peak", "the most that there were at a time", all.connections_peak),
        Number::level(
            "buffered-bytes",
            "bytes kept for sockets that do not take them",
            report.buffered_bytes as u64,
        )
        .in_bytes(),
        Number::level(
            "memory-reserved-bytes",
            "memory that connections are given, of --memory-limit",
            all.memory_reserved,
        )
        .in_bytes(),
        Number::events(
            "memory-waits",
            "times that a message for the guest waited for memory",
            all.memory_waits,
        ),
        Number::level(
            "zero-copy-in-flight",
            "packets that the kernel reads in the guest's memory",
            all.zero_copy_in_flight,
        ),
        Number::events(
            "zero-copy-resets",
            "connections reset because it still did when the ring stopped",
            all.zero_copy_resets,
        ),
        Number::events(
            "requests-from-guest",
            "connections that the guest asked for",
            table.requests_from_guest,
        ),
        Number::events(
            "requests-to-guest",
            "connections that the host side asked for",
            table.requests_to_guest,
        ),
        Number::events("refused-by-limit", "connections refused because of a limit", table.refused_by_limit),
        Number::events("resets-sent", "resets told to the guest", table.resets_sent),
        Number::events("resets-received", "resets that the guest sent", table.resets_received),
        Number::events("violations", "packets that no driver may send", table.violations),
        Number::events("dropped", "packets without a sender or a known form", table.dropped),
        Number::events("credit-updates-sent", "packets of nothing but credit", table.credit_updates_sent),
        Number::events("credit-updates-received", "such of the guest", table.credit_updates_received),
        Number::events("sends", "calls that sent to sockets", all.sends),
        Number::events("receives", "calls that received from sockets", all.receives),
        Number::events("socket-full", "times that a socket took less than there was", all.socket_full),
        Number::events("out-of-credit", "times that the guest had no credit", all.out_of_credit),
        Number::events("rx-ring-empty", "times that the guest's ring had no buffer", all.rx_ring_empty),
    ];
    numbers.extend(line(&all.totals));
    numbers
}

/// What went over connections.
fn line(line: &ConnectionStatistics) -> [Number; 6] {
    [
        Number::bytes("to-host-bytes", "to the host side", line.bytes_to_host),
        Number::bytes("to-guest-bytes", "to the guest", line.bytes_to_guest),
        Number::bytes("copied-bytes", "copied because a side was behind", line.bytes_copied),
        Number::bytes(
            "zero-copy-bytes",
            "to the host side, read in the guest's memory",
            line.bytes_zero_copy,
        ),
        Number::events("from-guest-packets", "packets from the guest", line.packets_from_guest),
        Number::events("to-guest-packets", "packets to the guest", line.packets_to_guest),
    ]
}
