//! The process of a QEMU, started and reaped by a separate thread.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Lifetime;
use crate::confinement::Given;
use crate::log::{LAST_WORDS, Log, LogWriter};
use crate::sys;

/// The end of a process.
#[derive(Debug, Default)]
pub(super) struct ProcessExit {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    status: Option<ExitStatus>,
    /// All that it wrote is in its log.
    is_logged: bool,
}

/// A process that was started.
#[derive(Debug)]
pub(super) struct Spawned {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    pub(super) exit: Arc<ProcessExit>,
}

impl ProcessExit {
    /// Waits for the status; `None` after `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        self.wait_while(timeout, |state| state.status.is_none()).status
    }

    /// Waits for the log of a process that has ended.
    pub(super) fn wait_for_log(&self) {
        drop(self.wait_while(LAST_WORDS, |state| state.status.is_some() && !state.is_logged));
    }

    fn wait_while(&self, timeout: Duration, is_waiting: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = self.changed.wait_timeout_while(state, timeout, |state| is_waiting(state));
        waiting.unwrap_or_else(PoisonError::into_inner).0
    }

    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        self.changed.notify_all();
    }
}

/// A process to be started.
pub(super) struct ToSpawn {
    pub(super) command: Command,
    /// Inherited by it, and closed here.
    pub(super) descriptors: Vec<OwnedFd>,
    pub(super) lifetime: Lifetime,
    pub(super) confinement: Option<Given>,
    pub(super) log: Log,
}

/// Starts a process. `admit` records it by its id before it becomes its program; it ends if that returns false, or if this process ends
/// before.
pub(super) fn spawn(process: ToSpawn, admit: impl FnOnce(u32) -> bool) -> io::Result<Spawned> {
    let exit = Arc::new(ProcessExit::default());
    let (sender, receiver) = sync_channel(1);
    let (mut gate, gate_of_child) = UnixStream::pair()?;
    let supervisor = {
        let exit = Arc::clone(&exit);
        move || {
            let ToSpawn { mut command, descriptors, lifetime, confinement, log } = process;
            sys::isolate(&mut command, &descriptors, lifetime, confinement, gate_of_child.as_fd());
            let child = command.spawn();
            // Only the child has them from here on: what it closes is closed.
            drop(gate_of_child);
            drop(descriptors);
            drop(command);
            supervise(child, log, &sender, &exit);
        }
    };
    thread::Builder::new().name("qemu".into()).spawn(supervisor)?;
    let mut pid = [0; size_of::<u32>()];
    // A child that has failed before has closed its end.
    if gate.read_exact(&mut pid).is_ok() {
        let answer = if admit(u32::from_ne_bytes(pid)) { sys::ADMITTED } else { 0 };
        // One that was killed meanwhile has a status, which says more than this error.
        let _ = gate.write_all(&[answer]);
    }
    let (pid, pidfd) =
        receiver.recv().map_err(|_| io::Error::other("the thread that starts it has ended"))??;
    Ok(Spawned { pid, pidfd, exit })
}

/// Reports the child and waits until it ends.
fn supervise(
    child: io::Result<Child>,
    log: Log,
    report: &SyncSender<io::Result<(u32, OwnedFd)>>,
    exit: &ProcessExit,
) {
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return drop(report.send(Err(error))),
    };
    let log = log.write().inspect_err(|error| tracing::warn!(%error, "QEMU has no log"));
    // Not yet reaped, so its id is its own.
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    if pidfd.is_err() && child.kill().is_err() {
        tracing::warn!(pid = child.id(), "QEMU cannot be supervised and is not killed");
    }
    let is_awaited = report.send(pidfd.map(|pidfd| (child.id(), pidfd)).map_err(io::Error::from)).is_ok();
    debug_assert!(is_awaited, "the caller waits for the report");
    let ended = child.wait();
    let status = ended
        .inspect_err(|error| tracing::warn!(pid = child.id(), %error, "QEMU's exit status is not known"))
        .ok();
    exit.set(State { status, is_logged: false });
    // The end of its log has the reason for its end.
    log.into_iter().for_each(LogWriter::wait);
    exit.set(State { status, is_logged: true });
}
