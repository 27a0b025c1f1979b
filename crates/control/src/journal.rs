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
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;
use towline_image::atomic_file::LockedFile;

use crate::lock::lock;
use crate::process::{Process, ProcessState, has_exited};

pub use record::{ChangedValue, ProtectionRecord, UndoRecord};
use record::{JournalContents, JournalHeader, JournalLine, VERSION};
pub(crate) use record::{Owner, milliseconds, monotonic_ms, now_ms};
pub use runtime_directory::{RuntimeDirectory, RuntimeDirectoryError};

/// Maximum size of a journal that is read.
const BYTES_MAX: u64 = 1 << 20;
/// Time for which a file is tried again that no process which lives owns, and its interval: one that only looks at it has its lock for a
/// moment, as has a process that a former owner was about to start when it was killed.
pub(crate) const LOCKED_MAX: Duration = Duration::from_secs(1);
pub(crate) const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// Error of a journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another towline owns it.
    #[error(
        "another towline{} works on QEMU at {socket}: wait until it has ended, or end it first", owner_text(*.pid)
    )]
    InUse {
        socket: String,
        /// The owner's process, if known.
        pid: Option<i32>,
    },
    /// No directory for journals.
    #[error("{0}")]
    Directory(#[from] RuntimeDirectoryError),
    /// The journal cannot be read or written.
    #[error("journal {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// A line is not a record of this version.
    #[error(
        "journal {path}, line {line}: expected a record of version {VERSION}, found another ({reason}): it belongs to another version of \
         towline, which can repair the QEMU; or remove it"
    )]
    Format {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
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
    file: LockedFile,
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
        let until = Instant::now() + LOCKED_MAX;
        let (file, contents) = loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = openat(directory.fd(), &name, flags, Mode::RUSR | Mode::WUSR)
                .map_err(|errno| failed(errno.into()))?;
            let mut file = File::from(fd);
            let is_locked = try_lock(&file).map_err(failed)?;
            // Its owner may have removed it while it was opened.
            let is_current = is_named(&file, directory, &name);
            let contents = record::parse(&read(&mut file).map_err(failed)?);
            let header =
                contents.as_ref().ok().filter(|_| is_current).and_then(|found| found.header.as_ref());
            let (owner, is_ours) = (header.map(|header| &header.owner), is_locked && is_current);
            if owner.is_some_and(Owner::lives) || !is_ours && Instant::now() >= until {
                let (socket, pid) = (socket.display().to_string(), owner.map(|owner| owner.pid));
                tracing::debug!(path = %path.display(), "the journal is locked");
                return Err(Error::InUse { socket, pid });
            }
            if is_ours {
                break (file, contents);
            }
            thread::sleep(LOCK_INTERVAL);
        };
        let JournalContents { header: found, records } = contents.map_err(|bad| Error::Format {
            path: path.clone(),
            line: bad.line,
            reason: bad.reason,
        })?;
        let state = State {
            file: LockedFile(file),
            directory: directory.shared_fd(),
            name,
            path,
            header,
            next_id: records.keys().max().map_or(1, |id| id + 1),
            records,
            process: Arc::clone(process),
        };
        state.take_over(found)
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
    fn take_over(mut self, before: Option<JournalHeader>) -> Result<(Journal, Option<i32>), Error> {
        let left_by = before
            .filter(|found| !self.records.is_empty() && self.header.is_same_qemu(found, &self.process))
            .map(|found| found.owner.pid);
        if left_by.is_some() {
            // Ends a truncated line.
            self.append_after("\n", &JournalLine::Begun(self.header.clone()))?;
        } else {
            self.records.clear();
            self.restart()?;
        }
        Ok((Journal(Arc::new(Mutex::new(self))), left_by))
    }

    /// Removes all records from the file.
    fn restart(&mut self) -> Result<(), Error> {
        self.file.0.set_len(0).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        self.append(&JournalLine::Begun(self.header.clone()))
    }

    fn append(&mut self, line: &JournalLine) -> Result<(), Error> {
        self.append_after("", line)
    }

    fn append_after(&mut self, before: &str, line: &JournalLine) -> Result<(), Error> {
        let written = serde_json::to_string(line).map_err(io::Error::from).and_then(|text| {
            let mut file = &self.file.0;
            let bytes = file.metadata()?.len();
            let written = file.write_all(format!("{before}{text}\n").as_bytes());
            // The part of a line for which a full file system had room would make the next one unreadable.
            written.inspect_err(|_| _ = file.set_len(bytes))
        });
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.records.is_empty() || self.process.state() == ProcessState::Exited {
            // Its lock is held until then.
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

/// The protection that a killed towline has left in the QEMU with this monitor, which need not reply, and need not even accept a connection.
pub(crate) fn leftover_protection(directory: &RuntimeDirectory, monitor: &Path) -> Option<ProtectionRecord> {
    let wanted = JournalHeader::of(monitor).ok()?;
    let journals = directory.names().into_iter().filter_map(|name| leftover(directory, &name));
    let mut of_qemu = journals
        .filter(|found| found.header.as_ref().is_some_and(|header| header.is_same_socket(&wanted)))
        .flat_map(|found| found.records.into_values());
    of_qemu.find_map(|record| match record {
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
    leftover(directory, &record::name_of(pid, start_time)).unwrap_or_default().records
}

/// The journal of this name, if no towline that lives has it.
fn leftover(directory: &RuntimeDirectory, name: &str) -> Option<JournalContents> {
    record::process_of(name)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(directory.fd(), name, flags, Mode::empty()).ok()?);
    flock(&file, FlockOperation::NonBlockingLockShared).ok()?;
    record::parse(&read(&mut file).ok()?).ok()
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

/// Locks a file; false if another process has a lock of it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns true if the name still leads to this file.
pub(crate) fn is_named(file: &File, directory: &RuntimeDirectory, name: &str) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), statat(directory.fd(), name, AtFlags::SYMLINK_NOFOLLOW))
    else {
        return false;
    };
    (open.dev(), open.ino()) == (named.st_dev, named.st_ino)
}

#[cfg(test)]
mod tests;
