//! The directory of a running guest: `$XDG_RUNTIME_DIR/towline/guests/NAME`, or `/run/towline/guests/NAME`;
//! for root in `/run` also in a login session, whose directory is removed at logout while its guests run on.
//!
//! ```text
//!   NAME/lock        locked (flock) by the launcher and by the QEMU that inherits it: the name is in use while either lives
//!   NAME/qmp.sock    QEMU's monitor
//!   NAME/qemu.log    standard output and error of QEMU, bounded
//!   NAME/state.json  for `towline ps`
//!   NAME/waiting     there while QEMU waits for the guest of another host
//! ```
//! Root and directory belong to the user alone (0700) and are not symbolic links. What a guest that has ended
//! leaves is removed by the next one of its name, or a day later by the next one of any name. Lock, socket
//! and state of a guest cannot disagree: all are written by the process that holds the lock. A state that
//! cannot be read, of another version or a damaged one, concerns no other guest, and none if the lock is free.

mod state;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, fstat, mkdirat, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

pub(crate) use state::wait_exit;
pub use state::{GuestGenerations, RunningGuest};

/// Longest path of a Unix socket.
pub(crate) const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Longest name of a guest in bytes, which is in the path of its monitor's socket.
const NAME_BYTES_MAX: usize = 48;
/// Attempts to lock a directory that others remove at the same time, and the interval between them.
const ATTEMPTS_MAX: u32 = 100;
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Guests that are listed.
const GUESTS_MAX: usize = 10_000;
const LOCK: &str = "lock";
const QMP: &str = "qmp.sock";
const STATE: &str = "state.json";
const STATE_STAGING: &str = "state.json.new";
/// Directories of login sessions, which end with them.
const SESSIONS: &str = "/run/user";
/// Age at which the log of a guest that has ended is removed with its directory.
const ENDED_KEPT: Duration = Duration::from_secs(24 * 3600);

/// End of a QEMU's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Killed when this process exits for any reason, or when its [`RunningQemu`](crate::RunningQemu) is
    /// dropped.
    WithOwner,
    /// Outlives this process.
    Detached,
}

/// Name of a guest: letters, digits, `-`, `_` and `.`, beginning with a letter or a digit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestName(String);

/// A text that cannot be a guest's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} cannot be a guest's name: expected up to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.', the first a letter or a \
     digit"
)]
pub struct NameError {
    /// The text.
    pub found: String,
}

/// Directory with one directory for each guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeRoot {
    path: PathBuf,
}

/// The directory of one guest, whose name is ours while this value or a process that inherited its lock
/// lives. It is removed with this value, unless it is kept for such a process.
#[derive(Debug)]
pub struct GuestDirectory {
    name: GuestName,
    path: PathBuf,
    directory: OwnedFd,
    lock: OwnedFd,
    is_kept: bool,
}

/// A runtime directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A call of the system failed.
    #[error("runtime directory {}: cannot {operation}: {source}; set XDG_RUNTIME_DIR to a directory of this user", path.display())]
    Io { path: PathBuf, operation: &'static str, source: io::Error },
    /// Not a directory that belongs to this user alone.
    #[error(
        "runtime directory {} has owner {owner} and mode {mode:03o}, expected {expected_owner} and 700; remove it or set XDG_RUNTIME_DIR",
        path.display()
    )]
    NotPrivate {
        path: PathBuf,
        owner: u32,
        mode: u32,
        /// User id of this process.
        expected_owner: u32,
    },
    /// The state of a guest that may run is damaged, or of another version of towline.
    #[error(
        "state {} of a guest cannot be read: {source}; use the towline that has started it, or end that QEMU",
        path.display()
    )]
    State {
        path: PathBuf,
        /// The guest's process, if that can be read: all versions have it.
        pid: Option<u32>,
        /// The system's error, or the fault of the text.
        source: io::Error,
    },
    /// A guest of this name runs.
    #[error("name {name} is taken by {holder}")]
    Taken {
        name: GuestName,
        /// The process that has it, if known.
        holder: String,
    },
    /// The path of a socket in it would be too long.
    #[error("socket path {} has {found} bytes, expected at most {SOCKET_PATH_BYTES_MAX}", path.display())]
    PathTooLong { path: PathBuf, found: usize },
}

impl FromStr for GuestName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let is_valid = text.len() <= NAME_BYTES_MAX
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if is_valid {
            return Ok(Self(text.to_owned()));
        }
        Err(NameError { found: crate::command_line::excerpt(text) })
    }
}

impl GuestName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for GuestName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns true for a directory of this user that no other user may write to.
fn is_own(path: &Path) -> bool {
    let is_own = |stat: rustix::fs::Stat| {
        stat.st_uid == geteuid().as_raw() && stat.st_mode & (Mode::WGRP | Mode::WOTH).as_raw_mode() == 0
    };
    path.is_absolute() && statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(is_own)
}

impl RuntimeRoot {
    /// The root of this user: in `$XDG_RUNTIME_DIR` if it is the user's own, no other may write to it and,
    /// for root, it is not that of a login session; else in `/run`.
    pub fn of_user() -> Self {
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| is_own(path));
        let lasts = |path: &PathBuf| !geteuid().is_root() || !path.starts_with(SESSIONS);
        Self::at(own.filter(lasts).unwrap_or_else(|| "/run".into()).join("towline/guests"))
    }

    /// Returns true if it is removed when its user logs out, while guests run on.
    pub fn ends_with_session(&self) -> bool {
        self.path.starts_with(SESSIONS)
    }

    /// A root at this path. It is created on demand, with its parent.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory of a guest, and removes what an earlier guest of that name has left.
    ///
    /// # Errors
    /// [`RuntimeError::Taken`] while that guest or its launcher lives; a root that others could write to.
    pub fn claim(&self, name: &GuestName) -> Result<GuestDirectory, RuntimeError> {
        if let Some(parent) = self.path.parent() {
            // Shared with journals and sockets. One that cannot be made is reported with the root.
            let _ = mkdirat(CWD, parent, Mode::from(0o755));
        }
        let root = open_private(CWD, &self.path, &self.path)?;
        self.remove_ended(root.as_fd());
        for _ in 0..ATTEMPTS_MAX {
            if let Some(claimed) = self.try_claim(root.as_fd(), name)? {
                return Ok(claimed);
            }
            // A guest that runs stays; one that is ending, or a process that removes what one has left, has it for a moment.
            match self.read(name) {
                Ok(None) => {}
                Ok(Some(guest)) if guest.is_ending() => {}
                _ => break,
            }
            thread::sleep(RETRY_INTERVAL);
        }
        Err(RuntimeError::Taken { name: name.clone(), holder: holder(&self.path.join(name.as_str())) })
    }

    /// Removes the directories of guests that ended long ago.
    fn remove_ended(&self, root: BorrowedFd<'_>) {
        for name in self.names().unwrap_or_default() {
            let path = self.path.join(name.as_str());
            let last = [path.join("qemu.log"), path]
                .iter()
                .find_map(|path| std::fs::symlink_metadata(path).ok()?.modified().ok());
            if last.and_then(|last| last.elapsed().ok()).is_some_and(|age| age > ENDED_KEPT) {
                drop(self.try_claim(root, &name));
            }
        }
    }

    /// Locks the directory of a guest, which is made if it is missing, and removes what is in it. `None`: another
    /// process has it, or has removed it meanwhile.
    fn try_claim(
        &self,
        root: BorrowedFd<'_>,
        name: &GuestName,
    ) -> Result<Option<GuestDirectory>, RuntimeError> {
        let path = self.path.join(name.as_str());
        let directory = match open_private(root, Path::new(name.as_str()), &path) {
            // Removed between its creation and its opening.
            Err(RuntimeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            other => other?,
        };
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = match openat(&directory, LOCK, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::NOENT) => return Ok(None),
            other => other.map_err(|errno| io_error(&path.join(LOCK), "open it", errno))?,
        };
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            other => other.map_err(|errno| io_error(&path.join(LOCK), "lock it", errno))?,
        }
        // The file may have been removed, with its directory, before it was locked.
        let named = statat(CWD, path.join(LOCK), AtFlags::SYMLINK_NOFOLLOW);
        let open = fstat(&lock).map_err(|errno| io_error(&path.join(LOCK), "examine it", errno))?;
        if !named.is_ok_and(|named| (named.st_dev, named.st_ino) == (open.st_dev, open.st_ino)) {
            return Ok(None);
        }
        let claimed = GuestDirectory { name: name.clone(), path, directory, lock, is_kept: false };
        claimed.remove_files();
        Ok(Some(claimed))
    }

    /// The guest of this name that runs.
    ///
    /// # Errors
    /// [`RuntimeError::State`]: it may run. A root that others could write to.
    pub fn find(&self, name: &GuestName) -> Result<Option<RunningGuest>, RuntimeError> {
        if std::fs::symlink_metadata(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        open_private(CWD, &self.path, &self.path)?;
        self.read(name)
    }

    fn read(&self, name: &GuestName) -> Result<Option<RunningGuest>, RuntimeError> {
        let path = self.path.join(name.as_str());
        let state = path.join(STATE);
        match RunningGuest::read(&state) {
            Ok(found) => Ok(found.filter(RunningGuest::is_running)),
            // Left by a guest that has ended.
            Err(_) if !is_locked(&path.join(LOCK)) => Ok(None),
            Err(source) => Err(RuntimeError::State {
                pid: RunningGuest::pid_in_any_version(&state),
                path: state,
                source,
            }),
        }
    }

    /// The guest in the QEMU of this process, or with this monitor if its process is not known.
    ///
    /// # Errors
    /// As [`Self::guests`]; [`RuntimeError::State`] of one that may be it.
    pub fn find_qemu(
        &self,
        process: Option<i32>,
        monitor: &Path,
    ) -> Result<Option<RunningGuest>, RuntimeError> {
        let is_it = |pid: u32, qmp: &Path| match process {
            Some(process) => i64::from(pid) == i64::from(process),
            None => qmp == monitor,
        };
        let mut doubt = None;
        for guest in self.guests()? {
            match guest {
                Ok(guest) if is_it(guest.pid, &guest.qmp) => return Ok(Some(guest)),
                Err(RuntimeError::State { pid: Some(pid), path, .. })
                    if !is_it(pid, &path.with_file_name(QMP)) => {}
                Err(error) => doubt = Some(error),
                Ok(_) => {}
            }
        }
        doubt.map_or(Ok(None), Err)
    }

    /// Returns the guests that run, by name, or [`RuntimeError::State`] in the place of one that may run.
    ///
    /// # Errors
    /// A root that cannot be read, or that others could write to. A root that does not exist has no guests.
    pub fn guests(&self) -> Result<Vec<Result<RunningGuest, RuntimeError>>, RuntimeError> {
        let names = match self.names() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|error| io_error(&self.path, "read it", error))?,
        };
        open_private(CWD, &self.path, &self.path)?;
        Ok(names.iter().filter_map(|name| self.read(name).transpose()).collect())
    }

    /// The names for which there is a directory, in order.
    fn names(&self) -> io::Result<Vec<GuestName>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path)?.take(GUESTS_MAX) {
            names.extend(entry?.file_name().to_str().and_then(|name| name.parse::<GuestName>().ok()));
        }
        names.sort();
        Ok(names)
    }
}

impl GuestDirectory {
    /// The guest's name.
    pub fn name(&self) -> &GuestName {
        &self.name
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the monitor's socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.path.join(QMP)
    }

    /// Path of QEMU's log.
    pub fn log_path(&self) -> PathBuf {
        self.path.join("qemu.log")
    }

    /// The descriptor that keeps the name in use; for the QEMU that inherits it.
    pub(crate) fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Creates QEMU's log.
    pub(crate) fn create_log(&self) -> Result<File, RuntimeError> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, "qemu.log", flags, Mode::RUSR | Mode::WUSR);
        file.map(File::from).map_err(|errno| io_error(&self.log_path(), "create it", errno))
    }

    /// Returns the state that its guest has at its start, in this process.
    pub(crate) fn new_state(
        &self,
        pid: u32,
        lifetime: Lifetime,
        image: Option<PathBuf>,
        generations: Option<GuestGenerations>,
    ) -> Result<RunningGuest, RuntimeError> {
        let start_time = state::start_time(pid);
        Ok(RunningGuest {
            name: self.name.0.clone(),
            pid,
            start_time: start_time
                .map_err(|error| io_error(&self.path, "examine QEMU's process for it", error))?,
            owner_pid: std::process::id(),
            is_detached: lifetime == Lifetime::Detached,
            qmp: self.qmp_path(),
            // The state is UTF-8, which a path need not be. It is shown and not opened.
            image: image.map(|image| image.to_string_lossy().into_owned().into()),
            generations,
        })
    }

    /// Writes the state of the guest for [`RuntimeRoot::guests`].
    pub(crate) fn write_state(&self, state: &RunningGuest) -> Result<(), RuntimeError> {
        let path = self.path.join(STATE);
        let error = |source| io_error(&path, "write it", source);
        let staging = self.path.join(STATE_STAGING);
        std::fs::write(&staging, state.to_json().map_err(error)?).map_err(error)?;
        std::fs::rename(&staging, &path).map_err(error)
    }

    /// Leaves it for a process that inherited its lock.
    pub(crate) fn keep(&mut self) {
        self.is_kept = true;
    }

    fn remove_files(&self) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name() != LOCK) {
            if let Err(error) = std::fs::remove_file(entry.path()) {
                tracing::debug!(path = %entry.path().display(), %error, "file of an earlier guest is not removed");
            }
        }
    }
}

impl Drop for GuestDirectory {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        self.remove_files();
        // The lock file is removed while it is locked: another process that opened it finds that it is not
        // the named one.
        let removed =
            unlinkat(&self.directory, LOCK, AtFlags::empty()).and_then(|()| rustix::fs::rmdir(&self.path));
        if let Err(errno) = removed {
            tracing::debug!(path = %self.path.display(), %errno, "runtime directory is not removed");
        }
    }
}

/// Creates a directory if it does not exist, opens it, and checks that it belongs to this user alone.
fn open_private(at: BorrowedFd<'_>, name: &Path, path: &Path) -> Result<OwnedFd, RuntimeError> {
    match mkdirat(at, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(io_error(path, "make it", errno)),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let directory =
        openat(at, name, flags, Mode::empty()).map_err(|errno| io_error(path, "open it", errno))?;
    let stat = fstat(&directory).map_err(|errno| io_error(path, "examine it", errno))?;
    let (expected_owner, mode) = (geteuid().as_raw(), stat.st_mode & 0o777);
    if stat.st_uid != expected_owner || mode != 0o700 {
        return Err(RuntimeError::NotPrivate {
            path: path.to_owned(),
            owner: stat.st_uid,
            mode,
            expected_owner,
        });
    }
    Ok(directory)
}

pub(crate) fn io_error(path: &Path, operation: &'static str, source: impl Into<io::Error>) -> RuntimeError {
    RuntimeError::Io { path: path.to_owned(), operation, source: source.into() }
}

/// Returns true if the guest with this lock, or its launcher, may live.
fn is_locked(path: &Path) -> bool {
    match File::open(path) {
        Ok(lock) => lock.try_lock_shared().is_err(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The process that has a name, according to its state.
fn holder(path: &Path) -> String {
    match RunningGuest::read(&path.join(STATE)) {
        Ok(Some(state)) => format!("process {} (started by process {})", state.pid, state.owner_pid),
        Ok(None) | Err(_) => "a guest that is being started".into(),
    }
}

#[cfg(test)]
mod tests;
