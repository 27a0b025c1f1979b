//! The ferry of a protection whose keeper was killed.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::journal::{ProtectionRecord, RuntimeDirectory, leftover_protection};
use crate::process::has_exited;
use crate::procfs::start_time;

/// Ends the ferry that a killed keeper has left in the QEMU of this monitor. A ferry that hangs while QEMU sends to it keeps QEMU's monitor from replying, so that it
/// is found by its journal alone.
pub(super) fn end_left_ferry(monitor: &Path) {
    let protection = RuntimeDirectory::open().ok().and_then(|found| leftover_protection(&found, monitor));
    protection.iter().for_each(end_ferry);
}

/// Returns true if the ferry has outlived its keeper.
pub(super) fn ferry_lives(record: &ProtectionRecord) -> bool {
    // It is killed: a process that is not known to be it is another one.
    start_time(record.ferry_pid).is_ok_and(|found| found == record.ferry_start_time)
        && !has_exited(record.ferry_pid, record.ferry_start_time)
}

/// Ends a ferry that has outlived its keeper.
pub(super) fn end_ferry(record: &ProtectionRecord) {
    if ferry_lives(record)
        && let Some(pid) = Pid::from_raw(record.ferry_pid)
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}
