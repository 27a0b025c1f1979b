//! A device outside QEMU.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// A towline device (a vhost-user backend).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DeviceFacts {
    /// `net`, `vsock`, …
    pub device_type: String,
    /// Features that it offers, by virtio's names.
    pub features: BTreeSet<String>,
    /// Features that its driver accepted; empty without a driver, and for a destination.
    pub negotiated: BTreeSet<String>,
    /// Queue pairs, or queues if these are not paired.
    pub queues: u16,
    /// The longest ring that it takes.
    pub ring_size_max: u16,
    /// The length of a ring in use; 0: no ring is in use.
    pub ring_size: u16,
    /// Maximum size of a packet in bytes; 0: unknown.
    pub mtu: u16,
    /// The version of the state that it writes.
    pub state_version: u32,
    /// The oldest that it reads.
    pub state_version_min: u32,
    /// `migration_version` of the device, made when it was started. Only the device type itself may interpret
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_version: Option<String>,
    /// Reason for which it cannot be migrated, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmigratable: Option<String>,
}

/// A `migration_version` attribute, as read from the device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct AttributeFacts {
    /// The device's type, which must be the same at both sides before anything is compared.
    pub device_type: String,
    /// Version string. Only the device type itself may interpret it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The errno with which reading it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
}
