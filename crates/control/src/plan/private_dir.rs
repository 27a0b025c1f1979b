//! A directory for the sockets between a QEMU and this process, which only those two can enter.

use std::fs;
use std::os::fd::{AsFd as _, IntoRawFd as _};
use std::path::PathBuf;
use std::sync::Once;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use towline_channel::{Address, Error as ChannelError, FileOwner, Listener, with_file_owner};
use towline_qmp::commands::GetFd;

use super::error::Error;
use crate::journal::{JournalEntry, UndoRecord};
use crate::qemu::Qemu;
use crate::temporary_names::{self, LockedDir};

/// A private directory; removed with its contents on drop.
#[derive(Debug)]
pub(crate) struct PrivateDir {
    made: LockedDir,
    /// Owner of the directory and its sockets, if it is not this process's user.
    owner: Option<FileOwner>,
    entry: Option<JournalEntry>,
}

impl PrivateDir {
    /// Creates a directory for `qemu`, which can enter it also as another user, and records it in its
    /// journal.
    pub(crate) fn for_qemu(qemu: &Qemu) -> Result<Self, Error> {
        let place = temporary_names::temp_dir();
        let place = place.map_err(|source| Error::PrivateDir { path: std::env::temp_dir(), source })?;
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| drop(temporary_names::remove_abandoned(&place)));
        let listener = qemu.facts().peer.as_ref().map(|peer| FileOwner { uid: peer.uid, gid: peer.gid });
        let owner = qemu.process().file_owner().or(listener);
        let owner = owner.filter(|owner| owner.uid != rustix::process::getuid().as_raw());
        let mut dir = Self::create(place, owner)?;
        let path = &dir.made.path;
        let failed = |source| Error::PrivateDir { path: path.clone(), source };
        dir.entry = qemu.record(&UndoRecord::directory(path).map_err(failed)?);
        Ok(dir)
    }

    fn create(place: PathBuf, owner: Option<FileOwner>) -> Result<Self, Error> {
        let made = temporary_names::create(&place, owner);
        let made = made.map_err(|source| Error::PrivateDir { path: place, source })?;
        Ok(Self { made, owner, entry: None })
    }

    /// Listens in the directory, on a socket that its QEMU may connect to.
    pub(super) fn listen(&self, name: &str) -> Result<Listener, Error> {
        let address = Address::Unix(self.join(name));
        let bound = match self.owner {
            None => Ok(Listener::bind(&address)),
            Some(owner) => with_file_owner(owner, || Listener::bind(&address)),
        };
        let failed = |source| Error::PrivateDir { path: self.join(name), source };
        Ok(bound.map_err(failed)??)
    }

    /// A path in the directory.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.made.path.join(name)
    }
}

/// Name of a passed connection in QEMU.
const PASSED: &str = "towline";

/// A QEMU's way to this process.
#[derive(Debug)]
pub(super) struct QemuLink {
    /// Our end.
    pub(super) address: Address,
    /// QEMU's end, for `migrate` and `migrate-incoming`.
    pub(super) uri: String,
}

impl QemuLink {
    /// A socket in the directory.
    pub(super) fn socket(dir: &PrivateDir, name: &str) -> Self {
        let address = Address::Unix(dir.join(name));
        Self { uri: address.to_string(), address }
    }

    /// One end of a connection, passed to QEMU, which needs no path and no permission for it.
    pub(super) fn pass(qemu: &mut Qemu) -> Result<Self, Error> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(|errno| {
                ChannelError::Io { op: "socketpair", peer: "this process".into(), source: errno.into() }
            })?;
        qemu.client().execute_with_fds(&GetFd { fdname: PASSED }, &[theirs.as_fd()])?;
        Ok(Self { address: Address::Fd(ours.into_raw_fd()), uri: format!("fd:{PASSED}") })
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.made.path) {
            Ok(()) => self.entry.iter().for_each(JournalEntry::done),
            Err(error) => {
                tracing::debug!(path = %self.made.path.display(), %error, "a private directory stays");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn the_directory_and_its_sockets_belong_to_the_user_of_the_qemu() {
        let place = tempfile::tempdir_in("/tmp").unwrap();
        let found = |path: &std::path::Path| {
            let found = fs::symlink_metadata(path).unwrap();
            (found.uid(), found.gid(), found.mode() & 0o700)
        };
        let (own_user, own_group, _) = found(place.path());
        let other = FileOwner { uid: 12_345, gid: 23_456 };
        if !rustix::process::geteuid().is_root() {
            let Error::PrivateDir { source, .. } =
                PrivateDir::create(place.path().to_owned(), Some(other)).unwrap_err()
            else {
                panic!("another error")
            };
            assert_eq!(source.raw_os_error(), Some(libc::EPERM));
            println!("skipped in part: only root can create files of another user");
            return;
        }
        fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        for (owner, user, group) in [(None, own_user, own_group), (Some(other), other.uid, other.gid)] {
            let dir = PrivateDir::create(place.path().to_owned(), owner).unwrap();
            assert_eq!(found(&dir.made.path), (user, group, 0o700));
            let _listener = dir.listen("stream").unwrap();
            // A connection needs the permission to write to the socket.
            assert_eq!(found(&dir.join("stream")), (user, group, 0o700));
            assert_eq!(found(&dir.join("owner")), (own_user, own_group, 0o600), "the lock is this process's");
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "both are removed");
    }
}
