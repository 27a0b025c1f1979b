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

use std::io;
use std::path::PathBuf;

use crate::journal::{RuntimeDirectory, RuntimeDirectoryError, has_leftover_changes};
use crate::qemu::{self, Qemu};
use record_file::{is_locked, names_of};

pub use record::{GuestPlan, Id, MoveEnd, MoveRecord, Role, Stage};
pub(crate) use record_file::RecordFile;
pub use resume::{ResumeChoice, Resumed, resume};
pub(crate) use text::notice;

/// Error of a record, or of a move that cannot be finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No directory for records.
    #[error(transparent)]
    Directory(#[from] RuntimeDirectoryError),
    /// The record cannot be read or written.
    #[error("record {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not a record of this version.
    #[error(
        "record {path}: expected a record of version {} of this user, found another ({reason}): use the towline that wrote it; or look at both \
         QEMUs, run the guest at one of them only (`cont`), and remove the file",
        record::VERSION
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// A towline works on the move.
    #[error("another towline (process {pid}) works on move {id}: wait until it has ended, or end it first")]
    InUse {
        /// The move.
        id: Id,
        /// The process of that towline.
        pid: i32,
    },
    /// No record has this id.
    #[error("no move {id} is recorded on this host for this user; `towline moves` lists those that are")]
    Unknown {
        /// The id as given.
        id: String,
    },
    /// Several records have this id.
    #[error("{id} is the beginning of several moves: {}; give more of its digits", shown(.found))]
    Ambiguous {
        /// The id as given.
        id: String,
        /// Ids that it may mean.
        found: Vec<Id>,
    },
    /// A QEMU failed.
    #[error(transparent)]
    Qemu(#[from] qemu::Error),
    /// The guest was to be started, and does not run.
    #[error("QEMU on {socket} got `cont`, and its status is `{status}`; its own log says why")]
    NotRunning {
        /// The monitor's socket.
        socket: String,
        /// Its run state.
        status: String,
    },
    /// The choice contradicts the state of the QEMUs.
    /// Remedy: choose the other end, or look at the state of both QEMUs first.
    #[error("refused: {text}")]
    Refused {
        /// That state, and what can be done.
        text: String,
    },
    /// The guest of this source was sent elsewhere, or was paused, when it was copied.
    /// Remedy: look at the guest in the place that the text names; `towline moves` lists the records.
    #[error("{text}")]
    Left {
        /// The record, and what can be done.
        text: String,
    },
}

fn shown(ids: &[Id]) -> String {
    ids.iter().map(Id::as_str).collect::<Vec<_>>().join(", ")
}

/// A record, with the state of its QEMUs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedMove {
    /// The record.
    pub record: MoveRecord,
    /// Process of the towline that works on the move.
    pub owner: Option<i32>,
    /// Monitors of QEMUs of this host that are known to have exited.
    pub exited: Vec<String>,
    /// Monitors of QEMUs that a killed towline has left changed.
    pub changed: Vec<String>,
}

impl ListedMove {
    /// A sentence that describes what is undecided.
    #[must_use]
    pub fn undecided(&self) -> String {
        text::undecided(&self.record)
    }

    /// Commands to run, and other advice.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        text::advice(self)
    }
}

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
            has_leftover_changes(directory, *pid, *start_time)
        }
        _ => false,
    }
}

/// Ids of undecided moves of this QEMU.
pub fn undecided_of(qemu: &Qemu) -> Vec<Id> {
    let Ok(directory) = RuntimeDirectory::open() else { return Vec::new() };
    let end = MoveEnd::qemu(qemu.socket(), qemu.process());
    let (records, _) = record_file::list(&directory);
    let of_qemu = records.into_iter().filter(|record| {
        record.stage != Stage::Left
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
pub(crate) fn check_source(qemu: &Qemu, is_paused_since: bool) -> Result<(), Error> {
    let Ok(directory) = RuntimeDirectory::open() else { return Ok(()) };
    let end = MoveEnd::qemu(qemu.socket(), qemu.process());
    let (records, bad) = record_file::list(&directory);
    if let Some(error) = bad.into_iter().next().filter(|_| is_paused_since) {
        return Err(error);
    }
    let speaks = |record: &&MoveRecord| {
        record.source.may_be_same_qemu(&end) && (is_paused_since || record.stage != Stage::Left)
    };
    match records.iter().find(speaks) {
        Some(record) => Err(Error::Left { text: text::left(record) }),
        None => Ok(()),
    }
}

/// Records that the source of a completed copy holds a guest which a later copy must not resume.
pub(crate) fn record_left_source(file: &mut RecordFile) -> Result<(), Error> {
    let record = file.record().at_stage(Stage::Left);
    // It replaces other records of this kind of the same QEMU.
    let directory = RuntimeDirectory::open()?;
    let (records, _) = record_file::list(&directory);
    for older in records.iter().filter(|older| {
        older.stage == Stage::Left && older.source.is_same_qemu(&record.source) && older.id != record.id
    }) {
        for name in names_of(&directory, &older.id) {
            RecordFile::open(&directory, &name)?.remove()?;
        }
    }
    file.write(record)
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
            Stage::Left => record.has_exited(&record.source) || record.source.is_same_qemu(source),
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
mod tests;
