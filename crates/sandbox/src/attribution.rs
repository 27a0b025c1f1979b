//! Attribution of errors to the sandbox.
//!
//! Refused system calls are recorded. The kernel does not report files that landlock refuses: such a file is
//! named in the error, is outside the policy's directories, and could be opened by this user, according to
//! `access(2)`, which landlock does not restrict.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::policy::parent_directory;
use super::{CONFINED, Policy, sys};

/// Beginning of errors that QEMU reports, which is not confined by this process.
const QEMU_ERROR: &str = "QEMU on ";
/// Characters that may precede a path in an error.
const BEFORE: [char; 7] = [' ', '"', '\'', '`', '(', '=', ':'];
/// Characters that may follow it.
const AFTER: [char; 8] = [' ', '"', '\'', '`', ')', ',', ';', ':'];

/// Returns an explanation of an error that the sandbox has caused.
pub fn explain(error: &str) -> Option<String> {
    let policy = CONFINED.get()?;
    let names = |errno| error.contains(&io::Error::from_raw_os_error(errno).to_string());
    if names(libc::EPERM) && sys::has_refused() {
        return Some(
            "the sandbox refused the system call that is named above (docs/sandbox.md); --sandbox none runs \
             without it"
                .into(),
        );
    }
    if !names(libc::EACCES) || error.starts_with(QEMU_ERROR) || policy.inspects_processes {
        return None;
    }
    let refused = paths(error).into_iter().find(|path| policy.refuses(path))?;
    Some(format!(
        "the sandbox permits only the files that the command line names, and not {} (docs/sandbox.md); \
         --sandbox none runs without it",
        refused.display()
    ))
}

impl Policy {
    /// Returns true if the policy, and not the user's permissions, forbids a file.
    fn refuses(&self, path: &Path) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        if path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket()) {
            // Landlock does not restrict connections to Unix sockets.
            return false;
        }
        let is_in = |directories: &[PathBuf]| {
            directories.iter().filter_map(|one| one.canonicalize().ok()).any(|one| path.starts_with(one))
        };
        if is_in(&self.write) {
            return false;
        }
        let needed = if is_in(&self.read) { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
        accessat(CWD, &path, needed, AtFlags::EACCESS).is_ok()
    }
}

/// Returns the existing files that an error names; for a missing one its directory.
fn paths(error: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let mut before = ' ';
    for (start, letter) in error.char_indices() {
        if BEFORE.contains(&before) && !BEFORE.contains(&letter) {
            let rest = &error[start..];
            let ends = rest.char_indices().filter(|(_, letter)| AFTER.contains(letter)).map(|(end, _)| end);
            let mut candidates = ends.chain([rest.len()]).map(|end| Path::new(&rest[..end]));
            // The longest, since a path may contain spaces.
            let existing = candidates.rfind(|path| path.symlink_metadata().is_ok());
            let parent = rest.starts_with('/').then(|| {
                let end = rest.find(AFTER).unwrap_or(rest.len());
                parent_directory(Path::new(&rest[..end]))
            });
            paths.extend(existing.map(Path::to_owned).or(parent));
        }
        before = letter;
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_errors_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let existing = directory.path().join("a file");
        std::fs::write(&existing, "a").unwrap();
        let missing = directory.path().join("missing");
        let text = format!("{}: Permission denied (os error 13)", existing.display());
        assert!(paths(&text).contains(&existing), "{:?}", paths(&text));
        let text = format!("image \"{}\" cannot be made: Permission denied", missing.display());
        assert_eq!(paths(&text), [directory.path()]);
    }
}
