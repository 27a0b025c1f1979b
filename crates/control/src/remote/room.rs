//! Room on the filesystems of a host for disks that are copied there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;
const MIB: u64 = 1 << 20;

/// Bytes that a disk will have in its file.
#[derive(Debug)]
pub(super) struct NeededRoom<'a> {
    pub(super) drive: &'a str,
    pub(super) file: &'a Path,
    pub(super) bytes: u64,
}

/// Disks whose files are on one filesystem.
#[derive(Debug, Default)]
struct OnFilesystem<'a> {
    drives: Vec<&'a str>,
    directory: PathBuf,
    /// Bytes beyond those that the files have.
    bytes: u64,
}

/// The reasons for which there is no room. Devices need none.
pub(super) fn refusals<'a>(needed: impl Iterator<Item = NeededRoom<'a>>) -> Vec<String> {
    let mut filesystems: BTreeMap<u64, OnFilesystem<'_>> = BTreeMap::new();
    for NeededRoom { drive, file, bytes } in needed {
        let (Ok(found), Some(held)) = (fs::metadata(file), allocated(file)) else { continue };
        let on = filesystems.entry(found.dev()).or_default();
        on.drives.push(drive);
        on.directory = file.parent().unwrap_or(file).to_owned();
        // From another host.
        on.bytes = on.bytes.saturating_add(bytes.saturating_sub(held));
    }
    filesystems.into_values().filter_map(|on| on.refusal()).collect()
}

impl OnFilesystem<'_> {
    fn refusal(&self) -> Option<String> {
        let Self { drives, directory, bytes } = self;
        let found = statvfs(directory).ok()?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        let (drives, directory) = (drives.join(", "), directory.display());
        let [needed, free_mib] = [bytes.div_ceil(MIB), free / MIB];
        (free < *bytes).then(|| {
            format!("disk {drives} needs {needed} MiB in {directory}, which has {free_mib} MiB free")
        })
    }
}

/// Bytes that a file has on its filesystem; `None` for a device, and what cannot be seen.
pub(super) fn allocated(file: &Path) -> Option<u64> {
    let found = fs::metadata(file).ok().filter(fs::Metadata::is_file)?;
    Some(found.blocks() * BLOCK_BYTES)
}
