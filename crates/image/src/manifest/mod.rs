//! The manifest beside an image: what the image is, and the checksums of its memory and device state.
//!
//! What it is not: needed to load the image. The image is a mapped-ram file that QEMU loads without it.
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
//! Its chunks are those of the whole guest: one whose hash is the base's is in the base and not in the file.
//!
//! `null` is a chunk of zeros. Offsets of devices count from the device state's beginning, all others from the file's. A
//! device's hash is that of the bytes up to the next device, or to the end. A bitmap's hash is that of its bytes in the file.
//! `seal` is where the file has the hash of the manifest's text, so that not a byte of it can be changed. The first manifests had
//! none of these three.
//! Fields that this version does not know are ignored; a version that it does not know is refused.
//!
//! A manifest is somebody's file. [`Manifest::load`] reads no more bytes than its image's block list calls for, and what it
//! returns is consistent: hashes fit lengths, offsets lie in the file, names and counts keep the protocol's limits.

mod check;
mod error;
mod identity;
#[cfg(test)]
mod tests;
mod text;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use towline_protocol::device_state::{self, DeviceState};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use crate::checksum::{CHUNK_BYTES, ChunkHash, chunk_count};

pub(crate) use check::Bitmap;
pub use error::{Error, Result};
pub use identity::Digest;
pub use text::Timestamp;

/// What `format` says.
pub const FORMAT: &str = "towline-image";
/// The newest version that is read. Only incremental images need it, and are written with it.
pub const VERSION: u32 = 2;
/// The version of all other images.
const VERSION_WHOLE: u32 = 1;

/// A manifest's most bytes apart from its blocks: 65,536 devices with names of ordinary length.
pub const FIXED_BYTES_MAX: u64 = 24 << 20;
/// And for each block: a name of 255 bytes, all of them escaped, and numbers.
pub const BLOCK_BYTES_MAX: u64 = 4096;
/// And for each chunk: 64 hex digits, quotation marks, a comma, a new line and its indentation.
pub const CHUNK_HASH_BYTES_MAX: u64 = 96;

/// An image's manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u32,
    machine_type: String,
    created: Timestamp,
    created_by: String,
    origin: Origin,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<Base>,
    image: ImageFile,
    chunk_size: u64,
    blocks: Vec<Block>,
    device_state: StoredState,
}

/// What a manifest is made of.
#[derive(Debug)]
pub struct Contents<'a> {
    /// Where the guest came from.
    pub origin: &'a Origin,
    /// QEMU's machine type with its version.
    pub machine_type: &'a str,
    /// The block list, with each block's place in the file.
    pub blocks: &'a [RamBlock],
    /// For each block how many pages have content.
    pub plain_pages: Vec<u64>,
    /// For each block the hashes of its chunks.
    pub hashes: Vec<Vec<ChunkHash>>,
    /// The device state, which ends where the file does.
    pub device_state: &'a DeviceState,
    /// The file's length.
    pub image_bytes: u64,
    /// The file's first bytes, as in [`Found::head`].
    pub head: &'a [u8],
    /// For each block the hash of its page bitmap, as it stands in the file.
    pub bitmaps: Vec<Digest>,
    /// Where the file has the hash of this manifest's text.
    pub seal: Option<u64>,
    /// What an incremental image is based on.
    pub base: Option<Base>,
}

/// What was found in an image, for [`Manifest::check`] to compare.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    /// The machine type in the configuration section.
    pub machine_type: &'a str,
    /// The block list, with each block's place in the file.
    pub blocks: &'a [RamBlock],
    /// The file's bytes up to the first block's bitmap.
    pub head: &'a [u8],
    /// All that follows the memory.
    pub device_state: &'a [u8],
    /// The file's length.
    pub image_bytes: u64,
    /// What the file says is the BLAKE3 of its manifest's text; `None` where it says nothing.
    pub seal: Option<Digest>,
}

/// Where a stored guest came from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The kind of source, for people to read.
    pub source: String,
    /// The version of the QEMU that ran the guest, if known.
    pub qemu: Option<String>,
    /// Migration capabilities that matter for who loads the image, by QEMU's names.
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// Whether the guest ran when it was stored; `None` if the source did not say.
    pub was_running: Option<bool>,
}

/// The image that an incremental one is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Where it was: a name in the image's own directory, or an absolute path.
    pub path: String,
    /// What it was, wherever it is: its manifest's [`Manifest::content`].
    pub content: Digest,
}

/// The file that a manifest belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Its length in bytes.
    pub length: u64,
    /// Tells it from other images.
    pub identity: Digest,
    /// Where the file has the BLAKE3 of this manifest's text. Images of the first versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<u64>,
}

/// One RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// QEMU's idstr.
    pub name: String,
    /// Its length in bytes, a multiple of the page size.
    pub length: u64,
    /// Pages with content in the file.
    pub pages_plain: u64,
    /// The other pages, which are zero.
    pub pages_zero: u64,
    /// The BLAKE3 of the block's page bitmap. The first manifests had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<Digest>,
    /// A hash for each [`CHUNK_BYTES`].
    #[serde(with = "text::chunks")]
    pub chunks: Vec<ChunkHash>,
}

/// The opaque bytes behind the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredState {
    /// Where it begins in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
    /// Their BLAKE3.
    pub blake3: Digest,
    /// The devices in it, in order.
    pub devices: Vec<Device>,
}

/// A device of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The idstr.
    pub name: String,
    /// Tells devices of one name apart.
    pub instance: u32,
    /// The version of its state.
    pub version: u32,
    /// Where its section begins in the device state.
    pub offset: u64,
    /// The BLAKE3 of the bytes from there to the next device, or to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Digest>,
}

impl Manifest {
    /// The manifest of an image that is complete now.
    ///
    /// # Panics
    /// If `plain_pages`, `hashes` or `bitmaps` have not one entry per block, or the device state is longer than the file.
    pub fn new(contents: Contents<'_>) -> Self {
        let Contents { origin, machine_type, blocks, plain_pages, hashes, device_state, .. } = contents;
        let Contents { image_bytes, head, bitmaps, seal, base, .. } = contents;
        let lengths = [plain_pages.len(), hashes.len(), bitmaps.len()];
        assert!(lengths == [blocks.len(); 3], "one entry per block");
        let mut chunks = hashes.into_iter();
        let block = |((block, pages_plain), bitmap): ((&RamBlock, u64), Digest)| Block {
            name: block.name.clone(),
            length: block.length,
            pages_plain,
            pages_zero: (block.length / PAGE_SIZE).saturating_sub(pages_plain),
            bitmap: Some(bitmap),
            chunks: chunks.next().unwrap_or_default(),
        };
        let bytes = device_state.bytes();
        let blake3 = Digest::of(bytes);
        Self {
            format: FORMAT.into(),
            version: if base.is_some() { VERSION } else { VERSION_WHOLE },
            machine_type: machine_type.into(),
            created: Timestamp::now(),
            created_by: format!("towline {}", env!("CARGO_PKG_VERSION")),
            origin: origin.clone(),
            base,
            image: ImageFile { length: image_bytes, identity: Digest::identity(head, blocks, blake3), seal },
            chunk_size: CHUNK_BYTES,
            blocks: blocks.iter().zip(plain_pages).zip(bitmaps).map(block).collect(),
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

    /// The most bytes that the manifest of an image with these blocks may have.
    pub fn bytes_max(blocks: &[RamBlock]) -> u64 {
        blocks.iter().fold(FIXED_BYTES_MAX, |sum, block| {
            let chunks = chunk_count(block.length).saturating_mul(CHUNK_HASH_BYTES_MAX);
            sum.saturating_add(BLOCK_BYTES_MAX).saturating_add(chunks)
        })
    }

    /// Reads the manifest beside `image`, whose block list is `blocks`; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, is too long, no manifest, of a newer version or inconsistent. Whether it is this very image's
    /// is for [`check`](Self::check) to say.
    pub fn load(image: &Path, blocks: &[RamBlock]) -> Result<Option<Self>> {
        Ok(Self::load_from(&sidecar_path(image), blocks)?.map(|(manifest, _)| manifest))
    }

    /// Reads the manifest at `path`, and hashes its text.
    pub(crate) fn load_from(path: &Path, blocks: &[RamBlock]) -> Result<Option<(Self, Digest)>> {
        let bytes = read(path, Self::bytes_max(blocks))?;
        bytes.map(|bytes| Ok((Self::parse(path, &bytes)?, Digest::of(&bytes)))).transpose()
    }

    /// Reads a manifest's text; `path` is for errors to name. The caller bounds its length.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        /// What every version begins with.
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let not_json = |error: serde_json::Error| Error::invalid_json(path, &error);
        let head: Head = serde_json::from_slice(bytes).map_err(not_json)?;
        if head.format != FORMAT {
            return Err(Error::format(path, &head.format));
        }
        if head.version == 0 || head.version > VERSION {
            return Err(Error::Version { path: path.into(), found: head.version, known: VERSION });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(not_json)?;
        manifest.check_fields(path)?;
        Ok(manifest)
    }

    /// The manifest's text.
    ///
    /// # Errors
    /// It is inconsistent, so that no reader would take it; `path` is for errors to name.
    pub fn to_json(&self, path: &Path) -> Result<Vec<u8>> {
        self.check_fields(path)?;
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| Error::invalid_json(path, &error))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// QEMU's machine type with its version.
    pub fn machine_type(&self) -> &str {
        &self.machine_type
    }

    /// When the image was made.
    pub fn created(&self) -> Timestamp {
        self.created
    }

    /// The program that made it, with its version.
    pub fn created_by(&self) -> &str {
        &self.created_by
    }

    /// Where the guest came from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// What an incremental image is based on; `None` for a whole one.
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// What the image holds, as a hash: two images of one content are the same guest at the same instant, in the same file
    /// layout and on the same base, whenever and wherever they were made.
    pub fn content(&self) -> Digest {
        Digest::content(self)
    }

    /// The file that this describes.
    pub fn image(&self) -> ImageFile {
        self.image
    }

    /// The memory, in the block list's order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// What follows the memory.
    pub fn device_state(&self) -> &StoredState {
        &self.device_state
    }

    /// The hash of a block's chunk number `chunk`.
    ///
    /// # Panics
    /// If there is no such chunk in the block list that the manifest was checked against.
    pub fn chunk_hash(&self, block: BlockIndex, chunk: usize) -> ChunkHash {
        self.blocks[block.index()].chunks[chunk]
    }
}

/// Where the manifest of `image` is: `guest.img.manifest.json` beside `guest.img`.
pub fn sidecar_path(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".manifest.json");
    path.into()
}

/// The devices of a guest, each with the hash of its part.
fn devices(state: &DeviceState) -> Vec<Device> {
    let (bytes, devices) = (state.bytes(), state.devices());
    let ends = devices.iter().skip(1).map(|device| device.offset).chain([bytes.len()]);
    let device = |(device, end): (&device_state::Device, usize)| Device {
        name: device.name.clone(),
        instance: device.instance,
        version: device.version,
        offset: device.offset as u64,
        blake3: Some(Digest::of(&bytes[device.offset..end])),
    };
    devices.iter().zip(ends).map(device).collect()
}

/// What is read of a manifest whose blocks are not known yet: enough for a guest of some TiB.
const ANY_BYTES_MAX: u64 = 256 << 20;

/// The base that the manifest at `path` names, if there is one that can be read.
pub(crate) fn base_of(path: &Path) -> Option<Base> {
    #[derive(Deserialize)]
    struct Named {
        base: Option<Base>,
    }
    let bytes = read(path, ANY_BYTES_MAX).ok()??;
    serde_json::from_slice::<Named>(&bytes).ok()?.base
}

/// Whether the file at `path` says that it is a manifest.
pub(crate) fn is_one(path: &Path) -> bool {
    #[derive(Deserialize)]
    struct Named {
        format: String,
    }
    let bytes = read(path, ANY_BYTES_MAX).ok().flatten().unwrap_or_default();
    serde_json::from_slice::<Named>(&bytes).is_ok_and(|named| named.format == FORMAT)
}

fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let failed = |op| move |source| Error::Io { op, path: path.into(), source };
    // Without NONBLOCK a FIFO of that name could keep us here for ever.
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let file = match options.open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed("open"))?,
    };
    let metadata = file.metadata().map_err(failed("look at"))?;
    if !metadata.is_file() {
        return Err(Error::NotRegular { path: path.into() });
    }
    let too_long = |found| Error::TooLong { path: path.into(), found, limit };
    if metadata.len() > limit {
        return Err(too_long(metadata.len()));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed("read"))?;
    if bytes.len() as u64 > limit {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(Some(bytes))
}
