//! The image file of a guest that is being uploaded, on a disk of this host.
//!
//! ```text
//!   TMPDIR or /var/tmp / towline-UID /      of this user alone (0700)
//!                          NAME-HASH.img    an image as any other: HASH is of the whole location, for equal names
//! ```
//! A file that is left over, by a failed upload or a killed process, is replaced by the next image of the
//! same location.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{statfs, statvfs};
use towline_protocol::RamBlock;

use super::{Error, Location, Result};
use crate::manifest::sidecar_path;
use crate::regular_file::FileId;
use crate::{Existing, Image, ImageWriter, Origin, directory, leftover};

/// Default without TMPDIR; /tmp is a tmpfs on many hosts.
const DIRECTORY: &str = "/var/tmp";
/// Filesystems in memory (`linux/magic.h`): tmpfs, ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];
/// Digits of the location's hash in the file's name.
const HASH_DIGITS: usize = 12;

/// Starts to write the image file of a guest that is stored as `image` in a store.
pub(super) fn create(image: &str, origin: Origin) -> Result<ImageWriter> {
    let directory = directory();
    let failed = |why| Error::Spool { path: directory.display().to_string(), why };
    let found = statfs(&directory).map_err(|errno| failed(errno.into()))?;
    if IN_MEMORY.contains(&(found.f_type as i64)) {
        let text = "it is in memory (tmpfs), where a guest would fill it";
        return Err(failed(io::Error::other(text)));
    }
    let own = own(&directory);
    create_private(&own).map_err(failed)?;
    let path = own.join(file_name(image));
    ImageWriter::create(&path, Existing::Replace, origin).map_err(|error| Error::Image(Box::new(error)))
}

/// Removes files of images of this prefix that did not reach the store, by failed uploads or killed processes: those with names that
/// `is_removed` accepts. A file that another process writes or sends stays.
pub fn remove_unsent(prefix: &Location, is_removed: &dyn Fn(&str) -> bool) {
    for entry in std::fs::read_dir(own(&directory())).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let file = file.strip_prefix('.').and_then(|file| file.strip_suffix(".partial")).unwrap_or(&file);
        let name = file.rsplit_once('-').map(|(name, _)| name).filter(|name| is_removed(name));
        let image = name.and_then(|name| prefix.image(name).ok());
        if image.is_some_and(|image| file_name(&image.to_string()) == file) {
            let path = entry.path().with_file_name(file);
            let removed = leftover::remove(&path).map(drop).and_then(|()| match path.exists() {
                true => directory::remove_leaf(&path).map(drop),
                false => Ok(()),
            });
            removed.unwrap_or_else(|error| tracing::info!(%error, "the file of an image stays"));
        }
    }
}

fn directory() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| DIRECTORY.into(), PathBuf::from)
}

/// The directory of this user.
fn own(directory: &Path) -> PathBuf {
    directory.join(format!("towline-{}", rustix::process::geteuid().as_raw()))
}

fn file_name(image: &str) -> String {
    let hash = blake3::hash(image.as_bytes()).to_hex();
    format!("{}-{}.img", image.rsplit('/').next().unwrap_or_default(), &hash[..HASH_DIGITS])
}

/// Refuses a guest for which the disk may have no room.
pub(super) fn check_room(path: &Path, blocks: &[RamBlock]) -> Result<()> {
    let directory = path.parent().unwrap_or(path);
    let failed = |why| Error::Spool { path: directory.display().to_string(), why };
    let found = statvfs(directory).map_err(|errno| failed(errno.into()))?;
    let needed: u64 = blocks.iter().map(|block| block.length).sum();
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free < needed {
        let text = format!("{free} bytes are free, and the guest has {needed} bytes of memory");
        return Err(failed(io::Error::other(text)));
    }
    Ok(())
}

/// Removes the file of an image and its manifest, unless another process has replaced it by a newer one.
pub(super) fn remove(image: &Image) -> io::Result<()> {
    let path = image.path();
    if FileId::named(path) != FileId::of_file(image.file()) {
        return Ok(());
    }
    std::fs::remove_file(path)?;
    std::fs::remove_file(sidecar_path(path))
}

/// Creates the directory of this user, unless it exists. Another user's would give that one the guest's
/// memory.
fn create_private(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => return done,
    }
    let found = std::fs::symlink_metadata(path)?;
    let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if is_own && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    let text = format!("{} is not a directory of this user alone (mode 0700); remove it", path.display());
    Err(io::Error::other(text))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_directory_that_others_can_use_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("towline-0");
        create_private(&path).unwrap();
        create_private(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
        assert!(create_private(&path).unwrap_err().to_string().contains("of this user alone"));
        std::fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink(directory.path(), &path).unwrap();
        assert!(create_private(&path).unwrap_err().to_string().contains("of this user alone"));
    }

    #[test]
    fn a_guest_that_may_not_fit_is_refused_with_both_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        let block = |length| [RamBlock { name: "a".into(), length, mapped: None }];
        check_room(&path, &block(4096)).unwrap();
        let error = check_room(&path, &block(1 << 60)).unwrap_err().to_string();
        assert!(error.contains("1152921504606846976 bytes of memory") && error.contains("TMPDIR"), "{error}");
    }
}
