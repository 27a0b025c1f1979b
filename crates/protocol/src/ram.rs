//! The `ram` section: block list and records (QEMU `migration/ram.c`, version 4).
//!
//! Each record begins with a be64 whose bits below the page size are flags and whose other bits are an
//! offset:
//!
//! ```text
//!   MEM_SIZE   total RAM          then per block: counted name, be64 length, [mapped-ram header]        START only
//!   PAGE       offset [name]      then one page                     name only without CONTINUE
//!   ZERO       offset [name] u8   the fill byte, 0
//!   XBZRLE     offset [name] u8 1 be16 length, data
//!   MULTIFD_FLUSH                 the lanes' barrier                8.1 and later
//!   EOS                           the section's payload ends
//! ```

use alloc::string::String;
use alloc::vec::Vec;

use crate::mapped_ram::header::MappedRamHeader;
pub use crate::page::PAGE_SIZE;
use crate::wire::{put_counted, put64};

/// The section's idstr.
pub const SECTION_NAME: &str = "ram";
/// The section's version in all QEMU releases since 0.11.
pub const SECTION_VERSION: u32 = 4;

bitflags::bitflags! {
    /// The low bits of a record's first word, with QEMU's names (`RAM_SAVE_FLAG_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct RamFlags: u64 {
        /// Obsolete.
        const FULL = 0x001;
        /// A page of zeros.
        const ZERO = 0x002;
        /// The block list.
        const MEM_SIZE = 0x004;
        /// A whole page.
        const PAGE = 0x008;
        /// The end of a section's payload.
        const EOS = 0x010;
        /// Modifier: the block is that of the previous record.
        const CONTINUE = 0x020;
        /// A page as its changes.
        const XBZRLE = 0x040;
        /// RDMA.
        const HOOK = 0x080;
        /// A page of the old compress threads (until 9.0).
        const COMPRESS_PAGE = 0x100;
        /// The barrier of the lanes.
        const MULTIFD_FLUSH = 0x200;
    }
}

/// Length of a record that names a page of the previous record's block.
pub const CONTINUED_RECORD_BYTES: usize = 8;

/// Returns true if `record` names a page with content, in the previous record's block: [`PAGE_SIZE`] bytes of
/// content follow.
pub fn is_continued_page(record: [u8; CONTINUED_RECORD_BYTES]) -> bool {
    let flags = u64::from_be_bytes(record) & (PAGE_SIZE - 1);
    flags == (RamFlags::PAGE | RamFlags::CONTINUE).bits()
}

/// A block's place in its guest's block list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIndex(pub u32);

impl BlockIndex {
    /// As an index into the block list.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The name of a page (or of the first of several): its block, and its offset there in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef {
    /// The block.
    pub block: BlockIndex,
    /// Bytes from the block's beginning, a multiple of the page size.
    pub offset: u64,
}

/// A RAM block of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlock {
    /// QEMU's idstr, e.g. `pc.ram` or `0000:00:02.0/vga.vram`.
    pub name: String,
    /// The bytes that the guest uses (`used_length`), a multiple of the page size.
    pub length: u64,
    /// Where a mapped-ram file keeps it.
    pub mapped: Option<MappedRamHeader>,
}

impl RamBlock {
    /// The number of target pages.
    pub fn pages(&self) -> u64 {
        self.length / PAGE_SIZE
    }
}

/// Appends the block list's beginning: the sum of all lengths.
pub fn put_total(total: u64, out: &mut Vec<u8>) {
    put64(out, total | RamFlags::MEM_SIZE.bits());
}

/// Appends one entry of the block list, without a mapped-ram header.
pub fn put_block(block: &RamBlock, out: &mut Vec<u8>) {
    put_counted(out, block.name.as_bytes());
    put64(out, block.length);
}

/// Appends a record that consists of its flag only: [`RamFlags::EOS`] or [`RamFlags::MULTIFD_FLUSH`].
pub fn put_flag(flag: RamFlags, out: &mut Vec<u8>) {
    put64(out, flag.bits());
}
