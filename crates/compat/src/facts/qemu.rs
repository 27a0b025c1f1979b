//! A running or waiting QEMU. `None` means unknown: it could not be queried.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{Error, at_most};
use crate::limits;

/// A QEMU, by its control socket.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct QemuFacts {
    /// Version of the QEMU, `10.0.2`.
    pub version: String,
    /// The versioned machine type, as the stream carries it.
    pub machine: String,
    /// The guest's run state, in QEMU's words.
    pub status: String,
    /// True if it waits for a guest.
    pub incoming: IncomingState,
    /// The guest's UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// True if KVM runs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kvm: Option<bool>,
    /// Memory that the stream carries.
    pub blocks: Vec<BlockFacts>,
    /// Migration capabilities that it knows, on or off.
    pub capabilities: BTreeMap<String, bool>,
    /// Migration parameters.
    pub parameters: BTreeMap<String, Value>,
    /// Reasons why QEMU refuses to migrate this guest.
    pub blocked_reasons: Vec<String>,
    /// Properties of the machine that are numbers, words or switches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_properties: Option<BTreeMap<String, Value>>,
    /// The virtual processors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<Cpu>>,
    /// CPUID of the guest's first processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_features: Option<Vec<FeatureWord>>,
    /// All devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<QemuDevice>>,
    /// Network backends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub netdevs: Option<Vec<Netdev>>,
    /// Drives, which are never moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drives: Option<Vec<Drive>>,
    /// Memory backend objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_backends: Option<Vec<MemoryBackend>>,
}

/// State of a QEMU's incoming migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IncomingState {
    /// None: it has a guest.
    #[default]
    No,
    /// With `-incoming defer`.
    Deferred,
    /// At an address of its command line.
    Listening,
    /// A guest is coming in, or failed to.
    Loading,
}

/// A RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BlockFacts {
    /// Name in the stream.
    pub name: String,
    /// Page size of the memory that backs it in bytes; 0: not known.
    pub page_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes it may grow to.
    pub max_bytes: u64,
}

/// A virtual processor.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Cpu {
    /// Number of the processor.
    pub index: u64,
    /// The model, as `-cpu` names it.
    pub model: String,
    /// The local APIC's id, which identifies its state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apic_id: Option<u64>,
    /// Socket, die, core, thread: `socket-id` and so on.
    pub topology: BTreeMap<String, u64>,
}

/// 32 bits of CPUID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FeatureWord {
    /// EAX of the question.
    pub leaf: u32,
    /// ECX of it, where that matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subleaf: Option<u32>,
    /// `EAX` to `EDX` of the result.
    pub register: String,
    /// The register's bits.
    pub bits: u32,
}

/// A device of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct QemuDevice {
    /// Type, as `-device` names it.
    pub kind: String,
    /// The user's name for it, or empty.
    pub id: String,
    /// Address, by which its state is found: `pci/02.0`, `pci/02.0/virtio`.
    pub place: String,
    /// Properties, as `info qtree` prints them.
    pub properties: BTreeMap<String, String>,
    /// Features of a virtio device and its driver; `None` for others, and where QEMU does not report them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtio: Option<Virtio>,
    /// Virtqueues of a virtio device, from the first on; empty for others, and where QEMU does not report
    /// them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub virtqueues: Vec<Virtqueue>,
}

impl QemuDevice {
    /// Returns true if it is below another one of these.
    pub(crate) fn is_part_of_any(&self, others: &[&Self]) -> bool {
        let is_below = |rest: &str| rest.starts_with('/');
        others.iter().any(|other| self.place.strip_prefix(&other.place).is_some_and(is_below))
    }

    /// For messages: `virtio-net-pci "net0" at pci/02.0`.
    pub fn shown(&self) -> String {
        match self.id.as_str() {
            "" => format!("{} at {}", self.kind, self.place),
            id => format!("{} {id:?} at {}", self.kind, self.place),
        }
    }
}

/// Features of a virtio device, by QEMU's names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Virtio {
    /// Features that the device offers.
    pub offered: BTreeSet<String>,
    /// Features that the driver accepted. Empty without a driver.
    pub negotiated: BTreeSet<String>,
}

/// A version of QEMU as numbers, up to the first part that is not a number.
pub(crate) fn version_numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// Size of a virtqueue, in entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Virtqueue {
    /// Current size, which the stream carries: the one that a driver has set, else the maximum.
    pub size: u32,
    /// Maximum size that the device accepts; `None` for a queue that a vhost-user backend processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_max: Option<u32>,
}

/// A network backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Netdev {
    /// Id.
    pub id: String,
    /// `tap`, `user`, `vhost-user`, …
    pub kind: String,
    /// True if QEMU is not connected to the process that serves it, and has set the guest's link down.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_disconnected: bool,
}

/// A drive with its medium.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Drive {
    /// The guest's device that uses it, or the node's name.
    pub device: String,
    /// The file.
    pub file: String,
    /// `raw`, `qcow2`, …
    pub format: String,
    /// True if the guest cannot write it.
    pub read_only: bool,
    /// Bytes that the guest sees.
    pub virtual_bytes: u64,
    /// Identity of the file on this host, `device:inode`, which is the same for all of its names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// Lock on the file that excludes writers.
    pub lock: Lock,
}

/// QEMU's image locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lock {
    /// Not a file of this host, or not checked.
    #[default]
    Unknown,
    /// Not locked.
    Free,
    /// Locked by a writer: the guest that runs with it, or another one.
    Held,
    /// Locked by readers that exclude writers.
    HeldByReaders,
}

/// A `memory-backend-*` object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemoryBackend {
    /// Id.
    pub id: String,
    /// Size in bytes.
    pub bytes: u64,
    /// True if its pages were touched at start.
    pub prealloc: bool,
    /// True if other processes may map it.
    pub share: bool,
}

impl QemuFacts {
    /// The device at a place.
    pub fn device_at(&self, place: &str) -> Option<&QemuDevice> {
        self.devices.iter().flatten().find(|device| device.place == place)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let lists = [
            ("RAM blocks", self.blocks.len()),
            ("capabilities", self.capabilities.len()),
            ("parameters", self.parameters.len()),
            ("blocked reasons", self.blocked_reasons.len()),
            ("machine properties", self.machine_properties.as_ref().map_or(0, BTreeMap::len)),
            ("processors", self.cpus.as_ref().map_or(0, Vec::len)),
            ("CPUID words", self.cpu_features.as_ref().map_or(0, Vec::len)),
            ("devices", self.devices.as_ref().map_or(0, Vec::len)),
            ("network backends", self.netdevs.as_ref().map_or(0, Vec::len)),
            ("drives", self.drives.as_ref().map_or(0, Vec::len)),
            ("memory backends", self.memory_backends.as_ref().map_or(0, Vec::len)),
        ];
        for (what, found) in lists {
            at_most(what, found, limits::ENTRIES_MAX)?;
        }
        for device in self.devices.iter().flatten() {
            at_most("properties of a device", device.properties.len(), limits::PROPERTIES_MAX)?;
            at_most("virtqueues of a device", device.virtqueues.len(), limits::VIRTQUEUES_MAX)?;
        }
        Ok(())
    }
}
