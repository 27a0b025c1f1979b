//! A directory for the sockets between a QEMU and us, which only the two can enter.

use std::fs::{self, DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use towline_qmp::PeerCredentials;

use super::error::Error;
use crate::journal::{Entry, Record};
use crate::qemu::Qemu;

/// Names tried at most.
const NAMES_MAX: u32 = 10_000;

/// Removed with all that is in it on drop.
#[derive(Debug)]
pub(super) struct PrivateDir {
    path: PathBuf,
    entry: Option<Entry>,
}

impl PrivateDir {
    /// Makes one that `peer`, if it is another user, can enter too.
    pub(super) fn new(peer: Option<&PeerCredentials>) -> Result<Self, Error> {
        let path = made()?;
        let failed = |source| Error::PrivateDir { path: path.clone(), source };
        let dir = Self { path: path.clone(), entry: None };
        if let Some(peer) = peer
            && peer.uid != rustix::process::getuid().as_raw()
        {
            chown(&path, Some(peer.uid), Some(peer.gid)).map_err(failed)?;
        }
        Ok(dir)
    }

    /// Makes one for `qemu`, and records it in its journal.
    pub(super) fn for_qemu(qemu: &Qemu) -> Result<Self, Error> {
        let mut dir = Self::new(qemu.facts().peer.as_ref())?;
        let record = Record::directory(&dir.path);
        dir.entry = record
            .map_err(|source| Error::PrivateDir { path: dir.path.clone(), source })
            .map(|record| qemu.record(&record))?;
        Ok(dir)
    }

    /// A path in it.
    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Makes a directory of a name that is free: a towline of the same number that was killed may have left its own.
fn made() -> Result<PathBuf, Error> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // QEMU has a working directory of its own.
        let path = std::path::absolute(std::env::temp_dir())
            .map_err(|source| Error::PrivateDir { path: std::env::temp_dir(), source })?
            .join(format!("towline-{}-{number}", process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < NAMES_MAX => {}
            Err(source) => return Err(Error::PrivateDir { path, source }),
        }
    }
}

/// Lets the QEMU that may enter the directory use the socket in it.
pub(super) fn open_to_peer(socket: &Path) -> Result<(), Error> {
    fs::set_permissions(socket, Permissions::from_mode(0o666))
        .map_err(|source| Error::PrivateDir { path: socket.into(), source })
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.path) {
            Ok(()) => self.entry.iter().for_each(Entry::done),
            Err(error) => {
                tracing::debug!(path = %self.path.display(), %error, "a private directory stays");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_is_in_nobodys_way() {
        let first = PrivateDir::new(None).unwrap();
        let number: u32 = first.path.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
        let next = std::env::temp_dir().join(format!("towline-{}-{}", process::id(), number + 1));
        // Another test may have it already.
        let left = DirBuilder::new().create(&next).is_ok();
        let second = PrivateDir::new(None).unwrap();
        assert_ne!(second.path, next);
        if left {
            fs::remove_dir(&next).unwrap();
        }
    }
}
