//! The ferry of a protection whose keeper was killed.

use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, Signal, kill_process};

use crate::journal::{ProtectionRecord, RuntimeDirectory, leftover_protection};
use crate::process::has_exited;
use crate::procfs::start_time;

/// Ends the ferry that a killed keeper has left in the QEMU of this monitor. A ferry that hangs while QEMU sends to it keeps QEMU's monitor from replying, so that its journal
/// is found by the process that listens there.
pub(super) fn end_left_ferry(monitor: &Path) {
    let Ok(monitor) = UnixStream::connect(monitor) else { return };
    let Ok(peer) = socket_peercred(&monitor) else { return };
    let pid = peer.pid.as_raw_nonzero().get();
    if let (Ok(started), Ok(directory)) = (start_time(pid), RuntimeDirectory::open())
        && let Some(record) = leftover_protection(&directory, pid, started)
    {
        end_ferry(&record);
    }
}

/// Returns true if the ferry has outlived its keeper.
pub(super) fn ferry_lives(record: &ProtectionRecord) -> bool {
    !has_exited(record.ferry_pid, record.ferry_start_time)
}

/// Ends a ferry that has outlived its keeper.
pub(super) fn end_ferry(record: &ProtectionRecord) {
    if ferry_lives(record)
        && let Some(pid) = Pid::from_raw(record.ferry_pid)
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}
