//! Guests that QEMU would lose or change by sending them, which it does not refuse itself.

use towline_qmp::commands::RunState;

use super::super::error::{ABORTS_ASLEEP, BlockedBy, Error};
use super::super::request::CopyRequest;
use crate::qemu::Qemu;

/// The first QEMU whose background snapshot does not run a guest that is stopped: 7.2 runs it.
const SNAPSHOTS_PAUSED_SINCE: u32 = 10;

/// Refuses a guest whose present run state this copy would not survive: queried before anything is changed,
/// and again right before `migrate`, as a guest stops whenever it likes.
pub(super) fn check_run_state(qemu: &mut Qemu, options: &CopyRequest) -> Result<(), Error> {
    let status = qemu.status()?.status;
    let is_quiet = [RunState::PAUSED, RunState::SUSPENDED].contains(&status);
    let snapshots_quiet = qemu.facts().version.qemu.major >= SNAPSHOTS_PAUSED_SINCE;
    let reason = if options.is_snapshot() && status != RunState::RUNNING && !(is_quiet && snapshots_quiet) {
        BlockedBy::Snapshot { status, version: qemu.version_text() }
    } else if options.resumes() && status == RunState::SUSPENDED {
        let reason = format!("it is `{status}`, and {ABORTS_ASLEEP}: wake it up first (`system_wakeup`)");
        BlockedBy::Qemu(reason)
    } else if options.is_postcopy() && status != RunState::RUNNING && !is_quiet {
        BlockedBy::Postcopy { status }
    } else {
        return Ok(());
    };
    Err(blocked(qemu, reason))
}

/// Refuses a guest that QEMU loses whenever it sends it.
pub(super) fn check_known_faults(qemu: &mut Qemu) -> Result<(), Error> {
    let replay = qemu.query_raw("query-replay", None)?.unwrap_or_default();
    if let Some(mode) = replay["mode"].as_str().filter(|mode| *mode != "none") {
        let reason =
            format!("its execution is under `-icount rr={mode}`, with which QEMU aborts at `migrate`");
        return Err(blocked(qemu, BlockedBy::Qemu(reason)));
    }
    let devices = qemu.query_raw("query-memory-devices", None)?.unwrap_or_default();
    let has_pmem = devices.as_array().into_iter().flatten().any(|device| device["type"] == "virtio-pmem");
    if has_pmem && qemu.facts().status.running && !qemu.is_kvm()? {
        let reason = "it is emulated (TCG) and has a virtio-pmem, whose content QEMU may lose on the way: pause it first (`stop`)";
        return Err(blocked(qemu, BlockedBy::Qemu(reason.into())));
    }
    Ok(())
}

fn blocked(qemu: &Qemu, reason: BlockedBy) -> Error {
    Error::Blocked { socket: qemu.socket().to_owned(), reasons: vec![reason] }
}
