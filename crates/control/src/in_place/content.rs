//! Comparison of an image's file with its page bitmaps: a mapping shows the content of the file, a reader the
//! content according to the bitmaps.
//!
//! QEMU leaves the old content of a page that became zero in the file and only clears its bit. towline's own
//! images have a hole there. Only data of the file is read, since holes are zeros, and of it only the pages
//! without a bit.

use std::fs::File;
use std::io;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use towline_image::Image;
use towline_migration::{ExtentKind, Guest as _};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef};

const ZERO_PAGE: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Offset in the file of the first page of a block that is not zero there and has no bit; `begin` is that of
/// the block. `file` is the image, with its own position.
pub(super) fn stale_page(
    image: &Image,
    file: &File,
    block: BlockIndex,
    begin: u64,
) -> io::Result<Option<u64>> {
    let end = begin + image.ram_blocks()[block.index()].length;
    let mut at = begin;
    while let Some((data, hole)) = next_data(file, at)?.filter(|(data, _)| *data < end) {
        // Data and holes begin at the filesystem's blocks, which may be larger than a page or smaller.
        let first = (data - begin) / PAGE_SIZE * PAGE_SIZE;
        let last = (hole.min(end) - begin).next_multiple_of(PAGE_SIZE);
        if let Some(page) = stale_within(image, block, first, last) {
            return Ok(Some(begin + page));
        }
        at = hole;
    }
    Ok(None)
}

/// The next data of a file at or after `at`, and the hole that follows.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some((data, seek(file, SeekFrom::Hole(data))?))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// As [`stale_page`], for the pages between two offsets of the block.
fn stale_within(image: &Image, block: BlockIndex, first: u64, last: u64) -> Option<u64> {
    let mut at = first;
    while at < last {
        let page = PageRef { block, offset: at };
        let extent = image.extent(page);
        let end = (at + extent.pages * PAGE_SIZE).min(last);
        if extent.kind == ExtentKind::Zero {
            // A block without anything to compare is not known to be zero.
            let Some(bytes) = image.immutable(page, end - at) else { return Some(at) };
            let stale = bytes.chunks(ZERO_PAGE.len()).position(|page| page != &ZERO_PAGE[..page.len()]);
            if let Some(stale) = stale {
                return Some(at + stale as u64 * PAGE_SIZE);
            }
        }
        at = end;
    }
    None
}
