//! Identifies the process of a QEMU, and detects its exit.
//!
//! `SO_PEERCRED` names the process that last called `listen` on the connected socket: QEMU, or a proxy. A
//! process is therefore identified as QEMU only if the threads of the guest's vCPUs, which QEMU itself
//! reports (`query-cpus-fast`), are its threads.
//!
//! ```text
//!   SO_PEERCRED ─► has the vCPU threads? ─ yes, in our pid namespace ─────────────────────────────────► known
//!                    │ └──────────────── yes, in one below ours ──┐
//!                    └ no ─► the process of these threads (Tgid) ─┴─► its command line has QEMU's UUID
//!                                                                     or the path of its monitor? ──── yes ─► known
//!                                                                                                  └── no ──► unknown
//! ```
//! The second proof is needed because the thread ids of a QEMU on another host or in a container may also
//! exist here. A known process is held by a pidfd, opened before the proof, so its id cannot come to mean
//! another process.
//!
//! Limits: Linux 5.3 (`pidfd_open`), and a `/proc` of our own pid namespace that shows QEMU. Without them,
//! and for a machine without vCPUs, the process is unknown, and never reported as exited.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use towline_channel::FileOwner;
use towline_qmp::commands::{CpuFast, QueryCpusFast, QueryUuid};
use towline_qmp::{self as qmp, Client};

use crate::procfs::{ProcStatus, file_owner, has_chroot, start_time};
use crate::qemu::if_known;

/// Maximum number of threads that are searched for those of the vCPUs in another pid namespace.
const THREADS_MAX: usize = 4096;
/// Longest single wait for the pidfd; a longer one is repeated.
const POLL_MAX: Duration = Duration::from_secs(3600);

/// The process of a QEMU.
#[derive(Debug)]
pub enum Process {
    /// Proven to be QEMU's.
    Known {
        /// Id in our pid namespace.
        pid: i32,
        /// Start time, in clock ticks since boot (field 22 of `/proc/PID/stat`).
        start_time: u64,
        /// Refers to this process even after its id is reused.
        pidfd: OwnedFd,
    },
    /// Not identified.
    Unknown {
        /// The reason.
        reason: String,
    },
}

/// State of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// Not exited.
    Running,
    /// Exited, or a zombie.
    Exited,
    /// The process is not known.
    Unknown,
}

impl Process {
    /// Identifies the process of the QEMU that `client` is connected to.
    ///
    /// # Errors
    /// The errors of the connection. Any other failure makes the process [`Process::Unknown`].
    pub(crate) fn identify(client: &mut Client) -> Result<Self, qmp::Error> {
        let cpus = match client.execute(&QueryCpusFast) {
            Ok(cpus) => Ok(cpus),
            Err(error @ (qmp::Error::Refusal { .. } | qmp::Error::Shape { .. })) => Err(error.to_string()),
            Err(error) => return Err(error),
        };
        let listener = client.peer_credentials().map_or(0, |peer| peer.pid);
        Self::of_cpus(client, cpus.as_deref().map_err(String::as_str), listener)
    }

    /// As [`Self::identify`], by the vCPUs in the reply to `query-cpus-fast`, or the reason why there are
    /// none, and the process that listens on the monitor's socket, or that was started with it.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) fn of_cpus(
        client: &mut Client,
        cpus: Result<&[CpuFast], &str>,
        listener: i32,
    ) -> Result<Self, qmp::Error> {
        let threads = match cpus {
            Ok(cpus) => cpus.iter().filter_map(|cpu| i32::try_from(cpu.thread_id).ok()).collect(),
            Err(reason) => return Ok(Self::unknown(reason.to_owned())),
        };
        let (pid, proof) = match candidate(listener, &threads) {
            Ok(found) => found,
            Err(reason) => return Ok(Self::unknown(reason)),
        };
        let held = Pid::from_raw(pid).ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let pidfd = match held {
            Ok(pidfd) => pidfd,
            Err(errno) => return Ok(Self::unknown(format!("pidfd_open of process {pid}: {errno}"))),
        };
        // The checks before `pidfd_open` may have seen an earlier process with this id.
        if candidate(listener, &threads) != Ok((pid, proof)) {
            return Ok(Self::unknown(format!("process {pid} changed while it was being identified")));
        }
        if proof == Proof::Threads && !command_line_is_of(client, pid)? {
            return Ok(Self::unknown(format!(
                "process {pid} has threads with the ids of the vCPUs, but its command line has neither QEMU's UUID nor the path of \
                 its monitor: QEMU may be on another host"
            )));
        }
        let process = match start_time(pid) {
            Ok(start_time) => Self::Known { pid, start_time, pidfd },
            Err(error) => return Ok(Self::unknown(format!("/proc/{pid}/stat: {error}"))),
        };
        Ok(match process.state() {
            // A process whose connection is open has not exited, so no other one has its id.
            ProcessState::Running => client.check_connected().map(|()| process)?,
            _ => Self::unknown(format!("process {pid} exited while it was being identified")),
        })
    }

    fn unknown(reason: String) -> Self {
        tracing::debug!(reason, "QEMU's process is not identified");
        Self::Unknown { reason }
    }

    /// Its id and start time; `None` if it is not known.
    pub(crate) fn identity(&self) -> Option<(i32, u64)> {
        match self {
            Self::Known { pid, start_time, .. } => Some((*pid, *start_time)),
            Self::Unknown { .. } => None,
        }
    }

    /// The current state.
    pub fn state(&self) -> ProcessState {
        self.state_within(Duration::ZERO)
    }

    /// As [`Self::state`]; waits up to `within` for a known process to exit.
    pub fn state_within(&self, within: Duration) -> ProcessState {
        let Self::Known { pidfd, .. } = self else { return ProcessState::Unknown };
        let started = Instant::now();
        loop {
            let left = within.saturating_sub(started.elapsed());
            let Ok(timeout) = Timespec::try_from(left.min(POLL_MAX)) else { return ProcessState::Unknown };
            match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timeout)) {
                Ok(0) if left.is_zero() => return ProcessState::Running,
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return ProcessState::Exited,
                Err(_) => return ProcessState::Unknown,
            }
        }
    }

    /// Kills it, and waits up to `within` for its exit. Returns true if it has exited.
    pub(crate) fn kill(&self, within: Duration) -> bool {
        let Self::Known { pid, pidfd, .. } = self else { return false };
        if let Err(errno) = pidfd_send_signal(pidfd, Signal::KILL) {
            tracing::debug!(pid, %errno, "it is not killed");
        }
        self.state_within(within) == ProcessState::Exited
    }

    /// Returns true if both are known to be one process.
    pub fn is_same(&self, other: &Self) -> bool {
        self.is_known() && self.identity() == other.identity()
    }

    /// User and group of the files that it opens now, which it may have changed since it listened (`-run-with
    /// user=`, `-runas`).
    pub(crate) fn file_owner(&self) -> Option<FileOwner> {
        self.pid().and_then(file_owner)
    }

    /// Returns true if its command line gives it another root directory, from which it cannot find a socket
    /// of towline.
    pub(crate) fn has_own_root(&self) -> bool {
        let Self::Known { pid, .. } = self else { return false };
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|bytes| has_chroot(&bytes))
    }

    /// Returns true if it is in another network namespace than this process.
    pub(crate) fn has_own_network(&self) -> bool {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let Self::Known { pid, .. } = self else { return false };
        let there = namespace(&pid.to_string());
        there.is_some() && there != namespace("self")
    }

    /// Process id, if it is identified.
    pub fn pid(&self) -> Option<i32> {
        self.known_pid().ok()
    }

    /// Process id, or the reason for which it is not known.
    pub(crate) fn known_pid(&self) -> Result<i32, &str> {
        match self {
            Self::Known { pid, .. } => Ok(*pid),
            Self::Unknown { reason } => Err(reason),
        }
    }

    /// Returns true if the process is identified.
    pub fn is_known(&self) -> bool {
        self.pid().is_some()
    }
}

/// Returns true if the process with this id and start time is known to have exited, or is a zombie.
pub(crate) fn has_exited(pid: i32, started: u64) -> bool {
    if start_time(pid).is_ok_and(|now| now != started) {
        return true;
    }
    // A `/proc` that hides processes of others has no start time of a running one either.
    match Pid::from_raw(pid).ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Ok(pidfd) => Process::Known { pid, start_time: started, pidfd }.state() == ProcessState::Exited,
        Err(errno) => errno == Errno::SRCH,
    }
}

/// Evidence from the threads of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// The process listens on the monitor's socket and has the vCPU threads in our pid namespace, so it is
    /// QEMU.
    ListenerAndThreads,
    /// The process has threads with the ids of the vCPU threads.
    Threads,
}

/// The process that may be QEMU's, and the evidence; or the reason why there is none.
fn candidate(peer: i32, threads: &BTreeSet<i32>) -> Result<(i32, Proof), String> {
    if threads.is_empty() {
        return Err("QEMU has no vCPU threads".into());
    }
    check_own_proc()?;
    if peer > 0 {
        if has_threads(peer, threads) {
            return Ok((peer, Proof::ListenerAndThreads));
        }
        if has_threads_in_child_pid_namespace(peer, threads) {
            return Ok((peer, Proof::Threads));
        }
    }
    let pid = process_of(threads)?;
    Ok((pid, Proof::Threads))
}

/// Checks that `/proc` is of our own pid namespace: another one would show other processes under our ids.
fn check_own_proc() -> Result<(), String> {
    let own = ProcStatus::read("/proc/self/status").map_err(|error| format!("/proc/self/status: {error}"))?;
    if own.ids == [getpid().as_raw_pid()] {
        return Ok(());
    }
    Err("/proc is of another pid namespace than this process".into())
}

/// Returns true if these are threads of `pid`, other than its first, in our pid namespace.
fn has_threads(pid: i32, threads: &BTreeSet<i32>) -> bool {
    threads.iter().all(|thread| {
        let status = ProcStatus::read(&format!("/proc/{pid}/task/{thread}/status"));
        *thread != pid && status.is_ok_and(|status| status.tgid == pid && status.ids == [*thread])
    })
}

/// As [`has_threads`] for a `pid` in a pid namespace below ours, in which the threads have these ids.
fn has_threads_in_child_pid_namespace(pid: i32, threads: &BTreeSet<i32>) -> bool {
    let Ok(first) = ProcStatus::read(&format!("/proc/{pid}/status")) else { return false };
    let Some((own, 1..)) = first.ids.last().map(|own| (*own, first.ids.len() - 1)) else { return false };
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let tasks = tasks.take(THREADS_MAX).flatten();
    let ids = tasks.filter_map(|task| {
        let path = task.path().join("status");
        ProcStatus::read(path.to_str()?).ok()?.ids.last().copied()
    });
    let ids: BTreeSet<i32> = ids.filter(|id| *id != own).collect();
    threads.is_subset(&ids)
}

/// The one process of our pid namespace that has these threads, none of them its first.
fn process_of(threads: &BTreeSet<i32>) -> Result<i32, String> {
    let mut found = None;
    for thread in threads {
        let status = ProcStatus::read(&format!("/proc/{thread}/status")).map_err(|error| {
            format!("the listener is not QEMU, and vCPU thread {thread} is not here: {error}")
        })?;
        let is_one_process = found.is_none_or(|pid| pid == status.tgid);
        if !is_one_process || status.tgid == *thread || status.ids != [*thread] {
            return Err(format!("the listener is not QEMU, and thread {thread} here is not a vCPU's"));
        }
        found = Some(status.tgid);
    }
    found.ok_or_else(|| "QEMU has no vCPU threads".into())
}

/// Returns true if the command line of a process contains QEMU's UUID, or the path of a Unix socket of its
/// monitors.
fn command_line_is_of(client: &mut Client, pid: i32) -> Result<bool, qmp::Error> {
    let Ok(bytes) = fs::read(format!("/proc/{pid}/cmdline")) else { return Ok(false) };
    let text = String::from_utf8_lossy(&bytes);
    let words: Vec<&str> = text.split('\0').collect();
    let uuid = client.execute(&QueryUuid)?.uuid;
    if has_uuid(&words, &uuid) {
        return Ok(true);
    }
    let chardevs = if_known(client.execute_raw("query-chardev", None))?.unwrap_or_default();
    let paths = chardevs.as_array().into_iter().flatten().filter_map(listening_path);
    Ok(paths.into_iter().any(|path| words.iter().any(|word| word.contains(path))))
}

fn has_uuid(words: &[&str], uuid: &str) -> bool {
    let is_set = uuid.bytes().any(|byte| !matches!(byte, b'0' | b'-'));
    is_set
        && words
            .windows(2)
            .any(|pair| pair[0].trim_start_matches('-') == "uuid" && pair[1].eq_ignore_ascii_case(uuid))
}

/// Absolute path of a chardev that is a listening Unix socket: `unix:PATH,server=on`, connected or not.
fn listening_path(chardev: &Value) -> Option<&str> {
    let name = chardev["filename"].as_str()?;
    let name = name.strip_prefix("disconnected:").unwrap_or(name);
    let (path, options) = name.strip_prefix("unix:")?.split_once(',')?;
    (path.starts_with('/') && options.contains("server")).then_some(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn uuid_of_zeroes_proves_nothing() {
        let zero = "00000000-0000-0000-0000-000000000000";
        assert!(!has_uuid(&["qemu", "-uuid", zero], zero));
        let uuid = "6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11";
        assert!(has_uuid(&["qemu", "-uuid", &uuid.to_uppercase()], uuid));
        assert!(!has_uuid(&["qemu", "-name", uuid], uuid));
    }

    #[test]
    fn only_absolute_paths_of_listening_sockets_count() {
        let path = |name: &str| listening_path(&json!({ "filename": name })).map(str::to_owned);
        assert_eq!(path("unix:/run/a.qmp,server=on").as_deref(), Some("/run/a.qmp"));
        assert_eq!(path("disconnected:unix:/run/a.qmp,server=on").as_deref(), Some("/run/a.qmp"));
        assert_eq!(path("unix:a.qmp,server=on"), None);
        assert_eq!(path("unix:/run/vhost.sock"), None);
        assert_eq!(path("pty:/dev/pts/1"), None);
    }

    #[test]
    fn a_process_for_which_its_parent_has_not_waited_has_exited() {
        let (own, started) = crate::procfs::own_process();
        assert!(!has_exited(own, started) && has_exited(own, started + 1));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let started = start_time(pid).unwrap();
        assert!(!has_exited(pid, started));
        drop(child.stdin.take());
        while !has_exited(pid, started) {
            std::thread::yield_now();
        }
        assert_eq!(start_time(pid).ok(), Some(started), "it is a zombie");
        child.wait().unwrap();
        assert!(has_exited(pid, started));
    }

    #[test]
    fn threads_of_a_process_are_found_and_others_are_not() {
        let own = getpid().as_raw_pid();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let (ids, id) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let path = fs::read_link("/proc/thread-self").unwrap();
            ids.send(path.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            let _ = receiver.recv();
        });
        let threads = BTreeSet::from([id.recv().unwrap()]);
        assert!(has_threads(own, &threads));
        assert_eq!(process_of(&threads), Ok(own));
        assert_eq!(candidate(own, &threads), Ok((own, Proof::ListenerAndThreads)));
        assert_eq!(candidate(0, &threads), Ok((own, Proof::Threads)));
        assert!(!has_threads(1, &threads), "of another process");
        assert!(!has_threads(own, &BTreeSet::from([own])), "the first thread runs no vCPU");
        assert!(candidate(own, &BTreeSet::new()).is_err());
        drop(sender);
        thread.join().unwrap();
    }
}
