//! A stored guest's layout: QEMU's `mapped-ram` (9.0 and later; `docs/devel/migration/mapped-ram.rst`).
//!
//! ```text
//!   header · configuration {capabilities: mapped-ram} · ram START: total,
//!     block 0: name, length, mapped-ram header, bitmap | padding to 1 MiB | page 0, page 1, …   (holes where zero)
//!     block 1: …                                                          | …
//!   EOS, footer · ram END: EOS, footer · device state · EOF · VMDESC
//! ```
//!
//! The bitmap has a bit for each page, 1 where the page has content; it is an array of the host's `unsigned
//! long`, on x86 little-endian, padded to 8 bytes. Offsets are absolute in the file. Each block's pages have
//! the layout of its memory, so a block can be mapped; a hole reads as zero, but only the bitmap is binding.

pub(crate) mod header;

pub use header::{HEADER_BYTES, MappedRamHeader, PAGES_ALIGNMENT, VERSION, bitmap_bytes};

use crate::ram::RamBlock;

/// Gives each of `blocks` its place in a file whose block list begins (with the be64 total) at `list_offset`;
/// returns the end of the last block.
pub fn place_all(blocks: &mut [RamBlock], list_offset: u64) -> u64 {
    place_all_reserving(blocks, list_offset, 0)
}

/// As [`place_all`], with `reserved` bytes or more between the first block's bitmap and its pages, which no
/// reader of the stream evaluates.
pub fn place_all_reserving(blocks: &mut [RamBlock], list_offset: u64, reserved: u64) -> u64 {
    let (mut offset, mut reserved) = (list_offset + 8, reserved);
    for block in blocks {
        let header_offset = offset + 1 + block.name.len() as u64 + 8;
        let header = MappedRamHeader::place_with(header_offset, block.length, core::mem::take(&mut reserved));
        offset = header.end(block.length);
        block.mapped = Some(header);
    }
    offset
}
