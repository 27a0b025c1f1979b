//! The file `state.json` of a running guest.
//!
//! Format: `{"version": 1, "name": …, "pid": …, "start-time": …, "owner-pid": …, "detached": …, "qmp": …,
//! "image": …}`. A reader ignores files of other versions. `start-time` is field 22 of `/proc/PID/stat`, so a
//! reused pid is not taken for the guest.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;
const BYTES_MAX: u64 = 64 << 10;

/// A running guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RunningGuest {
    /// Name of the guest.
    pub name: String,
    /// Process id of its QEMU.
    pub pid: u32,
    /// Start of that process in clock ticks since boot.
    pub start_time: u64,
    /// Process id of the towline that started it.
    pub owner_pid: u32,
    /// True if it outlives that towline.
    #[serde(rename = "detached")]
    pub is_detached: bool,
    /// Path of its monitor's socket.
    pub qmp: PathBuf,
    /// The image that it was started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    state: T,
}

impl RunningGuest {
    /// Reads a state file; `None` if there is none, or none of this version.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let read: Versioned<Self> = serde_json::from_slice(&bytes).ok()?;
        (read.version == VERSION).then_some(read.state)
    }

    pub(super) fn to_json(&self) -> io::Result<String> {
        let versioned = Versioned { version: VERSION, state: self };
        Ok(serde_json::to_string(&versioned)?)
    }

    /// Returns true if its process is the one that was started.
    #[must_use]
    pub fn is_running(&self) -> bool {
        start_time(self.pid).is_ok_and(|start_time| start_time == self.start_time)
    }
}

/// Reads the start time of a process, in clock ticks since boot. A process that has ended and is not yet
/// reaped has none.
pub(crate) fn start_time(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_time(&stat)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time of a running process"))
}

/// The name in parentheses may have any characters, so the fields are counted from its end.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(22 - 4)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_follows_any_name_and_not_a_zombie() {
        let stat = "7 (a) b 1 2) S 1 7 7 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 1 0 4711 10 11";
        assert_eq!(parse_start_time(stat), Some(4711));
        assert_eq!(parse_start_time(&stat.replace(") S", ") Z")), None);
    }
}
