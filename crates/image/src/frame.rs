//! Everything in an image file that is not a page: head, block list, page bitmaps, the seal, the end of the
//! memory.

use towline_protocol::configuration::{Configuration, MAPPED_RAM};
use towline_protocol::mapped_ram;
use towline_protocol::ram;
use towline_protocol::section::{SectionHeader, SectionType};
use towline_protocol::{RamBlock, mapped_ram::MappedRamHeader};

use crate::layer::{INCREMENTAL, memory_end};
use crate::manifest::Digest;
use crate::seal;

/// Kind of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageKind {
    Whole,
    /// Chunks of the base are omitted; QEMU must not load it.
    Incremental,
}

/// The bytes of an image file that are not pages, and the layout.
#[derive(Debug, Clone)]
pub(crate) struct ImageFrame {
    /// Header, configuration, section header and total.
    head: Vec<u8>,
    section_id: u32,
    /// With their positions in the file.
    pub(crate) blocks: Vec<RamBlock>,
    /// End of the last page.
    pub(crate) end: u64,
}

/// Bytes and their offset in the file.
pub(crate) type OffsetBytes = (u64, Vec<u8>);

impl ImageFrame {
    /// Lays out the file of a guest whose stream has this header.
    pub(crate) fn new(
        configuration: &Configuration,
        section_id: u32,
        blocks: &[RamBlock],
        kind: ImageKind,
    ) -> Self {
        let (mut head, mut blocks) = (head(configuration, section_id, kind), blocks.to_vec());
        let end = mapped_ram::place_all_reserving(&mut blocks, head.len() as u64, seal::BYTES as u64);
        ram::put_total(total(&blocks), &mut head);
        Self { head, section_id, blocks, end }
    }

    /// The same layout with the header of a whole image, which is not longer, and all pages in their places.
    pub(crate) fn whole(&self, configuration: &Configuration) -> Self {
        let mut head = head(configuration, self.section_id, ImageKind::Whole);
        let mut blocks = self.blocks.clone();
        let mut placed = self.blocks.clone();
        mapped_ram::place_all(&mut placed, head.len() as u64);
        // Only the first block's entry follows the header; the others follow the previous block's pages.
        if let (Some(first), Some(placed)) = (blocks.first_mut(), placed.first()) {
            let pages_offset = first.mapped.expect("laid out").pages_offset;
            first.mapped = placed.mapped.map(|mapped| MappedRamHeader { pages_offset, ..mapped });
        }
        ram::put_total(total(&blocks), &mut head);
        Self { head, blocks, ..self.clone() }
    }

    /// Length of the memory in bytes.
    pub(crate) fn total(&self) -> u64 {
        total(&self.blocks)
    }

    /// The file's bytes up to the first block's bitmap.
    pub(crate) fn up_to_bitmap(&self) -> Vec<u8> {
        match self.blocks.first() {
            Some(first) => [&self.head[..], &entry(first)].concat(),
            None => Vec::new(),
        }
    }

    /// All parts in file order. `bitmaps` has one entry per block.
    pub(crate) fn parts<'a>(
        &self,
        bitmaps: impl Iterator<Item = &'a [u8]>,
        device_state: &[u8],
    ) -> Vec<OffsetBytes> {
        let listed = |(block, bitmap): (&RamBlock, &[u8])| {
            let entry = entry(block);
            (mapped(block).bitmap_offset - entry.len() as u64, [&entry[..], bitmap].concat())
        };
        let tail = [&memory_end(self.section_id)[..], device_state].concat();
        let head = (0, self.head.clone());
        let list = self.blocks.iter().zip(bitmaps).map(listed);
        [head].into_iter().chain(list).chain([(self.end, tail)]).collect()
    }

    /// Position and bytes of the seal for a manifest with this text.
    pub(crate) fn seal(&self, manifest: &[u8]) -> Option<OffsetBytes> {
        Some((seal::offset(&self.blocks)?, seal::encode(Digest::of(manifest))))
    }
}

fn head(configuration: &Configuration, section_id: u32, kind: ImageKind) -> Vec<u8> {
    let mut configuration = configuration.clone();
    configuration.capabilities.push(MAPPED_RAM.into());
    if kind == ImageKind::Incremental {
        configuration.capabilities.push(INCREMENTAL.into());
    }
    let mut head = Vec::new();
    configuration.encode(&mut head);
    let (name, version) = (ram::SECTION_NAME.into(), ram::SECTION_VERSION);
    SectionHeader { id: section_id, name, instance: 0, version }.encode(SectionType::Start, &mut head);
    head
}

fn total(blocks: &[RamBlock]) -> u64 {
    blocks.iter().map(|block| block.length).sum()
}

/// A block's entry in the list, up to its bitmap.
fn entry(block: &RamBlock) -> Vec<u8> {
    let mut entry = Vec::new();
    ram::put_block(block, &mut entry);
    mapped(block).encode(&mut entry);
    entry
}

fn mapped(block: &RamBlock) -> MappedRamHeader {
    block.mapped.expect("laid out")
}
