//! Lines of a journal.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use towline_qmp::commands::Capability;

use crate::arbiter::{Arbiter, Claimant};
use crate::process::{Process, has_exited};
use crate::procfs::{own_process, start_time};

/// Version of the lines.
pub(super) const VERSION: u32 = 1;
/// Suffix of every journal's name.
const SUFFIX: &str = ".journal";

/// A changed setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedValue<T> {
    /// Value before; `None` if QEMU did not report it.
    pub before: Option<T>,
    /// Value that was set.
    pub set: T,
}

/// A change, with what undoes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum UndoRecord {
    /// Migration capabilities and parameters.
    Settings {
        /// By name.
        capabilities: BTreeMap<Capability, ChangedValue<bool>>,
        /// By QEMU's names.
        parameters: BTreeMap<String, ChangedValue<Value>>,
    },
    /// A device that was unplugged.
    Device {
        /// QOM path of the device.
        path: String,
        /// Arguments of the `device_add` that undoes it.
        add: Map<String, Value>,
    },
    /// A migration that was started.
    Migration {
        /// URI of the destination.
        to: String,
        /// Start time, in milliseconds since 1970.
        begun_ms: u64,
        /// A time at which it was still in progress, in milliseconds of the monotonic clock, which QEMU's
        /// ages are of too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seen_ms: Option<u64>,
    },
    /// A guest that was stopped, and ran before.
    Stopped {
        /// Files in which its drives may go on.
        overlays: Vec<PathBuf>,
    },
    /// Disks that are copied to another QEMU by these jobs.
    Mirrors {
        /// Their ids, which are also the names of their nodes.
        jobs: Vec<String>,
    },
    /// Disks that another QEMU may write.
    Exports,
    /// A guest that another host protects.
    Protection(ProtectionRecord),
    /// A temporary directory.
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Device number of the file.
        device: u64,
        /// Inode of the file.
        inode: u64,
    },
}

/// A protection of a guest by another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProtectionRecord {
    /// Process that takes its checkpoints.
    pub ferry_pid: i32,
    /// Start time of that, in clock ticks since boot.
    pub ferry_start_time: u64,
    /// Control sockets of the guest's cards, which hold its output.
    pub cards: Vec<PathBuf>,
    /// The guest's name, and its generation.
    pub guest: String,
    /// Number of that.
    pub generation: u64,
    /// Arbiter, which decides who goes on with it.
    pub arbiter: Arbiter,
    /// Claimant of the generation.
    pub claimant: Claimant,
}

impl UndoRecord {
    /// A migration that starts now.
    pub fn migration(to: impl Into<String>) -> Self {
        Self::Migration { to: to.into(), begun_ms: now_ms(), seen_ms: None }
    }

    /// An existing directory.
    ///
    /// # Errors
    /// The system's.
    pub fn directory(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self::Directory { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() })
    }

    /// Removes the directory if it is the recorded one; other records have no files. Returns what was done.
    pub(crate) fn remove_files(&self) -> Option<io::Result<String>> {
        let Self::Directory { path, device, inode } = self else { return None };
        let is_it = fs::symlink_metadata(path)
            .is_ok_and(|found| found.is_dir() && (found.dev(), found.ino()) == (*device, *inode));
        let removed = if is_it { fs::remove_dir_all(path) } else { Ok(()) };
        Some(removed.map(|()| format!("temporary directory {} removed", path.display())))
    }
}

/// The process that owns a journal, or works on the record of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Owner {
    pub(crate) pid: i32,
    start_time: u64,
    /// Namespace of the process ids; `None` if it cannot be read.
    pid_namespace: Option<PathBuf>,
}

impl Owner {
    pub(crate) fn this() -> Self {
        let (pid, start_time) = own_process();
        Self { pid, start_time, pid_namespace: pid_namespace() }
    }

    /// Returns true if process ids that it has written are of this process's namespace.
    pub(crate) fn is_of_this_namespace(&self) -> bool {
        self.pid_namespace.is_some() && self.pid_namespace == pid_namespace()
    }

    /// Returns true if it is another process, which runs. The lock is released a moment before the process has exited.
    pub(crate) fn lives(&self) -> bool {
        let is_other = own_process() != (self.pid, self.start_time);
        is_other
            && self.is_of_this_namespace()
            && start_time(self.pid).is_ok_and(|found| found == self.start_time)
            && !has_exited(self.pid, self.start_time)
    }
}

/// Owner of a journal, and its QEMU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct JournalHeader {
    version: u32,
    #[serde(flatten)]
    pub(super) owner: Owner,
    /// The monitor's socket.
    socket: PathBuf,
    device: u64,
    inode: u64,
    /// Creation time of the socket, in nanoseconds since 1970.
    created: Option<u64>,
}

impl JournalHeader {
    pub(super) fn of(socket: &Path) -> io::Result<Self> {
        let socket = std::path::absolute(socket)?;
        let metadata = fs::metadata(&socket)?;
        let created = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Ok(Self {
            version: VERSION,
            owner: Owner::this(),
            device: metadata.dev(),
            inode: metadata.ino(),
            created: created.and_then(|since| u64::try_from(since.as_nanos()).ok()),
            socket,
        })
    }

    /// Name of the journal, which [`process_of`] parses.
    pub(super) fn name(&self, process: &Process) -> String {
        match process {
            Process::Known { pid, start_time, .. } => name_of(*pid, *start_time),
            Process::Unknown { .. } => format!("socket-{:x}-{:x}{SUFFIX}", self.device, self.inode),
        }
    }

    /// Returns true if a journal of our name is of our QEMU. Its inode may have been reused for another
    /// socket.
    pub(super) fn is_same_qemu(&self, found: &Self, process: &Process) -> bool {
        process.is_known() || self.socket == found.socket && self.is_same_socket(found)
    }

    /// Returns true if both are of one socket, by whatever name.
    pub(super) fn is_same_socket(&self, found: &Self) -> bool {
        let key = |header: &Self| (header.device, header.inode, header.created);
        key(self) == key(found)
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    milliseconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Milliseconds of a time, or the most there are.
pub(crate) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds of the monotonic clock.
pub(crate) fn monotonic_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// The pid namespace of this process; `None` where it cannot be read.
fn pid_namespace() -> Option<PathBuf> {
    fs::read_link("/proc/self/ns/pid").ok()
}

/// Name of the journal of a QEMU whose process is known.
pub(super) fn name_of(pid: i32, start_time: u64) -> String {
    format!("qemu-{pid}-{start_time}{SUFFIX}")
}

/// Id and start time of the process in a journal's name.
pub(super) fn process_of(name: &str) -> Option<(i32, u64)> {
    let (pid, started) = name.strip_suffix(SUFFIX)?.strip_prefix("qemu-")?.split_once('-')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum JournalLine {
    Begun(JournalHeader),
    Record { id: u64, record: UndoRecord },
    Done { id: u64 },
}

/// Contents of a journal.
#[derive(Debug, Default)]
pub(super) struct JournalContents {
    /// That of the last owner.
    pub(super) header: Option<JournalHeader>,
    /// Records that are not done, by id.
    pub(super) records: BTreeMap<u64, UndoRecord>,
}

/// A line that cannot be parsed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadLine {
    /// Counted from 1.
    pub(super) line: usize,
    pub(super) reason: String,
}

/// Parses the lines. A truncated line belongs to a change that was not made.
pub(super) fn parse(text: &str) -> Result<JournalContents, BadLine> {
    let mut contents = JournalContents::default();
    for (index, line) in text.lines().enumerate() {
        let bad = |reason| Err(BadLine { line: index + 1, reason });
        match serde_json::from_str(line) {
            Ok(JournalLine::Begun(found)) if found.version == VERSION => contents.header = Some(found),
            Ok(JournalLine::Begun(found)) => return bad(format!("version {}", found.version)),
            Ok(JournalLine::Record { id, record }) => _ = contents.records.insert(id, record),
            Ok(JournalLine::Done { id }) => _ = contents.records.remove(&id),
            Err(error) if error.is_eof() => {}
            Err(error) => return bad(error.to_string()),
        }
    }
    Ok(contents)
}
