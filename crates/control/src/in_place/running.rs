//! Memory of a running guest: the parts that another QEMU can map, and the proof that a waiting one maps them.

use std::fs;
use std::path::PathBuf;

use towline_launch::MappedBlock;

use super::file_id::FileId;
use super::maps::{Detail, FilePart, MapSharing, has_shared, overlaps_shared, range_at, shared_parts};
use super::process::Mappings;
use super::proof::{BackendObject, Backends, address_in, check_backend, prove};
use super::{Error, Mapped, MappingKind, Presence, TransferReason, TransferredBlock};
use crate::qemu::Qemu;

/// Proves which blocks of the guest in `old` are the same memory in the waiting `new`.
///
/// # Errors
/// [`Error::DiscardsData`]; [`Error::ForeignMemory`]; [`Error::UndecidedMemory`]; [`Error::Qemu`].
pub fn of_running(new: &mut Qemu, old: &mut Qemu) -> Result<Presence, Error> {
    let (there, here) = (Backends::of(new.client())?, Backends::of(old.client())?);
    let ends = QemuPair {
        new: MappedQemu { backends: &there, process: Mappings::of(new, Detail::Mappings), qemu: &*new },
        old: MappedQemu { backends: &here, process: Mappings::of(old, Detail::Mappings), qemu: &*old },
    };
    let mut presence = Presence::default();
    for block in old.facts().migrated_blocks() {
        let proven = ends.block(&block.name, block.used_bytes);
        match &proven {
            Ok(_) => {
                for end in [&ends.new, &ends.old] {
                    end.backends.of_block(&block.name).map_or(Ok(()), |one| check_discards(one, end.qemu))?;
                }
            }
            Err(reason) => ends.check_foreign(&block.name, block.used_bytes, reason)?,
        }
        let is_unexpected = there.of_block(&block.name).is_some_and(BackendObject::maps_file);
        let sent = |reason| TransferredBlock { block: block.name.clone(), reason, is_unexpected };
        presence.add(proven.map_err(sent));
    }
    Ok(presence)
}

/// One of two QEMUs.
struct MappedQemu<'a> {
    backends: &'a Backends,
    process: Mappings,
    qemu: &'a Qemu,
}

impl MappedQemu<'_> {
    fn backend(&self, block: &str) -> Result<&BackendObject, TransferReason> {
        self.backends.of_block(block).ok_or(TransferReason::NoBackend)
    }
}

/// The exit of one QEMU must leave the memory to the other.
fn check_discards(backend: &BackendObject, qemu: &Qemu) -> Result<(), Error> {
    if backend.discard_data {
        let (socket, backend) = (qemu.socket().to_owned(), backend.id.clone());
        return Err(Error::DiscardsData { socket, backend });
    }
    Ok(())
}

/// The QEMU that waits, and the one that runs the guest.
struct QemuPair<'a> {
    new: MappedQemu<'a>,
    old: MappedQemu<'a>,
}

impl QemuPair<'_> {
    fn block(&self, block: &str, bytes: u64) -> Result<Mapped, TransferReason> {
        let (backend, version) = (self.old.backend(block)?, &self.new.qemu.facts().version);
        check_backend(self.new.backend(block)?, bytes, version)?;
        let new = range_at(self.new.process.get()?, address_in(self.new.qemu, block)?, bytes);
        let mappings = self.old.process.get()?;
        let old = match (address_in(self.old.qemu, block), &new) {
            (Ok(address), _) => range_at(mappings, address, bytes)?,
            (Err(reason), _) if !self.old.backends.has_unique_size(backend) => return Err(reason),
            (Err(_), Ok(range)) if !has_shared(mappings, range.file, range.offset, bytes) => {
                let (path, found) = (range.path.clone(), range.file);
                return Err(TransferReason::NotSharedWithSource { path, found });
            }
            (Err(_), _) => new.clone()?,
        };
        let kind = MappingKind::Running;
        let wanted = FilePart { file: old.file, offset: old.offset, length: bytes };
        // The old QEMU's side first: it must write into the file as well.
        prove(kind, wanted, old)?;
        prove(kind, wanted, new?)?;
        Ok(Mapped { block: block.to_owned(), bytes, kind })
    }

    /// Refuses memory of this block that is another memory of the guest, or may be: its pages would need to
    /// be sent.
    fn check_foreign(&self, block: &str, bytes: u64, reason: &TransferReason) -> Result<(), Error> {
        let is_shared = |backend: &BackendObject| backend.maps_file() && backend.share;
        if !self.new.backends.of_block(block).is_some_and(is_shared) {
            return Ok(());
        }
        let (socket, reason) = (self.new.qemu.socket().to_owned(), reason.clone());
        match self.is_foreign(block, bytes) {
            Some(false) => Ok(()),
            Some(true) => Err(Error::ForeignMemory { socket, block: block.to_owned(), reason }),
            None => Err(Error::UndecidedMemory { socket, block: block.to_owned(), reason }),
        }
    }

    /// Returns true if a part of the block in the new QEMU is memory of the old one; `None`: unknown.
    fn is_foreign(&self, block: &str, bytes: u64) -> Option<bool> {
        let address = address_in(self.new.qemu, block).ok()?;
        let (new, old) = (self.new.process.get().ok()?, self.old.process.get().ok()?);
        let mut parts = shared_parts(new, address, bytes);
        Some(parts.any(|part| overlaps_shared(old, part.file, part.offset, part.length)))
    }
}

/// A block of a guest's memory that no other process can map.
#[derive(Debug, Clone, PartialEq, Eq)]
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
pub struct GuestBackends {
    /// Blocks that another QEMU can map: of files by their names, or by descriptors of the QEMU that has them (`/proc/PID/fd/N`).
    pub shared: Vec<MappedBlock>,
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
        check_discards(backend, qemu)?;
        match locate(backend, block.address, &backends, &process) {
            Ok((path, offset)) => {
                let (id, length) = (backend.id.clone(), block.used_bytes);
                found.shared.push(MappedBlock { id, path, offset, length });
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

/// The file that most of a guest's memory is mapped from copy-on-write.
///
/// # Errors
/// As [`guest_backends`].
pub(crate) fn mapped_image(qemu: &mut Qemu) -> Result<Option<PathBuf>, Error> {
    let private = guest_backends(qemu)?.private;
    let Some(path) = private.into_iter().find_map(|block| block.path) else { return Ok(None) };
    Ok(Some(qemu.working_directory().unwrap_or_default().join(path)))
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
    let path_of = |is_it: &dyn Fn(&fs::Metadata) -> bool| {
        let open = descriptors.iter().find(|(_, found)| is_it(found));
        let path = named(backend, process, open.map(|(_, found)| found));
        path.or_else(|| open.map(|(path, _)| path.clone())).ok_or(TransferReason::Anonymous)
    };
    if let Some(address) = address {
        let range = range_at(mappings, address, backend.bytes).map_err(|_| TransferReason::Anonymous)?;
        if range.sharing != MapSharing::Shared {
            return Err(TransferReason::Private);
        }
        // On some filesystems the numbers of a file differ from those of its mappings, so only its name
        // identifies it.
        return Ok((path_of(&|found| FileId::of(found) == range.file)?, range.offset));
    }
    // QEMU before 8.2 reports no addresses, and maps files from their beginning.
    if !backends.has_unique_size(backend) {
        return Err(TransferReason::NoAddress { found: "before 8.2".into() });
    }
    let is_it = |found: &fs::Metadata| {
        let bytes = backend.bytes;
        found.is_file() && found.len() == bytes && has_shared(mappings, FileId::of(found), 0, bytes)
    };
    Ok((path_of(&is_it)?, 0))
}

/// The file's own name, if it still leads to the file that QEMU has open.
fn named(backend: &BackendObject, process: &Mappings, open: Option<&fs::Metadata>) -> Option<PathBuf> {
    let path = backend.file()?;
    let path = if path.is_absolute() { path.to_owned() } else { process.working_directory()?.join(path) };
    // A descriptor of a process that may end is not a name.
    if path.starts_with("/proc") {
        return None;
    }
    let named = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
    open.is_none_or(|open| FileId::of(open) == FileId::of(&named)).then_some(path)
}
