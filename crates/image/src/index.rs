//! The index of an image in an object store: a description of the guest, and the names of all chunks of its
//! memory.
//!
//! Out of scope: access to a store, and memory. An index is written last, so a present index only names
//! chunks that are present.
//!
//! ```text
//!   16 bytes  "towline-index\r\n\0"       detects a transfer as text
//!   le32      version (1)
//!   le64      length of the content before compression
//!   32 bytes  BLAKE3 of the content
//!   zstd      content: le32 length of the head · head (JSON) · a name for each chunk
//! ```
//!
//! A chunk's name is the BLAKE3 of its bytes, 32 bytes; 32 zero bytes denote a chunk of zeros, which is not
//! stored. The names are in the order of the block list, followed by those of the device state, which is
//! stored in chunks too.
//!
//! An index is untrusted. [`Index::parse`] uses no more memory than its limits allow, and its result is
//! consistent: the names match the lengths, which are within the protocol's limits.

mod error;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use towline_protocol::configuration::Configuration;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock, limits};

pub use error::Error;

use crate::manifest::{Digest, Timestamp};
use crate::{ChunkHash, Origin};

/// First bytes of an index.
pub const MAGIC: [u8; 16] = *b"towline-index\r\n\0";
/// Version that is written, and newest that can be read.
pub const VERSION: u32 = 1;
/// Maximum length of the content: a guest of 2 TiB in chunks of 256 KiB, or of 512 GiB in the smallest.
pub const CONTENT_BYTES_MAX: u64 = 256 << 20;
/// Maximum length of a stored index: names are incompressible.
pub const INDEX_BYTES_MAX: u64 = CONTENT_BYTES_MAX + (1 << 20);
/// Maximum length of the head: the protocol's maximum of blocks with names of 255 bytes, all of them escaped.
pub const HEAD_BYTES_MAX: usize = 8 << 20;
/// Smallest chunk size.
pub const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// Largest chunk size.
pub const CHUNK_BYTES_MAX: u64 = 4 << 20;

/// Length of everything before the compressed content.
const FRAME_BYTES: usize = MAGIC.len() + 4 + 8 + 32;
/// zstd level: names are incompressible, tables of zeros and the head compress well at any level.
const LEVEL: i32 = 3;
/// Length of a name.
const NAME_BYTES: usize = 32;

/// An image's index; as JSON, its head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    machine_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target_page_bits: Option<u32>,
    #[serde(default)]
    capabilities: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uuid: Option<[u8; 16]>,
    /// Section id of the stream's `ram` sections.
    pub section_id: u32,
    /// Time at which the image was made.
    pub created: Timestamp,
    created_by: String,
    /// Origin of the guest.
    pub origin: Origin,
    /// Chunk size; the last chunk of a block may be shorter.
    #[serde(rename = "chunk_size")]
    pub chunk_bytes: u64,
    blocks: Vec<IndexBlock>,
    device_state: State,
    /// By block, then those of the device state.
    #[serde(skip)]
    names: Vec<Vec<ChunkHash>>,
}

/// Values from which an index is made.
#[derive(Debug)]
pub struct IndexContents<'a> {
    /// Header of the stream.
    pub configuration: &'a Configuration,
    /// Section id of the stream's `ram` sections.
    pub section_id: u32,
    /// Origin of the guest.
    pub origin: &'a Origin,
    /// Chunk size, a power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
    pub chunk_bytes: u64,
    /// The block list.
    pub blocks: &'a [RamBlock],
    /// Names of the chunks, by block.
    pub names: Vec<Vec<ChunkHash>>,
    /// The device state.
    pub device_state: &'a [u8],
    /// Names of its chunks.
    pub device_state_names: Vec<ChunkHash>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct IndexBlock {
    name: String,
    length: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    length: u64,
    blake3: Digest,
}

impl Index {
    /// Creates the index of an image whose chunks are stored.
    ///
    /// # Panics
    /// If the number of names differs from that of the chunks.
    pub fn new(contents: IndexContents<'_>) -> Self {
        let IndexContents { configuration, blocks, device_state, .. } = contents;
        let mut names = contents.names;
        names.push(contents.device_state_names);
        let index = Self {
            machine_type: configuration.machine_type.clone(),
            target_page_bits: configuration.target_page_bits,
            capabilities: configuration.capabilities.clone(),
            uuid: configuration.uuid,
            section_id: contents.section_id,
            created: Timestamp::now(),
            created_by: format!("towline {}", env!("CARGO_PKG_VERSION")),
            origin: contents.origin.clone(),
            chunk_bytes: contents.chunk_bytes,
            blocks: blocks
                .iter()
                .map(|block| IndexBlock { name: block.name.clone(), length: block.length })
                .collect(),
            device_state: State { length: device_state.len() as u64, blake3: Digest::of(device_state) },
            names,
        };
        let lengths: Vec<_> = index.names.iter().map(|names| names.len() as u64).collect();
        assert_eq!(lengths, index.counts(), "a name for each chunk");
        index
    }

    /// Encodes the index.
    ///
    /// # Errors
    /// The index is larger than any reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        let head = serde_json::to_vec(self).map_err(|error| Error::Head { why: error.to_string() })?;
        let count: usize = self.names.iter().map(Vec::len).sum();
        let mut content = Vec::with_capacity(4 + head.len() + NAME_BYTES * count);
        let length = u32::try_from(head.len()).unwrap_or(u32::MAX);
        content.extend_from_slice(&length.to_le_bytes());
        content.extend_from_slice(&head);
        for name in self.names.iter().flatten() {
            content.extend_from_slice(&name.data().unwrap_or_default());
        }
        let found = content.len() as u64;
        if head.len() > HEAD_BYTES_MAX || found > CONTENT_BYTES_MAX {
            return Err(Error::TooLarge { found, limit: CONTENT_BYTES_MAX });
        }
        let mut bytes = Vec::with_capacity(FRAME_BYTES + content.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&found.to_le_bytes());
        bytes.extend_from_slice(blake3::hash(&content).as_bytes());
        let compressed = zstd::bulk::compress(&content, LEVEL);
        bytes.extend(compressed.map_err(|error| Error::Content { why: error.to_string() })?);
        Ok(bytes)
    }

    /// Parses an index.
    ///
    /// # Errors
    /// The object is not an index, is newer than this program, damaged, truncated or inconsistent.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let content = content(bytes)?;
        let truncated = || Error::Content { why: "it ends inside the head".into() };
        let (length, rest) = content.split_first_chunk::<4>().ok_or_else(truncated)?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > HEAD_BYTES_MAX {
            let why = format!("its head has {length} bytes, at most {HEAD_BYTES_MAX} are allowed");
            return Err(Error::Head { why });
        }
        let (head, table) = rest.split_at_checked(length).ok_or_else(truncated)?;
        let mut index: Self =
            serde_json::from_slice(head).map_err(|error| Error::Head { why: error.to_string() })?;
        index.check()?;
        let counts = index.counts();
        let expected = counts.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let (table, more) = table.as_chunks::<NAME_BYTES>();
        if table.len() as u64 != expected || !more.is_empty() {
            return Err(Error::Names { found: table.len() as u64, expected });
        }
        let mut left = table.iter();
        let take = |count: u64| left.by_ref().take(count as usize).map(name).collect();
        index.names = counts.into_iter().map(take).collect();
        Ok(index)
    }

    /// Header of the stream.
    pub fn configuration(&self) -> Configuration {
        Configuration {
            machine_type: self.machine_type.clone(),
            target_page_bits: self.target_page_bits,
            capabilities: self.capabilities.clone(),
            uuid: self.uuid,
        }
    }

    /// The block list.
    pub fn blocks(&self) -> Vec<RamBlock> {
        let block =
            |block: &IndexBlock| RamBlock { name: block.name.clone(), length: block.length, mapped: None };
        self.blocks.iter().map(block).collect()
    }

    /// Names of a block's chunks.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn chunk_names(&self, block: BlockIndex) -> &[ChunkHash] {
        assert!(block.index() < self.blocks.len(), "no block {}", block.0);
        &self.names[block.index()]
    }

    /// Names of the device state's chunks.
    pub fn device_state_names(&self) -> &[ChunkHash] {
        self.names.last().map_or(&[], Vec::as_slice)
    }

    /// Length of the device state in bytes, and its BLAKE3.
    pub fn device_state(&self) -> (u64, Digest) {
        (self.device_state.length, self.device_state.blake3)
    }

    /// All names, of memory and device state.
    pub fn all_names(&self) -> impl Iterator<Item = [u8; 32]> + '_ {
        self.names.iter().flatten().filter_map(|name| name.data())
    }

    /// Numbers of chunks of each block and of the device state.
    fn counts(&self) -> Vec<u64> {
        let lengths = self.blocks.iter().map(|block| block.length).chain([self.device_state.length]);
        lengths.map(|length| length.div_ceil(self.chunk_bytes)).collect()
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |field: &str, found: u64, expected: String| {
            Err(Error::Field { field: field.into(), found, expected })
        };
        let size = self.chunk_bytes;
        if !size.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&size) {
            let expected = format!("a power of two from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}");
            return bad("chunk_size", size, expected);
        }
        let at_most = |limit: usize| format!("at most {limit}");
        if self.machine_type.len() > limits::MACHINE_NAME_BYTES_MAX {
            let expected = at_most(limits::MACHINE_NAME_BYTES_MAX);
            return bad("machine_type's length", self.machine_type.len() as u64, expected);
        }
        if let Some(field) = self.origin.overlong_field() {
            return bad(field.name, field.found as u64, at_most(field.limit));
        }
        let capabilities = self.capabilities.len();
        if capabilities > limits::CAPABILITIES_MAX
            || self.capabilities.iter().any(|name| name.len() > limits::NAME_BYTES_MAX)
        {
            let expected = format!("{} of ordinary length", at_most(limits::CAPABILITIES_MAX));
            return bad("the number of capabilities", capabilities as u64, expected);
        }
        if self.blocks.len() > limits::BLOCKS_MAX {
            return bad("the number of blocks", self.blocks.len() as u64, at_most(limits::BLOCKS_MAX));
        }
        let mut left = limits::RAM_BYTES_MAX;
        for block in &self.blocks {
            if block.name.len() > limits::NAME_BYTES_MAX {
                let expected = at_most(limits::NAME_BYTES_MAX);
                return bad("the length of a block's name", block.name.len() as u64, expected);
            }
            if !block.length.is_multiple_of(PAGE_SIZE) || block.length > left {
                let expected = format!("whole pages, {left} bytes at most");
                return bad("a block's length", block.length, expected);
            }
            left -= block.length;
        }
        let limit = limits::DEVICE_STATE_BYTES_MAX;
        match self.device_state.length {
            length if length > limit as u64 => bad("device_state.length", length, at_most(limit)),
            _ => Ok(()),
        }
    }
}

/// Decompresses the content and compares it with its hash.
fn content(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let truncated = Error::Truncated { found: bytes.len() as u64 };
    let Some((magic, rest)) = bytes.split_first_chunk::<16>() else {
        return Err(if MAGIC.starts_with(bytes) { truncated } else { Error::NotAnIndex });
    };
    if *magic != MAGIC {
        return Err(Error::NotAnIndex);
    }
    let Some((version, rest)) = rest.split_first_chunk::<4>() else { return Err(truncated) };
    let version = u32::from_le_bytes(*version);
    if version == 0 || version > VERSION {
        return Err(Error::Version { found: version, known: VERSION });
    }
    let Some((length, rest)) = rest.split_first_chunk::<8>() else { return Err(truncated) };
    let Some((hash, compressed)) = rest.split_first_chunk::<32>() else { return Err(truncated) };
    let length = u64::from_le_bytes(*length);
    if length > CONTENT_BYTES_MAX {
        return Err(Error::TooLarge { found: length, limit: CONTENT_BYTES_MAX });
    }
    // The announced length must be possible for the compressed content.
    let bound = zstd::bulk::Decompressor::upper_bound(compressed);
    if bound.is_some_and(|bound| (bound as u64) < length) {
        return Err(Error::Truncated { found: bytes.len() as u64 });
    }
    let content = zstd::bulk::decompress(compressed, length as usize);
    let content = content.map_err(|error| Error::Content { why: error.to_string() })?;
    if content.len() as u64 != length || Digest::of(&content) != Digest(*hash) {
        return Err(Error::Content { why: "its BLAKE3 differs".into() });
    }
    Ok(content)
}

fn name(bytes: &[u8; NAME_BYTES]) -> ChunkHash {
    match bytes {
        [0, ..] if *bytes == [0; NAME_BYTES] => ChunkHash::Zero,
        bytes => ChunkHash::Data(*bytes),
    }
}
