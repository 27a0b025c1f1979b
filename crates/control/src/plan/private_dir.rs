//! A directory for the sockets between a QEMU and us, which only the two can enter.

use std::fs::{self, DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Error;
use crate::qmp::PeerCredentials;

/// Removed with all that is in it on drop.
#[derive(Debug)]
pub(super) struct PrivateDir {
    path: PathBuf,
}

impl PrivateDir {
    /// Makes one that `peer`, if it is another user, can enter too.
    pub(super) fn new(peer: Option<&PeerCredentials>) -> Result<Self, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("towline-{}-{number}", process::id()));
        let failed = |source| Error::PrivateDir { path: path.clone(), source };
        DirBuilder::new().mode(0o700).create(&path).map_err(failed)?;
        let dir = Self { path: path.clone() };
        if let Some(peer) = peer
            && peer.uid != rustix::process::getuid().as_raw()
        {
            chown(&path, Some(peer.uid), Some(peer.gid)).map_err(failed)?;
        }
        Ok(dir)
    }

    /// A path in it.
    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Lets the QEMU that may enter the directory use the socket in it.
pub(super) fn open_to_peer(socket: &Path) -> Result<(), Error> {
    fs::set_permissions(socket, Permissions::from_mode(0o666))
        .map_err(|source| Error::PrivateDir { path: socket.into(), source })
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a private directory stays");
        }
    }
}
