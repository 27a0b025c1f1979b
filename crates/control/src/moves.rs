//! Records of moves that reached a point of decision: written durably at each end, listed, and finished by a
//! later towline.
//!
//! ```text
//!   switchover: Record(decision) ─► RecordFile ─► move-ID-ROLE.json ─► moves: list ─► resume: query the QEMUs ─► finish, or ask for a choice
//!                                      └ removed when the outcome is known and carried out
//! ```
//! A record is a file beside the journals of QEMUs ([`crate::journal::RuntimeDirectory`]), 0600, locked while
//! its towline works on the move. A move between two towlines has one on each host, under the same id.
//! `switchover::resume`, which is model-checked with the switchover itself, decides what records and the state
//! of the ends allow.
//!
//! One kind of record is left by a copy that completed: of a source that stays paused while its guest runs
//! elsewhere, or that was paused before. A later `copy --resume` does not resume such a guest. The record is
//! removed with its QEMU.

mod record;
mod record_file;
mod resume;
mod text;

use crate::journal::{RuntimeDirectory, leftover_changes};
use crate::qemu::Qemu;
use record_file::{is_locked, names_of};
use towline_qmp::commands::RunState;

pub use crate::switchover::{Decision, OtherEnd};
pub(crate) use record::RecordedWay;
pub use record::{GuestPlan, Id, ListedMove, MoveEnd, MoveRecord, RecordedEnds, Role};
pub use record_file::Error;
pub(crate) use record_file::{RecordFile, record_left_source};
pub use resume::{Finding, InterruptedPostcopy, ResumeChoice, Resumed, interrupted, resume};
pub(crate) use text::notice;

/// Records of this user on this host, the oldest first, and errors of those that cannot be read.
///
/// # Errors
/// There is no usable directory for them.
pub fn list() -> Result<(Vec<ListedMove>, Vec<Error>), Error> {
    let directory = RuntimeDirectory::open()?;
    let (records, bad) = record_file::list(&directory);
    let listed = records.into_iter().map(|record| {
        let owner = is_locked(&directory, &record.name()).then_some(record.owner.pid);
        let ends = [&record.source, &record.destination];
        let sockets = |guest_plan: &dyn Fn(&MoveEnd) -> bool| {
            ends.iter().filter(|end| guest_plan(end)).map(ToString::to_string).collect::<Vec<_>>()
        };
        let exited = sockets(&|end| record.has_exited(end));
        let changed = sockets(&|end| !record.has_exited(end) && is_changed(&directory, end));
        ListedMove { owner, exited, changed, record }
    });
    Ok((listed.collect(), bad))
}

fn is_changed(directory: &RuntimeDirectory, end: &MoveEnd) -> bool {
    match end {
        MoveEnd::Qemu { pid: Some(pid), start_time: Some(start_time), .. } => {
            !leftover_changes(directory, *pid, *start_time).is_empty()
        }
        _ => false,
    }
}

/// Ids of undecided moves of this QEMU.
pub fn undecided_of(qemu: &Qemu) -> Vec<Id> {
    let Ok(directory) = RuntimeDirectory::open() else { return Vec::new() };
    let end = MoveEnd::qemu(qemu);
    let (records, _) = record_file::list(&directory);
    let of_qemu = records.into_iter().filter(|record| {
        record.stage != Decision::Left
            && (record.source.is_same_qemu(&end) || record.destination.is_same_qemu(&end))
    });
    of_qemu.map(|record| record.id).collect()
}

/// Refuses a source whose guest is part of another, undecided move: sending it elsewhere would leave the first
/// destination with an older state that a later `resume` might run. A source that is paused since it was copied
/// is also refused if its record forbids to resume it: the guest may run elsewhere, or was paused before.
///
/// # Errors
/// [`Error::Left`], and those of records that cannot be read, since they may be of this QEMU.
pub(crate) fn check_source(qemu: &Qemu) -> Result<(), Error> {
    let is_paused_since = qemu.facts().status.status == RunState::POSTMIGRATE;
    let Ok(directory) = RuntimeDirectory::open() else { return Ok(()) };
    let end = MoveEnd::qemu(qemu);
    let (records, bad) = record_file::list(&directory);
    let may_be_of_it = |error: &Error| error.may_be_of(|recorded| recorded.may_be_same_qemu(&end));
    if let Some(error) = bad.into_iter().find(|error| is_paused_since && may_be_of_it(error)) {
        return Err(error);
    }
    match records.iter().find(|record| forbids(record, &end, is_paused_since)) {
        Some(record) => Err(Error::Left { text: text::left(record) }),
        None => Ok(()),
    }
}

/// Returns true if this record keeps the guest of a QEMU from being sent. One that only says that its source was left paused
/// is out of date when the guest runs again.
fn forbids(record: &MoveRecord, source: &MoveEnd, is_paused_since: bool) -> bool {
    record.source.may_be_same_qemu(source) && (is_paused_since || record.stage != Decision::Left)
}

/// Removes records that are over: of left sources whose QEMUs have exited, or whose guest has been resumed,
/// which is that of `source`; and of moves whose QEMUs were both on this host and have exited.
pub(crate) fn sweep(directory: &RuntimeDirectory, source: &MoveEnd) {
    let (records, _) = record_file::list(directory);
    let is_over = |record: &&MoveRecord| {
        let is_gone = |end: &dyn Fn(&MoveRecord) -> bool| {
            records.iter().any(|other| other.id == record.id && end(other))
        };
        match record.stage {
            Decision::Left => record.has_exited(&record.source) || record.source.is_same_qemu(source),
            _ => {
                is_gone(&|one| one.has_exited(&one.source))
                    && is_gone(&|one| one.has_exited(&one.destination))
            }
        }
    };
    for record in records.iter().filter(is_over) {
        let removed = RecordFile::open(directory, &record.name()).and_then(|mut file| file.remove());
        if let Err(error) = removed {
            tracing::debug!(%error, "the record of a QEMU that exited stays");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
