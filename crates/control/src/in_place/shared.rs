//! Memory of a running guest that another QEMU can map.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::backend::{BackendObject, Backends};
use super::maps::{Detail, FileId, MapSharing, MapsEntry, has_shared, range_at};
use super::process::Mappings;
use super::{Error, TransferReason};
use crate::qemu::Qemu;

/// A block of a guest's memory that another process can map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedBlock {
    /// Id of its backend.
    pub backend: String,
    /// Length of the block in bytes.
    pub bytes: u64,
    /// The file: its name, or a descriptor of the QEMU that has it (`/proc/PID/fd/N`).
    pub path: PathBuf,
    /// The block's first byte in the file.
    pub offset: u64,
}

/// A block of a guest's memory that no other process can map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrivateBlock {
    /// Id of its backend.
    pub backend: String,
    /// Type of the backend.
    pub kind: String,
    /// File of the block, if it is mapped privately from one.
    pub path: Option<String>,
    /// Reason for it.
    pub reason: TransferReason,
}

/// The memory backends of a running guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GuestBackends {
    /// Blocks that another QEMU can map.
    pub shared: Vec<SharedBlock>,
    /// The others.
    pub private: Vec<PrivateBlock>,
}

/// Names of the blocks that are mapped shared. With `x-ignore-shared`, QEMU leaves out some of them or all.
///
/// # Errors
/// [`Error::Qemu`].
pub fn shared_blocks(qemu: &mut Qemu) -> Result<Vec<String>, Error> {
    let backends = Backends::of(qemu.client())?;
    let is_shared =
        |name: &&String| backends.of_block(name).is_some_and(|backend| backend.share && !backend.readonly);
    Ok(qemu.facts().migrated_blocks().map(|block| &block.name).filter(is_shared).cloned().collect())
}

/// Finds the files of a running guest's memory. That another QEMU maps the same is proven later
/// ([`super::of_running`]).
///
/// # Errors
/// [`Error::DiscardsData`]; [`Error::Qemu`].
pub fn guest_backends(qemu: &mut Qemu) -> Result<GuestBackends, Error> {
    let backends = Backends::of(qemu.client())?;
    let process = Mappings::of(qemu, Detail::Mappings);
    let mut found = GuestBackends::default();
    for block in qemu.facts().migrated_blocks() {
        let Some(backend) = backends.of_block(&block.name) else { continue };
        if backend.discard_data {
            let (socket, backend) = (qemu.socket().to_owned(), backend.id.clone());
            return Err(Error::DiscardsData { socket, backend });
        }
        match locate(backend, block.address, &backends, &process) {
            Ok((path, offset)) => {
                let (backend, bytes) = (backend.id.clone(), block.used_bytes);
                found.shared.push(SharedBlock { backend, bytes, path, offset });
            }
            Err(reason) => found.private.push(PrivateBlock {
                backend: backend.id.clone(),
                kind: backend.kind.clone(),
                path: backend.path.clone().filter(|_| backend.maps_file()),
                reason,
            }),
        }
    }
    Ok(found)
}

/// The file of a backend, by a name that another process can open, and the offset of the block in it.
fn locate(
    backend: &BackendObject,
    address: Option<u64>,
    backends: &Backends,
    process: &Mappings,
) -> Result<(PathBuf, u64), TransferReason> {
    if !backend.share {
        return Err(TransferReason::Private);
    }
    let mappings = process.get()?;
    let descriptors = process.files()?;
    if let Some(address) = address {
        let range = range_at(mappings, address, backend.bytes).map_err(|_| TransferReason::Anonymous)?;
        if range.sharing != MapSharing::Shared {
            return Err(TransferReason::Private);
        }
        let is_it = |(_, found): &&(PathBuf, fs::Metadata)| file_id(found) == range.file;
        let open = descriptors.iter().find(is_it);
        let path = named(backend, process, open.map(|(_, found)| found));
        // On some filesystems the numbers of a file differ from those of its mappings, so only its name
        // identifies it.
        let path = path.or_else(|| open.map(|(path, _)| path.clone())).ok_or(TransferReason::Anonymous)?;
        return Ok((path, range.offset));
    }
    // QEMU before 8.2 reports no addresses, and maps files from their beginning.
    if !backends.has_unique_size(backend) {
        return Err(TransferReason::NoAddress { found: "before 8.2".into() });
    }
    let is_it = |(_, found): &&(PathBuf, fs::Metadata)| {
        found.is_file() && found.len() == backend.bytes && is_mapped(mappings, found, backend.bytes)
    };
    let open = descriptors.iter().find(is_it);
    let path = named(backend, process, open.map(|(_, found)| found));
    let path = path.or_else(|| open.map(|(path, _)| path.clone())).ok_or(TransferReason::Anonymous)?;
    Ok((path, 0))
}

fn is_mapped(mappings: &[MapsEntry], file: &fs::Metadata, bytes: u64) -> bool {
    has_shared(mappings, file_id(file), 0, bytes)
}

/// The file's own name, if it still leads to the file that QEMU has open.
fn named(backend: &BackendObject, process: &Mappings, open: Option<&fs::Metadata>) -> Option<PathBuf> {
    let path = Path::new(backend.path.as_ref().filter(|_| backend.maps_file())?);
    let path = if path.is_absolute() { path.to_owned() } else { process.working_directory()?.join(path) };
    // A descriptor of a process that may end is not a name.
    if path.starts_with("/proc") {
        return None;
    }
    let named = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
    let is_same = |open: &fs::Metadata| (open.dev(), open.ino()) == (named.dev(), named.ino());
    open.is_none_or(is_same).then_some(path)
}

fn file_id(file: &fs::Metadata) -> FileId {
    let (major, minor) = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    FileId { major, minor, inode: file.ino() }
}
