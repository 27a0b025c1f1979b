//! The `ram` section's states: block list, records, footer.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::states::{
    AwaitBlock, AwaitFooter, AwaitRecord, AwaitSection, Checkpoints, Complete, RamSection, RamState,
    SectionKind, Step, StreamDecoder, StreamItem,
};
use crate::error::check_length;
use crate::limits;
use crate::mapped_ram::MappedRamHeader;
use crate::multifd::check_offset;
use crate::ram::{BlockIndex, PAGE_SIZE, PageRef, RamBlock, RamFlags};
use crate::section::SectionType;
use crate::wire::{Reader, Stop, lossy};
use crate::{InvalidMessage, PeerIncompatible, PeerMisbehaved, Result};

impl AwaitBlock {
    pub(super) fn handle(mut self, input: &mut Reader<'_>) -> Step {
        let item = match self.left {
            None => input.be64().ok().map(|word| self.total(word)).transpose()?,
            Some(0) => {
                let section = RamSection { kind: SectionKind::Start, id: self.ram.id };
                return AwaitRecord { ram: self.ram, section }.handle(input);
            }
            Some(left) => input.whole(|input| self.block(input, left))?.map(StreamItem::Block),
        };
        Ok((StreamDecoder::Blocks(self), item))
    }

    fn total(&mut self, word: u64) -> Result<StreamItem> {
        let flags = RamFlags::from_bits_retain(word & (PAGE_SIZE - 1));
        let total = word & !(PAGE_SIZE - 1);
        if flags != RamFlags::MEM_SIZE {
            return Err(InvalidMessage::RecordFlags { flags: flags.bits(), offset: total }.into());
        }
        if total > limits::RAM_BYTES_MAX {
            return Err(InvalidMessage::RamTotal { total }.into());
        }
        self.left = Some(total);
        Ok(StreamItem::Total(total))
    }

    fn block(&mut self, input: &mut Reader<'_>, left: u64) -> Result<RamBlock, Stop> {
        let start = input.position();
        let (name, length) = (input.counted()?, input.be64()?);
        if self.has_addresses {
            // A destination of the same machine type has the block at the same address.
            input.be64()?;
        }
        let header_offset = self.file_offset + (input.position() - start) as u64;
        let header = if self.ram.mapped { Some(MappedRamHeader::decode(input)?) } else { None };
        let Ok(name) = core::str::from_utf8(name) else {
            return Err(InvalidMessage::Text { what: "block name", shown: lossy(name) }.into());
        };
        check_block(name, length, left)?;
        if let Some((version, header)) = &header {
            header.check(*version, name, length, header_offset)?;
        }
        let block = RamBlock { name: name.into(), length, mapped: header.map(|(_, header)| header) };
        self.ram.add(block.clone())?;
        self.left = Some(left - length);
        Ok(block)
    }
}

fn check_block(name: &str, length: u64, left: u64) -> Result<()> {
    if length > left || length == 0 {
        return Err(InvalidMessage::BlockLength { name: name.into(), length, left }.into());
    }
    if !length.is_multiple_of(PAGE_SIZE) {
        let page_size = PAGE_SIZE;
        return Err(InvalidMessage::BlockAlignment { name: name.into(), length, page_size }.into());
    }
    Ok(())
}

impl RamState {
    pub(super) fn new(id: u32, mapped: bool, is_snapshot: bool) -> Self {
        let (blocks, by_name) = (Vec::new(), BTreeMap::new());
        Self { id, mapped, blocks, by_name, last: None, is_snapshot, has_part: false }
    }

    /// Returns true if a device's section is the memory's end.
    pub(super) fn is_complete_snapshot(&self) -> bool {
        self.is_snapshot && self.has_part
    }

    fn add(&mut self, block: RamBlock) -> Result<()> {
        if self.blocks.len() == limits::BLOCKS_MAX {
            return Err(InvalidMessage::TooManyBlocks.into());
        }
        let index = BlockIndex(u32::try_from(self.blocks.len()).expect("bounded by BLOCKS_MAX"));
        if self.by_name.insert(block.name.clone(), index).is_some() {
            return Err(InvalidMessage::DuplicateBlock { name: block.name }.into());
        }
        self.blocks.push(block);
        Ok(())
    }

    /// The page that a record names; consumes the block name unless it continues.
    fn page(&mut self, flags: RamFlags, offset: u64, input: &mut Reader<'_>) -> Result<PageRef, Stop> {
        let block = if flags.contains(RamFlags::CONTINUE) {
            self.last.ok_or(InvalidMessage::NothingToContinue)?
        } else {
            let name = input.counted()?;
            let known = core::str::from_utf8(name).ok().and_then(|name| self.by_name.get(name));
            *known.ok_or_else(|| PeerMisbehaved::UnknownBlock { name: lossy(name) })?
        };
        check_offset(offset, &self.blocks[block.index()])?;
        Ok(PageRef { block, offset })
    }
}

impl AwaitRecord {
    pub(super) fn handle(mut self, input: &mut Reader<'_>) -> Step {
        let item = input.whole(|input| self.record(input))?;
        let next = match item {
            Some(StreamItem::SectionEnd(section)) => {
                StreamDecoder::Footer(AwaitFooter { ram: self.ram, section })
            }
            _ => StreamDecoder::Records(self),
        };
        Ok((next, item))
    }

    fn record(&mut self, input: &mut Reader<'_>) -> Result<StreamItem, Stop> {
        let word = input.be64()?;
        let flags = RamFlags::from_bits_retain(word & (PAGE_SIZE - 1));
        let offset = word & !(PAGE_SIZE - 1);
        let kind = flags.difference(RamFlags::CONTINUE);
        match kind {
            RamFlags::EOS if offset == 0 && flags == kind => {
                return Ok(StreamItem::SectionEnd(self.section));
            }
            RamFlags::MULTIFD_FLUSH if offset == 0 && flags == kind && !self.ram.mapped => {
                return Ok(StreamItem::Flush);
            }
            RamFlags::PAGE | RamFlags::ZERO | RamFlags::XBZRLE if !self.ram.mapped => {}
            RamFlags::HOOK => {
                return Err(PeerIncompatible::Feature { what: "RDMA", switch: "rdma-pin-all" }.into());
            }
            RamFlags::COMPRESS_PAGE => {
                return Err(PeerIncompatible::Feature { what: "compress threads", switch: "compress" }.into());
            }
            _ => return Err(InvalidMessage::RecordFlags { flags: flags.bits(), offset }.into()),
        }
        let page = self.ram.page(flags, offset, input)?;
        let item = match kind {
            RamFlags::PAGE => StreamItem::Page(page),
            RamFlags::ZERO => self.zero(page, input.u8()?)?,
            _ => xbzrle(page, input)?,
        };
        self.ram.last = Some(page.block);
        Ok(item)
    }

    fn zero(&self, page: PageRef, fill: u8) -> Result<StreamItem> {
        match fill {
            0 => Ok(StreamItem::ZeroPage(page)),
            found => {
                let block = self.ram.blocks[page.block.index()].name.clone();
                Err(InvalidMessage::FillByte { block, found }.into())
            }
        }
    }
}

fn xbzrle(page: PageRef, input: &mut Reader<'_>) -> Result<StreamItem, Stop> {
    let (kind, length) = (input.u8()?, input.be16()?);
    if kind != 1 {
        return Err(InvalidMessage::Xbzrle("an encoding other than 1").into());
    }
    check_length("XBZRLE page", length.into(), PAGE_SIZE as usize)?;
    Ok(StreamItem::Xbzrle { page, data: input.take(length.into())?.into() })
}

impl AwaitFooter {
    pub(super) fn handle(self, input: &mut Reader<'_>) -> Step {
        let Some((kind, found)) = input.whole(|input| Ok((input.u8()?, input.be32()?)))? else {
            return Ok((StreamDecoder::Footer(self), None));
        };
        if kind != SectionType::Footer as u8 {
            return Err(InvalidMessage::SectionType { found: kind, expected: "the section's footer" }.into());
        }
        if found != self.section.id {
            return Err(InvalidMessage::Footer { found, expected: self.section.id }.into());
        }
        match self.section.kind {
            SectionKind::End => {
                Ok((StreamDecoder::DeviceState(Complete { ram: self.ram }), Some(StreamItem::DeviceState)))
            }
            _ => AwaitSection::after(self.ram).handle(input),
        }
    }
}

impl AwaitSection {
    /// Between sections, with the block list known.
    fn after(ram: Box<RamState>) -> Self {
        let (is_snapshot, checkpoints) = (ram.is_snapshot, Checkpoints::Refused);
        Self { ram: Some(ram), mapped_ram: false, is_snapshot, has_addresses: false, checkpoints }
    }
}

impl Complete {
    /// The decoder of further sections of this memory. A record may continue the block of the last one before.
    pub(crate) fn reopen(self) -> StreamDecoder {
        StreamDecoder::Sections(AwaitSection::after(self.ram))
    }

    /// The blocks of the memory.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.ram.blocks
    }
}
