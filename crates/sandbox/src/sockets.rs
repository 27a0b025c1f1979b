//! Sockets that a confined device created, the only files that it removes.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::sys::{SealedPath, seal};

/// Sockets of this process.
#[derive(Debug)]
pub(super) struct OwnSockets(Vec<OwnSocket>);

#[derive(Debug)]
struct OwnSocket {
    path: PathBuf,
    sealed: SealedPath,
    /// Device and inode, once the socket exists.
    identity: Option<(u64, u64)>,
}

impl OwnSockets {
    /// Seals the paths.
    pub(super) fn new<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> io::Result<Self> {
        let paths: Vec<PathBuf> = paths.map(std::path::absolute).collect::<Result<_, _>>()?;
        let names = paths.iter().map(|path| Ok(CString::new(path.clone().into_os_string().into_vec())?));
        let sealed = seal(&names.collect::<io::Result<Vec<_>>>()?)?;
        let socket = |(path, sealed)| OwnSocket { path, sealed, identity: None };
        Ok(Self(paths.into_iter().zip(sealed).map(socket).collect()))
    }

    /// Records the identities of the sockets, which exist now.
    pub(super) fn identify(&mut self) {
        self.0.iter_mut().for_each(|socket| socket.identity = identity(&socket.path));
    }

    /// Returns the addresses of the paths.
    pub(super) fn addresses(&self) -> Vec<u64> {
        self.0.iter().map(|socket| socket.sealed.address()).collect()
    }

    /// Removes the sockets that are unchanged. Another process may replace one between the check and the
    /// removal: the lock of the directory, which prevents that elsewhere, would require opening the
    /// directory.
    pub(super) fn remove(&self) {
        for socket in &self.0 {
            if socket.identity.is_some() && identity(&socket.path) == socket.identity {
                // A socket that cannot be removed is replaced by the next process.
                let _ = socket.sealed.unlink();
            }
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}
