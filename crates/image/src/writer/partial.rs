//! Storing a guest of which most is known to be in the new image's base, so that it need not arrive.
//!
//! The guest runs on an image, whose chunks have checksums, and has written some pages. A chunk without such a page has the image's
//! checksum. If the base's chunk has the same, it is the base's:
//!
//! ```text
//!   the guest's image    h0  h1  h2  h3  h4
//!   written pages            ▓       ▓
//!   the new image's base h0  h1  x2  h3  h4     ─► chunks 1, 2 and 3 arrive, whole; 0 and 4 are the base's
//! ```
//!
//! They stay in the base, or are taken from it into an image that is whole afterwards.

use std::ops::Range;

use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::{ImageLayout, ImageWriter};
use crate::base_image::BaseImage;
use crate::checksum::{CHUNK_BYTES, ChunkHash, chunk_runs};
use crate::{Image, Result};

/// Ranges of a block that arrive: whole chunks, in ascending order.
type ArrivingRanges = Vec<Range<u64>>;

impl ImageWriter {
    /// Expects a guest that is `image` but for a `difference`: ascending ranges of each block. Returns the ranges of each block that must
    /// arrive; the others are the base's. `None`: all of it must, since this image has no base, or `image` no checksums.
    ///
    /// Called before the block list arrives.
    ///
    /// # Errors
    /// The guest's blocks are not the base's.
    pub fn expect_difference<'a>(
        &self,
        image: &Image,
        difference: impl Fn(BlockIndex) -> &'a [Range<u64>],
    ) -> Result<Option<Vec<ArrivingRanges>>> {
        let (Some(base), Some(manifest)) = (&self.base, image.manifest()) else { return Ok(None) };
        base.check(&self.path, image.ram_blocks())?;
        let arriving = |(block, ram): (BlockIndex, &RamBlock)| {
            let is_in_base = |chunk| manifest.chunk_hash(block, chunk) == base.chunk_hash(block, chunk);
            arriving(ram.length, difference(block), is_in_base)
        };
        let ranges: Vec<_> = (0..).map(BlockIndex).zip(image.ram_blocks()).map(arriving).collect();
        Ok(Some(self.arriving.get_or_init(|| ranges).clone()))
    }

    /// Takes the chunks that did not arrive from the base's files. Whether those have changed meanwhile is checked later.
    ///
    /// # Errors
    /// They cannot be copied.
    pub(super) fn take_chunks(
        &self,
        base: &BaseImage,
        layout: &ImageLayout,
        hashes: &[Vec<ChunkHash>],
    ) -> Result<()> {
        let blocks = (0..).map(BlockIndex).zip(&layout.frame.blocks);
        for ((block, ram), arriving) in blocks.zip(self.arriving.get().map_or(&[][..], Vec::as_slice)) {
            let pages_offset = ram.mapped.expect("laid out").pages_offset;
            for (chunk, hash) in hashes[block.index()].iter().enumerate() {
                let start = chunk as u64 * CHUNK_BYTES;
                let range = start..(start + CHUNK_BYTES).min(ram.length);
                if *hash == ChunkHash::Zero || overlaps(arriving, &range) {
                    continue;
                }
                let (file, from) = base.place_of(PageRef { block, offset: start });
                self.with_file(|new| {
                    new.take(file, from, pages_offset + start, range.end - start)?;
                    self.write_back.written(new.file(), range.end - start)
                })?;
            }
        }
        Ok(())
    }

    /// Takes what does not arrive from the base: its checksums, and which of its pages have content.
    pub(super) fn take_from_base(&self, layout: &ImageLayout) {
        let (Some(base), Some(arriving)) = (&self.base, self.arriving.get()) else { return };
        for (block, arriving) in (0..).map(BlockIndex).zip(arriving) {
            take_block(base, block, layout, arriving);
        }
    }
}

fn take_block(base: &BaseImage, block: BlockIndex, layout: &ImageLayout, arriving: &[Range<u64>]) {
    let (length, bitmap) = (layout.frame.blocks[block.index()].length, &layout.bitmaps[block.index()]);
    for (chunk, start) in (0..length).step_by(CHUNK_BYTES as usize).enumerate() {
        if overlaps(arriving, &(start..start + 1)) {
            continue;
        }
        layout.hashers[block.index()].set_known(chunk, base.chunk_hash(block, chunk));
        for offset in (start..(start + CHUNK_BYTES).min(length)).step_by(PAGE_SIZE as usize) {
            if base.has_content(PageRef { block, offset }) {
                bitmap.set(offset / PAGE_SIZE);
            }
        }
    }
}

/// The chunks of a block that arrive.
fn arriving(length: u64, difference: &[Range<u64>], is_in_base: impl Fn(usize) -> bool) -> ArrivingRanges {
    chunk_runs(length, |chunk| {
        let start = chunk as u64 * CHUNK_BYTES;
        !is_in_base(chunk) || overlaps(difference, &(start..(start + CHUNK_BYTES).min(length)))
    })
}

fn overlaps(ascending: &[Range<u64>], range: &Range<u64>) -> bool {
    let first = ascending.partition_point(|other| other.end <= range.start);
    ascending.get(first).is_some_and(|other| other.start < range.end)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use towline_migration::{ChannelId, Guest as _, Pages, Sink};
    use towline_protocol::destination::{RamSection, SectionKind};

    use super::*;
    use crate::testing::{PAGE, TestGuest, delivered, directory};
    use crate::{Existing, Origin};

    /// Stores `guest` as what it differs in from the image at `base`: the page at the end of its first block.
    fn store_difference(guest: &TestGuest, path: &Path, base: &Path, fill: u8) {
        let writer = ImageWriter::create(path, Existing::Refuse, Origin::default()).unwrap();
        let writer = writer.based_on(base).unwrap().taking_base();
        let image = Image::open(base).unwrap();
        let end = CHUNK_BYTES..CHUNK_BYTES + PAGE_SIZE;
        let difference = |block| if block == BlockIndex(0) { std::slice::from_ref(&end) } else { &[] };
        let arriving = writer.expect_difference(&image, difference).unwrap().unwrap();
        assert_eq!(arriving, [vec![end.clone()], Vec::new()]);
        Sink::configuration(&writer, image.configuration()).unwrap();
        writer.section_start(RamSection { kind: SectionKind::Start, id: 2 }).unwrap();
        writer.blocks(&TestGuest::blocks()).unwrap();
        let pages = Pages { block: BlockIndex(0), offsets: &[CHUNK_BYTES], contents: &[&[fill; PAGE]] };
        writer.pages(ChannelId::Main, &pages).unwrap();
        writer.device_state(guest.device_state()).unwrap();
        writer.commit().unwrap();
        writer.publish().unwrap();
    }

    #[test]
    fn an_image_that_takes_its_base_needs_none() {
        let place = directory();
        let path = |name: &str| place.path().join(name);
        let mut guest = TestGuest::new(3, 1);
        guest.store(&path("a"), Existing::Refuse, None).unwrap();
        // Its second block differs, its first one is in the whole image.
        guest.pages.last_mut().unwrap().2 = 77;
        guest.store(&path("b"), Existing::Refuse, Some(&path("a"))).unwrap();
        store_difference(&guest, &path("c"), &path("b"), 5);
        *guest.pages.iter_mut().find(|page| page.1 == 512).unwrap() = (0, 512, 5);
        guest.store(&path("whole"), Existing::Refuse, None).unwrap();
        ["a", "b"].iter().for_each(|name| std::fs::remove_file(path(name)).unwrap());
        let [taken, whole] = ["c", "whole"].map(|name| Image::open(&path(name)).unwrap());
        assert_eq!(taken.configuration(), whole.configuration());
        assert_eq!(delivered(&taken), delivered(&whole));
        assert!(taken.is_sealed() && taken.manifest().unwrap().base.is_none());
    }

    #[test]
    fn chunks_that_may_differ_arrive_whole() {
        const C: u64 = CHUNK_BYTES;
        let arriving = |difference: &[(u64, u64)], in_base: &[usize]| {
            let difference: Vec<_> = difference.iter().map(|&(start, end)| start..end).collect();
            let ranges = arriving(4 * C + PAGE_SIZE, &difference, |chunk| in_base.contains(&chunk));
            ranges.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(arriving(&[], &[0, 1, 2, 3, 4]), []);
        assert_eq!(arriving(&[(C + PAGE_SIZE, C + 2 * PAGE_SIZE)], &[0, 1, 2, 3, 4]), [(C, 2 * C)]);
        let split = [(C, 4 * C - PAGE_SIZE), (4 * C, 4 * C + PAGE_SIZE)];
        assert_eq!(arriving(&split, &[0, 1, 2, 3, 4]), [(C, 4 * C + PAGE_SIZE)]);
        assert_eq!(arriving(&[(0, C)], &[0, 1, 3, 4]), [(0, C), (2 * C, 3 * C)]);
    }
}
