//! Journal of the changes that towline has made in a QEMU and not undone, in a file that outlives a killed
//! towline.
//!
//! ```text
//!   connect ─► lock the QEMU's journal ─► each change: record, change, ─► undo: record done ─► no records left: remove
//!                 │ locked: another towline works on this QEMU
//!                 └ records of a killed towline: undone first
//! ```
//! A journal is a file of JSON lines in the runtime directory ([`RuntimeDirectory`]), named by the id and
//! start time of QEMU's process. A record is written by one `write` before its change is made (for temporary
//! directories right after), so a truncated last line belongs to a change that was never made. It is not
//! synced: a host that crashes ends the QEMU too, and the kernel keeps what a killed towline has written. The
//! owner holds a lock (`flock`) on the file as long as it lives.
//!
//! If QEMU's process is not known, the journal is named by the device and inode of the monitor's socket, and
//! holds the socket's path and, if the file system has it, its creation time. Such a journal is not found
//! through another monitor.

mod record;
mod runtime_directory;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::lock::lock;
use crate::process::{Process, ProcessState, has_exited};

pub use record::{ChangedValue, ProtectionRecord, UndoRecord};
use record::{JournalContents, JournalHeader, JournalLine, VERSION};
pub(crate) use record::{Owner, milliseconds, monotonic_ms, now_ms};
pub use runtime_directory::{RuntimeDirectory, RuntimeDirectoryError};

/// Maximum size of a journal that is read.
const BYTES_MAX: u64 = 1 << 20;
/// Maximum number of attempts to open a journal that its owner is removing.
const ATTEMPTS_MAX: u32 = 16;

/// Error of a journal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another towline owns it.
    #[error(
        "another towline{} works on QEMU at {socket}: wait until it has ended, or end it first", owner_text(*.pid)
    )]
    InUse {
        /// The monitor's socket.
        socket: String,
        /// The owner's process, if known.
        pid: Option<i32>,
    },
    /// No directory for journals.
    #[error("{0}")]
    Directory(#[from] RuntimeDirectoryError),
    /// The journal cannot be read or written.
    #[error("journal {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not a record of this version.
    #[error(
        "journal {path}, line {line}: expected a record of version {VERSION}, found another ({reason}): it belongs to another version of \
         towline, which can repair the QEMU; or remove it"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The difference.
        reason: String,
    },
}

fn owner_text(pid: Option<i32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

/// The locked journal of one QEMU. Clones share it.
///
/// The file is removed when the last clone is dropped, if it has no records or its QEMU has exited.
#[derive(Clone, Debug)]
pub struct Journal(Arc<Mutex<State>>);

/// A record in a journal.
#[derive(Clone, Debug)]
pub struct JournalEntry {
    journal: Journal,
    id: u64,
}

#[derive(Debug)]
struct State {
    file: File,
    directory: Arc<OwnedFd>,
    name: String,
    path: PathBuf,
    header: JournalHeader,
    records: BTreeMap<u64, UndoRecord>,
    next_id: u64,
    process: Arc<Process>,
}

impl Journal {
    /// Opens and locks the journal of the QEMU whose monitor is at `socket`. Also returns the id of the
    /// process that left records in it, if there are any.
    ///
    /// # Errors
    /// [`Error::InUse`] if another towline has it, [`Error::Io`], [`Error::Format`].
    pub fn open(
        directory: &RuntimeDirectory,
        socket: &Path,
        process: &Arc<Process>,
    ) -> Result<(Self, Option<i32>), Error> {
        let header = JournalHeader::of(socket).map_err(|source| Error::Io { path: socket.into(), source })?;
        let name = header.name(process);
        let path = directory.path().join(&name);
        let failed = |source: io::Error| Error::Io { path: path.clone(), source };
        for _ in 0..ATTEMPTS_MAX {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = openat(directory.fd(), &name, flags, Mode::RUSR | Mode::WUSR)
                .map_err(|errno| failed(errno.into()))?;
            let mut file = File::from(fd);
            let is_ours = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => true,
                Err(Errno::AGAIN) => false,
                Err(errno) => return Err(failed(errno.into())),
            };
            let text = read(&mut file).map_err(failed)?;
            if !is_ours {
                return Err(in_use(socket, &path, &text));
            }
            // Its owner removed it while it was opened.
            if !is_named(&file, directory, &name) {
                continue;
            }
            let JournalContents { header: found, records } = record::parse(&text)
                .map_err(|bad| Error::Format { path: path.clone(), line: bad.line, reason: bad.reason })?;
            if found.as_ref().is_some_and(|header| header.owner.lives()) {
                return Err(in_use(socket, &path, &text));
            }
            let state = State {
                file,
                directory: directory.shared_fd(),
                name,
                path,
                header,
                next_id: records.keys().max().map_or(1, |id| id + 1),
                records,
                process: Arc::clone(process),
            };
            return state.take_over(found, text.ends_with('\n'));
        }
        Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, "it is removed and created repeatedly")))
    }

    /// Records how to undo a change, before the change is made.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, record: &UndoRecord) -> Result<JournalEntry, Error> {
        let mut state = self.state();
        let id = state.next_id;
        state.append(&JournalLine::Record { id, record: record.clone() })?;
        state.next_id += 1;
        state.records.insert(id, record.clone());
        Ok(JournalEntry { journal: self.clone(), id })
    }

    /// Records that are not undone, the newest first.
    #[must_use]
    pub fn records(&self) -> Vec<(JournalEntry, UndoRecord)> {
        let entry = |id: &u64| JournalEntry { journal: self.clone(), id: *id };
        self.state().records.iter().rev().map(|(id, record)| (entry(id), record.clone())).collect()
    }

    /// Removes the records of migrations, which are over.
    pub(crate) fn end_migrations(&self) {
        self.migrations().for_each(|(entry, _)| entry.done());
    }

    /// Records that a recorded migration was still in progress at this time.
    ///
    /// # Errors
    /// [`Error::Io`]; the former record is there.
    pub(crate) fn migration_seen(&self, at_ms: u64) -> Result<(), Error> {
        for (entry, mut record) in self.migrations() {
            if let UndoRecord::Migration { seen_ms, .. } = &mut record {
                *seen_ms = Some(at_ms);
            }
            self.write(&record)?;
            entry.done();
        }
        Ok(())
    }

    fn migrations(&self) -> impl Iterator<Item = (JournalEntry, UndoRecord)> + use<> {
        self.records().into_iter().filter(|(_, record)| matches!(record, UndoRecord::Migration { .. }))
    }

    /// Removes all records: nothing is left to undo.
    pub fn clear(&self) {
        for (entry, _) in self.records() {
            entry.done();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl JournalEntry {
    /// Removes the record: its change is undone, or obsolete. A journal that cannot be written is logged; the
    /// change is then undone once more.
    pub fn done(&self) {
        let mut state = self.journal.state();
        if state.records.remove(&self.id).is_none() {
            return;
        }
        let written = if state.records.is_empty() {
            state.restart()
        } else {
            state.append(&JournalLine::Done { id: self.id })
        };
        if let Err(error) = written {
            tracing::warn!(%error, "a record that is done stays in the journal");
        }
    }
}

impl State {
    /// Records this process as the new owner. Records of the previous owner are kept if they are of the same
    /// QEMU.
    fn take_over(
        mut self,
        before: Option<JournalHeader>,
        is_whole: bool,
    ) -> Result<(Journal, Option<i32>), Error> {
        let left_by = before
            .filter(|found| !self.records.is_empty() && self.header.is_same_qemu(found, &self.process))
            .map(|found| found.owner.pid);
        if left_by.is_some() {
            // Ends a truncated line.
            let separator = if is_whole { "" } else { "\n" };
            self.append_after(separator, &JournalLine::Begun(self.header.clone()))?;
        } else {
            self.records.clear();
            self.restart()?;
        }
        Ok((Journal(Arc::new(Mutex::new(self))), left_by))
    }

    /// Removes all records from the file.
    fn restart(&mut self) -> Result<(), Error> {
        self.file.set_len(0).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        self.append(&JournalLine::Begun(self.header.clone()))
    }

    fn append(&mut self, line: &JournalLine) -> Result<(), Error> {
        self.append_after("", line)
    }

    fn append_after(&mut self, before: &str, line: &JournalLine) -> Result<(), Error> {
        let written = serde_json::to_string(line)
            .map_err(io::Error::from)
            .and_then(|text| self.file.write_all(format!("{before}{text}\n").as_bytes()));
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.records.is_empty() || self.process.state() == ProcessState::Exited {
            // Its lock is held until the file is closed.
            if let Err(errno) = unlinkat(&*self.directory, &self.name, AtFlags::empty()) {
                tracing::debug!(%errno, path = %self.path.display(), "a journal stays");
            }
        }
    }
}

/// Removes the journals of QEMUs that have exited.
pub(crate) fn sweep(directory: &RuntimeDirectory) {
    for name in directory.names() {
        let Some((pid, started)) = record::process_of(&name) else { continue };
        if has_exited(pid, started)
            && let Err(error) = remove_stale(directory, &name)
        {
            tracing::debug!(%error, name, "the journal of a QEMU that exited stays");
        }
    }
}

/// The protection that a killed towline has left in the QEMU of this process and start time.
pub(crate) fn leftover_protection(
    directory: &RuntimeDirectory,
    pid: i32,
    start_time: u64,
) -> Option<ProtectionRecord> {
    leftover_changes(directory, pid, start_time).into_values().find_map(|record| match record {
        UndoRecord::Protection(protection) => Some(protection),
        _ => None,
    })
}

/// Changes that a killed towline has left in the QEMU of this process and start time; none of one that lives.
pub(crate) fn leftover_changes(
    directory: &RuntimeDirectory,
    pid: i32,
    start_time: u64,
) -> BTreeMap<u64, UndoRecord> {
    let name = record::name_of(pid, start_time);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(fd) = openat(directory.fd(), &name, flags, Mode::empty()) else { return BTreeMap::new() };
    let mut file = File::from(fd);
    let is_free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
    let contents = read(&mut file).ok().and_then(|text| record::parse(&text).ok());
    contents.filter(|_| is_free).map(|contents| contents.records).unwrap_or_default()
}

fn remove_stale(directory: &RuntimeDirectory, name: &str) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(directory.fd(), name, flags, Mode::empty())?);
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let text = read(&mut file)?;
    let Ok(JournalContents { header: Some(header), records }) = record::parse(&text) else { return Ok(()) };
    // That QEMU may live under this id in another pid namespace.
    if !header.owner.is_of_this_namespace() || header.owner.lives() {
        return Ok(());
    }
    records.values().filter_map(UndoRecord::remove_files).for_each(drop);
    if is_named(&file, directory, name) {
        unlinkat(directory.fd(), name, AtFlags::empty())?;
    }
    Ok(())
}

/// Text of a journal or record, up to [`BYTES_MAX`].
pub(crate) fn read(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("expected at most {BYTES_MAX} bytes"),
        ));
    }
    // A line may be truncated within a character.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns true if the name still leads to this file.
pub(crate) fn is_named(file: &File, directory: &RuntimeDirectory, name: &str) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), statat(directory.fd(), name, AtFlags::SYMLINK_NOFOLLOW))
    else {
        return false;
    };
    (open.dev(), open.ino()) == (named.st_dev, named.st_ino)
}

fn in_use(socket: &Path, path: &Path, text: &str) -> Error {
    let pid = record::parse(text).ok().and_then(|contents| contents.header).map(|header| header.owner.pid);
    tracing::debug!(path = %path.display(), "the journal is locked");
    Error::InUse { socket: socket.display().to_string(), pid }
}

#[cfg(test)]
mod tests;
