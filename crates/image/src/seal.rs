//! The seal: the BLAKE3 of the manifest's text, stored in the image file at a place that readers of the
//! stream ignore.
//!
//! ```text
//!   … bitmap of the first block | "towline-seal 1\r\n" · 32 bytes, BLAKE3 of the manifest | … up to the first block's pages
//! ```
//!
//! The seal binds an image to exactly one manifest, even if two images store guests with the same devices,
//! and every change of a manifest is detected without reading the memory. Images of earlier versions and of
//! QEMU itself have none.

use towline_protocol::RamBlock;
use towline_protocol::mapped_ram::bitmap_bytes;

use crate::manifest::Digest;

const MAGIC: [u8; 16] = *b"towline-seal 1\r\n";
/// Length of a seal.
pub(crate) const BYTES: usize = MAGIC.len() + 32;

/// Offset of the seal of an image with these blocks; `None` if there is no space for one.
pub(crate) fn offset(blocks: &[RamBlock]) -> Option<u64> {
    let first = blocks.first()?;
    let mapped = first.mapped?;
    let at = mapped.bitmap_offset + bitmap_bytes(first.length, mapped.page_size);
    (mapped.pages_offset - at >= BYTES as u64).then_some(at)
}

/// Encodes a seal.
pub(crate) fn encode(manifest: Digest) -> Vec<u8> {
    [&MAGIC[..], &manifest.0].concat()
}

/// Reads the seal of an image file, if it has one.
pub(crate) fn read(file: &[u8], blocks: &[RamBlock]) -> Option<Digest> {
    let at = usize::try_from(offset(blocks)?).ok()?;
    let (magic, rest) = file.get(at..)?.split_first_chunk()?;
    (*magic == MAGIC).then(|| rest.first_chunk().copied().map(Digest))?
}
