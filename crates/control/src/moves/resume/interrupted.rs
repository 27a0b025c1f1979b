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

/// Time in which a source notices that its towline, which was its connection, has ended, and reports that on a busy host.
const NOTICE_TIME: Duration = Duration::from_secs(10);
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

/// Returns true if this source, which is not changed, waits for a connection to send the rest of the memory.
fn is_interrupted(socket: &Path, source: &MoveEnd) -> bool {
    Qemu::inspect(socket, &qmp::Options::default())
        .is_ok_and(|mut qemu| source.is_same_qemu(&MoveEnd::qemu(&qemu)) && waits_for_connection(&mut qemu))
}

/// As above. One that was connected to its towline notices within a moment that this one was killed.
fn waits_for_connection(qemu: &mut Qemu) -> bool {
    let begun = Instant::now();
    loop {
        let Ok(migration) = qemu.try_query(Qemu::migration) else { return false };
        match migration.map(|migration| migration.status.unwrap_or(MigrationStatus::NONE)) {
            Some(status) if status == MigrationStatus::POSTCOPY_PAUSED => return true,
            Some(status) if !status.is_postcopy() => return false,
            _ if begun.elapsed() >= NOTICE_TIME => return false,
            // It has not noticed yet, or has not replied.
            _ => thread::sleep(NOTICE_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fake_qemu::FakeQemu;

    /// The time limit of one reply is not that of the answer.
    #[test]
    fn a_source_that_replies_late_is_awaited() {
        let fake = FakeQemu::start("postmigrate");
        fake.script().migration = Some("postcopy-paused");
        let mut qemu = Qemu::inspect(fake.path(), &qmp::Options::default()).unwrap();
        let is_busy = fake.script();
        thread::scope(|scope| {
            let found = scope.spawn(|| waits_for_connection(&mut qemu));
            // Longer than that limit.
            thread::sleep(Duration::from_millis(700));
            drop(is_busy);
            assert!(found.join().unwrap());
        });
        fake.script().migration = Some("completed");
        assert!(!waits_for_connection(&mut qemu));
    }
}
