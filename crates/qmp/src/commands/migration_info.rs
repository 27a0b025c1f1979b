//! State and statistics of a migration.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::command;
use super::open_enum::open_enum;
use crate::Event;

/// `query-migrate`: state of the outgoing migration or, at a destination, of the incoming one.
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
    /// Returns true if no migration is in progress: it has completed, failed, was cancelled, or none was
    /// started.
    pub fn is_idle(&self) -> bool {
        [Self::NONE, Self::COMPLETED, Self::FAILED, Self::CANCELLED].contains(self)
    }

    /// Returns true if it failed, or is failing: QEMU 11.1 reports `failing` before `failed`.
    pub fn has_failed(&self) -> bool {
        [Self::FAILING, Self::FAILED].contains(self)
    }

    /// Returns true if the guest is its destination's, and not all of its memory has arrived. `postcopy-device`
    /// is not such a status: a source that fails then runs its guest again.
    pub fn is_postcopy(&self) -> bool {
        [Self::POSTCOPY_ACTIVE, Self::POSTCOPY_PAUSED, Self::POSTCOPY_RECOVER_SETUP, Self::POSTCOPY_RECOVER]
            .contains(self)
    }

    /// The status in a `MIGRATION` event. QEMU sends these only with the capability
    /// [`Capability::EVENTS`](super::Capability::EVENTS).
    pub fn of_event(event: &Event) -> Option<Self> {
        let status = event.data.get("status").filter(|_| event.name == "MIGRATION")?;
        status.as_str().map(Self::new)
    }
}

/// Reply of `query-migrate`: QEMU's `MigrationInfo`. Empty without a migration.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrationInfo {
    /// Status; `None` without a migration, and at a QEMU 7.2 that only listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<MigrationStatus>,
    /// Statistics of the memory; only at the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ram: Option<RamStats>,
    /// Time since the migration started, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_time: Option<i64>,
    /// Downtime in milliseconds, at the end of the migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime: Option<i64>,
    /// Downtime in milliseconds that QEMU expects if the guest is stopped now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_downtime: Option<i64>,
    /// Remaining bytes of memory and devices. QEMU 11.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u64>,
    /// CPU throttling by auto-converge, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_percentage: Option<u64>,
    /// Reason of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_desc: Option<String>,
    /// Reasons why this guest cannot be migrated now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked_reasons: Vec<String>,
    /// Addresses at which QEMU listens, as `SocketAddress`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub socket_address: Vec<Value>,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// QEMU's `MigrationStats`. A missing counter is 0.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamStats {
    /// Bytes sent.
    pub transferred: u64,
    /// Remaining bytes of this pass.
    pub remaining: u64,
    /// Bytes of guest memory.
    pub total: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Pages sent with their content (QEMU: normal).
    pub normal: u64,
    /// Bytes of normal pages.
    pub normal_bytes: u64,
    /// Dirty pages per second.
    pub dirty_pages_rate: u64,
    /// Current rate in megabits per second.
    pub mbps: f64,
    /// Number of passes, the current one included.
    pub dirty_sync_count: u64,
    /// Passes for which zero-copy was enabled but the kernel copied.
    pub dirty_sync_missed_zero_copy: u64,
    /// Number of pages that the destination requested.
    pub postcopy_requests: u64,
    /// Page size in bytes.
    pub page_size: u64,
    /// Bytes sent on multifd channels.
    pub multifd_bytes: u64,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}
