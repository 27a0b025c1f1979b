//! Version, machine and state of QEMU and its guest.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::open_enum::open_enum;
use super::{Empty, command};

/// `query-version`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryVersion;
command!(QueryVersion, "query-version", Version);

/// QEMU's version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Major, minor and micro number.
    pub qemu: VersionTriple,
    /// Version of the distribution's package, or empty.
    #[serde(default)]
    pub package: String,
}

/// A version; its order is that of its three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VersionTriple {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Micro number.
    pub micro: u32,
}

impl std::fmt::Display for VersionTriple {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

open_enum! {
    /// QEMU's `RunState`.
    RunState {
        DEBUG = "debug",
        INMIGRATE = "inmigrate",
        INTERNAL_ERROR = "internal-error",
        IO_ERROR = "io-error",
        PAUSED = "paused",
        POSTMIGRATE = "postmigrate",
        PRELAUNCH = "prelaunch",
        FINISH_MIGRATE = "finish-migrate",
        RESTORE_VM = "restore-vm",
        RUNNING = "running",
        SAVE_VM = "save-vm",
        SHUTDOWN = "shutdown",
        SUSPENDED = "suspended",
        WATCHDOG = "watchdog",
        GUEST_PANICKED = "guest-panicked",
        COLO = "colo",
    }
}

/// `query-status`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryStatus;
command!(QueryStatus, "query-status", Status);

/// True if the guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Run state.
    pub status: RunState,
    /// True if the vCPUs run.
    pub running: bool,
}

/// `stop`: pauses the guest. A waiting destination stays paused after loading.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stop;
command!(Stop, "stop", Empty);

/// `cont`: resumes the guest. Before an incoming migration: runs the guest as soon as it is loaded.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cont;
command!(Cont, "cont", Empty);

/// `xen-save-devices-state`: writes the state of the devices of a stopped guest, without its memory, to a file.
#[derive(Clone, Debug, Serialize)]
pub struct XenSaveDevicesState {
    /// The file, which is created or truncated.
    pub filename: String,
    /// False: the drives of a stopped guest stay active.
    pub live: bool,
}
command!(XenSaveDevicesState, "xen-save-devices-state", Empty);

/// `quit`: terminates QEMU.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quit;
command!(Quit, "quit", Empty);

/// `query-uuid`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryUuid;
command!(QueryUuid, "query-uuid", Uuid);

/// The guest's UUID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uuid {
    /// All zeros if none was configured.
    #[serde(rename = "UUID")]
    pub uuid: String,
}

/// `qom-get`: a property of an object.
#[derive(Clone, Debug, Serialize)]
pub struct QomGet {
    /// QOM path of the object.
    pub path: String,
    /// Name of the property.
    pub property: String,
}
command!(QomGet, "qom-get", Value);

/// `human-monitor-command`: a command line of the human monitor. Its errors are part of the returned text.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HumanMonitorCommand {
    /// Command line.
    pub command_line: String,
}
command!(HumanMonitorCommand, "human-monitor-command", String);

/// `query-memdev`: the `memory-backend-*` objects.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMemdev;
command!(QueryMemdev, "query-memdev", Vec<Memdev>);

/// A memory backend. Other properties are read by [`QomGet`] of `/objects/ID`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Memdev {
    /// Id of the backend; absent if it has none.
    #[serde(default)]
    pub id: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// True if its memory is allocated at start (`prealloc`).
    #[serde(default)]
    pub prealloc: bool,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `query-cpus-fast`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryCpusFast;
command!(QueryCpusFast, "query-cpus-fast", Vec<CpuFast>);

/// A vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CpuFast {
    /// Index of the vCPU.
    pub cpu_index: u64,
    /// QOM path; the object's type names the CPU model.
    pub qom_path: String,
    /// Thread id on the host.
    pub thread_id: i64,
    /// Architecture, for example `x86_64`.
    pub target: String,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `set_link`: the link of a network card.
#[derive(Clone, Debug, Serialize)]
pub struct SetLink {
    /// Id of the card or of its network.
    pub name: String,
    /// True: up.
    pub up: bool,
}
command!(SetLink, "set_link", Empty);

/// `transaction`: all of the actions, or none.
#[derive(Clone, Debug, Serialize)]
pub struct Transaction {
    /// The actions.
    pub actions: Vec<TransactionAction>,
}
command!(Transaction, "transaction", Empty);

/// An action of a transaction.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum TransactionAction {
    /// A drive continues in a file that exists, with the file that it had as its backing file.
    #[serde(rename_all = "kebab-case")]
    BlockdevSnapshotSync {
        /// The node that the drive's device uses.
        node_name: String,
        /// Name of the new node, unique in QEMU.
        snapshot_node_name: String,
        /// The file.
        snapshot_file: String,
        /// Format of the file.
        format: String,
        /// `existing`: the file is opened, not created.
        mode: String,
    },
    /// A new bitmap gets what is written from then on.
    BlockDirtyBitmapAdd {
        /// The node.
        node: String,
        /// The bitmap.
        name: String,
    },
    /// A bitmap stays as it is.
    BlockDirtyBitmapDisable {
        /// The node.
        node: String,
        /// The bitmap.
        name: String,
    },
}

/// `query-block`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryBlock;
command!(QueryBlock, "query-block", Vec<BlockDevice>);

/// A drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockDevice {
    /// Name; empty if it was created by `-blockdev`.
    pub device: String,
    /// Device of the guest that uses it: an id or a QOM path.
    #[serde(default)]
    pub qdev: Option<String>,
    /// True if its medium can be removed.
    pub removable: bool,
    /// True if the guest locked the tray.
    pub locked: bool,
    /// The medium.
    #[serde(default)]
    pub inserted: Option<BlockInserted>,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The medium of a drive. QEMU writes some of its keys with underscores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockInserted {
    /// A path, a URL or `json:{…}`.
    pub file: String,
    /// Node name.
    #[serde(default)]
    pub node_name: Option<String>,
    /// True if it is read-only.
    pub ro: bool,
    /// The driver, for example `qcow2`.
    pub drv: String,
    /// The driver's description of the image.
    pub image: BlockImage,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A disk image, and its backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockImage {
    /// A path, a URL or `json:{…}`.
    pub filename: String,
    /// Format, for example `qcow2`.
    pub format: String,
    /// Size in bytes that the guest sees.
    pub virtual_size: u64,
    /// Backing image.
    #[serde(default)]
    pub backing_image: Option<Box<BlockImage>>,
    /// Keys without a field.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}
