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
    /// The numbers.
    pub qemu: VersionTriple,
    /// The distribution's own, or empty.
    #[serde(default)]
    pub package: String,
}

/// Three numbers, which compare as versions do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VersionTriple {
    /// The first.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
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
    /// Its state.
    pub status: RunState,
    /// True if its CPUs run.
    pub running: bool,
}

/// `stop`: pauses the guest. A waiting destination stays paused after loading.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Stop;
command!(Stop, "stop", Empty);

/// `cont`: runs the guest; before an incoming migration, as soon as it is loaded.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cont;
command!(Cont, "cont", Empty);

/// `quit`: ends QEMU.
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
    /// All zeroes if QEMU was given none.
    #[serde(rename = "UUID")]
    pub uuid: String,
}

/// `query-commands`: those that this QEMU knows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryCommands;
command!(QueryCommands, "query-commands", Vec<CommandName>);

/// A command's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandName {
    /// The name.
    pub name: String,
}

/// `query-machines`: the machine types that this QEMU can be.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMachines;
command!(QueryMachines, "query-machines", Vec<Machine>);

/// A machine type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Machine {
    /// Its versioned name, for example `pc-q35-10.0`.
    pub name: String,
    /// Its short name, for example `q35`.
    #[serde(default)]
    pub alias: Option<String>,
    /// True if it will go in a later QEMU.
    #[serde(default)]
    pub deprecated: bool,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `qom-get`: a property of an object.
#[derive(Clone, Debug, Serialize)]
pub struct QomGet {
    /// The object.
    pub path: String,
    /// The property.
    pub property: String,
}
command!(QomGet, "qom-get", Value);

/// `human-monitor-command`: a line of QEMU's human monitor. Its errors are text too.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HumanMonitorCommand {
    /// The line.
    pub command_line: String,
}
command!(HumanMonitorCommand, "human-monitor-command", String);

/// `x-query-ramblock`: the text of `info ramblock`. Not a stable command, by its `x-`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct XQueryRamblock;
command!(XQueryRamblock, "x-query-ramblock", HumanReadableText);

/// Text for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HumanReadableText {
    /// The text.
    pub human_readable_text: String,
}

/// `query-memory-size-summary`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMemorySizeSummary;
command!(QueryMemorySizeSummary, "query-memory-size-summary", MemorySizeSummary);

/// Size of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemorySizeSummary {
    /// Bytes it began with.
    pub base_memory: u64,
    /// Bytes plugged in since.
    #[serde(default)]
    pub plugged_memory: u64,
}

/// `query-memdev`: the `memory-backend-*` objects.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryMemdev;
command!(QueryMemdev, "query-memdev", Vec<Memdev>);

/// A memory backend. Other properties are read by [`QomGet`] of `/objects/ID`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Memdev {
    /// Its id; absent if it has none.
    #[serde(default)]
    pub id: Option<String>,
    /// Bytes.
    pub size: u64,
    /// True if its memory was allocated at start.
    #[serde(default)]
    pub prealloc: bool,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `query-cpus-fast`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryCpusFast;
command!(QueryCpusFast, "query-cpus-fast", Vec<CpuFast>);

/// A virtual CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CpuFast {
    /// Its number.
    pub cpu_index: u64,
    /// Its object; the object's type names the CPU model.
    pub qom_path: String,
    /// Its thread on the host.
    pub thread_id: i64,
    /// The architecture, for example `x86_64`.
    pub target: String,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `query-block`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryBlock;
command!(QueryBlock, "query-block", Vec<BlockDevice>);

/// A drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockDevice {
    /// Its name; empty where `-blockdev` made it.
    pub device: String,
    /// The guest's device that uses it: an id or a QOM path.
    #[serde(default)]
    pub qdev: Option<String>,
    /// True if its medium can be taken out.
    pub removable: bool,
    /// True if the guest locked the tray.
    pub locked: bool,
    /// The medium.
    #[serde(default)]
    pub inserted: Option<BlockInserted>,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The medium of a drive. QEMU writes some of its keys with underscores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockInserted {
    /// A path, a URL or `json:{…}`.
    pub file: String,
    /// Its node's name.
    #[serde(default)]
    pub node_name: Option<String>,
    /// True if it is read-only.
    pub ro: bool,
    /// The driver, for example `qcow2`.
    pub drv: String,
    /// The driver's description of the image.
    pub image: BlockImage,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A disk image, and its backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockImage {
    /// A path, a URL or `json:{…}`.
    pub filename: String,
    /// For example `qcow2`.
    pub format: String,
    /// Bytes the guest sees.
    pub virtual_size: u64,
    /// The image beneath.
    #[serde(default)]
    pub backing_image: Option<Box<BlockImage>>,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}
