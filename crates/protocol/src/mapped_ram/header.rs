//! The header of a block in a stored guest.

use alloc::vec::Vec;

use crate::limits;
use crate::page::PAGE_SIZE;
use crate::wire::{Incomplete, Reader, put32, put64};
use crate::{InvalidMessage, Result};

/// The header's only version.
pub const VERSION: u32 = 1;
/// Pages of a block begin at a multiple of this, so it can be mapped with any page size of the host.
pub const PAGES_ALIGNMENT: u64 = 1 << 20;
/// Bytes of a header.
pub const HEADER_BYTES: u64 = 28;

/// Where one block lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRamHeader {
    /// The target page size, which is one bit's worth of the bitmap.
    pub page_size: u64,
    /// The bitmap's offset in the file.
    pub bitmap_offset: u64,
    /// The first page's offset in the file.
    pub pages_offset: u64,
}

impl MappedRamHeader {
    /// The header of a block of `length` bytes whose header begins at `header_offset` of the file.
    pub fn place(header_offset: u64, length: u64) -> Self {
        Self::place_with(header_offset, length, 0)
    }

    /// The same with `reserved` bytes or more between bitmap and pages.
    pub(super) fn place_with(header_offset: u64, length: u64, reserved: u64) -> Self {
        let bitmap_offset = header_offset + HEADER_BYTES;
        let end = bitmap_offset + bitmap_bytes(length, PAGE_SIZE) + reserved;
        Self { page_size: PAGE_SIZE, bitmap_offset, pages_offset: end.next_multiple_of(PAGES_ALIGNMENT) }
    }

    /// Appends the header.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put32(out, VERSION);
        put64(out, self.page_size);
        put64(out, self.bitmap_offset);
        put64(out, self.pages_offset);
    }

    /// Reads a header. [`Self::check`] compares it with its block and file.
    pub(crate) fn decode(input: &mut Reader<'_>) -> Result<(u32, Self), Incomplete> {
        let version = input.be32()?;
        let (page_size, bitmap_offset, pages_offset) = (input.be64()?, input.be64()?, input.be64()?);
        Ok((version, Self { page_size, bitmap_offset, pages_offset }))
    }

    /// Checks the header of `block` (of `length` bytes), whose own offset in the file is `header_offset`.
    pub(crate) fn check(&self, version: u32, block: &str, length: u64, header_offset: u64) -> Result<()> {
        let bad = |what, found, expected| {
            Err(InvalidMessage::MappedRam { block: block.into(), what, found, expected }.into())
        };
        if version != VERSION {
            return bad("version", version.into(), VERSION.into());
        }
        if self.page_size != PAGE_SIZE {
            return bad("page size", self.page_size, PAGE_SIZE);
        }
        let expected = header_offset + HEADER_BYTES;
        if self.bitmap_offset != expected {
            return bad("bitmap offset", self.bitmap_offset, expected);
        }
        let least = expected + bitmap_bytes(length, PAGE_SIZE);
        if self.pages_offset < least || !self.pages_offset.is_multiple_of(PAGE_SIZE) {
            return bad("pages offset", self.pages_offset, least.next_multiple_of(PAGES_ALIGNMENT));
        }
        if self.pages_offset.checked_add(length).is_none_or(|end| end > limits::FILE_BYTES_MAX) {
            return bad("pages offset", self.pages_offset, least.next_multiple_of(PAGES_ALIGNMENT));
        }
        Ok(())
    }

    /// The end of the block's last page, where the next entry of the list is.
    pub fn end(&self, length: u64) -> u64 {
        self.pages_offset + length
    }
}

/// Bytes of a block's bitmap.
pub fn bitmap_bytes(length: u64, page_size: u64) -> u64 {
    length.div_ceil(page_size).div_ceil(64) * 8
}
