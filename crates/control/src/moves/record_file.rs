//! Files of records: replaced as a whole, and locked by the towline that works on the move.
//!
//! ```text
//!   .move-ID-ROLE.json.PID-N: created, locked, written ─► rename to move-ID-ROLE.json
//! ```
//! Each state of a record is a separate file, which is locked before it is named, and replaces the previous
//! one. So a record is complete or missing, and locked as long as its owner lives. It outlives a process, not
//! the host, with which its QEMUs end, so it is not synced: the guest may be stopped at that time.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, RenameFlags, flock, openat, renameat, renameat_with, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{geteuid, getpid};
use towline_image::atomic_file::LockedFile;

use super::record::{self, Id, MoveEnd, MoveRecord, RecordedEnds};
use crate::journal::{
    LOCK_INTERVAL, LOCKED_MAX, RuntimeDirectory, RuntimeDirectoryError, is_named, read, try_lock,
};
use crate::qemu;
use crate::switchover::Decision;

/// Age from which a file without its final name is abandoned.
const UNNAMED_MAX: Duration = Duration::from_secs(60);

/// Makes temporary names unique within a process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The record of one move, which this process works on.
#[derive(Debug)]
pub(crate) struct RecordFile {
    directory: RuntimeDirectory,
    record: MoveRecord,
    /// The locked file under the record's name; `None` until the first write.
    file: Option<LockedFile>,
}

impl RecordFile {
    /// A record that is not written yet.
    pub(crate) fn new(directory: RuntimeDirectory, record: MoveRecord) -> Self {
        Self { directory, record, file: None }
    }

    /// Takes over the record of this name, which no other process may work on.
    pub(super) fn open(directory: &RuntimeDirectory, name: &str) -> Result<Self, Error> {
        let path = directory.path().join(name);
        let failed = |source: io::Error| Error::Io { path: path.clone(), source };
        let until = Instant::now() + LOCKED_MAX;
        loop {
            let mut file = open(directory, name).map_err(failed)?;
            let (is_ours, is_over) = (try_lock(&file).map_err(failed)?, Instant::now() >= until);
            if is_named(&file, directory, name) {
                let record = parse(&mut file, directory, name)?;
                if is_ours {
                    return Ok(Self { directory: directory.clone(), record, file: Some(LockedFile(file)) });
                }
                if is_over {
                    return Err(Error::InUse { id: record.id, pid: record.owner.pid });
                }
            } else if is_over {
                return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, "it is replaced repeatedly")));
            }
            thread::sleep(LOCK_INTERVAL);
        }
    }

    /// The record.
    pub(crate) fn record(&self) -> &MoveRecord {
        &self.record
    }

    /// Replaces the record durably.
    ///
    /// # Errors
    /// [`Error::Io`]. [`Self::record`] is then the previous one, which is in the file if there was one.
    pub(crate) fn write(&mut self, record: MoveRecord) -> Result<(), Error> {
        let name = record.name();
        let path = self.directory.path().join(&name);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let unnamed = format!(".{name}.{}-{number}", getpid().as_raw_pid());
        self.replace(record, &unnamed, &name).map_err(|source| {
            let _ = unlinkat(self.directory.fd(), &unnamed, AtFlags::empty());
            Error::Io { path, source }
        })
    }

    fn replace(&mut self, record: MoveRecord, unnamed: &str, name: &str) -> io::Result<()> {
        let directory = self.directory.fd();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = LockedFile(File::from(openat(directory, unnamed, flags, Mode::RUSR | Mode::WUSR)?));
        flock(&file.0, FlockOperation::NonBlockingLockExclusive)?;
        let text = serde_json::to_string(&record)?;
        (&file.0).write_all(text.as_bytes())?;
        (&file.0).write_all(b"\n")?;
        match self.file {
            Some(_) => renameat(directory, unnamed, directory, name)?,
            // A record of this name may be of another move, whose towline got the same id from its peer.
            None => renameat_with(directory, unnamed, directory, name, RenameFlags::NOREPLACE)?,
        }
        (self.file, self.record) = (Some(file), record);
        if self.directory.is_in_place() {
            Ok(())
        } else {
            Err(io::Error::new(io::ErrorKind::NotFound, "its directory is not at this path any more"))
        }
    }

    /// Removes the record: nothing is undecided.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn remove(&mut self) -> Result<(), Error> {
        if self.file.is_none() {
            return Ok(());
        }
        let name = self.record.name();
        let removed = match unlinkat(self.directory.fd(), &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::Io { path: self.directory.path().join(name), source: errno.into() }),
        };
        removed.inspect(|()| self.file = None)
    }
}

/// Returns true if a towline works on it.
pub(super) fn is_locked(directory: &RuntimeDirectory, name: &str) -> bool {
    let Ok(file) = open(directory, name) else { return false };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::AGAIN)
}

/// All records of a directory, and errors of those that cannot be read.
pub(super) fn list(directory: &RuntimeDirectory) -> (Vec<MoveRecord>, Vec<Error>) {
    let (mut records, mut bad) = (Vec::new(), Vec::new());
    for name in directory.names() {
        if !record::is_name(&name) {
            remove_unnamed(directory, &name);
            continue;
        }
        let failed = |source| Error::Io { path: directory.path().join(&name), source };
        let loaded = open(directory, &name).map_err(failed).and_then(|mut file| {
            let is_removed = is_empty(&file) && remove_unlocked(directory, &name, &file);
            if is_removed { Ok(None) } else { parse(&mut file, directory, &name).map(Some) }
        });
        match loaded {
            Ok(record) => records.extend(record),
            // It has since been removed.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => bad.push(error),
        }
    }
    records.sort_by(|a, b| (a.begun_ms, &a.id, a.role).cmp(&(b.begun_ms, &b.id, b.role)));
    (records, bad)
}

fn open(directory: &RuntimeDirectory, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(openat(directory.fd(), name, flags, Mode::empty())?))
}

/// Only files of our own may decide about guests.
fn parse(file: &mut File, directory: &RuntimeDirectory, name: &str) -> Result<MoveRecord, Error> {
    let path: PathBuf = directory.path().join(name);
    let failed = |source| Error::Io { path: path.clone(), source };
    let metadata = file.metadata().map_err(failed)?;
    let refused = |reason: String| Error::Format { path: path.clone(), reason, ends: None };
    if metadata.uid() != geteuid().as_raw() {
        return Err(refused(format!("it belongs to user {}", metadata.uid())));
    }
    if !metadata.is_file() || metadata.mode() & 0o022 != 0 {
        return Err(refused("it is not a file that only its owner can write".into()));
    }
    let text = read(file).map_err(failed)?;
    let record = MoveRecord::parse(&text).map_err(|reason| Error::Format {
        path: path.clone(),
        reason,
        ends: RecordedEnds::of(&text),
    })?;
    if record.name() != name {
        return Err(refused(format!("it is of move {}", record.id)));
    }
    Ok(record)
}

/// Removes the file of a towline that was killed before the rename.
fn remove_unnamed(directory: &RuntimeDirectory, name: &str) {
    if !name.starts_with(".move-") {
        return;
    }
    let Ok(file) = open(directory, name) else { return };
    let age = file.metadata().ok().and_then(|found| found.modified().ok()?.elapsed().ok());
    // A newer file is about to be locked by its owner.
    if age > Some(UNNAMED_MAX) {
        remove_unlocked(directory, name, &file);
    }
}

/// Returns true for a record without content, which a host that lost its power may leave on a disk, as records are not
/// synced. No process leaves one: a record is written and locked before it is named.
fn is_empty(file: &File) -> bool {
    file.metadata()
        .is_ok_and(|found| found.is_file() && found.len() == 0 && found.uid() == geteuid().as_raw())
}

/// Removes an open file that no other process works on; `false` if it is still there.
fn remove_unlocked(directory: &RuntimeDirectory, name: &str, file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
        && unlinkat(directory.fd(), name, AtFlags::empty()).is_ok()
}

/// Names of the records of a move.
pub(super) fn names_of(directory: &RuntimeDirectory, id: &Id) -> Vec<String> {
    let (records, _) = list(directory);
    records.iter().filter(|record| record.id == *id).map(MoveRecord::name).collect()
}

/// Records that the source of a completed copy holds a guest which a later copy must not resume.
pub(crate) fn record_left_source(file: &mut RecordFile) -> Result<(), Error> {
    let record = file.record().at_stage(Decision::Left);
    // It replaces other records of this kind of the same QEMU.
    let directory = RuntimeDirectory::open()?;
    let (records, _) = list(&directory);
    for older in records.iter().filter(|older| {
        older.stage == Decision::Left && older.source.is_same_qemu(&record.source) && older.id != record.id
    }) {
        for name in names_of(&directory, &older.id) {
            RecordFile::open(&directory, &name)?.remove()?;
        }
    }
    file.write(record)
}

/// Error of a record, or of a move that cannot be finished.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No directory for records.
    #[error("{0}")]
    Directory(#[from] RuntimeDirectoryError),
    /// The record cannot be read or written.
    #[error("record {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// The file is not a record of this version.
    #[error(
        "record {path}: expected a record of version {} of this user, found another ({reason}): use the towline that wrote it; or look at both \
         QEMUs, run the guest at one of them only (`cont`), and remove the file",
        record::VERSION
    )]
    Format {
        path: PathBuf,
        reason: String,
        /// Its ends, of which those of other versions can be read, too.
        ends: Option<Box<RecordedEnds>>,
    },
    /// A towline works on the move.
    #[error("another towline (process {pid}) works on move {id}: wait until it has ended, or end it first")]
    InUse { id: Id, pid: i32 },
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
        found: Vec<Id>,
    },
    /// A QEMU failed.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// Another place may have the guest.
    #[error("{0}")]
    Generation(#[from] crate::generations::Error),
    /// The guest should have been started, and does not run.
    #[error("QEMU on {socket} got `cont`, and its status is `{status}`; its own log says why")]
    NotRunning { socket: String, status: String },
    /// The choice contradicts the state of the QEMUs.
    #[error("refused: {text}")]
    Refused {
        /// The state of the move, and what can be done.
        text: String,
    },
    /// The guest of this source was sent elsewhere, or was paused, when it was copied.
    #[error("{text}")]
    Left {
        /// The record, and what can be done.
        text: String,
    },
}

impl Error {
    /// Returns true if the record that cannot be read may be of an end for which `is_it` is true.
    pub fn may_be_of(&self, is_it: impl Fn(&MoveEnd) -> bool) -> bool {
        match self {
            Self::Format { ends: Some(ends), .. } => is_it(&ends.source) || is_it(&ends.destination),
            _ => true,
        }
    }
}

fn shown(ids: &[Id]) -> String {
    ids.iter().map(Id::as_str).collect::<Vec<_>>().join(", ")
}
