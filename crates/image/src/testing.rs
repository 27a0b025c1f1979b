//! Small stored guests for tests: a block of a chunk and a page, and one of a page.

use std::path::Path;

use serde_json::json;
use towline_migration::{ChannelId, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use crate::checksum::CHUNK_BYTES;
use crate::manifest::Digest;
use crate::{Existing, Image, ImageWriter, Origin, Result};

pub(crate) const PAGE: usize = PAGE_SIZE as usize;
pub(crate) const LENGTHS: [u64; 2] = [CHUNK_BYTES + PAGE_SIZE, PAGE_SIZE];

/// A guest: its pages with content, and one byte of its device state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestGuest {
    /// Block, page, and the byte that fills the page.
    pub(crate) pages: Vec<(u32, u64, u8)>,
    pub(crate) device: u8,
}

impl TestGuest {
    /// A guest with pages filled from `fill`; the page after the first chunk is always the same.
    pub(crate) fn new(fill: u8, device: u8) -> Self {
        let pages = [0, 1, 7, 300].map(|page| (0, page, fill.wrapping_add(page as u8)));
        Self { pages: pages.into_iter().chain([(0, 512, 9), (1, 0, fill)]).collect(), device }
    }

    pub(crate) fn blocks() -> Vec<RamBlock> {
        let block = |(index, length): (usize, &u64)| RamBlock {
            name: format!("b{index}"),
            length: *length,
            mapped: None,
        };
        LENGTHS.iter().enumerate().map(block).collect()
    }

    pub(crate) fn device_state(&self) -> DeviceState {
        let section = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x02";
        let devices =
            json!([{ "name": "timer", "instance_id": 0, "vmsd_name": "timer", "version": 2, "fields": [] }]);
        let description = json!({ "page_size": PAGE_SIZE, "devices": devices }).to_string();
        let length = u32::try_from(description.len()).unwrap().to_be_bytes();
        let tail = [&[self.device, 2, 0x7e, 0, 0, 0, 3][..], &[0, 6], &length, description.as_bytes()];
        DeviceState::parse(&[&section[..], &tail.concat()].concat()).unwrap()
    }

    /// The memory of all blocks.
    pub(crate) fn memory(&self) -> Vec<Vec<u8>> {
        let mut memory: Vec<_> = LENGTHS.iter().map(|&length| vec![0; length as usize]).collect();
        for &(block, page, fill) in &self.pages {
            memory[block as usize][page as usize * PAGE..][..PAGE].fill(fill);
        }
        memory
    }

    /// Stores the guest.
    pub(crate) fn store(&self, path: &Path, existing: Existing, base: Option<&Path>) -> Result<ImageWriter> {
        let writer = self.write(path, existing, base)?;
        writer.commit().map_err(crate_error)?;
        writer.publish().map_err(crate_error)?;
        Ok(writer)
    }

    /// Stores the guest without committing it.
    pub(crate) fn write(&self, path: &Path, existing: Existing, base: Option<&Path>) -> Result<ImageWriter> {
        let writer = ImageWriter::create(path, existing, Origin::default())?;
        let writer = match base {
            Some(base) => writer.based_on(base)?,
            None => writer,
        };
        let configuration = Configuration { machine_type: "pc-q35-10.0".into(), ..Default::default() };
        writer.configuration(&configuration).map_err(crate_error)?;
        writer.section_start(RamSection { kind: SectionKind::Start, id: 2 }).map_err(crate_error)?;
        writer.blocks(&Self::blocks()).map_err(crate_error)?;
        for &(block, page, fill) in &self.pages {
            let (content, offset) = ([fill; PAGE], page * PAGE_SIZE);
            let pages = Pages { block: BlockIndex(block), offsets: &[offset], contents: &[&content] };
            writer.pages(ChannelId::Main, &pages).map_err(crate_error)?;
        }
        writer.device_state(self.device_state()).map_err(crate_error)?;
        Ok(writer)
    }
}

/// A directory in memory if possible, where a sync is free.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Hash of device state and memory as delivered, of an image that opens and verifies.
pub(crate) fn delivered(image: &Image) -> Digest {
    use towline_migration::{ExtentKind, Guest};
    use towline_protocol::PageRef;

    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?} {}", image.configuration(), image.ram_section_id()).as_bytes());
    hasher.update(image.devices().bytes());
    for (index, block) in image.ram_blocks().iter().enumerate() {
        hasher.update(format!("{} {}", block.name, block.length).as_bytes());
        let (block, length, mut at) = (BlockIndex(index as u32), block.length, 0);
        while at < length {
            let page = PageRef { block, offset: at };
            let extent = image.extent(page);
            let end = at + (extent.pages * PAGE_SIZE).min(CHUNK_BYTES - at % CHUNK_BYTES);
            match extent.kind {
                ExtentKind::Zero => hasher.update(&vec![0; (end - at) as usize]),
                _ => hasher.update(image.immutable(page, end - at).unwrap()),
            };
            at = end;
        }
    }
    Digest(*hasher.finalize().as_bytes())
}

/// The crate's own error within the engine's.
fn crate_error(error: towline_migration::Error) -> crate::Error {
    match error {
        towline_migration::Error::Guest(error) => *error.downcast().unwrap(),
        error => panic!("{error}"),
    }
}
