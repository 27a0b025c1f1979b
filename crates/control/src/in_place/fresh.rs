//! Content of a waiting QEMU's memory before a guest is sent into it.
//!
//! QEMU assumes that the memory of an incoming guest is zero: it loads only the pages of an image that have a
//! bit, and ignores the first zero page that a lane sends for an address. If the backend's file has content,
//! that content stays there and the guest gets it. Records of the main channel clear the page.
//!
//! Limit: where QEMU's process cannot be inspected, a directory at an absolute path of this process is
//! assumed to be QEMU's.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::image_file::next_data;
use super::maps::{Detail, private_bytes};
use super::process::Mappings;
use super::proof::{BackendObject, Backends, OBJECTS};
use super::{Error, TransferReason};
use crate::qemu::Qemu;

/// `f_type` of hugetlbfs, where `lseek` takes holes for data.
const HUGETLBFS: u64 = 0x958458f6;

/// A backend whose memory may have content before the guest arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OldMemory {
    /// Id of the object.
    pub backend: String,
    /// Reason for which it is not known to be zero.
    pub reason: TransferReason,
}

impl fmt::Display for OldMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, reason } = self;
        write!(
            f,
            "memory backend {backend:?} of QEMU may have old content, so zero pages are sent as well and without lanes, which takes \
             longer: {reason}; start QEMU with mem-path= of a directory or of a new file"
        )
    }
}

impl OldMemory {
    /// Names that the blocks of these backends may have.
    pub(crate) fn blocks(old: &[Self]) -> impl Iterator<Item = String> {
        old.iter().flat_map(|old| [old.backend.clone(), format!("{OBJECTS}{}", old.backend)])
    }
}

/// The backends of a waiting QEMU whose memory is a file and not known to be zero.
///
/// # Errors
/// [`Error::Qemu`].
pub fn old_memory(qemu: &mut Qemu) -> Result<Vec<OldMemory>, Error> {
    let backends = Backends::of(qemu.client())?;
    let process = Mappings::of(qemu, Detail::PrivateCopies);
    let old = |backend: &BackendObject| {
        let reason = check(backend, &process).err()?;
        Some(OldMemory { backend: backend.id.clone(), reason })
    };
    Ok(backends.iter().filter(|backend| backend.maps_file()).filter_map(old).collect())
}

/// Returns true if the backend has a file that seems to have no content.
pub(super) fn may_be_new_file(backend: &BackendObject) -> bool {
    let named = backend.file().map(fs::metadata);
    matches!(named, Some(Ok(named)) if named.is_file() && named.blocks() == 0)
}

fn check(backend: &BackendObject, process: &Mappings) -> Result<(), TransferReason> {
    let path = PathBuf::from(backend.path.clone().unwrap_or_default());
    let named = metadata(&path, process)?;
    if named.is_dir() {
        // QEMU creates a new file there, and unlinks it.
        return Ok(());
    }
    let file = process.open_file(&named)?.ok_or_else(|| TransferReason::NotOpen { path: path.clone() })?;
    let begin = backend.offset.unwrap_or_default();
    let first = first_data(&file, &named, begin).map_err(|error| TransferReason::file(&path, error))?;
    if let Some(offset) = first
        && offset < begin.saturating_add(backend.bytes)
    {
        return Err(TransferReason::OldContent { path, offset });
    }
    match private_bytes(process.get()?, named.ino()) {
        Some(0) => Ok(()),
        Some(bytes) => Err(TransferReason::PrivateCopies { bytes }),
        None => Err(TransferReason::PrivateCopiesUnknown),
    }
}

/// The file that QEMU was given, resolved as by QEMU where possible.
fn metadata(path: &Path, process: &Mappings) -> Result<Metadata, TransferReason> {
    let seen = process.seen(path).and_then(|seen| fs::metadata(seen).ok());
    match seen {
        Some(metadata) => Ok(metadata),
        None if path.is_absolute() => fs::metadata(path).map_err(|error| TransferReason::file(path, error)),
        None => Err(TransferReason::file(path, "a path of QEMU's directory, which is not known")),
    }
}

/// Offset of the first data of a file at or after `begin`.
fn first_data(file: &File, metadata: &Metadata, begin: u64) -> std::io::Result<Option<u64>> {
    if rustix::fs::fstatfs(file)?.f_type as u64 == HUGETLBFS {
        return Ok((metadata.blocks() > 0).then_some(begin));
    }
    Ok(next_data(file, begin)?.map(|(data, _)| data))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_of_a_file_is_found_behind_its_begin() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let first = |begin| first_data(&file, &file.metadata().unwrap(), begin).unwrap();
        assert_eq!(first(0), None);
        file.write_all_at(&[0], 4 << 20).unwrap();
        assert_eq!(first(0), Some(4 << 20), "also if it is zeros");
        assert_eq!(first(6 << 20), None);
    }
}
