//! Attribution of errors to the sandbox.
//!
//! Refused system calls are recorded. The kernel does not report files that landlock refuses: such a file is
//! outside the policy's directories, and could be opened by this user, according to `access(2)`, which
//! landlock does not restrict.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use super::policy::parent_directory;
use super::{Policy, sys};

/// Part of the sandbox that has caused an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denied {
    /// A system call, which was reported on standard error.
    Call,
    /// A file, or the directory of one to be created.
    File(PathBuf),
}

impl Policy {
    /// Returns what the sandbox of this process, with this policy, has refused, if an error with this number,
    /// about this file, is its.
    pub fn denied(&self, errno: Errno, file: Option<&Path>) -> Option<Denied> {
        match errno {
            Errno::PERM => sys::has_refused().then_some(Denied::Call),
            Errno::ACCESS if !self.inspects_processes => {
                let file = file?;
                let exists = file.symlink_metadata().is_ok();
                let refused = if exists { file.to_owned() } else { parent_directory(file) };
                self.refuses(&refused).then_some(Denied::File(refused))
            }
            _ => None,
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_outside_of_the_policy_is_denied_by_it() {
        let directory = tempfile::tempdir().unwrap();
        let (existing, missing) = (directory.path().join("a file"), directory.path().join("missing"));
        std::fs::write(&existing, "a").unwrap();
        let mut policy = Policy::default();
        let denied = |policy: &Policy, file: &Path| policy.denied(Errno::ACCESS, Some(file));
        assert_eq!(denied(&policy, &existing), Some(Denied::File(existing.clone())));
        assert_eq!(denied(&policy, &missing), Some(Denied::File(directory.path().to_owned())));
        assert_eq!(policy.denied(Errno::NOENT, Some(&existing)), None);
        policy.write.push(directory.path().to_owned());
        assert_eq!(denied(&policy, &existing), None);
    }
}
