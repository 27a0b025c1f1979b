//! Memory of a running guest, which another QEMU maps as well.

use super::backend::{BackendObject, Backends};
use super::maps::{Detail, FileId, has_shared, overlaps_shared, range_at, shared_parts};
use super::process::Mappings;
use super::proof::{ExpectedMapping, check_backend, prove};
use super::{BackendPurpose, Error, Mapped, MappingKind, Presence, TransferReason};
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
        let outcome = ends.block(&block.name, block.used_bytes);
        match &outcome {
            Ok(_) => {
                ends.new.check_discards(&block.name)?;
                ends.old.check_discards(&block.name)?;
            }
            Err(reason) => ends.check_foreign(&block.name, block.used_bytes, reason)?,
        }
        let is_file = there.of_block(&block.name).is_some_and(BackendObject::maps_file);
        presence.add(
            &block.name,
            outcome,
            if is_file { BackendPurpose::Mapped } else { BackendPurpose::Other },
        );
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

    fn address_of(&self, block: &str) -> Option<u64> {
        self.qemu.facts().address_of(block)
    }

    /// The exit of one QEMU must leave the memory to the other.
    fn check_discards(&self, block: &str) -> Result<(), Error> {
        match self.backends.of_block(block) {
            Some(backend) if backend.discard_data => {
                let (socket, backend) = (self.qemu.socket().to_owned(), backend.id.clone());
                Err(Error::DiscardsData { socket, backend })
            }
            _ => Ok(()),
        }
    }
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
        let no_address = |side: &MappedQemu<'_>| TransferReason::NoAddress {
            found: side.qemu.facts().version.qemu.to_string(),
        };
        let address = self.new.address_of(block).ok_or_else(|| no_address(&self.new))?;
        let new = range_at(self.new.process.get()?, address, bytes);
        let mappings = self.old.process.get()?;
        let old = match (self.old.address_of(block), &new) {
            (Some(address), _) => range_at(mappings, address, bytes),
            (None, _) if !self.old.backends.has_unique_size(backend) => {
                return Err(no_address(&self.old));
            }
            (None, Ok(range)) if !has_shared(mappings, range.file, range.offset, bytes) => {
                let (path, found) = (range.path.clone(), range.file);
                return Err(TransferReason::NotSharedWithSource { path, found });
            }
            (None, _) => new.clone(),
        };
        let wanted =
            |file, offset| ExpectedMapping { block, bytes, kind: MappingKind::Running, file, offset };
        // The old QEMU's side first: it must write into the file as well.
        let (file, offset) = match &old {
            Ok(range) => (range.file, range.offset),
            Err(_) => return prove(&wanted(FileId::default(), 0), old),
        };
        prove(&wanted(file, offset), old)?;
        prove(&wanted(file, offset), new)
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
        let address = self.new.address_of(block)?;
        let (new, old) = (self.new.process.get().ok()?, self.old.process.get().ok()?);
        let mut parts = shared_parts(new, address, bytes);
        Some(parts.any(|part| overlaps_shared(old, part.file, part.offset, part.length)))
    }
}
