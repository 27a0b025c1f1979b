//! Hash of the content of an image, over all of its chunks.

use super::{Digest, Manifest};
use crate::checksum::ChunkHash;

/// BLAKE3 key context of a content.
const CONTENT_CONTEXT: &str = "towline-image 2026 content of a stored guest, version 1";

impl Digest {
    /// Content of an image: hash of its identity, of all its chunks' hashes, and of its base's content.
    pub(super) fn content(manifest: &Manifest) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTENT_CONTEXT);
        hasher.update(&manifest.image().identity.0);
        for block in manifest.blocks() {
            hasher.update(&(block.chunks.len() as u64).to_be_bytes());
            for chunk in &block.chunks {
                match chunk {
                    ChunkHash::Zero => hasher.update(&[0]),
                    ChunkHash::Data(hash) => hasher.update(&[1]).update(hash),
                };
            }
        }
        hasher.update(manifest.base().map_or(&[][..], |base| &base.content.0[..]));
        Self(*hasher.finalize().as_bytes())
    }
}
