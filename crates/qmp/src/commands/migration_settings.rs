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

/// A capability and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilityState {
    /// The capability.
    pub capability: Capability,
    /// True if it is enabled.
    pub state: bool,
}

/// `migrate-set-capabilities`: sets all of them, or none and returns an error.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateSetCapabilities {
    /// Capabilities to be changed; the others keep their state.
    pub capabilities: Vec<CapabilityState>,
}
command!(MigrateSetCapabilities, "migrate-set-capabilities", Empty);

/// `query-migrate-capabilities`: every capability that this QEMU has.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateCapabilities;
command!(QueryMigrateCapabilities, "query-migrate-capabilities", Vec<CapabilityState>);

/// `migrate-set-parameters`: sets the parameters that are `Some` or in `other`.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct MigrateSetParameters(pub MigrationParameters);
command!(MigrateSetParameters, "migrate-set-parameters", Empty);

/// `query-migrate-parameters`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMigrateParameters;
command!(QueryMigrateParameters, "query-migrate-parameters", MigrationParameters);

/// QEMU's `MigrationParameters`. In a command: parameters to be changed. In a reply: the current values.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationParameters {
    /// Maximum rate in bytes per second; 0 is unlimited. QEMU's default is 128 MiB/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<u64>,
    /// Maximum rate of background pages in postcopy, in bytes per second; 0 is unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_postcopy_bandwidth: Option<u64>,
    /// Maximum downtime in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_limit: Option<u64>,
    /// Number of multifd channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_channels: Option<u8>,
    /// Compression of multifd channels: `none`, `zlib`, `zstd`, and others in later versions of QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_compression: Option<String>,
    /// Level of zlib, from 0 (no compression) to 9 (smallest output).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_zlib_level: Option<u8>,
    /// Level of zstd, from 0 (its default) to 20 (smallest output).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multifd_zstd_level: Option<u8>,
    /// Id of the `tls-creds` object; empty disables TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_creds: Option<String>,
    /// Name expected in the destination's certificate; empty: the host of the URI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_hostname: Option<String>,
    /// CPU throttling with which auto-converge begins, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_initial: Option<u8>,
    /// Maximum CPU throttling by auto-converge, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpu_throttle: Option<u8>,
    /// Migration mode: `normal`, `cpr-reboot`, and others in later versions of QEMU. QEMU 8.2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// True if QEMU writes files with `O_DIRECT`. QEMU 9.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_io: Option<bool>,
    /// All other parameters, under QEMU's names.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl MigrationParameters {
    /// The parameters that are set, under QEMU's names.
    pub fn to_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => unreachable!("a struct with text keys is a JSON object"),
        }
    }

    /// Parameters under QEMU's names, all in `other`: to be sent, they need no types.
    pub fn from_map(other: Map<String, Value>) -> Self {
        Self { other, ..Self::default() }
    }
}
