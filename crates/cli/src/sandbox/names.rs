//! The sockets that a confined device made, which it removes in the end, and no other file.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::sys::{SealedName, seal};

/// Paths of sockets.
#[derive(Debug)]
pub(super) struct Names(Vec<Name>);

#[derive(Debug)]
struct Name {
    path: PathBuf,
    sealed: SealedName,
    /// Device and inode of our socket, once it is there.
    identity: Option<(u64, u64)>,
}

impl Names {
    /// Fixes the paths.
    pub(super) fn new<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> io::Result<Self> {
        let paths: Vec<PathBuf> = paths.map(std::path::absolute).collect::<Result<_, _>>()?;
        let names = paths.iter().map(|path| Ok(CString::new(path.clone().into_os_string().into_vec())?));
        let sealed = seal(&names.collect::<io::Result<Vec<_>>>()?)?;
        let name = |(path, sealed)| Name { path, sealed, identity: None };
        Ok(Self(paths.into_iter().zip(sealed).map(name).collect()))
    }

    /// The sockets are there.
    pub(super) fn remember(&mut self) {
        self.0.iter_mut().for_each(|name| name.identity = identity(&name.path));
    }

    pub(super) fn addresses(&self) -> Vec<u64> {
        self.0.iter().map(|name| name.sealed.address()).collect()
    }

    /// Removes the sockets that are still there. Between looking and removing another process may replace one: the directory's
    /// lock, which prevents that elsewhere, cannot be had without opening the directory.
    pub(super) fn remove(&self) {
        for name in &self.0 {
            if name.identity.is_some() && identity(&name.path) == name.identity {
                // There is nothing to do about one that stays: the next process replaces it.
                let _ = name.sealed.unlink();
            }
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}
