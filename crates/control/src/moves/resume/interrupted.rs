//! A postcopy to another host that was interrupted: the rest of the guest's memory is at the source on this one.

use std::path::PathBuf;

use super::super::{Error, Id, MoveEnd, RecordFile, RecordedWay, names_of};
use super::find;
use super::recorded_qemu::RecordedQemu;
use crate::journal::RuntimeDirectory;

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
    for name in names_of(&directory, &id) {
        let file = RecordFile::open(&directory, &name)?;
        let record = file.record();
        let (MoveEnd::Qemu { socket, .. }, Some(way)) = (&record.source, &record.way) else { continue };
        if RecordedQemu::open(&record.source, record).is_in_postcopy() {
            return Ok(Some(InterruptedPostcopy { socket: socket.clone(), way: way.clone(), file }));
        }
    }
    Ok(None)
}
