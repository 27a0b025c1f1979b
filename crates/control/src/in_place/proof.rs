//! The proof itself: compares QEMU's description of a backend and the kernel's list of its mappings with the
//! requirements. No I/O.

use super::backend::BackendObject;
use super::error::TransferReason;
use super::maps::{FileId, FileRange, MapSharing, NotOneRange};
use super::{Mapped, MappingKind};

/// Version since which QEMU maps ranges (`offset=`) of files that it opens for reading only (`rom=off`).
const RANGES_SINCE: (u32, u32) = (8, 2);

/// Memory that a block must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExpectedMapping<'a> {
    /// Name of the block.
    pub(super) block: &'a str,
    /// Length in bytes.
    pub(super) bytes: u64,
    pub(super) kind: MappingKind,
    /// The file.
    pub(super) file: FileId,
    /// The block's first byte in it.
    pub(super) offset: u64,
}

/// Refuses a backend by QEMU's own description; its mapping need not be examined then.
pub(super) fn check_backend(
    backend: &BackendObject,
    bytes: u64,
    qemu: &towline_qmp::commands::Version,
) -> Result<(), TransferReason> {
    if !backend.maps_file() {
        return Err(TransferReason::BackendType { found: backend.kind.clone() });
    }
    if (qemu.qemu.major, qemu.qemu.minor) < RANGES_SINCE {
        return Err(TransferReason::OldQemu { found: qemu.qemu.to_string() });
    }
    if backend.bytes != bytes {
        return Err(TransferReason::Size { found: backend.bytes, expected: bytes });
    }
    let is_rom = match backend.rom.as_deref() {
        Some("on") => true,
        Some("off") => false,
        _ => backend.readonly,
    };
    if is_rom {
        return Err(TransferReason::ReadOnly);
    }
    Ok(())
}

/// Returns true if QEMU has opened the backend's file for writing. Then its guest can change the file: by
/// writes if it is mapped shared, and by a balloon if it is private, since QEMU discards memory of a file by
/// punching holes into it.
pub(super) fn may_change_file(backend: &BackendObject) -> bool {
    backend.maps_file() && !backend.readonly
}

/// Compares the mapping of a block with the expected one.
pub(super) fn prove(
    wanted: &ExpectedMapping<'_>,
    found: Result<FileRange, NotOneRange>,
) -> Result<Mapped, TransferReason> {
    let found = found.map_err(|reason| match reason {
        NotOneRange::Hole => TransferReason::NotMapped,
        NotOneRange::Anonymous => TransferReason::Anonymous,
        NotOneRange::Scattered => TransferReason::NotContiguous,
    })?;
    if found.file != wanted.file {
        let (path, found, expected) = (found.path, found.file, wanted.file);
        return Err(TransferReason::OtherFile { path, found, expected });
    }
    if found.offset != wanted.offset {
        let (path, found, expected) = (found.path, found.offset, wanted.offset);
        return Err(TransferReason::Offset { path, found, expected });
    }
    if !found.is_writable {
        return Err(TransferReason::ReadOnly);
    }
    match (wanted.kind, found.sharing, found.private_bytes) {
        (MappingKind::CopyOnWrite, MapSharing::Private, Some(0))
        | (MappingKind::Reflink | MappingKind::Running, MapSharing::Shared, _) => {
            Ok(Mapped { block: wanted.block.to_owned(), bytes: wanted.bytes, kind: wanted.kind })
        }
        (MappingKind::CopyOnWrite, MapSharing::Private, Some(bytes)) => {
            Err(TransferReason::PrivateCopies { bytes })
        }
        (MappingKind::CopyOnWrite, MapSharing::Private, None) => Err(TransferReason::PrivateCopiesUnknown),
        (MappingKind::CopyOnWrite, MapSharing::Shared, _) => Err(TransferReason::WritableImage),
        (MappingKind::Reflink | MappingKind::Running, MapSharing::Private, _) => Err(TransferReason::Private),
    }
}
