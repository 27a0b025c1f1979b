//! Memory backends of a QEMU, as it describes them over QMP, and the proof itself, which compares that
//! description and the kernel's list of QEMU's mappings with the requirements.

use std::path::Path;

use serde_json::{Map, Value};
use towline_qmp::commands::{Memdev, QomGet, QueryMemdev};
use towline_qmp::{self as qmp, Client, CommandRequest};

use super::MappingKind;
use super::maps::{FilePart, FileRange, MapSharing};
use super::transfer_reason::TransferReason;
use crate::qemu::{Qemu, if_known};

/// Version since which QEMU maps ranges (`offset=`) of files that it opens for reading only (`rom=off`).
const RANGES_SINCE: (u32, u32) = (8, 2);

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

/// Address of a block in the process of its QEMU.
pub(super) fn address_in(qemu: &Qemu, block: &str) -> Result<u64, TransferReason> {
    let no_address = || TransferReason::NoAddress { found: qemu.facts().version.qemu.to_string() };
    qemu.facts().address_of(block).ok_or_else(no_address)
}

/// Compares the mapping of a block with the part of a file that it must be.
pub(super) fn prove(kind: MappingKind, wanted: FilePart, found: FileRange) -> Result<(), TransferReason> {
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
    match (kind, found.sharing, found.private_bytes) {
        (MappingKind::CopyOnWrite, MapSharing::Private, Some(0))
        | (MappingKind::Written, MapSharing::Private, _)
        | (MappingKind::Reflink | MappingKind::Running, MapSharing::Shared, _) => Ok(()),
        (MappingKind::CopyOnWrite, MapSharing::Private, Some(bytes)) => {
            Err(TransferReason::PrivateCopies { bytes })
        }
        (MappingKind::CopyOnWrite, MapSharing::Private, None) => Err(TransferReason::PrivateCopiesUnknown),
        (MappingKind::CopyOnWrite | MappingKind::Written, MapSharing::Shared, _) => {
            Err(TransferReason::WritableImage)
        }
        (MappingKind::Reflink | MappingKind::Running, MapSharing::Private, _) => Err(TransferReason::Private),
    }
}

// Memory backends of a QEMU, as it describes them over QMP.
//
// A RAM block of a `memory-backend-*` object has the object's id as its name, or with old machine types the
// object's path (`x-use-canonical-path-for-ramblock-id`).

/// The only type of backend that maps a given file.
const FILE_BACKEND: &str = "memory-backend-file";
/// Container of the objects that `-object` creates.
pub(super) const OBJECTS: &str = "/objects/";

/// A `memory-backend-*` object. A property is absent where this QEMU, or this type, does not have it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct BackendObject {
    /// Id of the object.
    pub(super) id: String,
    /// Type of the object, for example `memory-backend-file`.
    pub(super) kind: String,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// True if its pages were allocated at start.
    pub(super) prealloc: bool,
    /// True if it is mapped shared.
    pub(super) share: bool,
    /// Name of the file on the command line.
    pub(super) path: Option<String>,
    /// Offset of the first byte in the file; since 8.1.
    pub(super) offset: Option<u64>,
    /// True if the file was opened for reading only.
    pub(super) readonly: bool,
    /// `on`: the guest cannot write; `auto`: as `readonly`; since 8.2.
    pub(super) rom: Option<String>,
    /// True if the file's content is discarded when QEMU exits.
    pub(super) discard_data: bool,
}

/// The properties of a backend that are queried, by their QOM names.
const PROPERTIES: [&str; 7] = ["type", "share", "mem-path", "offset", "readonly", "rom", "discard-data"];

/// All backends of a QEMU.
#[derive(Debug, Clone, Default)]
pub(super) struct Backends(Vec<BackendObject>);

impl BackendObject {
    /// Returns true if it maps a given file.
    pub(super) fn maps_file(&self) -> bool {
        self.kind == FILE_BACKEND
    }

    /// The given file that it maps, by its name.
    pub(super) fn file(&self) -> Option<&Path> {
        self.path.as_deref().filter(|_| self.maps_file()).map(Path::new)
    }

    /// A backend with these [`PROPERTIES`], null where QEMU does not have one.
    fn new(id: String, memdev: &Memdev, properties: &Map<String, Value>) -> Self {
        let text = |name: &str| properties[name].as_str().map(str::to_owned);
        let is_on = |name: &str| properties[name].as_bool().unwrap_or_default();
        Self {
            id,
            kind: text("type").unwrap_or_default(),
            bytes: memdev.size,
            prealloc: memdev.prealloc,
            share: is_on("share"),
            path: text("mem-path"),
            offset: properties["offset"].as_u64(),
            readonly: is_on("readonly"),
            rom: text("rom"),
            discard_data: is_on("discard-data"),
        }
    }
}

impl Backends {
    /// Queries them with two round trips.
    pub(super) fn of(client: &mut Client) -> Result<Self, qmp::Error> {
        let mut memdevs = client.execute(&QueryMemdev)?;
        memdevs.retain(|memdev| memdev.id.is_some());
        let mut requests = Vec::new();
        for id in memdevs.iter().filter_map(|memdev| memdev.id.as_ref()) {
            for property in PROPERTIES {
                let get = QomGet { path: format!("{OBJECTS}{id}"), property: property.into() };
                requests.push(CommandRequest::new(&get)?);
            }
        }
        if requests.is_empty() {
            return Ok(Self::default());
        }
        let mut replies = client.execute_all(&requests)?.into_iter();
        let mut backends = Vec::new();
        for memdev in memdevs {
            let mut properties = Map::new();
            for (property, reply) in PROPERTIES.into_iter().zip(&mut replies) {
                let value = if_known(reply.of::<QomGet>())?.unwrap_or_default();
                properties.insert(property.into(), value);
            }
            let id = memdev.id.clone().unwrap_or_default();
            backends.push(BackendObject::new(id, &memdev, &properties));
        }
        Ok(Self(backends))
    }

    /// The backend of a block.
    pub(super) fn of_block(&self, block: &str) -> Option<&BackendObject> {
        let id = block.strip_prefix(OBJECTS).unwrap_or(block);
        self.0.iter().find(|backend| backend.id == id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &BackendObject> {
        self.0.iter()
    }

    /// Returns true if no other backend has its size, so the size identifies it.
    pub(super) fn has_unique_size(&self, backend: &BackendObject) -> bool {
        self.0.iter().filter(|other| other.bytes == backend.bytes).count() == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_named_by_id_or_path() {
        let backend = |id: &str, bytes| BackendObject { id: id.into(), bytes, ..BackendObject::default() };
        let backends = Backends(vec![backend("mem", 8), backend("more", 8), backend("small", 4)]);
        assert_eq!(backends.of_block("mem"), backends.of_block("/objects/mem"));
        assert!(backends.of_block("mem").is_some());
        assert!(backends.of_block("pc.bios").is_none());
        assert!(!backends.has_unique_size(backends.of_block("mem").unwrap()));
        assert!(backends.has_unique_size(backends.of_block("small").unwrap()));
    }
}
