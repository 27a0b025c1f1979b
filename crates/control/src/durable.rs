//! Files on storage of several hosts, whole at every moment and durable.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Makes a file that has all of this value, as JSON, at every moment, durably, on storage of several hosts: one of many gets it.
/// Returns false if it was there, and it is durable then. A server may have made it for this call, and its reply was lost.
pub(crate) fn create_once(path: &Path, value: &impl Serialize) -> io::Result<bool> {
    let (directory, staging) = (path.parent().unwrap_or(Path::new("/")), staging(path));
    let linked = write(&staging, value).and_then(|()| fs::hard_link(&staging, path));
    let _ = fs::remove_file(&staging);
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => sync(directory).map(|()| false),
        linked => linked.and_then(|()| sync(directory)).map(|()| true),
    }
}

/// Gives a file this content, as JSON, in one step, durably.
pub(crate) fn replace(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let staging = staging(path);
    let replaced = write(&staging, value).and_then(|()| fs::rename(&staging, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&staging);
    }
    replaced.and_then(|()| path.parent().map_or(Ok(()), sync))
}

/// Removes a file durably, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        // A server may have done it, and its reply was lost.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    path.parent().map_or(Ok(()), sync)
}

/// The highest number that the name of a file in this directory has.
pub(crate) fn highest(directory: &Path, number: impl Fn(&str) -> Option<u64>) -> io::Result<Option<u64>> {
    let mut highest = None;
    for entry in fs::read_dir(directory)? {
        highest = highest.max(entry?.file_name().to_str().and_then(&number));
    }
    Ok(highest)
}

/// Name of a file beside this one, of this process alone.
fn staging(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}-{:016x}", fastrand::u64(..)))
}

fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let json = serde_json::to_vec(value)?;
    let mut file = File::create_new(path)?;
    file.write_all(&json)?;
    file.sync_all()
}

/// Has a directory on its storage.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
