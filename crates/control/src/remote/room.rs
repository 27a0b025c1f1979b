//! Room on the filesystems of a host for disks that are copied there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

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

/// The reasons for which there is no room. Devices need none.
pub(super) fn refusals<'a>(needed: impl Iterator<Item = NeededRoom<'a>>) -> Vec<String> {
    let mut filesystems: BTreeMap<u64, Vec<NeededRoom<'_>>> = BTreeMap::new();
    for NeededRoom { drive, file, bytes } in needed {
        let (Ok(found), Some(held)) = (fs::metadata(file), allocated(file)) else { continue };
        let bytes = bytes.saturating_sub(held);
        filesystems.entry(found.dev()).or_default().push(NeededRoom { drive, file, bytes });
    }
    filesystems.values().filter_map(|disks| refusal(disks)).collect()
}

/// The reason of one filesystem.
fn refusal(disks: &[NeededRoom<'_>]) -> Option<String> {
    let directory = disks.last()?.file.parent()?;
    let found = statvfs(directory).ok()?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    // From another host.
    let bytes = disks.iter().fold(0_u64, |sum, disk| sum.saturating_add(disk.bytes));
    let drives = disks.iter().map(|disk| disk.drive).collect::<Vec<_>>().join(", ");
    let [needed, free_mib] = [bytes.div_ceil(MIB), free / MIB];
    let directory = directory.display();
    (free < bytes)
        .then(|| format!("disk {drives} needs {needed} MiB in {directory}, which has {free_mib} MiB free"))
}

/// Bytes that a file has on its filesystem; `None` for a device, and what cannot be seen.
pub(super) fn allocated(file: &Path) -> Option<u64> {
    let found = fs::metadata(file).ok().filter(fs::Metadata::is_file)?;
    Some(found.blocks() * BLOCK_BYTES)
}
