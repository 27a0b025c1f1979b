//! The manifest beside an image: a description of the image, and the checksums of its memory and device
//! state.
//!
//! The manifest is not needed to load the image, which is a mapped-ram file that QEMU loads without it.
//!
//! ```json
//! { "format": "towline-image", "version": 1,
//!   "machine_type": "pc-q35-10.0",
//!   "created": "2025-11-21T09:30:00Z", "created_by": "towline 0.1.0",
//!   "origin": { "source": "migration", "qemu": "10.0.2", "capabilities": ["multifd"], "was_running": true },
//!   "image": { "length": 4297064448, "identity": "<64 hex digits>", "seal": 131352 },
//!   "chunk_size": 2097152,
//!   "blocks": [ { "name": "pc.ram", "length": 4294967296, "pages_plain": 9, "pages_zero": 1048567,
//!                 "bitmap": "<64 hex digits>", "chunks": [ "<64 hex digits>", null, … ] } ],
//!   "device_state": { "offset": 4296015872, "length": 60123, "blake3": "<64 hex digits>",
//!                     "devices": [ { "name": "timer", "instance": 0, "version": 2, "offset": 0,
//!                                    "blake3": "<64 hex digits>" } ] } }
//! ```
//!
//! An incremental image's manifest has version 2 and a `base`:
//!
//! ```json
//!   "version": 2, "base": { "path": "old.img", "content": "<64 hex digits>" }
//! ```
//!
//! Its chunks are those of the whole guest: one whose hash equals the base's is stored in the base and not in
//! the file.
//!
//! The origin of a guest whose QEMU's command line was recorded has a `process` with it, as JSON in a string,
//! so readers which do not know its format need not parse it:
//!
//! ```json
//!   "process": { "command_line": "{\"version\":1,…}", "working_directory": "/srv",
//!                "disks": [{ "file": "/srv/a.qcow2", "state": { "bytes": 4194304, "modified_ns": 1764200000000000000 }}] }
//! ```
//!
//! `null` is a chunk of zeros. Offsets of devices are relative to the device state, all others to the file. A
//! device's hash covers the bytes up to the next device or the end. A bitmap's hash covers its bytes in the
//! file. `seal` is the offset in the file of the hash of the manifest's text, which protects every byte of
//! it. The first manifests had none of these three.
//! Unknown fields are ignored, an unknown version is refused.
//!
//! A manifest is untrusted. `Manifest::load` reads no more bytes than the image's block list requires, and
//! its result is consistent: hashes match lengths, offsets are within the file, names and counts are within
//! the protocol's limits.

mod check;
mod error;
mod identity;
#[cfg(test)]
mod tests;
mod text;

use std::io::Read;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use towline_protocol::device_state::{self, DeviceState};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use crate::checksum::{CHUNK_BYTES, ChunkHash};
use crate::regular_file::open_regular;

pub use error::{Error, Result};
pub use identity::Digest;
pub use text::Timestamp;

/// BLAKE3 key context of a content.
const CONTENT_CONTEXT: &str = "towline-image 2026 content of a stored guest, version 1";

/// BLAKE3 key context of a block's memory.
const BLOCK_CONTEXT: &str = "towline-image 2026 memory of a block, version 1";

/// Value of `format`.
pub const FORMAT: &str = "towline-image";
/// Newest version that can be read. Only incremental images need it and are written with it.
pub const VERSION: u32 = 2;
/// Version of all other images.
const VERSION_WHOLE: u32 = 1;

/// Linux's limit for paths.
const PATH_BYTES_MAX: usize = 4096;
/// Maximum length of a recorded command line.
pub const COMMAND_LINE_BYTES_MAX: usize = 512 << 10;
/// Maximum length without the blocks: 65,536 devices with names of ordinary length.
pub const FIXED_BYTES_MAX: u64 = 24 << 20;
/// Maximum length per block: a name of 255 bytes, all of them escaped, and numbers.
pub const BLOCK_BYTES_MAX: u64 = 4096;
/// Maximum length per chunk: 64 hex digits, quotation marks, a comma, a new line and its indentation.
pub const CHUNK_HASH_BYTES_MAX: u64 = 96;

/// An image's manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u32,
    /// QEMU's machine type with its version.
    pub machine_type: String,
    /// Time at which the image was made.
    pub created: Timestamp,
    /// Program that made it, with its version.
    pub created_by: String,
    /// Origin of the guest.
    pub origin: Origin,
    /// The base of an incremental image; `None` for a whole one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// The image file.
    pub image: ImageFile,
    chunk_size: u64,
    /// The blocks in the block list's order.
    pub blocks: Vec<StoredBlock>,
    /// The device state.
    pub device_state: StoredState,
}

/// Values from which a manifest is made.
#[derive(Debug)]
pub struct ManifestContents<'a> {
    /// Origin of the guest.
    pub origin: &'a Origin,
    /// QEMU's machine type with its version.
    pub machine_type: &'a str,
    /// The block list, with each block's position in the file.
    pub blocks: &'a [RamBlock],
    /// Pages with content, by block.
    pub plain_pages: Vec<u64>,
    /// Hashes of the chunks, by block.
    pub hashes: Vec<Vec<ChunkHash>>,
    /// The device state, which ends at the end of the file.
    pub device_state: &'a DeviceState,
    /// Length of the file.
    pub image_bytes: u64,
    /// The file's first bytes, as in [`ImageProperties::head`].
    pub head: &'a [u8],
    /// Hash of the page bitmap in the file, by block.
    pub bitmaps: Vec<Digest>,
    /// Offset of the hash of this manifest's text in the file.
    pub seal: Option<u64>,
    /// The base of an incremental image.
    pub base: Option<Base>,
}

/// Properties of an image file that [`Manifest::check`] compares.
#[derive(Debug, Clone, Copy)]
pub struct ImageProperties<'a> {
    /// The machine type in the configuration section.
    pub machine_type: &'a str,
    /// The block list, with each block's position in the file.
    pub blocks: &'a [RamBlock],
    /// The file's bytes up to the first block's bitmap.
    pub head: &'a [u8],
    /// All bytes after the memory.
    pub device_state: &'a [u8],
    /// Length of the file.
    pub image_bytes: u64,
    /// The BLAKE3 of the manifest's text as recorded in the file, if it has a seal.
    pub seal: Option<Digest>,
}

/// Origin of a stored guest.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Origin {
    /// Kind of source, for people to read.
    pub source: String,
    /// The version of the QEMU that ran the guest, if known.
    pub qemu: Option<String>,
    /// Migration capabilities that are required to load the image, by QEMU's names.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// True if the guest was running when it was stored; `None` if the source did not report it.
    pub was_running: Option<bool>,
    /// Process of the QEMU that ran the guest, if it was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<QemuProcess>,
}

/// Process of a QEMU that ran a guest. Untrusted, like everything in an image: it is shown, and never started
/// unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuProcess {
    /// Command line without secrets, in a format with its own version. Opaque here.
    pub command_line: String,
    /// Working directory, if it could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
    /// The disks that stay as they were at the guest's instant, since it continued in overlays of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<StoredDisk>,
}

/// A disk of a stored guest, which is a backing file of the disk that the guest continued with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDisk {
    /// Absolute path.
    pub file: String,
    /// State of a regular file at the guest's instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StoredDiskState>,
}

/// State of a disk's file, which changes if it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDiskState {
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the last write in nanoseconds since 1970.
    pub modified_ns: i64,
}

impl StoredDisk {
    /// The disk as it is now.
    #[must_use]
    pub fn of(file: &str) -> Self {
        let metadata = std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file);
        let state = metadata.map(|metadata| StoredDiskState {
            bytes: metadata.len(),
            modified_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
        });
        Self { file: file.to_owned(), state }
    }
}

/// A field of an [`Origin`] that exceeds its limit, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverlongField {
    pub(crate) name: &'static str,
    pub(crate) found: usize,
    pub(crate) limit: usize,
}

impl Origin {
    /// Returns the first field that exceeds its limit.
    pub(crate) fn overlong_field(&self) -> Option<OverlongField> {
        let process = self.process.as_ref()?;
        let directory = process.working_directory.as_deref().unwrap_or_default();
        let disks = process.disks.iter().map(|disk| disk.file.len()).sum();
        [
            ("origin.process.command_line", process.command_line.len(), COMMAND_LINE_BYTES_MAX),
            ("origin.process.working_directory", directory.len(), PATH_BYTES_MAX),
            ("origin.process.disks", disks, COMMAND_LINE_BYTES_MAX),
        ]
        .into_iter()
        .map(|(name, found, limit)| OverlongField { name, found, limit })
        .find(|field| field.found > field.limit)
    }

    /// The same origin, with the run state in the guest's device state.
    pub(crate) fn with_run_state(self, state: &DeviceState) -> Self {
        Self { was_running: state.run_state().map(|state| state == "running"), ..self }
    }
}

/// Reference to the base of an incremental image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// File name in the image's own directory, or an absolute path.
    pub path: String,
    /// Content of the base ([`Manifest::content`]), which identifies it at any path.
    pub content: Digest,
}

/// The image file of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Length in bytes.
    pub length: u64,
    /// Hash that distinguishes it from other images.
    pub identity: Digest,
    /// Offset of the BLAKE3 of this manifest's text in the file. Images of the first versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<u64>,
}

/// A RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBlock {
    /// QEMU's idstr.
    pub name: String,
    /// Length in bytes, a multiple of the page size.
    pub length: u64,
    /// Pages with content in the file.
    pub pages_plain: u64,
    /// The other pages, which are zero.
    pub pages_zero: u64,
    /// The BLAKE3 of the block's page bitmap. The first manifests had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<Digest>,
    /// A hash for each [`CHUNK_BYTES`].
    pub chunks: Vec<ChunkHash>,
}

/// The device state, which follows the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredState {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// BLAKE3 of the bytes.
    pub blake3: Digest,
    /// Devices, in order.
    pub devices: Vec<StoredDevice>,
}

/// A device of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDevice {
    /// The idstr.
    pub name: String,
    /// Distinguishes devices with the same name.
    pub instance: u32,
    /// Version of its state.
    pub version: u32,
    /// Offset of its section in the device state.
    pub offset: u64,
    /// BLAKE3 of the bytes from there to the next device, or to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Digest>,
}

impl Manifest {
    /// Creates the manifest of a complete image.
    ///
    /// # Panics
    /// If `plain_pages`, `hashes` or `bitmaps` do not have one entry per block, or the device state is longer
    /// than the file.
    pub fn new(contents: ManifestContents<'_>) -> Self {
        let ManifestContents {
            blocks, plain_pages, hashes, device_state, image_bytes, bitmaps, base, ..
        } = contents;
        let lengths = [plain_pages.len(), hashes.len(), bitmaps.len()];
        assert!(lengths == [blocks.len(); 3], "one entry per block");
        let stored = blocks.iter().zip(plain_pages).zip(bitmaps).zip(hashes);
        let stored = stored.map(|(((block, pages_plain), bitmap), chunks)| StoredBlock {
            name: block.name.clone(),
            length: block.length,
            pages_plain,
            pages_zero: (block.length / PAGE_SIZE).saturating_sub(pages_plain),
            bitmap: Some(bitmap),
            chunks,
        });
        let bytes = device_state.bytes();
        let blake3 = Digest::of(bytes);
        let identity = Digest::identity(contents.head, blocks, blake3);
        Self {
            format: FORMAT.into(),
            version: if base.is_some() { VERSION } else { VERSION_WHOLE },
            machine_type: contents.machine_type.into(),
            created: Timestamp::now(),
            created_by: format!("towline {}", env!("CARGO_PKG_VERSION")),
            origin: contents.origin.clone(),
            base,
            image: ImageFile { length: image_bytes, identity, seal: contents.seal },
            chunk_size: CHUNK_BYTES,
            blocks: stored.collect(),
            device_state: StoredState {
                offset: image_bytes
                    .checked_sub(bytes.len() as u64)
                    .expect("the file ends with the device state"),
                length: bytes.len() as u64,
                blake3,
                devices: devices(device_state),
            },
        }
    }

    /// Maximum length of the manifest of an image with these blocks.
    pub fn bytes_max(blocks: &[RamBlock]) -> u64 {
        blocks.iter().fold(FIXED_BYTES_MAX, |sum, block| {
            let chunks = block.length.div_ceil(CHUNK_BYTES).saturating_mul(CHUNK_HASH_BYTES_MAX);
            sum.saturating_add(BLOCK_BYTES_MAX).saturating_add(chunks)
        })
    }

    /// Reads the manifest at `path` of an image with these blocks, and hashes its text; `None` if there is none.
    ///
    /// # Errors
    /// The manifest cannot be read, is too long, malformed, of a newer version or inconsistent.
    /// [`check`](Self::check) compares it with the image.
    pub(crate) fn load(path: &Path, blocks: &[RamBlock]) -> Result<Option<(Self, Digest)>> {
        let bytes = read(path, Self::bytes_max(blocks))?;
        bytes.map(|bytes| Ok((Self::parse(path, &bytes)?, Digest::of(&bytes)))).transpose()
    }

    /// Parses a manifest; `path` is for errors only. The caller limits the length.
    ///
    /// # Errors
    /// The manifest is malformed, of a newer version or inconsistent.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        /// First fields of every version.
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let not_json = |error: serde_json::Error| Error::invalid_json(path, &error);
        let head: Head = serde_json::from_slice(bytes).map_err(not_json)?;
        if head.format != FORMAT {
            return Err(Error::Format { path: path.into(), found: text::truncated(&head.format) });
        }
        if head.version == 0 || head.version > VERSION {
            return Err(Error::Version { path: path.into(), found: head.version, known: VERSION });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(not_json)?;
        manifest.check_fields(path)?;
        Ok(manifest)
    }

    /// Encodes the manifest.
    ///
    /// # Errors
    /// The manifest is inconsistent, so no reader would accept it; `path` is for errors only.
    pub fn to_json(&self, path: &Path) -> Result<Vec<u8>> {
        self.check_fields(path)?;
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| Error::invalid_json(path, &error))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Hash of the image's identity, of all its chunks' hashes, and of its base's content: images with the same content store the same guest at the same instant, in
    /// the same file layout and on the same base.
    pub fn content(&self) -> Digest {
        let mut hasher = blake3::Hasher::new_derive_key(CONTENT_CONTEXT);
        hasher.update(&self.image.identity.0);
        self.blocks.iter().for_each(|block| hash_chunks(&mut hasher, &block.chunks));
        hasher.update(self.base.as_ref().map_or(&[][..], |base| &base.content.0[..]));
        Digest(*hasher.finalize().as_bytes())
    }

    /// Hash of the memory of a block, by its name, its length and its chunks' hashes: equal in all images that store the same.
    ///
    /// # Panics
    /// As [`Self::chunk_hash`].
    pub fn block_memory(&self, block: BlockIndex) -> Digest {
        let StoredBlock { name, length, chunks, .. } = &self.blocks[block.index()];
        let mut hasher = blake3::Hasher::new_derive_key(BLOCK_CONTEXT);
        hasher.update(&length.to_be_bytes()).update(name.as_bytes());
        hash_chunks(&mut hasher, chunks);
        Digest(*hasher.finalize().as_bytes())
    }

    /// The hash of chunk `chunk` of a block.
    ///
    /// # Panics
    /// If the block list against which the manifest was checked has no such chunk.
    pub fn chunk_hash(&self, block: BlockIndex, chunk: usize) -> ChunkHash {
        self.blocks[block.index()].chunks[chunk]
    }
}

/// Path of the manifest of `image`: `guest.img.manifest.json` beside `guest.img`.
pub fn sidecar_path(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".manifest.json");
    path.into()
}

fn hash_chunks(hasher: &mut blake3::Hasher, chunks: &[ChunkHash]) {
    hasher.update(&(chunks.len() as u64).to_be_bytes());
    for chunk in chunks {
        match chunk {
            ChunkHash::Zero => hasher.update(&[0]),
            ChunkHash::Data(hash) => hasher.update(&[1]).update(hash),
        };
    }
}

/// The devices of a guest, each with the hash of its bytes.
fn devices(state: &DeviceState) -> Vec<StoredDevice> {
    let (bytes, devices) = (state.bytes(), state.devices());
    let ends = devices.iter().skip(1).map(|device| device.offset).chain([bytes.len()]);
    let device = |(device, end): (&device_state::DeviceSection, usize)| StoredDevice {
        name: device.name.clone(),
        instance: device.instance,
        version: device.version,
        offset: device.offset as u64,
        blake3: Some(Digest::of(&bytes[device.offset..end])),
    };
    devices.iter().zip(ends).map(device).collect()
}

/// Maximum length of a manifest whose blocks are not known: enough for a guest of several TiB.
const ANY_BYTES_MAX: u64 = 256 << 20;

/// Files that a manifest names.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct NamedFiles {
    pub(crate) base: Option<Base>,
    #[serde(default)]
    origin: NamedOrigin,
}

#[derive(Debug, Default, Deserialize)]
struct NamedOrigin {
    process: Option<NamedProcess>,
}

#[derive(Debug, Default, Deserialize)]
struct NamedProcess {
    #[serde(default)]
    disks: Vec<StoredDisk>,
}

impl NamedFiles {
    /// Paths of the disks.
    pub(crate) fn disks(&self) -> impl Iterator<Item = PathBuf> {
        self.origin.process.iter().flat_map(|process| &process.disks).map(|disk| PathBuf::from(&disk.file))
    }
}

/// The files that the manifest at `path` names; none if there is no manifest.
pub(crate) fn named_by(path: &Path) -> Result<NamedFiles> {
    let Some(bytes) = read(path, ANY_BYTES_MAX)? else { return Ok(NamedFiles::default()) };
    serde_json::from_slice(&bytes).map_err(|error| Error::invalid_json(path, &error))
}

/// Returns true if the file at `path` is a manifest by its `format`.
pub(crate) fn is_manifest(path: &Path) -> bool {
    #[derive(Deserialize)]
    struct Named {
        format: String,
    }
    let bytes = read(path, ANY_BYTES_MAX).ok().flatten().unwrap_or_default();
    serde_json::from_slice::<Named>(&bytes).is_ok_and(|named| named.format == FORMAT)
}

fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let failed = |op| move |source| Error::Io { op, path: path.into(), source };
    let file = match open_regular(path, OFlags::empty()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed("open"))?.ok_or_else(|| Error::NotRegular { path: path.into() })?,
    };
    let too_long = |found| Error::TooLong { path: path.into(), found, limit };
    let length = file.metadata().map_err(failed("stat"))?.len();
    if length > limit {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed("read"))?;
    if bytes.len() as u64 > limit {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(Some(bytes))
}
