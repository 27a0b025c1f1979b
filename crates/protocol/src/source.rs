//! The writing end of a main channel.
//!
//! Each state appends its bytes to a buffer of the caller and is replaced by the next, so a stream can only
//! be written in its order: [`Setup`] → [`Iterating`] ⇄ [`Part`] → [`End`]. A page's bytes are not written
//! here: the caller sends them after the record that names them.
//!
//! The lanes' barriers: at a barrier the caller has every lane send SYNC and then calls
//! [`RamWriter::barrier`], which writes a FLUSH record or, for the older form, nothing, because there the
//! section's end is the barrier.

use alloc::vec::Vec;

use crate::configuration::Configuration;
use crate::machine::BarrierForm;
use crate::ram::{self, BlockIndex, PageRef, RamBlock, RamFlags};
use crate::return_path::ReturnPathMessage;
use crate::section::{SectionHeader, SectionType, VmCommand, put_footer};
use crate::session::{self, FromDestination, ReceiverMode};
use crate::wire::{put_counted, put16, put32, put64};
use crate::{PeerMisbehaved, Result};

/// The first PING, sent with the return path's opening: its PONG shows that the destination read the stream's
/// head.
pub const PING_SETUP: u32 = 1;

/// Sent after the last device's section: its PONG shows that the destination has loaded the whole guest, and
/// waits only for the end of the stream. A towline never receives it there.
pub const PING_LOADED: u32 = 0x7477_6c03;

/// Header and configuration are written.
#[derive(Debug)]
pub struct Setup(());

/// Options for the memory.
#[derive(Debug, Clone, Copy)]
pub struct RamOptions {
    /// The number that the `ram` sections carry.
    pub section_id: u32,
    /// Form of the lanes' barriers; `None` without lanes.
    pub barrier: Option<BarrierForm>,
}

impl Setup {
    /// Writes the header and the configuration.
    pub fn begin(configuration: &Configuration, out: &mut Vec<u8>) -> Self {
        configuration.encode(out);
        Self(())
    }

    /// As [`Self::begin`], and opens a return path. Sends `pings`, each a value of a PING, before the first
    /// PING of every stream, so their replies precede its reply.
    pub fn begin_with_return_path(configuration: &Configuration, pings: &[u32], out: &mut Vec<u8>) -> Self {
        configuration.encode(out);
        VmCommand::OpenReturnPath.encode(out);
        for &value in pings.iter().chain(&[PING_SETUP]) {
            VmCommand::Ping(value).encode(out);
        }
        Self(())
    }

    /// Writes the `ram` START section with the block list. With lanes, it holds the first barrier.
    pub fn write_ram_start(self, options: RamOptions, blocks: &[RamBlock], out: &mut Vec<u8>) -> Iterating {
        let (name, version) = (ram::SECTION_NAME.into(), ram::SECTION_VERSION);
        SectionHeader { id: options.section_id, name, instance: 0, version }.encode(SectionType::Start, out);
        ram::put_total(blocks.iter().map(|block| block.length).sum(), out);
        for block in blocks {
            ram::put_block(block, out);
            if let Some(mapped) = &block.mapped {
                mapped.encode(out);
            }
        }
        let mut writer = RamWriter::new(options, blocks.into());
        writer.barrier(out);
        writer.close(out);
        Iterating(writer)
    }
}

/// Between sections, with the guest running.
#[derive(Debug)]
pub struct Iterating(RamWriter);

impl Iterating {
    /// Opens a PART.
    pub fn open_part(self, out: &mut Vec<u8>) -> Part {
        OpenSection::begin(self.0, SectionType::Part, Iterating, out)
    }

    /// The guest is stopped: opens END.
    pub fn end(self, out: &mut Vec<u8>) -> End {
        OpenSection::begin(self.0, SectionType::End, drop, out)
    }
}

/// In a section of the memory, whose end leads to `N`.
#[derive(Debug)]
pub struct OpenSection<N> {
    writer: RamWriter,
    next: fn(RamWriter) -> N,
}

/// In a PART.
pub type Part = OpenSection<Iterating>;

/// In END, with the guest stopped. The caller writes the device state after it
/// ([`crate::device_state::DeviceState::bytes`]).
pub type End = OpenSection<()>;

impl<N> OpenSection<N> {
    pub(crate) fn begin(
        writer: RamWriter,
        kind: SectionType,
        next: fn(RamWriter) -> N,
        out: &mut Vec<u8>,
    ) -> Self {
        writer.open(kind, out);
        Self { writer, next }
    }

    /// Records go here.
    pub fn records(&mut self) -> &mut RamWriter {
        &mut self.writer
    }

    /// Closes the section.
    pub fn close(mut self, out: &mut Vec<u8>) -> N {
        self.writer.close(out);
        (self.next)(self.writer)
    }
}

/// Writes records of one channel, and remembers the block of the last one.
#[derive(Debug)]
pub struct RamWriter {
    options: RamOptions,
    blocks: Vec<RamBlock>,
    last: Option<BlockIndex>,
}

impl RamWriter {
    pub(crate) fn new(options: RamOptions, blocks: Vec<RamBlock>) -> Self {
        Self { options, blocks, last: None }
    }

    /// The same, which has written no record yet.
    pub(crate) fn renewed(self) -> Self {
        Self { last: None, ..self }
    }

    /// Appends the record of a page, whose bytes the caller sends next.
    pub fn page(&mut self, page: PageRef, out: &mut Vec<u8>) {
        self.named(RamFlags::PAGE, page, out);
    }

    /// Appends the record of a zero page.
    pub fn zero(&mut self, page: PageRef, out: &mut Vec<u8>) {
        self.named(RamFlags::ZERO, page, out);
        out.push(0);
    }

    /// Returns true if the last record named a page of `block`: records received that continue it can be sent
    /// as they are.
    pub fn continues(&self, block: BlockIndex) -> bool {
        self.last == Some(block)
    }

    /// Appends a page in XBZRLE form.
    pub fn xbzrle(&mut self, page: PageRef, data: &[u8], out: &mut Vec<u8>) {
        self.named(RamFlags::XBZRLE, page, out);
        out.push(1);
        put16(out, u16::try_from(data.len()).expect("no longer than a page"));
        out.extend_from_slice(data);
    }

    fn named(&mut self, flags: RamFlags, page: PageRef, out: &mut Vec<u8>) {
        if self.continues(page.block) {
            put64(out, page.offset | (flags | RamFlags::CONTINUE).bits());
        } else {
            put64(out, page.offset | flags.bits());
            put_counted(out, self.blocks[page.block.index()].name.as_bytes());
            self.last = Some(page.block);
        }
    }

    /// Writes the barrier, after every lane has sent SYNC.
    pub fn barrier(&mut self, out: &mut Vec<u8>) {
        if self.options.barrier == Some(BarrierForm::FlushRecord) {
            ram::put_flag(RamFlags::MULTIFD_FLUSH, out);
        }
    }

    pub(crate) fn open(&self, kind: SectionType, out: &mut Vec<u8>) {
        out.push(kind as u8);
        put32(out, self.options.section_id);
    }

    pub(crate) fn close(&mut self, out: &mut Vec<u8>) {
        ram::put_flag(RamFlags::EOS, out);
        put_footer(out, self.options.section_id);
    }
}

/// State of the return path: messages received, and those that may follow. Unlike the stream, its messages
/// have no fixed order.
#[derive(Debug, Default)]
pub struct ReturnPathReader {
    pong: bool,
    receiver: Option<ReceiverMode>,
    loaded: bool,
    awaits_shut: bool,
    shut: bool,
}

impl ReturnPathReader {
    /// Allows SHUT from here on. Call it before the last bytes are sent.
    pub fn expect_shut(&mut self) {
        self.awaits_shut = true;
    }

    /// Processes a message.
    ///
    /// # Errors
    /// The destination failed to load the guest, or sent an invalid message, such as a SHUT before the end of
    /// the stream.
    pub fn handle(&mut self, message: &ReturnPathMessage) -> Result<()> {
        let unexpected = |found, expected| Err(PeerMisbehaved::Unexpected { found, expected }.into());
        match message {
            ReturnPathMessage::Shut(0) if !self.awaits_shut => {
                return unexpected("SHUT before the stream's end".into(), "PONG");
            }
            ReturnPathMessage::Shut(0) => self.shut = true,
            ReturnPathMessage::Shut(status) => {
                return Err(PeerMisbehaved::ShutWithError { status: *status }.into());
            }
            ReturnPathMessage::Pong(PING_SETUP) => self.pong = true,
            ReturnPathMessage::Pong(PING_LOADED) => self.loaded = true,
            ReturnPathMessage::Pong(value) => match session::decode_pong(*value) {
                Some(receiver) => self.receiver = Some(receiver),
                // A QEMU repeats the value.
                None if *value == session::ping() => {}
                None => return Err(PeerMisbehaved::Pong { found: *value }.into()),
            },
            ReturnPathMessage::SwitchoverAck => {}
            message => match FromDestination::of(message) {
                Some(FromDestination::Alive | FromDestination::Base(_)) => {}
                _ => return unexpected(alloc::format!("{message:?}"), "PONG or SHUT on the return path"),
            },
        }
        Ok(())
    }

    /// Returns true if the first PING was answered.
    pub fn has_pong(&self) -> bool {
        self.pong
    }

    /// Use of the guest by a towline at the destination; `None` of a QEMU. Known with [`Self::has_pong`].
    pub fn receiver(&self) -> Option<ReceiverMode> {
        self.receiver
    }

    /// Returns true if the destination has answered [`PING_LOADED`].
    pub fn has_loaded(&self) -> bool {
        self.loaded
    }

    /// Returns true if the destination has the guest.
    pub fn has_shut(&self) -> bool {
        self.shut
    }
}
