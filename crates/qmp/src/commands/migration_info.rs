//! State and statistics of a migration.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::open_enum::open_enum;
use super::{SocketAddress, command};
use crate::Event;

/// `query-migrate`: of the outgoing migration or, at a destination, of the incoming one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrate;
command!(QueryMigrate, "query-migrate", MigrationInfo);

open_enum! {
    /// QEMU's `MigrationStatus`.
    MigrationStatus {
        NONE = "none",
        SETUP = "setup",
        CANCELLING = "cancelling",
        CANCELLED = "cancelled",
        ACTIVE = "active",
        POSTCOPY_DEVICE = "postcopy-device",
        POSTCOPY_ACTIVE = "postcopy-active",
        POSTCOPY_PAUSED = "postcopy-paused",
        POSTCOPY_RECOVER_SETUP = "postcopy-recover-setup",
        POSTCOPY_RECOVER = "postcopy-recover",
        COMPLETED = "completed",
        FAILING = "failing",
        FAILED = "failed",
        COLO = "colo",
        PRE_SWITCHOVER = "pre-switchover",
        DEVICE = "device",
        WAIT_UNPLUG = "wait-unplug",
    }
}

impl MigrationStatus {
    /// Returns true if nothing more happens by itself: completed, failed, cancelled, or none was ever started.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        [Self::NONE, Self::COMPLETED, Self::FAILED, Self::CANCELLED].contains(self)
    }

    /// Returns true if it failed, or is failing: QEMU 11.1 reports `failing` before `failed`.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        [Self::FAILING, Self::FAILED].contains(self)
    }

    /// The status in a `MIGRATION` event. QEMU sends these only with the capability
    /// [`Capability::EVENTS`](super::Capability::EVENTS).
    #[must_use]
    pub fn of_event(event: &Event) -> Option<Self> {
        let status = event.data.get("status").filter(|_| event.name == "MIGRATION")?;
        status.as_str().map(Self::new)
    }
}

/// Reply of `query-migrate`: QEMU's `MigrationInfo`. Empty without a migration.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrationInfo {
    /// The state; `None` without a migration, and at a 7.2 that only listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<MigrationStatus>,
    /// Statistics of the memory; the source's only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ram: Option<RamStats>,
    /// Milliseconds since it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_time: Option<i64>,
    /// Milliseconds that preparation took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setup_time: Option<i64>,
    /// Milliseconds that the guest stood still, at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime: Option<i64>,
    /// Milliseconds it would stand still if it were stopped now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_downtime: Option<i64>,
    /// Bytes still to be sent, of memory and devices. QEMU 11.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u64>,
    /// Nanoseconds that a page took which the guest waited for, on average; the destination's, with the capability
    /// `postcopy-blocktime`. QEMU 10.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postcopy_latency: Option<u64>,
    /// The same of pages that a virtual CPU waited for, by its number. QEMU 10.1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub postcopy_vcpu_latency: Vec<u64>,
    /// The same of pages that QEMU's other threads waited for. QEMU 10.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postcopy_non_vcpu_latency: Option<u64>,
    /// Number of pages that took how long: the entry i counts those of 2^i up to 2^(i + 1) microseconds. QEMU 10.1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub postcopy_latency_dist: Vec<u64>,
    /// CPU throttling by auto-converge, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_percentage: Option<u64>,
    /// Reason of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_desc: Option<String>,
    /// Reasons why this guest cannot be migrated now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked_reasons: Vec<String>,
    /// Where it listens, QEMU's `SocketAddress`es.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub socket_address: Vec<Value>,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl MigrationInfo {
    /// Where it listens, of the kinds that we know.
    pub fn listening(&self) -> impl Iterator<Item = SocketAddress> + '_ {
        self.socket_address.iter().filter_map(|address| SocketAddress::deserialize(address).ok())
    }
}

/// QEMU's `MigrationStats`. Missing figures read 0.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamStats {
    /// Bytes sent.
    pub transferred: u64,
    /// Bytes still to be looked at.
    pub remaining: u64,
    /// Bytes of guest memory.
    pub total: u64,
    /// Pages of zeroes.
    pub duplicate: u64,
    /// Pages sent whole.
    pub normal: u64,
    /// Their bytes.
    pub normal_bytes: u64,
    /// Pages that the guest dirties a second.
    pub dirty_pages_rate: u64,
    /// Megabits a second, now.
    pub mbps: f64,
    /// Passes begun.
    pub dirty_sync_count: u64,
    /// Passes for which zero-copy was enabled but the kernel copied.
    pub dirty_sync_missed_zero_copy: u64,
    /// Number of pages that the destination requested.
    pub postcopy_requests: u64,
    /// Bytes a page.
    pub page_size: u64,
    /// Bytes sent on multifd channels.
    pub multifd_bytes: u64,
    /// Pages sent a second.
    pub pages_per_second: u64,
    /// Bytes sent while the guest ran at the source.
    pub precopy_bytes: u64,
    /// Bytes sent while it stood still.
    pub downtime_bytes: u64,
    /// Bytes sent while it ran at the destination.
    pub postcopy_bytes: u64,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}
