//! Children that die with this process, whichever thread starts them.
//!
//! The kernel's death signal follows the *thread* that started a child. A test's helper thread may end long
//! before its guest should, so one thread that never ends starts them all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::sys::die_with_parent;

/// A child. Dropping it kills it.
pub(crate) struct KilledChild(pub(crate) Child);

impl KilledChild {
    /// Kills it (SIGKILL) and waits until it has exited.
    pub(crate) fn kill(&mut self) -> io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for KilledChild {
    fn drop(&mut self) {
        // It may have exited already, and a destructor cannot return an error.
        let _ = self.kill();
    }
}

struct Request {
    command: Command,
    answer: Sender<io::Result<KilledChild>>,
}

/// Starts `command`; the child is killed when this process ends.
pub(crate) fn spawn(command: Command) -> io::Result<KilledChild> {
    static SPAWNER: OnceLock<Sender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = channel::<Request>();
        std::thread::spawn(move || {
            for mut request in requests {
                let child = die_with_parent(&mut request.command).spawn();
                // If the requesting thread has ended, its child is not needed, and is killed here.
                let _ = request.answer.send(child.map(KilledChild));
            }
        });
        sender
    });
    let (answer, child) = channel();
    spawner.send(Request { command, answer }).map_err(|_| io::Error::other("the spawning thread is gone"))?;
    child.recv().map_err(|_| io::Error::other("the spawning thread is gone"))?
}

/// Command that begins with these words, as those of a network; the program and its arguments follow.
pub fn command_after(prefix: &[String]) -> Command {
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]);
    command
}

/// Sends a signal to a process that this test started.
///
/// # Panics
/// If it cannot be sent.
pub fn signal(pid: u32, signal: Signal) {
    send(pid, signal).unwrap_or_else(|error| panic!("{signal:?} to process {pid}: {error}"));
}

/// Sends a signal to a process, which may have ended.
///
/// # Panics
/// If it cannot be sent for another reason.
pub fn signal_if_any(pid: u32, signal: Signal) {
    match send(pid, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => panic!("{signal:?} to process {pid}: {error}"),
    }
}

/// Kills a process, which may have ended.
///
/// # Panics
/// If it cannot be killed.
pub fn kill(pid: u32) {
    signal_if_any(pid, Signal::KILL);
}

/// Returns the process of the QEMU that towline has started with this runtime directory, unless it has ended. Until then it
/// has the guest's name.
pub fn running_qemu(directory: &Path) -> Option<u32> {
    let state: Value = serde_json::from_slice(&fs::read(directory.join("state.json")).ok()?).ok()?;
    let pid = u32::try_from(state["pid"].as_u64()?).ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // From the state, field 3 of proc_pid_stat(5), on. Field 22 is the start time.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let start_time = fields.get(19)?.parse().ok();
    (start_time == state["start-time"].as_u64() && !["Z", "X"].contains(&fields[0])).then_some(pid)
}

/// Returns the processes of the QEMUs that [run](running_qemu) below `$XDG_RUNTIME_DIR` of a towline, by their runtime directories.
pub fn running_qemus(runtime: &Path) -> BTreeMap<PathBuf, u32> {
    let guests = fs::read_dir(runtime.join("towline/guests"));
    let directories = guests.into_iter().flatten().flatten().map(|entry| entry.path());
    directories.filter_map(|directory| running_qemu(&directory).map(|pid| (directory, pid))).collect()
}

fn send(pid: u32, signal: Signal) -> Result<(), Errno> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(process.unwrap_or_else(|| panic!("{pid} is no process")), signal)
}

/// The first child of a process with this name.
pub fn child(pid: u32, name: &str) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let has_name =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it.trim() == name);
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(has_name)
}

/// Returns true if all threads of a process sleep. On a busy host one that has done nothing for a while may
/// wait for a processor instead.
///
/// # Panics
/// If there is no such process.
pub fn is_asleep(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.unwrap_or_else(|error| panic!("process {pid}: {error}")).flatten();
    // A thread may have ended since.
    let mut states = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    states.all(|stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('S')))
}
