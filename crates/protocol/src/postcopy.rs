//! The source's part of postcopy: the destination runs the guest at once, and its memory follows.
//!
//! ```text
//!   head · PING 1 · ADVISE │ ram START │ DISCARD × blocks │ [PART: pages sent ahead] │ PING 2 · PACKAGED { LISTEN · devices · PING 3 · RUN }
//!   Setup ──► Advised ────► Loading ──► Discarded ⇄ PrefetchSection ──► Packaged ───┐
//!                                                                    its last byte ─┤ from here on the guest may run there
//!        SHUT ◄── END · EOF ── Serving ◄── PING 4 · PART ──────────────────────────┘
//!                                  ▲
//!   another connection: RECV_BITMAP × blocks │ RESUME · RESUME_ACK │ PART       Recovery ──► AwaitingResumeAck ──► Serving
//! ```
//!
//! A destination reads a package completely before it does anything in it, so the package's last byte is the
//! point of no return: [`Discarded::package`] keeps that byte back, and [`Packaged::run`] writes it.
//!
//! Requirements of a destination: page sizes in ADVISE exactly as its own; at least one DISCARD before
//! LISTEN, for without one it loads pages by plain copies into memory that it monitors, and deadlocks; after
//! RUN each page only once, since a second copy of a page is an error that pauses it; the pages of a huge
//! page all on one channel, one after the other.
//!
//! The preempt channel has no header and no sections: records only ([`Preempt`]), of requested pages.

use alloc::string::String;
use alloc::vec::Vec;

use crate::error::check_length;
use crate::ram::{self, BlockIndex, PAGE_SIZE, PageRef, RamBlock, RamFlags};
use crate::return_path::ReturnPathMessage;
use crate::section::{CommandKind, SectionHeader, SectionType, VmCommand};
use crate::source::{OpenSection, PING_SETUP, RamOptions, RamWriter, Setup};
use crate::wire::{Reader, put_counted, put64};
use crate::{InvalidMessage, PeerMisbehaved, Result, limits};

/// Sent before the package: its PONG shows that the destination will send no further requests.
pub const PING_PACKAGE: u32 = 2;
/// Sent in the package, between the devices and RUN: its PONG shows that all device state was loaded.
pub const PING_LOADED: u32 = 3;
/// Sent after the package: its PONG shows that the destination accepts pages.
pub const PING_LISTENS: u32 = 4;

/// Version of the DISCARD command.
const DISCARD_VERSION: u8 = 0;
/// End mark of a bitmap of received pages (`RAMBLOCK_RECV_BITMAP_ENDING`).
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

/// A block, and the page size of its memory at the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostcopyBlock {
    /// Name and length of the block.
    pub ram: RamBlock,
    /// Size of the block's host pages in bytes: 4 KiB, or that of its huge pages.
    pub page_bytes: u64,
}

impl PostcopyBlock {
    /// Number of pages of the destination's size; the last one may be shorter.
    pub fn host_pages(&self) -> u64 {
        self.ram.length.div_ceil(self.page_bytes)
    }
}

fn command(kind: CommandKind, data: Vec<u8>, out: &mut Vec<u8>) {
    VmCommand::Other { kind, data }.encode(out);
}

fn writer(section_id: u32, blocks: &[PostcopyBlock]) -> RamWriter {
    let blocks = blocks.iter().map(|block| block.ram.clone()).collect();
    RamWriter::new(RamOptions { section_id, barrier: None }, blocks)
}

impl Setup {
    /// Writes the header, the configuration, the return path's opening and ADVISE.
    pub fn advise(
        configuration: &crate::configuration::Configuration,
        blocks: &[PostcopyBlock],
        out: &mut Vec<u8>,
    ) -> Advised {
        configuration.encode(out);
        VmCommand::OpenReturnPath.encode(out);
        VmCommand::Ping(PING_SETUP).encode(out);
        let mut data = Vec::new();
        put64(&mut data, blocks.iter().fold(0, |sizes, block| sizes | block.page_bytes));
        put64(&mut data, PAGE_SIZE);
        command(CommandKind::POSTCOPY_ADVISE, data, out);
        Advised(())
    }
}

/// The destination knows that postcopy will follow.
#[derive(Debug)]
pub struct Advised(());

impl Advised {
    /// Writes `ram` START with the block list.
    pub fn write_ram_start(self, section_id: u32, blocks: &[PostcopyBlock], out: &mut Vec<u8>) -> Loading {
        let (name, version) = (ram::SECTION_NAME.into(), ram::SECTION_VERSION);
        SectionHeader { id: section_id, name, instance: 0, version }.encode(SectionType::Start, out);
        ram::put_total(blocks.iter().map(|block| block.ram.length).sum(), out);
        for block in blocks {
            ram::put_block(&block.ram, out);
            if block.page_bytes != PAGE_SIZE {
                put64(out, block.page_bytes);
            }
        }
        let mut writer = writer(section_id, blocks);
        writer.close(out);
        Loading(writer)
    }
}

/// The destination knows the blocks; nothing runs.
#[derive(Debug)]
pub struct Loading(RamWriter);

impl Loading {
    /// Discards everything, which prepares the destination: from here on its memory has small pages only.
    /// Pages received before would be up to 2 MiB of zeros each, to be discarded again.
    pub fn discard(self, blocks: &[PostcopyBlock], out: &mut Vec<u8>) -> Discarded {
        for block in blocks.iter().filter(|block| block.ram.length > 0) {
            let mut data = alloc::vec![DISCARD_VERSION];
            put_counted(&mut data, block.ram.name.as_bytes());
            data.push(0);
            put64(&mut data, 0);
            put64(&mut data, block.host_pages() * block.page_bytes);
            command(CommandKind::POSTCOPY_RAM_DISCARD, data, out);
        }
        Discarded(self.0)
    }
}

/// Pages may be sent ahead; nothing runs.
#[derive(Debug)]
pub struct Discarded(RamWriter);

/// In a PART of pages that are sent ahead.
pub type PrefetchSection = OpenSection<Discarded>;

impl Discarded {
    /// Opens a PART for pages that are sent ahead.
    pub fn open_part(self, out: &mut Vec<u8>) -> PrefetchSection {
        OpenSection::begin(self.0, SectionType::Part, Discarded, out)
    }

    /// Writes the package with these device sections, but for its last byte. If the connection breaks before
    /// that byte, no guest runs.
    ///
    /// # Errors
    /// The sections are longer than a destination accepts.
    pub fn package(self, sections: &[u8], out: &mut Vec<u8>) -> Result<Packaged> {
        check_length("device state", sections.len() as u64, limits::DEVICE_STATE_BYTES_MAX)?;
        VmCommand::Ping(PING_PACKAGE).encode(out);
        let mut package = Vec::with_capacity(sections.len() + 32);
        command(CommandKind::POSTCOPY_LISTEN, Vec::new(), &mut package);
        package.extend_from_slice(sections);
        VmCommand::Ping(PING_LOADED).encode(&mut package);
        command(CommandKind::POSTCOPY_RUN, Vec::new(), &mut package);
        let length = u32::try_from(package.len()).expect("bounded by DEVICE_STATE_BYTES_MAX");
        command(CommandKind::PACKAGED, length.to_be_bytes().to_vec(), out);
        let last = package.pop().expect("RUN is not empty");
        out.extend_from_slice(&package);
        // Records begin again, with their block's name, as QEMU's do here.
        Ok(Packaged { writer: self.0.renewed(), last })
    }
}

/// Everything but the package's last byte is written.
#[derive(Debug)]
pub struct Packaged {
    writer: RamWriter,
    last: u8,
}

impl Packaged {
    /// Writes that byte: the destination runs the guest when it has it. Then opens the section for its pages.
    pub fn run(self, out: &mut Vec<u8>) -> Serving {
        out.push(self.last);
        VmCommand::Ping(PING_LISTENS).encode(out);
        Serving::open(self.writer, out)
    }
}

/// The guest runs at the destination; each page is sent once.
#[derive(Debug)]
pub struct Serving(RamWriter);

impl Serving {
    fn open(writer: RamWriter, out: &mut Vec<u8>) -> Self {
        writer.open(SectionType::Part, out);
        Self(writer)
    }

    /// Records are written here, each page once.
    pub fn records(&mut self) -> &mut RamWriter {
        &mut self.0
    }

    /// Every page was sent: ends the stream.
    pub fn end(mut self, out: &mut Vec<u8>) {
        self.0.close(out);
        self.0.open(SectionType::End, out);
        self.0.close(out);
        out.push(SectionType::Eof as u8);
    }
}

/// The preempt channel, which carries records only, of requested pages.
#[derive(Debug)]
pub struct Preempt(RamWriter);

impl Preempt {
    /// A channel on which nothing was written yet.
    pub fn new(blocks: &[PostcopyBlock]) -> Self {
        // Its records are outside of sections.
        Self(writer(0, blocks))
    }

    /// Ends the preempt channel: no further page is requested. Destinations up to QEMU 7.2 wait for that.
    pub fn end(self, out: &mut Vec<u8>) {
        ram::put_flag(RamFlags::EOS, out);
    }

    /// Records go here.
    pub fn records(&mut self) -> &mut RamWriter {
        &mut self.0
    }
}

/// A new connection to a destination that lost the previous one: it is queried for its received pages.
#[derive(Debug)]
pub struct Recovery(RamWriter);

impl Recovery {
    /// Requests the bitmaps of all blocks at once.
    pub fn ask(section_id: u32, blocks: &[PostcopyBlock], out: &mut Vec<u8>) -> Self {
        for block in blocks {
            let mut data = Vec::new();
            put_counted(&mut data, block.ram.name.as_bytes());
            command(CommandKind::RECV_BITMAP, data, out);
        }
        Self(writer(section_id, blocks))
    }

    /// Sends RESUME after all bitmaps were received. The preempt channel, if there is one, is connected
    /// before.
    pub fn resume(self, out: &mut Vec<u8>) -> AwaitingResumeAck {
        command(CommandKind::POSTCOPY_RESUME, Vec::new(), out);
        AwaitingResumeAck(self.0)
    }
}

/// RESUME_ACK is awaited.
#[derive(Debug)]
pub struct AwaitingResumeAck(RamWriter);

impl AwaitingResumeAck {
    /// The acknowledgement was received: opens the section for the missing pages.
    pub fn acknowledged(self, out: &mut Vec<u8>) -> Serving {
        Serving::open(self.0, out)
    }
}

/// A message of the return path, as a postcopy source sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReturnMessage {
    /// PONG to the PING of this number.
    Pong(u32),
    /// A fault on this memory, whole host pages of one block.
    Request {
        /// The first page.
        page: PageRef,
        /// Bytes.
        length: u64,
    },
    /// The bitmap of this block follows ([`decode_bitmap`]).
    Bitmap(BlockIndex),
    /// The destination resumes after a recovery.
    ResumeAck,
    /// The destination has the guest and sends nothing more.
    Shut,
    /// Ignored here.
    Other,
}

/// Reads a postcopy destination's messages: requests name their block only where it changes.
#[derive(Debug, Default)]
pub struct PostcopyReturnPathReader {
    last: Option<BlockIndex>,
    awaits_shut: bool,
}

impl PostcopyReturnPathReader {
    /// Allows SHUT from here on.
    pub fn expect_shut(&mut self) {
        self.awaits_shut = true;
    }

    /// Processes a message.
    ///
    /// # Errors
    /// The destination failed, or sent an invalid message: a request outside its blocks, SHUT too early, a
    /// PONG to nothing.
    pub fn handle(&mut self, message: &ReturnPathMessage, blocks: &[PostcopyBlock]) -> Result<ReturnMessage> {
        let unexpected = |found: String, expected| PeerMisbehaved::Unexpected { found, expected };
        Ok(match message {
            ReturnPathMessage::Shut(0) if !self.awaits_shut => {
                return Err(unexpected("SHUT before the last page".into(), "requests for pages").into());
            }
            ReturnPathMessage::Shut(0) => ReturnMessage::Shut,
            ReturnPathMessage::Shut(status) => {
                return Err(PeerMisbehaved::ShutWithError { status: *status }.into());
            }
            ReturnPathMessage::Pong(value @ (PING_SETUP | PING_PACKAGE | PING_LOADED | PING_LISTENS)) => {
                ReturnMessage::Pong(*value)
            }
            ReturnPathMessage::Pong(found) => return Err(PeerMisbehaved::Pong { found: *found }.into()),
            ReturnPathMessage::RequestPages { start, length, block } => {
                if let Some(name) = block {
                    self.last = Some(find(blocks, name)?);
                }
                let Some(block) = self.last else { return Err(InvalidMessage::NothingToContinue.into()) };
                request(blocks, block, *start, u64::from(*length))?
            }
            ReturnPathMessage::ReceivedBitmap(name) => ReturnMessage::Bitmap(find(blocks, name)?),
            ReturnPathMessage::ResumeAck(1) => ReturnMessage::ResumeAck,
            ReturnPathMessage::ResumeAck(value) => {
                return Err(unexpected(alloc::format!("RESUME_ACK {value}"), "RESUME_ACK 1").into());
            }
            ReturnPathMessage::SwitchoverAck | ReturnPathMessage::Other { .. } => ReturnMessage::Other,
        })
    }
}

fn find(blocks: &[PostcopyBlock], name: &str) -> Result<BlockIndex> {
    let index = blocks.iter().position(|block| block.ram.name == name);
    let unknown = || PeerMisbehaved::UnknownBlock { name: name.into() };
    Ok(BlockIndex(u32::try_from(index.ok_or_else(unknown)?).expect("bounded by BLOCKS_MAX")))
}

/// Whole host pages within the block, of which there is at least one.
fn request(blocks: &[PostcopyBlock], index: BlockIndex, start: u64, length: u64) -> Result<ReturnMessage> {
    let block = &blocks[index.index()];
    let is_aligned = start.is_multiple_of(block.page_bytes) && length.is_multiple_of(PAGE_SIZE);
    let end = start.checked_add(length).filter(|&end| end <= block.host_pages() * block.page_bytes);
    match end {
        Some(_) if is_aligned && length > 0 => {
            // The last host page may reach beyond what the guest uses.
            let length = length.min(block.ram.length - start);
            Ok(ReturnMessage::Request { page: PageRef { block: index, offset: start }, length })
        }
        _ => {
            let (name, total) = (block.ram.name.clone(), block.ram.length);
            Err(InvalidMessage::Request { block: name, start, length, total }.into())
        }
    }
}

/// Reads a bitmap of received target pages, which follows its message: be64 bytes, the bits (least
/// significant first), be64 end mark. `None` and nothing consumed while more bytes are needed.
///
/// # Errors
/// The bitmap is not as long as the block's, or its end mark is missing.
pub fn decode_bitmap(input: &mut Reader<'_>, block: &PostcopyBlock) -> Result<Option<Vec<u8>>> {
    let bytes = block.ram.pages().div_ceil(8).next_multiple_of(8);
    let check = |what, found, expected| {
        let block = &block.ram.name;
        let wrong = || InvalidMessage::Bitmap { block: block.clone(), what, found, expected };
        if found == expected { Ok(()) } else { Err(wrong()) }
    };
    input.whole(|input| {
        check("its bytes are", input.be64()?, bytes)?;
        let bits = input.take(bytes as usize)?;
        check("its end mark is", input.be64()?, BITMAP_END)?;
        Ok(bits.to_vec())
    })
}

/// Appends such a bitmap, for a destination.
pub fn put_bitmap(bits: &[u8], out: &mut Vec<u8>) {
    let bytes = bits.len().next_multiple_of(8);
    put64(out, bytes as u64);
    out.extend_from_slice(bits);
    out.resize(out.len() + bytes - bits.len(), 0);
    put64(out, BITMAP_END);
}

const _: () = assert!(RamFlags::all().bits() < PAGE_SIZE);
