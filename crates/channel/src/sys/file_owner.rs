//! The user for files of one thread (`setfsuid(2)`).

use std::io;

/// User and group of new files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Creates files that belong to another user, without changing the owner of an existing one: a process that
/// may not change owners (a sandbox) can share a socket with that user. During `create` this thread has that
/// user's permissions for files, and only it.
///
/// # Errors
/// `EPERM`: this process may not create files of that user.
pub fn with_file_owner<T>(owner: FileOwner, create: impl FnOnce() -> T) -> io::Result<T> {
    // Group first: the right to change it may end with the user.
    let group = Changed::new(set_group, owner.gid);
    let user = Changed::new(set_user, owner.uid);
    if !(group.is_set() && user.is_set()) {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    Ok(create())
}

type Set = fn(u32) -> u32;

/// A changed id of this thread, restored on drop.
struct Changed {
    set: Set,
    id: u32,
    before: u32,
}

impl Changed {
    fn new(set: Set, id: u32) -> Self {
        Self { set, id, before: set(id) }
    }

    /// The calls have no other result than the id before them. That of all ones is invalid, and changes
    /// nothing.
    fn is_set(&self) -> bool {
        (self.set)(u32::MAX) == self.id
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        (self.set)(self.before);
    }
}

fn set_user(id: u32) -> u32 {
    // SAFETY: the call takes a number and concerns the permissions of this thread.
    unsafe { libc::setfsuid(id) }.cast_unsigned()
}

fn set_group(id: u32) -> u32 {
    // SAFETY: as above.
    unsafe { libc::setfsgid(id) }.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn owner_of_a_new_file(directory: &std::path::Path, name: &str) -> FileOwner {
        let found = File::create(directory.join(name)).unwrap().metadata().unwrap();
        FileOwner { uid: found.uid(), gid: found.gid() }
    }

    #[test]
    fn files_belong_to_the_owner_only_meanwhile() {
        let directory = tempfile::tempdir_in("/tmp").unwrap();
        let ours = owner_of_a_new_file(directory.path(), "before");
        assert_eq!(with_file_owner(ours, || owner_of_a_new_file(directory.path(), "own")).unwrap(), ours);
        let other = FileOwner { uid: 12_345, gid: 23_456 };
        if !rustix::process::geteuid().is_root() {
            let error = with_file_owner(other, || panic!("created")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            println!("skipped in part: only root can create files of another user");
            return;
        }
        let shared = directory.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let in_another_thread = |name: &str| {
            std::thread::scope(|scope| scope.spawn(|| owner_of_a_new_file(&shared, name)).join().unwrap())
        };
        let created = with_file_owner(other, || {
            (owner_of_a_new_file(&shared, "other"), in_another_thread("inherited"))
        });
        assert_eq!(created.unwrap(), (other, other), "threads that it starts inherit it");
        assert_eq!(owner_of_a_new_file(&shared, "after"), ours);
        let panicked = std::panic::catch_unwind(|| with_file_owner(other, || panic!("create")));
        assert!(panicked.is_err());
        assert_eq!(owner_of_a_new_file(&shared, "after a panic"), ours);
    }
}
