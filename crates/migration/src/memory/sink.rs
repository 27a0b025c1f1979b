//! Memory as where a guest arrives.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use towline_channel::IoBufMut;
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::{BlockBacking, KnownBlocks, Memory, MemoryBlock, MemoryError, lock, offset_in_block};
use crate::{ChannelId, Pages, Result, Sink};

const PAGE: usize = PAGE_SIZE as usize;

impl Sink for Memory {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        let own = &self.configuration.get_or_init(|| configuration.clone()).machine_type;
        if *own != configuration.machine_type {
            let (found, expected) = (configuration.machine_type.clone(), own.clone());
            return Err(MemoryError::MachineType { found, expected }.into());
        }
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        self.is_committed.store(false, Ordering::Release);
        match self.ram.get() {
            Some(ram) => check(blocks, &ram.blocks)?,
            None => {
                let ram = self.adopt(blocks)?;
                self.ram.get_or_init(|| ram);
            }
        }
        Ok(())
    }

    fn buffer_for(&self, page: PageRef, length: u64) -> Option<IoBufMut<'_>> {
        let ram = self.ram.get()?;
        // Before the bytes arrive: those of a migration that fails in the middle stay.
        ram.touched.mark(page, length);
        Some(ram.span(page).io_buf_mut(offset_in_block(page), usize::try_from(length).ok()?))
    }

    fn pages(&self, _stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        let ram = self.ram.get().ok_or(MemoryError::NoBlocks)?;
        let contents = pages.contents.iter().flat_map(|slice| slice.chunks(PAGE));
        for (&offset, content) in pages.offsets.iter().zip(contents) {
            let page = PageRef { block: pages.block, offset };
            ram.touched.mark(page, PAGE_SIZE);
            ram.span(page).write(offset_in_block(page), content);
        }
        Ok(())
    }

    fn zero(&self, _stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        let ram = self.ram.get().ok_or(MemoryError::NoBlocks)?;
        for &offset in offsets {
            let page = PageRef { block, offset };
            // Zero pages are not written again: the first write of a page costs more than its transfer.
            if !ram.is_known_zero(page) && !ram.span(page).is_zero(offset_in_block(page), PAGE) {
                ram.span(page).write(offset_in_block(page), &[0; PAGE]);
            }
        }
        Ok(())
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()> {
        self.ram.get().ok_or(MemoryError::NoBlocks)?.span(page).read(offset_in_block(page), content);
        Ok(())
    }

    fn section_start(&self, section: RamSection) -> Result<()> {
        if section.kind == SectionKind::Start {
            self.section_id.store(section.id, Ordering::Relaxed);
        }
        Ok(())
    }

    fn device_state(&self, state: DeviceState) -> Result<()> {
        *lock(&self.received_state) = Some(state);
        Ok(())
    }

    fn commit(&self) -> Result<()> {
        self.is_committed.store(true, Ordering::Release);
        Ok(())
    }
}

impl Memory {
    /// Allocates the blocks of an incoming guest.
    fn adopt(&self, blocks: &[RamBlock]) -> Result<KnownBlocks, MemoryError> {
        let expected = self.limit.unwrap_or(0);
        let (mut found, mut places) = (0_u64, Vec::new());
        for RamBlock { name, length, .. } in blocks {
            let backing = match &self.file {
                Some(file) => BlockBacking::Shared { file: file.as_fd(), offset: found },
                None => BlockBacking::Anonymous,
            };
            found = found.saturating_add(*length);
            if found > expected {
                return Err(MemoryError::TooLarge { block: name.clone(), found, expected });
            }
            places.push(MemoryBlock { name, length: *length, backing });
        }
        if self.file.is_some() && found != expected {
            return Err(MemoryError::TooSmall { found, expected });
        }
        KnownBlocks::map(&places)
    }
}

/// Compares the source's list with our own.
fn check(found: &[RamBlock], expected: &[RamBlock]) -> Result<(), MemoryError> {
    for (number, theirs) in found.iter().enumerate() {
        let (block, length) = (theirs.name.clone(), theirs.length);
        match expected.get(number) {
            Some(own) if own.name == theirs.name && own.length == length => {}
            Some(own) if own.name == theirs.name => {
                return Err(MemoryError::BlockLength { block, found: length, expected: own.length });
            }
            own => {
                let own = own.map(|own| format!("{:?} of {} bytes", own.name, own.length));
                let expected = own.unwrap_or_else(|| "the list's end".into());
                return Err(MemoryError::Block { number, block, found: length, expected });
            }
        }
    }
    match expected.get(found.len()) {
        None => Ok(()),
        Some(own) => {
            let block = own.name.clone();
            Err(MemoryError::BlockMissing { block, found: found.len(), expected: own.length })
        }
    }
}
