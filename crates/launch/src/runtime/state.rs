//! The file `state.json` of a running guest.
//!
//! Format: `{"version": 1, "name": …, "pid": …, "start-time": …, "owner-pid": …, "detached": …, "qmp": …,
//! "image": …, "generation": …}`. A file of another version is an error: its guest may run. `pid` is the same in all versions. `start-time` is field 22 of `/proc/PID/stat`, so a
//! reused pid is not taken for the guest.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
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
    /// Its generations, of a guest that several hosts may run in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generations: Option<GuestGenerations>,
}

/// Generations of a guest, on storage that several hosts share: each run of it has one, which no other can have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GuestGenerations {
    /// The directory that has them.
    pub directory: PathBuf,
    /// The generation from which this QEMU continues; it runs as the next one. 0 if there was none.
    pub after: u64,
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    state: T,
}

impl RunningGuest {
    /// Reads a state file; `None` if there is none.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let bytes = match read_bytes(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read?,
        };
        let read: Versioned<Self> = serde_json::from_slice(&bytes)?;
        if read.version != VERSION {
            let text = format!("version {}, expected {VERSION}", read.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(Some(read.state))
    }

    /// The process in a state file of any version.
    pub(super) fn pid_in_any_version(path: &Path) -> Option<u32> {
        let state: serde_json::Value = serde_json::from_slice(&read_bytes(path).ok()?).ok()?;
        state.get("pid")?.as_u64()?.try_into().ok()
    }

    pub(super) fn to_json(&self) -> io::Result<String> {
        let versioned = Versioned { version: VERSION, state: self };
        Ok(serde_json::to_string(&versioned)?)
    }

    /// Returns true if its process is the one that was started, or may be: this process may have no descriptor left to learn it.
    pub fn is_running(&self) -> bool {
        match start_time(self.pid) {
            Ok(start_time) => start_time == self.start_time,
            Err(error) => Errno::from_io_error(&error)
                .is_some_and(|errno| [Errno::MFILE, Errno::NFILE, Errno::NOMEM].contains(&errno)),
        }
    }

    /// File that is there while it waits for the guest of another host.
    pub fn waiting_path(monitor: &Path) -> PathBuf {
        monitor.with_file_name("waiting")
    }

    /// Returns true while it waits for the guest of another host.
    pub fn is_waiting(&self) -> bool {
        Self::waiting_path(&self.qmp).exists()
    }

    /// A descriptor of its process; `None`: it has ended.
    ///
    /// # Errors
    /// The system's, if it has not.
    pub fn process(&self) -> io::Result<Option<OwnedFd>> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let process = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())).transpose();
        // The descriptor is of the process that has this id now.
        if self.is_running() { Ok(process?) } else { Ok(None) }
    }

    /// Returns true if it is about to end: its first thread has, or frees its memory. Its files and locks are kept for a moment.
    pub(super) fn is_ending(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        is_exiting(&stat)
    }

    /// Ends it: lets it quit for up to `quit`, and then kills it and waits for up to `killed`. Returns true if it has ended.
    #[must_use]
    pub fn end(&self, quit: Duration, killed: Duration) -> bool {
        self.send(&[(Signal::TERM, quit), (Signal::KILL, killed)])
    }

    /// Kills it, and waits for up to `within`. Returns true if it has ended.
    #[must_use]
    pub fn kill(&self, within: Duration) -> bool {
        self.send(&[(Signal::KILL, within)])
    }

    /// Sends signals, each of which may take this time, until it has ended.
    fn send(&self, signals: &[(Signal, Duration)]) -> bool {
        let process = match self.process() {
            Ok(Some(process)) => process,
            Ok(None) => return true,
            Err(error) => {
                tracing::warn!(pid = self.pid, %error, "QEMU cannot be ended");
                return false;
            }
        };
        signals.iter().any(|&(signal, within)| {
            let sent = pidfd_send_signal(&process, signal);
            let ended = wait_exit(&process, within);
            tracing::debug!(pid = self.pid, ?signal, ?sent, ?ended, "ending QEMU");
            ended == Ok(true)
        })
    }
}

/// Waits for at most this time, which a signal to this process neither ends nor extends. Returns true if the process has exited.
pub(crate) fn wait_exit(process: &OwnedFd, within: Duration) -> Result<bool, Errno> {
    let deadline = Instant::now() + within;
    let ready = retry_on_intr(|| {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        poll(&mut [PollFd::new(process, PollFlags::IN)], left.as_ref())
    })?;
    Ok(ready > 0)
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the start time of a process, in clock ticks since boot. A process that has ended and is not yet
/// reaped has none.
pub(crate) fn start_time(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_time(&stat)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time of a running process"))
}

/// By the flags of the first thread, which it has as a zombie, too.
fn is_exiting(stat: &str) -> bool {
    /// `PF_EXITING` of linux/sched.h.
    const EXITING: u32 = 1 << 2;
    let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(9 - 3)?.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

/// The name in parentheses may have any characters, so the fields are counted from its end.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let threads: u64 = fields.nth(20 - 4)?.parse().ok()?;
    // A process whose first thread has ended has its files and locks until the last one has.
    if state == "X" || state == "Z" && threads <= 1 {
        return None;
    }
    fields.nth(22 - 21)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn of_process(pid: u32) -> RunningGuest {
        RunningGuest {
            name: "a".into(),
            pid,
            start_time: start_time(pid).unwrap(),
            owner_pid: 1,
            is_detached: true,
            qmp: "/run/a/qmp.sock".into(),
            image: None,
            generations: None,
        }
    }

    #[test]
    fn a_signal_does_not_shorten_the_time_to_quit() {
        let script = "trap 'for i in 1 2 3 4 5; do sleep 0.1; done; exit 7' TERM; echo ready; while :; do sleep 0.1; done";
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let guest = of_process(child.id());
        let signals = crate::sys::tests::interrupt_this_thread();
        assert!(guest.end(Duration::from_secs(60), Duration::from_secs(60)));
        drop(signals);
        assert_eq!(child.wait().unwrap().code(), Some(7), "it was not killed");
    }

    /// Counted as ended, its memory and disks would be given to the next one.
    #[test]
    fn a_guest_runs_also_if_this_process_has_no_descriptor_left() {
        const NAME: &str = "runtime::state::tests::a_guest_runs_also_if_this_process_has_no_descriptor_left";
        const INNER: &str = "TOWLINE_TEST_WITHOUT_DESCRIPTORS";
        if std::env::var_os(INNER).is_none() {
            let own = std::env::current_exe().unwrap();
            let script = "ulimit -n 64; exec \"$0\" --exact \"$1\"";
            let tested = Command::new("sh").args(["-c", script]).arg(own).arg(NAME).env(INNER, "1").output();
            let tested = tested.unwrap();
            assert!(tested.status.success(), "{}", String::from_utf8_lossy(&tested.stdout));
            return;
        }
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let guest = of_process(child.id());
        let open: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        let found = (guest.is_running(), guest.process().is_err(), guest.kill(Duration::ZERO));
        drop(open);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, (true, true, false));
        assert!(!guest.is_running() && guest.kill(Duration::ZERO));
    }

    #[test]
    fn start_time_follows_any_name_and_not_a_zombie() {
        let stat = "7 (a) b 1 2) S 1 7 7 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 1 0 4711 10 11";
        assert_eq!(parse_start_time(stat), Some(4711));
        let zombie = stat.replace(") S", ") Z");
        assert_eq!(parse_start_time(&zombie), None);
        assert_eq!(parse_start_time(&zombie.replace(" 20 0 1 0 ", " 20 0 2 0 ")), Some(4711));
        let exiting = stat.replace(" 4194560 ", " 4194564 ");
        assert_eq!([stat, &exiting].map(is_exiting), [false, true]);
    }
}
