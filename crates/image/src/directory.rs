//! Images in a directory: listing and removal.
//!
//! An incremental image needs its base images, and a restore needs its image until the guest has its memory.
//! Neither is removed: [`remove`] refuses an image that is locked, open or mapped by a process, or (possibly)
//! the base of another one in the same directory. It has the image locked from before these checks until it
//! is removed, so no increment is stored on it and no writer replaces it during that time.
//!
//! Limits: increments in other directories are not found, nor processes of other users without the right to
//! see them.

mod removal;

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

pub use removal::{is_in_use, remove, remove_leaf};
use rustix::fs::OFlags;
use towline_protocol::configuration::MAGIC;

use crate::manifest::Timestamp;
use crate::regular_file::{allocated, open_regular};
use crate::{Error, Image, Result, base_paths};

/// An image file of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageEntry {
    /// Path of the file.
    pub path: PathBuf,
    /// Time of the last modification.
    pub modified: Timestamp,
    /// Disk space of the file in bytes.
    pub allocated: u64,
    /// Paths of its base images, the whole one last.
    pub bases: Vec<PathBuf>,
    /// Images of the same directory that are based on it.
    pub increments: Vec<PathBuf>,
    /// Content of the image; the error's text if it cannot be read.
    pub summary: Result<ImageSummary, String>,
}

/// Content of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSummary {
    /// Source of its guest, if it was recorded.
    pub source: Option<String>,
    /// Version of the QEMU that ran the guest, if it was recorded.
    pub qemu: Option<String>,
    /// Memory of the guest in bytes.
    pub memory_bytes: u64,
    /// Bytes of pages with content: about the size of the image without a base.
    pub content_bytes: u64,
}

/// Lists the images in a directory, by name. Other files and symbolic links are omitted.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<ImageEntry>> {
    let mut entries: Vec<ImageEntry> =
        image_paths(directory)?.iter().filter_map(|path| entry(path)).collect();
    let bases: Vec<Vec<PathBuf>> = entries.iter().map(|entry| canonical(&entry.bases)).collect();
    let paths: Vec<PathBuf> = entries.iter().map(|entry| entry.path.clone()).collect();
    for entry in &mut entries {
        let Ok(path) = entry.path.canonicalize() else { continue };
        let based = paths.iter().zip(&bases).filter(|(_, bases)| bases.contains(&path));
        entry.increments = based.map(|(path, _)| path.clone()).collect();
    }
    Ok(entries)
}

/// Returns the paths of all images in a directory, sorted.
fn image_paths(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = paths_in(directory)?;
    // A partial file begins like an image.
    paths.retain(|path| !is_partial_name(path) && open(path).is_ok_and(|mut file| is_image(&mut file)));
    Ok(paths)
}

/// Returns the paths of all files in a directory, sorted.
pub(crate) fn paths_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source| Error::Read { path: directory.into(), source };
    let entries = fs::read_dir(directory).map_err(failed)?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect::<Result<_>>()?;
    paths.sort();
    Ok(paths)
}

fn is_partial_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".partial")
}

/// Opens a regular file; a symbolic link is not followed. Opening a FIFO does not block.
fn open(path: &Path) -> Result<File> {
    let file = open_regular(path, OFlags::NOFOLLOW);
    let file = file.map_err(|source| Error::Read { path: path.into(), source })?;
    file.ok_or_else(|| Error::NotAFile { path: path.into() })
}

fn is_image(file: &mut File) -> bool {
    let mut magic = [0; 4];
    file.read_exact(&mut magic).is_ok() && magic == MAGIC.to_be_bytes()
}

/// `None`: the file has since been removed, or is a stream.
fn entry(path: &Path) -> Option<ImageEntry> {
    let metadata = fs::metadata(path).ok()?;
    let opened = Image::open(path);
    if let Err(Error::NotMappedRam { .. }) = opened {
        return None;
    }
    let summary = opened.map(|image| {
        let pages = image.qemu_load_statistics();
        let origin = image.manifest().map(|manifest| &manifest.origin);
        ImageSummary {
            source: origin.map(|origin| origin.source.clone()),
            qemu: origin.and_then(|origin| origin.qemu.clone()),
            memory_bytes: pages.total,
            content_bytes: pages.normal_bytes,
        }
    });
    Some(ImageEntry {
        path: path.into(),
        modified: metadata.modified().unwrap_or(std::time::UNIX_EPOCH).into(),
        allocated: allocated(&metadata),
        bases: base_paths(path),
        increments: Vec::new(),
        summary: summary.map_err(|error| error.to_string()),
    })
}

fn canonical(paths: &[PathBuf]) -> Vec<PathBuf> {
    paths.iter().filter_map(|path| path.canonicalize().ok()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn another_file_is_neither_listed_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes.txt");
        fs::write(&path, b"notes").unwrap();
        assert_eq!(list(directory.path()).unwrap(), []);
        assert!(matches!(remove(&path), Err(Error::NotAnImage { .. })));
        assert!(matches!(remove(directory.path()), Err(Error::NotAFile { .. })));
        assert!(path.exists());
    }
}
