//! Capabilities and parameters of migration.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::open_enum::open_enum;
use super::{Empty, command};

open_enum! {
    /// QEMU's `MigrationCapability`.
    Capability {
        XBZRLE = "xbzrle",
        AUTO_CONVERGE = "auto-converge",
        EVENTS = "events",
        POSTCOPY_RAM = "postcopy-ram",
        RELEASE_RAM = "release-ram",
        RETURN_PATH = "return-path",
        PAUSE_BEFORE_SWITCHOVER = "pause-before-switchover",
        MULTIFD = "multifd",
        DIRTY_BITMAPS = "dirty-bitmaps",
        POSTCOPY_BLOCKTIME = "postcopy-blocktime",
        LATE_BLOCK_ACTIVATE = "late-block-activate",
        X_IGNORE_SHARED = "x-ignore-shared",
        VALIDATE_UUID = "validate-uuid",
        BACKGROUND_SNAPSHOT = "background-snapshot",
        ZERO_COPY_SEND = "zero-copy-send",
        POSTCOPY_PREEMPT = "postcopy-preempt",
        SWITCHOVER_ACK = "switchover-ack",
        DIRTY_LIMIT = "dirty-limit",
        MAPPED_RAM = "mapped-ram",
    }
}

/// One capability, on or off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilityState {
    /// The capability.
    pub capability: Capability,
    /// On.
    pub state: bool,
}

/// `migrate-set-capabilities`: all of them, or with an error none.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateSetCapabilities {
    /// Those to change.
    pub capabilities: Vec<CapabilityState>,
}
command!(MigrateSetCapabilities, "migrate-set-capabilities", Empty);

/// `query-migrate-capabilities`: each capability that this QEMU knows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateCapabilities;
command!(QueryMigrateCapabilities, "query-migrate-capabilities", Vec<CapabilityState>);

/// `migrate-set-parameters`: those that are `Some` or in `other`.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct MigrateSetParameters(pub MigrationParameters);
command!(MigrateSetParameters, "migrate-set-parameters", Empty);

/// `query-migrate-parameters`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateParameters;
command!(QueryMigrateParameters, "query-migrate-parameters", MigrationParameters);

/// QEMU's `MigrationParameters`. As a question: what to change. As an answer: what is set.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationParameters {
    /// Bytes a second at most; 0 is without limit. QEMU's default is 128 MiB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<u64>,
    /// Bytes a second assumed for the switchover; 0: as measured. QEMU 8.2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avail_switchover_bandwidth: Option<u64>,
    /// Maximum rate of background pages in postcopy, in bytes per second; 0 is unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_postcopy_bandwidth: Option<u64>,
    /// Milliseconds the guest may stand still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_limit: Option<u64>,
    /// Number of multifd that channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_channels: Option<u8>,
    /// `none`, `zlib`, `zstd`, and more in later QEMUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_compression: Option<String>,
    /// 0 (none) to 9 (best).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_zlib_level: Option<u8>,
    /// 0 (none) to 20 (best).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_zstd_level: Option<u8>,
    /// `none`, `legacy` or `multifd`. QEMU 9.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_page_detection: Option<String>,
    /// Id of QEMU's TLS credentials; empty is without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_creds: Option<String>,
    /// The name expected in the destination's certificate; empty: the host of the URI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_hostname: Option<String>,
    /// Id of the authorization object for clients; empty: every client with a valid certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_authz: Option<String>,
    /// Bytes of xbzrle's cache, a power of two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xbzrle_cache_size: Option<u64>,
    /// Percent that auto-converge begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_initial: Option<u8>,
    /// Percent that it adds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_increment: Option<u8>,
    /// Percent it ends with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpu_throttle: Option<u8>,
    /// `normal`, `cpr-reboot` and more. QEMU 8.2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The program that a QEMU in mode `cpr-exec` becomes, and its arguments. QEMU 10.2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpr_exec_command: Option<Vec<String>>,
    /// True if files are written past the page cache. QEMU 9.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_io: Option<bool>,
    /// All others, as QEMU names them.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl MigrationParameters {
    /// The parameters that are set, under QEMU's names.
    #[must_use]
    pub fn to_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => unreachable!("a struct with text keys is a JSON object"),
        }
    }

    /// Parameters under QEMU's names, all in `other`: to be sent, they need no types.
    #[must_use]
    pub fn from_map(other: Map<String, Value>) -> Self {
        Self { other, ..Self::default() }
    }
}
