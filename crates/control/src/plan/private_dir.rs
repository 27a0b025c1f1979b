//! A directory for the sockets between a QEMU and this process, which only those two can enter.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Once;

use super::error::Error;
use crate::journal::{JournalEntry, UndoRecord};
use crate::private_dirs::{self, LockedDir};
use crate::qemu::Qemu;

/// A private directory; removed with its contents on drop.
#[derive(Debug)]
pub(super) struct PrivateDir {
    made: LockedDir,
    entry: Option<JournalEntry>,
}

impl PrivateDir {
    /// Creates a directory for `qemu`, which can enter it also as another user, and records it in its journal.
    pub(super) fn for_qemu(qemu: &Qemu) -> Result<Self, Error> {
        let place = private_dirs::temp_dir();
        let place = place.map_err(|source| Error::PrivateDir { path: std::env::temp_dir(), source })?;
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| drop(private_dirs::remove_abandoned(&place)));
        let made = private_dirs::create(&place);
        let mut dir = made
            .map(|made| Self { made, entry: None })
            .map_err(|source| Error::PrivateDir { path: place, source })?;
        let path = &dir.made.path;
        let failed = |source| Error::PrivateDir { path: path.clone(), source };
        if let Some(peer) = &qemu.facts().peer
            && peer.uid != rustix::process::getuid().as_raw()
        {
            chown(path, Some(peer.uid), Some(peer.gid)).map_err(failed)?;
        }
        dir.entry = qemu.record(&UndoRecord::directory(path).map_err(failed)?);
        Ok(dir)
    }

    /// A path in the directory.
    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.made.path.join(name)
    }
}

/// Lets the QEMU that may enter the directory use the socket in it.
pub(super) fn open_to_peer(socket: &Path) -> Result<(), Error> {
    fs::set_permissions(socket, Permissions::from_mode(0o666))
        .map_err(|source| Error::PrivateDir { path: socket.into(), source })
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
