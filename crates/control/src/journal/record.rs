//! The lines of a journal.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use towline_qmp::commands::Capability;

use crate::process::{Process, own_process, start_time};

/// The version of the lines.
pub(super) const VERSION: u32 = 1;
/// How the name of every journal ends.
const SUFFIX: &str = ".journal";

/// A setting before and after a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangedValue<T> {
    /// Before; `None`: QEMU did not show it.
    pub before: Option<T>,
    /// What it was set to.
    pub set: T,
}

/// One change, and what undoes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
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
        /// Its QOM path.
        path: String,
        /// The arguments of the `device_add` that plugs it again.
        add: Map<String, Value>,
    },
    /// A migration that was begun.
    Migration {
        /// Its URI.
        to: String,
        /// When, in milliseconds since 1970.
        begun_ms: u64,
    },
    /// A temporary directory.
    Directory {
        /// Where.
        path: PathBuf,
        /// Its device.
        device: u64,
        /// Its inode.
        inode: u64,
    },
}

impl UndoRecord {
    /// A migration that is begun now.
    #[must_use]
    pub fn migration(to: impl Into<String>) -> Self {
        Self::Migration { to: to.into(), begun_ms: now_ms() }
    }

    /// A directory that is there.
    ///
    /// # Errors
    /// The system's.
    pub fn directory(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self::Directory { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() })
    }

    /// Removes a directory, if it is the recorded one; no other record is of files that may be removed. What was done, if anything.
    pub(crate) fn remove_files(&self) -> Option<io::Result<String>> {
        let Self::Directory { path, device, inode } = self else { return None };
        let is_it = fs::symlink_metadata(path)
            .is_ok_and(|found| found.is_dir() && (found.dev(), found.ino()) == (*device, *inode));
        let removed = if is_it { fs::remove_dir_all(path) } else { Ok(()) };
        Some(removed.map(|()| format!("temporary directory {} removed", path.display())))
    }
}

/// Who writes a journal, and of which QEMU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Header {
    version: u32,
    /// The owner.
    pub(super) pid: i32,
    start_time: u64,
    /// In which its ids are; `None` where it cannot be read.
    pid_namespace: Option<PathBuf>,
    /// The monitor's socket.
    socket: PathBuf,
    device: u64,
    inode: u64,
    /// When the socket was made, in nanoseconds since 1970.
    created: Option<u64>,
}

impl Header {
    pub(super) fn of(socket: &Path) -> io::Result<Self> {
        let (pid, start_time) = own_process();
        let socket = std::path::absolute(socket)?;
        let metadata = fs::metadata(&socket)?;
        let created = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Ok(Self {
            version: VERSION,
            pid,
            start_time,
            pid_namespace: pid_namespace(),
            device: metadata.dev(),
            inode: metadata.ino(),
            created: created.and_then(|since| u64::try_from(since.as_nanos()).ok()),
            socket,
        })
    }

    /// The journal's name, which [`process_of`] understands.
    pub(super) fn name(&self, process: &Process) -> String {
        match process {
            Process::Known { pid, start_time, .. } => name_of(*pid, *start_time),
            Process::Unknown { .. } => format!("socket-{:x}-{:x}{SUFFIX}", self.device, self.inode),
        }
    }

    /// Whether a journal of our name is of our QEMU. An inode may be another socket's by now.
    pub(super) fn is_same_qemu(&self, found: &Self, process: &Process) -> bool {
        let key = |header: &Self| (header.socket.clone(), header.device, header.inode, header.created);
        process.is_known() || key(self) == key(found)
    }

    /// Whether its owner runs. A lock says the same, but is dropped a moment before the process has exited.
    pub(super) fn owner_lives(&self) -> bool {
        let is_other = own_process() != (self.pid, self.start_time);
        is_other && self.is_of_our_namespace() && start_time(self.pid).is_ok_and(|now| now == self.start_time)
    }

    pub(super) fn is_of_our_namespace(&self) -> bool {
        self.pid_namespace.is_some() && self.pid_namespace == pid_namespace()
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// The pid namespace of this process; `None` where it cannot be read.
pub(crate) fn pid_namespace() -> Option<PathBuf> {
    fs::read_link("/proc/self/ns/pid").ok()
}

/// The name of the journal of a QEMU whose process is known.
pub(super) fn name_of(pid: i32, start_time: u64) -> String {
    format!("qemu-{pid}-{start_time}{SUFFIX}")
}

/// The id and start time of the process that a journal of this name is of.
pub(super) fn process_of(name: &str) -> Option<(i32, u64)> {
    let (pid, started) = name.strip_suffix(SUFFIX)?.strip_prefix("qemu-")?.split_once('-')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

/// One line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Line {
    Begun(Header),
    Record { id: u64, record: UndoRecord },
    Done { id: u64 },
}

/// What a journal holds.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The last owner.
    pub(super) owner: Option<Header>,
    /// Those that are not done, by their ids.
    pub(super) records: BTreeMap<u64, UndoRecord>,
}

/// A line that is not understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadLine {
    /// Counted from 1.
    pub(super) line: usize,
    pub(super) reason: String,
}

/// Reads the lines. One that was cut off is of a change that was not made.
pub(super) fn parse(text: &str) -> Result<Contents, BadLine> {
    let mut contents = Contents::default();
    for (index, line) in text.lines().enumerate() {
        let bad = |reason| Err(BadLine { line: index + 1, reason });
        match serde_json::from_str(line) {
            Ok(Line::Begun(found)) if found.version == VERSION => contents.owner = Some(found),
            Ok(Line::Begun(found)) => return bad(format!("version {}", found.version)),
            Ok(Line::Record { id, record }) => _ = contents.records.insert(id, record),
            Ok(Line::Done { id }) => _ = contents.records.remove(&id),
            Err(error) if error.is_eof() => {}
            Err(error) => return bad(error.to_string()),
        }
    }
    Ok(contents)
}
