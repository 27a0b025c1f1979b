//! Whether an error is of the sandbox's making.
//!
//! A refused system call is counted when it is refused. A file that landlock refuses is not reported by the kernel: it is one that the
//! error names, that is in none of the policy's directories, and that this user could access otherwise; `access(2)`, which
//! landlock leaves alone, says the latter.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::{CONFINED, Policy, directory, sys};

/// What QEMU was refused is none of our sandbox's.
const OF_QEMU: &str = "QEMU on ";
/// What may stand before a path in an error.
const BEFORE: [char; 7] = [' ', '"', '\'', '`', '(', '=', ':'];
/// What may stand behind it.
const BEHIND: [char; 8] = [' ', '"', '\'', '`', ')', ',', ';', ':'];

/// What there is to add to an error that the sandbox has caused.
pub(crate) fn hint(error: &str) -> Option<String> {
    let policy = CONFINED.get()?;
    let says = |errno| error.contains(&io::Error::from_raw_os_error(errno).to_string());
    if says(libc::EPERM) && sys::has_refused() {
        return Some(
            "the sandbox refused a system call, which is named above (docs/sandbox.md); --sandbox none goes on \
             without it"
                .into(),
        );
    }
    if !says(libc::EACCES) || error.starts_with(OF_QEMU) || policy.looks_into_others {
        return None;
    }
    let refused = paths(error).into_iter().find(|path| policy.refuses(path))?;
    Some(format!(
        "the sandbox leaves this process only the files that its command line names, and not {} (docs/sandbox.md); \
         --sandbox none goes on without it",
        refused.display()
    ))
}

impl Policy {
    /// Whether it is the policy, and not the user's rights, that forbids a file.
    fn refuses(&self, path: &Path) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        if path.metadata().is_ok_and(|found| found.file_type().is_socket()) {
            // Connecting is not landlock's matter.
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

/// What an error names that is there: files, and for one that is not its directory.
fn paths(error: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let mut before = ' ';
    for (start, letter) in error.char_indices() {
        if BEFORE.contains(&before) && !BEFORE.contains(&letter) {
            let rest = &error[start..];
            let ends = rest.char_indices().filter(|(_, letter)| BEHIND.contains(letter)).map(|(end, _)| end);
            let mut candidates = ends.chain([rest.len()]).map(|end| Path::new(&rest[..end]));
            // The longest: a path may have spaces.
            let there = candidates.rfind(|path| path.symlink_metadata().is_ok());
            let made = rest.starts_with('/').then(|| {
                let end = rest.find(BEHIND).unwrap_or(rest.len());
                directory(Path::new(&rest[..end]))
            });
            paths.extend(there.map(Path::to_owned).or(made));
        }
        before = letter;
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_in_what_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("a file");
        std::fs::write(&there, "a").unwrap();
        let missing = directory.path().join("missing");
        let text = format!("{}: Permission denied (os error 13)", there.display());
        assert!(paths(&text).contains(&there), "{:?}", paths(&text));
        let text = format!("image \"{}\" cannot be made: Permission denied", missing.display());
        assert_eq!(paths(&text), [directory.path()]);
    }
}
