//! Files on storage of several hosts, whole at every moment and durable.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Makes a file that has all of these bytes at every moment, durably, on storage of several hosts: one of many gets it.
///
/// # Errors
/// `AlreadyExists`: it is there, and durable. A server may have made it for this call, and its reply was lost.
pub(crate) fn create_once(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (directory, staging) = (path.parent().unwrap_or(Path::new("/")), staging(path));
    let linked = write(&staging, bytes).and_then(|()| fs::hard_link(&staging, path));
    let _ = fs::remove_file(&staging);
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        linked => sync(directory).and(linked),
    }
}

/// Gives a file this content in one step, durably.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let staging = staging(path);
    let replaced = write(&staging, bytes).and_then(|()| fs::rename(&staging, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&staging);
    }
    replaced.and_then(|()| path.parent().map_or(Ok(()), sync))
}

/// Name of a file beside this one, of this process alone.
fn staging(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}-{:016x}", fastrand::u64(..)))
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Has a directory on its storage.
pub(crate) fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
