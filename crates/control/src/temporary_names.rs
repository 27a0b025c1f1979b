//! Names in the file system for a while, which a later towline finds if theirs was killed: private
//! directories, and the staging names of an upgrade.
//!
//! Private directories below the directory for temporary files, and removal of those that killed towlines
//! have left.
//!
//! Each is named `towline-sockets-PID-N`. Its owner holds a lock (`flock`) on the file `owner` in it as long
//! as it lives, and the kernel releases the lock with the process, in any pid namespace. A directory whose
//! file can be locked is abandoned, and removed. (Binding a socket locks the directory itself.)

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use towline_channel::{FileOwner, with_file_owner};
use towline_image::atomic_file::LockedFile;

/// Prefix of the names.
const PREFIX: &str = "towline-sockets-";
/// File that the owner holds locked.
const LOCK: &str = "owner";
/// Maximum number of names that are tried.
const NAMES_MAX: u32 = 10_000;
/// Maximum number of entries of the directory for temporary files that are listed.
const ENTRIES_MAX: usize = 100_000;

/// A directory that only its owner can enter, and the lock that marks it as in use.
#[derive(Debug)]
pub(crate) struct LockedDir {
    pub(crate) path: PathBuf,
    /// `None` on a file system without locks, where no directory counts as abandoned either.
    _lock: Option<LockedFile>,
}

/// Directory for temporary files.
///
/// # Errors
/// The working directory was removed, and `TMPDIR` is relative to it.
pub(crate) fn temp_dir() -> io::Result<PathBuf> {
    // QEMU has its own working directory.
    std::path::absolute(std::env::temp_dir())
}

/// Creates a directory of this user or another in `place` under a free name: a process with the same id in
/// another pid namespace may have one.
///
/// # Errors
/// The system's; `EPERM` if this process may not create files of that user.
pub(crate) fn create(place: &Path, owner: Option<FileOwner>) -> io::Result<LockedDir> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = place.join(format!("{PREFIX}{}-{number}", process::id()));
        let create = || DirBuilder::new().mode(0o700).create(&path);
        match owner.map_or_else(|| Ok(create()), |owner| with_file_owner(owner, create))? {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < NAMES_MAX => continue,
            Err(error) => return Err(error),
        }
        match lock(&path, File::options().create_new(true)) {
            Ok(_lock) => return Ok(LockedDir { path, _lock }),
            // Another towline took it for abandoned in the moment before it was locked.
            Err(error) if is_others(&error) && number < NAMES_MAX => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes abandoned directories from `place`; those that cannot be removed stay. Returns the removed ones.
pub(crate) fn remove_abandoned(place: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(place).into_iter().flatten().take(ENTRIES_MAX).flatten();
    let ours = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_name));
    ours.map(|entry| entry.path()).filter(|path| remove(path)).collect()
}

fn remove(path: &Path) -> bool {
    let removed = match lock(path, &mut File::options()) {
        // In a directory that other users can write to, the name does not prove the owner.
        Ok(Some(lock)) if lock.0.metadata().is_ok_and(|found| found.uid() != geteuid().as_raw()) => {
            return false;
        }
        Ok(Some(_lock)) => fs::remove_dir_all(path),
        Ok(None) => return false,
        Err(error) => Err(error),
    };
    match removed {
        Ok(()) => {
            tracing::info!(path = %path.display(), "removed the private directory of an exited process");
        }
        Err(ref error) => tracing::debug!(path = %path.display(), %error, "a private directory stays"),
    }
    removed.is_ok()
}

/// Opens and locks the file `owner` in it; `None` if the file system has no locks.
fn lock(path: &Path, options: &mut OpenOptions) -> io::Result<Option<LockedFile>> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    let path = path.join(LOCK);
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = options.write(true).mode(0o600).custom_flags(flags).open(&path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOLCK) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    let (open, named) = (file.metadata()?, fs::symlink_metadata(&path)?);
    if (open.dev(), open.ino()) == (named.dev(), named.ino()) {
        Ok(Some(LockedFile(file)))
    } else {
        Err(Errno::NOENT.into())
    }
}

fn is_others(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::WouldBlock)
}

fn is_name(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(pid, count)| number(pid) && number(count))
}

// Names under which the new QEMU of an upgrade has the sockets of the old one, until that has exited.
//
// ```text
//   /run/vm/a.qmp ──► /run/vm/.a.qmp.towline-1f2e3d4c      beside it, because rename(2) does not leave a filesystem
//                ◄── rename, once the old QEMU, which unlinks its sockets, has exited
// ```
// A staging name has its final name in it, so a later towline finds both names in the command line of the
// new QEMU, even if the towline that started it was killed. It stays in that command line: the next upgrade
// replaces the final name.

/// Between the final name and the number of the upgrade.
const MARK: &str = ".towline-";
/// Hexadecimal digits of that number.
const DIGITS: usize = 8;

/// A name that is to replace another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StagingName {
    /// The name for now.
    pub(crate) path: PathBuf,
    /// The name that it replaces.
    pub(crate) target: PathBuf,
}

impl StagingName {
    /// A staging name for `target`, or for the final name of a `target` that is one itself.
    pub(crate) fn new(target: &Path, number: u32) -> Self {
        let target = of_path(target).map_or_else(|| target.to_owned(), |name| name.target);
        let file = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = target.with_file_name(format!(".{file}{MARK}{number:0DIGITS$x}"));
        Self { path, target }
    }

    /// Gives the file the permissions and the group of the one that it is to replace.
    pub(crate) fn adopt_permissions(&self) {
        let Ok(old) = fs::metadata(&self.target) else { return };
        let adopted = std::os::unix::fs::chown(&self.path, None, Some(old.gid()))
            .and_then(|()| fs::set_permissions(&self.path, old.permissions()));
        if let Err(error) = adopted {
            tracing::debug!(path = %self.path.display(), %error, "permissions are not adopted");
        }
    }

    /// Returns true if its final name exists and it does not.
    pub(crate) fn is_published(&self) -> bool {
        self.target.symlink_metadata().is_ok() && self.path.symlink_metadata().is_err()
    }

    /// Renames it to its final name, and replaces a file there. Returns false if it does not exist.
    pub(crate) fn publish(&self) -> io::Result<bool> {
        if !self.path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket() || found.is_file()) {
            return Ok(false);
        }
        fs::rename(&self.path, &self.target).map(|()| true)
    }

    /// Removes it.
    pub(crate) fn remove(&self) {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(path = %self.path.display(), %error, "staging name is not removed");
            }
            _ => {}
        }
    }
}

/// Parses a path that may be a staging name.
fn of_path(path: &Path) -> Option<StagingName> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?;
    let (file, number) = name.rsplit_once(MARK)?;
    let is_number = number.len() == DIGITS && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_number && !file.is_empty())
        .then(|| StagingName { path: path.to_owned(), target: path.with_file_name(file) })
}

/// The staging names in the command line of a process.
pub(crate) fn staging_names_of_process(pid: u32) -> Vec<StagingName> {
    let Ok(bytes) = fs::read(format!("/proc/{pid}/cmdline")) else { return Vec::new() };
    let words = bytes.split(|byte| matches!(byte, 0 | b',' | b'='));
    let paths = words.filter_map(|word| {
        let at = word.iter().position(|byte| *byte == b'/')?;
        of_path(Path::new(OsStr::from_bytes(&word[at..])))
    });
    paths.collect()
}

/// Gives the sockets of a QEMU that has its guest for good their final names. Returns these.
pub(crate) fn publish_staging_names(pid: u32) -> Vec<PathBuf> {
    let names = staging_names_of_process(pid).into_iter();
    let published = names.filter_map(|name| match name.publish() {
        Ok(true) => Some(name.target),
        Ok(false) => None,
        Err(error) => {
            tracing::warn!(from = %name.path.display(), to = %name.target.display(), %error, "not renamed");
            None
        }
    });
    published.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_abandoned_directories_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let ours = create(place.path(), None).unwrap();
        let mut left = create(place.path(), None).unwrap();
        fs::write(left.path.join("socket"), b"").unwrap();
        assert_eq!(remove_abandoned(place.path()), [""; 0].map(PathBuf::from), "both are held");
        // A process that is being started has it.
        let _inherited = left._lock.as_ref().unwrap().0.try_clone().unwrap();
        left._lock = None;
        let others = ["towline-sockets-1", "towline-sockets-1-x", "towline-1-0", "other"];
        for name in others {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        std::os::unix::fs::symlink(&ours.path, place.path().join("towline-sockets-1-1")).unwrap();
        fs::write(place.path().join("towline-sockets-1-2"), b"").unwrap();
        assert_eq!(remove_abandoned(place.path()), [left.path]);
        assert!(ours.path.is_dir());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1 + others.len() + 2);
    }

    #[test]
    fn existing_names_are_skipped() {
        let place = tempfile::tempdir().unwrap();
        let first = create(place.path(), None).unwrap();
        let number: u32 = first.path.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
        let taken: Vec<_> = (number + 1..number + 20)
            .map(|number| place.path().join(format!("{PREFIX}{}-{number}", process::id())))
            .collect();
        taken.iter().for_each(|path| fs::create_dir(path).unwrap());
        let second = create(place.path(), None).unwrap();
        assert!(!taken.contains(&second.path) && second.path != first.path);
    }

    #[test]
    fn a_staging_name_has_its_final_name() {
        let name = StagingName::new(Path::new("/run/vm/a.qmp"), 0x1f2e_3d4c);
        assert_eq!(name.path, Path::new("/run/vm/.a.qmp.towline-1f2e3d4c"));
        assert_eq!(of_path(&name.path), Some(name.clone()));
        // The next upgrade finds the staging name in the command line.
        let next = StagingName::new(&name.path, 1);
        assert_eq!(
            (next.path.as_path(), &next.target),
            (Path::new("/run/vm/.a.qmp.towline-00000001"), &name.target)
        );
        for other in
            ["/run/vm/a.qmp", "/run/.towline-00000001", "/run/.a.towline-1", "/run/.a.towline-0000000g"]
        {
            assert_eq!(of_path(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_socket_replaces_its_target_once() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("a.qmp");
        let name = StagingName::new(&target, 7);
        assert!(!name.publish().unwrap());
        let _listener = std::os::unix::net::UnixListener::bind(&name.path).unwrap();
        fs::write(&target, "stale").unwrap();
        assert!(!name.is_published());
        assert!(name.publish().unwrap() && name.is_published());
        assert!(fs::metadata(&target).unwrap().file_type().is_socket() && !name.path.exists());
        assert!(!name.publish().unwrap());
    }
}
