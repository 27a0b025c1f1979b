//! Number of times that a QEMU's vCPU threads have run: evidence that its guest has not.
//!
//! QEMU has no identifier of a migration: `completed` may be that of a later one, of a guest that has run on.
//! But a guest has not run since it was sent if the kernel has not scheduled its vCPU threads. Then only the
//! migration of that time can have completed. Linux counts the switches of each thread
//! (`/proc/PID/task/TID/status`), and any command that wakes a vCPU, as a run of its guest does, changes the
//! sum.
//!
//! Limits: threads of our pid namespace. A vCPU that was unplugged or plugged in since changes the sum as
//! well.

use std::fs;
use std::path::PathBuf;

use towline_qmp::commands::CpuFast;

use crate::process::Process;

/// Fields that count the switches of a thread.
const COUNTERS: [&str; 2] = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];

/// The vCPU threads of a QEMU.
#[derive(Clone, Debug, Default)]
pub(crate) struct VcpuThreads(Vec<PathBuf>);

impl VcpuThreads {
    /// The threads of these vCPUs; none of a process that is not known.
    pub(crate) fn of(process: &Process, cpus: &[CpuFast]) -> Self {
        let Process::Known { pid, .. } = process else { return Self::default() };
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
        self.0.iter().map(|path| switches(&fs::read_to_string(path).ok()?)).sum()
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
