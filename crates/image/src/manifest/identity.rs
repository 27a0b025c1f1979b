//! Hashes that bind a manifest to its image.

use std::fmt;

use serde::{Deserialize, Serialize};
use towline_protocol::RamBlock;

use super::text::truncated;

/// BLAKE3 key context of an identity, so no other hash can equal one.
const CONTEXT: &str = "towline-image 2025 identity of a mapped-ram file, version 1";

/// A BLAKE3 hash; 64 hex digits as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Hashes `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Identity of an image: everything in the file except the pages and their bitmaps.
    ///
    /// `head` is the file up to the first block's bitmap (header, configuration, the start of the `ram`
    /// section), `blocks` the block list with its mapped-ram headers, `device_state` the hash of all bytes
    /// after the memory. Each part is preceded by its length, so different images hash different bytes.
    pub fn identity(head: &[u8], blocks: &[RamBlock], device_state: Self) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_be_bytes()).update(bytes);
        };
        part(head);
        part(&(blocks.len() as u64).to_be_bytes());
        let mut header = Vec::new();
        for block in blocks {
            part(block.name.as_bytes());
            part(&block.length.to_be_bytes());
            header.clear();
            if let Some(mapped) = &block.mapped {
                mapped.encode(&mut header);
            }
            part(&header);
        }
        part(&device_state.0);
        Self(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let hash = blake3::Hash::from_hex(&text);
        let hash = hash.map_err(|_| format!("a hash has 64 hex digits, not {:?}", truncated(&text)))?;
        Ok(Self(*hash.as_bytes()))
    }
}
