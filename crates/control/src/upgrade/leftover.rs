//! New QEMUs of upgrades whose towline was killed before it recorded a decision.
//!
//! ```text
//!   numbered, of no towline, in no record ─┬─ waits, or has a part of the guest ────────────────────────► ended
//!                                          ├─ paused, with the memory of the old QEMU, which has the guest ─► ended
//!                                          └─ anything else: it may have a guest ────────────────────────► left alone
//! ```

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use towline_launch::{RunningGuest, RuntimeRoot};
use towline_qmp::Options;
use towline_qmp::commands::RunState;

use super::old::OldQemu;
use crate::moves::{self, MoveEnd};
use crate::qemu::{IncomingState, Qemu};
use crate::staging_names::{self, StagingName};

/// Time limit of each reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Ends the QEMUs of that name that hold no guest: nothing else would, and they map the guest's memory. One
/// that a record of a move names is left to `towline resume`.
pub(super) fn end(root: &RuntimeRoot, base: &str, old: &OldQemu) {
    let Ok(guests) = root.list() else { return };
    for guest in guests.iter().filter(|guest| is_leftover(guest, base)) {
        if is_useless(guest, old) {
            tracing::info!(name = guest.name, pid = guest.pid, "ending a QEMU of a killed towline");
            kill(guest);
        }
    }
}

fn is_leftover(guest: &RunningGuest, base: &str) -> bool {
    let number = guest.name.strip_prefix(base).and_then(|rest| rest.strip_prefix('.'));
    let is_numbered = number.is_some_and(|number| number.parse::<u32>().is_ok());
    let has_owner = Path::new("/proc").join(guest.owner_pid.to_string()).exists();
    is_numbered && guest.is_detached && guest.image.is_none() && !has_owner
}

/// See the picture in the module's text.
fn is_useless(guest: &RunningGuest, old: &OldQemu) -> bool {
    let options = Options { deadline: REPLY_TIMEOUT, greeting_deadline: REPLY_TIMEOUT, ..Options::default() };
    let Ok(qemu) = Qemu::inspect(&guest.qmp, &options) else { return false };
    let facts = qemu.facts();
    match &facts.incoming {
        IncomingState::Deferred => true,
        IncomingState::Listening | IncomingState::Loading(_) => !may_be_recorded(guest.pid),
        IncomingState::No => {
            let is_paused = facts.status.status == RunState::PAUSED && !facts.status.running;
            is_paused && old.has_guest && maps_memory_of(guest.pid, old) && !may_be_recorded(guest.pid)
        }
    }
}

/// Returns true if the record of a move names this process, or cannot be read.
fn may_be_recorded(pid: u32) -> bool {
    let Ok((moves, bad)) = moves::list() else { return true };
    let is_it = |end: &MoveEnd| matches!(end, MoveEnd::Qemu { pid: Some(recorded), .. } if recorded.cast_unsigned() == pid);
    !bad.is_empty()
        || moves.iter().any(|listed| is_it(&listed.record.source) || is_it(&listed.record.destination))
}

/// Returns true if the process has a file open that is memory of the old QEMU.
fn maps_memory_of(pid: u32, old: &OldQemu) -> bool {
    let numbers = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let memory: Vec<_> = old.backends.shared.iter().filter_map(|shared| numbers(&shared.path)).collect();
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut open = descriptors.filter_map(|entry| numbers(&entry.ok()?.path()));
    open.any(|file| memory.contains(&file))
}

fn kill(guest: &RunningGuest) {
    let Some(pid) = i32::try_from(guest.pid).ok().and_then(Pid::from_raw) else { return };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The descriptor refers to the process that runs now; it must be that of the state.
    if guest.is_running() {
        let names = staging_names::of_process(guest.pid);
        if let Err(errno) = pidfd_send_signal(&process, Signal::KILL) {
            tracing::debug!(pid = guest.pid, %errno, "it has ended");
        }
        names.iter().for_each(StagingName::remove);
    }
}
