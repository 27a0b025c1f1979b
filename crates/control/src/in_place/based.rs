//! A running guest that maps an image copy-on-write: it is the image, and the pages that it has written since.
//!
//! ```text
//!   proven     QEMU maps the image at each block's address, or anonymous memory  ─► a private mapping of the same here
//!   stopped    PAGEMAP_SCAN: pages that are not the file's ─► copied into that mapping, which is the guest's memory then
//! ```
//! A page that QEMU or its guest has written is anonymous in the mapping, in memory or in swap, and stays so. Pages that a balloon
//! returned are the file's again, for both. Nothing is missed, because the scan follows the stop.
//!
//! Limits: Linux 6.7, QEMU 8.2 (`info ramblock` with addresses), the rights of a debugger.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use towline_channel::IoBuf;
use towline_image::checksum::CHUNK_BYTES;
use towline_image::{Image, Origin, StoredGuest};
use towline_migration::{Extent, ExtentKind, Guest, ProcessMemory, RamMapping};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::image_file::Unchanged;
use super::maps::{Detail, range_at};
use super::process::{Mappings, OpenMode};
use super::proof::address_in;
use super::stored::ImageBlock;
use super::{MappingKind, TransferReason};
use crate::qemu::Qemu;

/// A guest that is proven to run on an image.
#[derive(Debug)]
pub(crate) struct BasedGuest {
    image: Arc<Image>,
    memory: ProcessMemory,
    blocks: Vec<BasedBlock>,
    unchanged: Unchanged,
}

#[derive(Debug)]
struct BasedBlock {
    /// In QEMU's process.
    address: u64,
    /// The guest's memory, as of the last [`BasedGuest::capture`].
    view: RamMapping,
    base: BlockBase,
    /// Ranges that were copied into the view.
    written: Vec<Range<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockBase {
    Image,
    /// All of the block is copied.
    Nothing,
}

impl BasedGuest {
    /// Proves that the guest in `qemu` runs on `image`.
    ///
    /// # Errors
    /// The first reason against it.
    pub(crate) fn of(qemu: &Qemu, image: &Arc<Image>) -> Result<Self, TransferReason> {
        check_blocks(qemu, image)?;
        let (process, own) = (Mappings::of(qemu, Detail::Mappings), Mappings::own());
        let unreadable = |error: io::Error| TransferReason::file(image.path(), error);
        let metadata = image.file().metadata().map_err(unreadable)?;
        if process.open_mode(&metadata)? == Some(OpenMode::Writable) {
            return Err(TransferReason::WritableImage);
        }
        let unchanged = Unchanged::of(image)?.locked()?;
        let mut blocks = Vec::new();
        for (index, block) in (0..).map(BlockIndex).zip(image.ram_blocks()) {
            let stored = ImageBlock { image, own: &own, index, block, kind: MappingKind::Written };
            let address = address_in(qemu, &block.name)?;
            let length = usize::try_from(block.length).expect("a block fits the address space");
            let (base, view) = match range_at(process.get()?, address, block.length) {
                Err(TransferReason::Anonymous) => (BlockBase::Nothing, RamMapping::anonymous(length)),
                found => {
                    let range = stored.own_range()?;
                    stored.prove_range(found?, &range, &process)?;
                    let view = RamMapping::copy_on_write(image.file().as_fd(), range.offset, length);
                    (BlockBase::Image, view)
                }
            };
            blocks.push(BasedBlock { address, view: view.map_err(unreadable)?, base, written: Vec::new() });
        }
        if !blocks.iter().any(|block| block.base == BlockBase::Image) {
            return Err(TransferReason::NoBackend);
        }
        let memory = open_memory(&process)?;
        Ok(Self { image: Arc::clone(image), memory, blocks, unchanged })
    }

    /// Copies what the guest has written. It is stopped, or its pages are a mixture: then the call only makes room for the next one,
    /// which is faster.
    ///
    /// # Errors
    /// The process has exited, or Linux is older than 6.7.
    pub(crate) fn capture(&mut self) -> io::Result<()> {
        for block in &mut self.blocks {
            let length = block.view.span().length();
            let written = match block.base {
                BlockBase::Image => self.memory.written(block.address, length as u64)?,
                BlockBase::Nothing => std::iter::once(0..length as u64).collect(),
            };
            for range in without(&block.written, &written) {
                // The guest has given it back: it is the file's again.
                block.view.discard(range.start as usize, (range.end - range.start) as usize);
            }
            self.memory.copy(block.address, &block.view.span(), &written)?;
            block.written = written;
        }
        Ok(())
    }

    /// The image.
    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// Bytes that differ from the image.
    pub(crate) fn written_bytes(&self) -> u64 {
        let based = self.blocks.iter().filter(|block| block.base == BlockBase::Image);
        based.flat_map(|block| &block.written).map(|range| range.end - range.start).sum()
    }

    /// Bytes of the image's chunks in which there is any of that.
    pub(crate) fn written_chunk_bytes(&self) -> u64 {
        let based = self.blocks.iter().filter(|block| block.base == BlockBase::Image);
        let count = |block: &BasedBlock| {
            let (mut chunks, mut next) = (0, 0);
            for range in &block.written {
                let first = (range.start / CHUNK_BYTES).max(next);
                next = range.end.div_ceil(CHUNK_BYTES);
                chunks += next.saturating_sub(first);
            }
            chunks * CHUNK_BYTES
        };
        based.map(count).sum()
    }

    /// The captured guest, with its device state of the same instant, this origin, and the time for which it was stopped.
    ///
    /// # Errors
    /// The image was written meanwhile.
    pub(crate) fn into_guest(
        self,
        devices: DeviceState,
        origin: Origin,
        standstill: Duration,
    ) -> Result<CapturedGuest, super::Error> {
        self.unchanged.check()?;
        Ok(CapturedGuest { based: self, devices, origin, standstill })
    }
}

/// The parts of ascending ranges that are in none of the others.
fn without(ranges: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    for range in ranges {
        let mut at = range.start;
        let first = others.partition_point(|other| other.end <= range.start);
        for other in others[first..].iter().take_while(|other| other.start < range.end) {
            if at < other.start {
                left.push(at..other.start);
            }
            at = at.max(other.end);
        }
        if at < range.end {
            left.push(at..range.end);
        }
    }
    left
}

/// Refuses a guest with other blocks than the image has: a plugged DIMM, another amount of memory.
fn check_blocks(qemu: &Qemu, image: &Image) -> Result<(), TransferReason> {
    let mut found: Vec<_> =
        qemu.facts().migrated_blocks().map(|block| (&block.name, block.used_bytes)).collect();
    let mut expected: Vec<_> = image.ram_blocks().iter().map(|block| (&block.name, block.length)).collect();
    found.sort_unstable();
    expected.sort_unstable();
    let other = found.iter().find(|block| !expected.contains(block));
    match other.or_else(|| expected.iter().find(|block| !found.contains(block))) {
        None => Ok(()),
        Some((name, _)) => {
            Err(TransferReason::OtherBlock { block: (*name).clone(), path: image.path().to_owned() })
        }
    }
}

fn open_memory(process: &Mappings) -> Result<ProcessMemory, TransferReason> {
    let pid = process.pid()?;
    let unreadable = |error| TransferReason::unreadable(format!("/proc/{pid}/pagemap").into(), error);
    ProcessMemory::open(pid).map_err(unreadable)
}

/// A guest at the instant of its stop.
#[derive(Debug)]
pub(crate) struct CapturedGuest {
    based: BasedGuest,
    devices: DeviceState,
    origin: Origin,
    /// Time for which it was stopped; zero if it was paused before.
    pub(crate) standstill: Duration,
}

impl CapturedGuest {
    /// Bytes that differ from the image.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.based.written_bytes()
    }

    fn block(&self, block: BlockIndex) -> &BasedBlock {
        &self.based.blocks[block.index()]
    }
}

impl Guest for CapturedGuest {
    fn configuration(&self) -> &Configuration {
        self.based.image.configuration()
    }

    fn blocks(&self) -> &[RamBlock] {
        self.based.image.ram_blocks()
    }

    fn ram_section_id(&self) -> u32 {
        self.based.image.ram_section_id()
    }

    fn difference(&self, block: BlockIndex) -> &[Range<u64>] {
        &self.block(block).written
    }

    fn extent(&self, page: PageRef) -> Extent {
        let block = self.block(page.block);
        let next = block.written.partition_point(|range| range.end <= page.offset);
        match block.written.get(next) {
            Some(range) if range.start <= page.offset => {
                Extent { pages: (range.end - page.offset) / PAGE_SIZE, kind: ExtentKind::Unknown }
            }
            next => {
                let extent = self.based.image.extent(page);
                let until = next.map_or(u64::MAX, |range| (range.start - page.offset) / PAGE_SIZE);
                Extent { pages: extent.pages.min(until), ..extent }
            }
        }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        let length = usize::try_from(length).expect("within a block that is mapped here");
        self.block(page.block).view.span().io_buf(page.offset as usize, length)
    }

    fn is_zero(&self, page: PageRef) -> bool {
        self.block(page.block).view.span().is_zero(page.offset as usize, PAGE_SIZE as usize)
    }

    fn device_state(&self) -> towline_migration::Result<Vec<u8>> {
        self.based.image.check_not_truncated().map_err(towline_migration::Error::guest)?;
        Ok(self.devices.bytes().to_vec())
    }
}

impl StoredGuest for CapturedGuest {
    fn name(&self) -> String {
        self.origin.source.clone()
    }

    fn described(&self) -> String {
        self.name()
    }

    fn devices(&self) -> &DeviceState {
        &self.devices
    }

    fn origin(&self) -> Option<&Origin> {
        Some(&self.origin)
    }

    fn base(&self) -> Option<&Image> {
        Some(&self.based.image)
    }

    fn check_not_truncated(&self) -> towline_image::Result<()> {
        self.based.image.check_not_truncated()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn ranges_without_others_are_what_is_left() {
        let without = |ranges: &[(u64, u64)], others: &[(u64, u64)]| {
            let of =
                |ranges: &[(u64, u64)]| -> Vec<_> { ranges.iter().map(|&(start, end)| start..end).collect() };
            let left = super::without(&of(ranges), &of(others));
            left.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(without(&[(0, 10)], &[]), [(0, 10)]);
        assert_eq!(without(&[(0, 10)], &[(0, 10)]), []);
        assert_eq!(without(&[(0, 10), (20, 30)], &[(2, 4), (8, 22), (29, 40)]), [(0, 2), (4, 8), (22, 29)]);
        assert_eq!(without(&[(5, 6)], &[(0, 5), (6, 9)]), [(5, 6)]);
    }
}
