//! A postcopy to another host that was interrupted: the rest of the guest's memory is at the source on this one.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use towline_qmp as qmp;
use towline_qmp::commands::MigrationStatus;

use super::super::{Error, Id, MoveEnd, RecordFile, RecordedWay, record_file};
use super::find;
use crate::journal::RuntimeDirectory;
use crate::qemu::Qemu;

/// Time in which a source notices that its towline, which was its connection, has ended.
const NOTICE_TIME: Duration = Duration::from_secs(2);
const NOTICE_INTERVAL: Duration = Duration::from_millis(20);

/// A guest that was switched to postcopy and lacks memory at another host. The record of its source is locked by this value.
#[derive(Debug)]
pub struct InterruptedPostcopy {
    pub(crate) file: RecordFile,
    pub(crate) socket: PathBuf,
    pub(crate) way: RecordedWay,
}

impl InterruptedPostcopy {
    /// The move.
    #[must_use]
    pub fn id(&self) -> Id {
        self.file.record().id.clone()
    }
}

/// The interrupted postcopy of the move whose id begins with these digits, if that is one, and its source is on this host.
///
/// # Errors
/// As [`resume`](super::resume).
pub fn interrupted(digits: &str) -> Result<Option<InterruptedPostcopy>, Error> {
    let directory = RuntimeDirectory::open()?;
    let id = find(&directory, digits)?;
    let (records, _) = record_file::list(&directory);
    for record in records.iter().filter(|record| record.id == id && record.is_of_this_namespace()) {
        let (MoveEnd::Qemu { socket, .. }, Some(way)) = (&record.source, &record.way) else { continue };
        if record.source.has_exited() {
            continue;
        }
        let file = RecordFile::open(&directory, &record.name())?;
        if is_interrupted(socket, &record.source) {
            return Ok(Some(InterruptedPostcopy { socket: socket.clone(), way: way.clone(), file }));
        }
    }
    Ok(None)
}

/// Returns true if this source, which is not changed, waits for a connection to send the rest of the memory. One that was connected to its
/// towline notices within a moment that this one was killed.
fn is_interrupted(socket: &Path, source: &MoveEnd) -> bool {
    let Ok(mut qemu) = Qemu::inspect(socket, &qmp::Options::default()) else { return false };
    if !source.is_same_qemu(&MoveEnd::qemu(&qemu)) {
        return false;
    }
    let begun = Instant::now();
    loop {
        let migration = qemu.try_query(Qemu::migration).ok().flatten();
        match migration.and_then(|migration| migration.status) {
            Some(status) if status == MigrationStatus::POSTCOPY_PAUSED => return true,
            Some(status) if status.is_postcopy() && begun.elapsed() < NOTICE_TIME => {
                thread::sleep(NOTICE_INTERVAL);
            }
            _ => return false,
        }
    }
}
