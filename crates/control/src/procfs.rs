//! Facts about processes in `/proc`: ids, owners, start times, and the number of times that vCPU threads have
//! run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::getpid;
use towline_channel::FileOwner;
use towline_qmp::commands::CpuFast;

/// A value of the kernel, such as `hostname`; empty if it cannot be read.
pub(crate) fn of_kernel(name: &str) -> String {
    fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default().trim().to_owned()
}

/// A file of a process. The name in it may be cut within a character: QEMU's `-name process=` sets it, and the kernel keeps 15 bytes.
fn text_of(path: impl AsRef<Path>) -> io::Result<String> {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Parsed `/proc/PID/status` or `/proc/PID/task/TID/status`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProcStatus {
    /// Id of the process.
    pub(crate) tgid: i32,
    /// Id of the thread in each pid namespace, from that of `/proc` to its own.
    pub(crate) ids: Vec<i32>,
}

impl ProcStatus {
    pub(crate) fn read(path: &str) -> io::Result<Self> {
        Self::parse(&text_of(path)?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no Tgid and Pid in it"))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')))
        };
        let tgid = field("Tgid")?.trim().parse().ok()?;
        // A kernel without pid namespaces has no `NSpid`.
        let ids = field("NSpid").or_else(|| field("Pid"))?.split_whitespace();
        Some(Self { tgid, ids: ids.map(|id| id.parse().ok()).collect::<Option<_>>()? })
    }
}

/// User and group of the files that a process opens now.
pub(crate) fn file_owner(pid: i32) -> Option<FileOwner> {
    parse_file_owner(&text_of(format!("/proc/{pid}/status")).ok()?)
}

/// The last of four ids each: real, effective, saved, and that of files.
fn parse_file_owner(status: &str) -> Option<FileOwner> {
    let of_files = |name: &str| {
        let ids = status.lines().find_map(|line| line.strip_prefix(name))?;
        ids.split_whitespace().last()?.parse().ok()
    };
    Some(FileOwner { uid: of_files("Uid:")?, gid: of_files("Gid:")? })
}

/// Returns true for `-chroot DIR` and `-run-with chroot=DIR`.
pub(crate) fn has_chroot(command_line: &[u8]) -> bool {
    let mut words = command_line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word));
    while let Some(word) = words.next() {
        match word.trim_start_matches('-') {
            "chroot" if word.starts_with('-') => return true,
            "run-with" if word.starts_with('-') => {
                let value = words.next().unwrap_or_default();
                if value.split(',').any(|option| option.starts_with("chroot=")) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

/// Id and start time of our own process; the time is 0 without a readable `/proc`.
pub(crate) fn own_process() -> (i32, u64) {
    let pid = getpid().as_raw_pid();
    (pid, start_time(pid).unwrap_or_default())
}

/// Start time of a process, in clock ticks since boot.
pub(crate) fn start_time(pid: i32) -> io::Result<u64> {
    parse_start_time(&text_of(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time in its field 22"))
}

/// The second field, the name in parentheses, may contain any characters.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(22 - 3)?.trim().parse().ok()
}

// Number of times that a QEMU's vCPU threads have run: evidence that its guest has not.
//
// QEMU has no identifier of a migration: `completed` may be that of a later one, of a guest that has run on.
// But a guest has not run since it was sent if the kernel has not scheduled its vCPU threads. Then only the
// migration of that time can have completed. Linux counts the switches of each thread
// (`/proc/PID/task/TID/status`), and any command that wakes a vCPU, as a run of its guest does, changes the
// sum.
//
// Limits: threads of our pid namespace. A vCPU that was unplugged or plugged in since changes the sum as
// well.

/// Fields that count the switches of a thread.
const COUNTERS: [&str; 2] = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];

/// The vCPU threads of a QEMU.
#[derive(Clone, Debug, Default)]
pub(crate) struct VcpuThreads(Vec<PathBuf>);

impl VcpuThreads {
    /// The threads of these vCPUs; none if the id of the process is not known.
    pub(crate) fn of(pid: Option<i32>, cpus: &[CpuFast]) -> Self {
        let Some(pid) = pid else { return Self::default() };
        Self(cpus.iter().map(|cpu| format!("/proc/{pid}/task/{}/status", cpu.thread_id).into()).collect())
    }

    /// Threads of these files, in place of a QEMU's.
    #[cfg(test)]
    pub(crate) fn of_files(files: Vec<PathBuf>) -> Self {
        Self(files)
    }

    /// Number of times that they were scheduled, in all; `None` if that is not known.
    pub(crate) fn switches(&self) -> Option<u64> {
        if self.0.is_empty() {
            return None;
        }
        self.0.iter().map(|path| switches(&text_of(path).ok()?)).sum()
    }
}

fn switches(status: &str) -> Option<u64> {
    let count = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name))?;
        found.trim().parse::<u64>().ok()
    };
    COUNTERS.into_iter().map(count).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn status_has_ids_of_all_namespaces() {
        let text = "Name:\tqemu\nTgid:\t70\nPid:\t72\nNSpid:\t72\t9\t3\n";
        assert_eq!(ProcStatus::parse(text), Some(ProcStatus { tgid: 70, ids: vec![72, 9, 3] }));
        let old = "Name:\tqemu\nTgid:\t70\nPid:\t72\n";
        assert_eq!(ProcStatus::parse(old), Some(ProcStatus { tgid: 70, ids: vec![72] }));
        assert_eq!(ProcStatus::parse("Name:\tNSpid: 1\n"), None);
    }

    #[test]
    fn files_belong_to_the_user_of_now() {
        let text = "Name:\tqemu\nUid:\t0\t0\t0\t65534\nGid:\t0\t0\t0\t65533\nGroups:\t1\n";
        assert_eq!(parse_file_owner(text), Some(FileOwner { uid: 65534, gid: 65533 }));
        assert_eq!(parse_file_owner("Name:\tUid:\n"), None);
    }

    #[test]
    fn a_root_directory_is_found_in_a_command_line() {
        let has = |line: &str| has_chroot(line.replace(' ', "\0").as_bytes());
        assert!(
            has("qemu -chroot /x -m 1") && has("qemu --chroot /x") && has("qemu -run-with user=a,chroot=/x")
        );
        assert!(
            !has("qemu -name chroot") && !has("qemu -run-with user=chroot") && !has("qemu -m 1 chroot=/x")
        );
    }

    #[test]
    fn start_time_follows_any_name() {
        let stat = "7 (a) b 1 2) S 1 7 7 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 1 0 4711 10 11";
        assert_eq!(parse_start_time(stat), Some(4711));
        assert!(start_time(getpid().as_raw_pid()).unwrap() > 0);
    }

    /// As with `-name process=`, which the kernel cuts after 15 bytes.
    #[test]
    fn a_name_that_is_cut_within_a_character_hides_nothing() {
        let named = r"printf 'gr\303\266\303' > /proc/self/comm; read end";
        let mut command = std::process::Command::new("sh");
        let mut child = command.args(["-c", named]).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let is_named = || fs::read(format!("/proc/{pid}/comm")).unwrap() == b"gr\xc3\xb6\xc3\n";
        while !is_named() {
            thread::yield_now();
        }
        let status = ProcStatus::read(&format!("/proc/{pid}/status"));
        let threads = VcpuThreads(vec![format!("/proc/{pid}/status").into()]);
        let found =
            (status.map(|status| status.tgid).ok(), start_time(pid).is_ok(), file_owner(pid).is_some());
        let is_counted = threads.switches().is_some();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((found, is_counted), ((Some(pid), true, true), true));
    }

    #[test]
    fn both_kinds_of_switches_count() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t30\n";
        assert_eq!(switches(text), Some(42));
        assert_eq!(switches("Name:\tx\nvoluntary_ctxt_switches:\t12\n"), None);
        assert_eq!(VcpuThreads::default().switches(), None);
        assert_eq!(VcpuThreads(vec!["/proc/self/nothing".into()]).switches(), None);
    }

    /// As a vCPU that waits for `cont`, and gets it.
    #[test]
    fn a_thread_that_sleeps_keeps_its_number_and_one_that_ran_does_not() {
        let (wakes, waits) = mpsc::channel::<()>();
        let (tells, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            tells.send(fs::read_link("/proc/thread-self").unwrap()).unwrap();
            while waits.recv().is_ok() {
                tells.send("ran".into()).unwrap();
            }
        });
        let status = PathBuf::from("/proc").join(told.recv().unwrap()).join("status");
        let is_asleep = || fs::read_to_string(&status).unwrap().contains("State:\tS");
        while !is_asleep() {
            thread::yield_now();
        }
        let threads = VcpuThreads(vec![status.clone()]);
        let before = threads.switches().unwrap();
        assert_eq!(threads.switches(), Some(before));
        wakes.send(()).unwrap();
        told.recv().unwrap();
        while !is_asleep() {
            thread::yield_now();
        }
        assert!(threads.switches().unwrap() > before);
        drop(wakes);
        thread.join().unwrap();
        assert_eq!(threads.switches(), None);
    }
}
