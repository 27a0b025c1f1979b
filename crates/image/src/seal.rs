//! What an image file says of its manifest: the BLAKE3 of the manifest's text, in room that no reader of the stream looks at.
//!
//! ```text
//!   … bitmap of the first block | "towline-seal 1\r\n" · 32 bytes, BLAKE3 of the manifest | … up to the first block's pages
//! ```
//!
//! With it an image has one manifest and no other, even where two images are of guests with the same devices; and whatever is
//! changed in a manifest is found without reading the memory. Images of earlier versions and of QEMU itself have none.

use towline_protocol::RamBlock;
use towline_protocol::mapped_ram::bitmap_bytes;

use crate::manifest::Digest;

const MAGIC: [u8; 16] = *b"towline-seal 1\r\n";
/// Bytes that it takes.
pub(crate) const BYTES: usize = MAGIC.len() + 32;

/// Where the seal of an image with these blocks is; `None`: there is no room for one.
pub(crate) fn offset(blocks: &[RamBlock]) -> Option<u64> {
    let first = blocks.first()?;
    let mapped = first.mapped?;
    let at = mapped.bitmap_offset + bitmap_bytes(first.length, mapped.page_size);
    (mapped.pages_offset - at >= BYTES as u64).then_some(at)
}

/// Its bytes.
pub(crate) fn encode(manifest: Digest) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&manifest.0);
    bytes
}

/// The seal of an image file, if it has one.
pub(crate) fn read(file: &[u8], blocks: &[RamBlock]) -> Option<Digest> {
    let at = usize::try_from(offset(blocks)?).ok()?;
    let (magic, rest) = file.get(at..)?.split_first_chunk()?;
    (*magic == MAGIC).then(|| rest.first_chunk().copied().map(Digest))?
}
