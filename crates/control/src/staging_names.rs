//! Names under which the new QEMU of an upgrade has the sockets of the old one, until that has exited.
//!
//! ```text
//!   /run/vm/a.qmp ──► /run/vm/.a.qmp.towline-1f2e3d4c      beside it, because rename(2) does not leave a filesystem
//!                ◄── rename, once the old QEMU, which unlinks its sockets, has exited
//! ```
//! A staging name has its final name in it, so a later towline finds both names in the command line of the
//! new QEMU, even if the towline that started it was killed. It stays in that command line: the next upgrade
//! replaces the final name.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

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
pub(crate) fn of_path(path: &Path) -> Option<StagingName> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?;
    let (file, number) = name.rsplit_once(MARK)?;
    let is_number = number.len() == DIGITS && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_number && !file.is_empty())
        .then(|| StagingName { path: path.to_owned(), target: path.with_file_name(file) })
}

/// The staging names in the command line of a process.
pub(crate) fn of_process(pid: u32) -> Vec<StagingName> {
    let Ok(bytes) = fs::read(format!("/proc/{pid}/cmdline")) else { return Vec::new() };
    let words = bytes.split(|byte| matches!(byte, 0 | b',' | b'='));
    let paths = words.filter_map(|word| {
        let at = word.iter().position(|byte| *byte == b'/')?;
        of_path(Path::new(OsStr::from_bytes(&word[at..])))
    });
    paths.collect()
}

/// Gives the sockets of a QEMU that has its guest for good their final names. Returns these.
pub(crate) fn publish_of_process(pid: u32) -> Vec<PathBuf> {
    let names = of_process(pid).into_iter();
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
