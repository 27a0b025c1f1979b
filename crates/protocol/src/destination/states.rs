//! States of a decoder of a stream, and its items.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use crate::Result;
use crate::configuration::Configuration;
use crate::machine::BarrierForm;
use crate::ram::{BlockIndex, PageRef, RamBlock};
use crate::section::VmCommand;

/// One item of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamItem {
    /// The stream's beginning, complete.
    Configuration(Configuration),
    /// A command between sections.
    Command(VmCommand),
    /// A `ram` section begins.
    SectionStart(RamSection),
    /// The guest's RAM in all; its blocks follow.
    Total(u64),
    /// The next entry of the block list.
    Block(RamBlock),
    /// A page, whose [`PAGE_SIZE`](crate::ram::PAGE_SIZE) bytes follow and are not for this machine.
    Page(PageRef),
    /// A page of zeros.
    ZeroPage(PageRef),
    /// A page as its changes ([`crate::xbzrle`]).
    Xbzrle {
        /// The page.
        page: PageRef,
        /// The changes.
        data: Vec<u8>,
    },
    /// A `MULTIFD_FLUSH` record: wait for the SYNC of every lane.
    Flush,
    /// The payload of a `ram` section ends; its footer is checked next.
    SectionEnd(RamSection),
    /// All memory is named; device state follows up to the end.
    DeviceState,
}

/// A `ram` section of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSection {
    /// START, PART or END.
    pub kind: SectionKind,
    /// The source's number for `ram`.
    pub id: u32,
}

/// The three kinds of section that `ram` consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "QEMU's own names")]
pub enum SectionKind {
    Start,
    Part,
    End,
}

/// Position of the lanes' barriers, which the stream itself shows: a source of FLUSH records sends one in its
/// first section; a source without them has one at the end of each section.
#[derive(Debug, Default)]
pub struct Barriers(pub(super) Option<BarrierForm>);

/// State of the machine that reads a main channel.
#[derive(Debug)]
pub enum StreamDecoder {
    /// Nothing was read.
    Header(AwaitHeader),
    /// The header was.
    Machine(AwaitMachine),
    /// The machine type was read; subsections may follow.
    Subsections(AwaitSubsection),
    /// Between sections.
    Sections(AwaitSection),
    /// In the block list.
    Blocks(AwaitBlock),
    /// In a `ram` section.
    Records(AwaitRecord),
    /// After the payload of a `ram` section.
    Footer(AwaitFooter),
    /// After the END of `ram`: nothing more for this machine.
    DeviceState(Complete),
}

/// Memory that a source leaves out of its stream because another process can map it (`x-ignore-shared`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SharedMemory {
    /// Such a stream is refused: its guest would be without that memory.
    #[default]
    Refused,
    /// The driver knows that the destination has it.
    AtDestination,
}

/// Properties of a stream that the driver knows before it begins.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StreamKind {
    pub(super) is_snapshot: bool,
    pub(super) shared_memory: SharedMemory,
    pub(super) checkpoints: Checkpoints,
}

/// COLO's checkpoints after the stream, which a command before the memory may announce, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Checkpoints {
    #[default]
    Refused,
    Expected,
}

/// Waits for magic and version.
#[derive(Debug, Default)]
pub struct AwaitHeader {
    pub(super) kind: StreamKind,
}

/// Waits for the configuration section.
#[derive(Debug)]
pub struct AwaitMachine {
    pub(super) kind: StreamKind,
}

/// Waits for a configuration subsection, or for the byte that ends them.
#[derive(Debug)]
pub struct AwaitSubsection {
    pub(super) configuration: Configuration,
    /// Number of subsections read so far.
    pub(super) count: usize,
    pub(super) kind: StreamKind,
}

/// Waits for a section or command.
#[derive(Debug)]
pub struct AwaitSection {
    pub(super) ram: Option<Box<RamState>>,
    pub(super) mapped_ram: bool,
    pub(super) is_snapshot: bool,
    /// The block list has the guest address of each block, as `x-ignore-shared` adds it.
    pub(super) has_addresses: bool,
    pub(super) checkpoints: Checkpoints,
}

/// Result of a step: the next state, and the item unless more bytes are needed.
pub type Step = Result<(StreamDecoder, Option<StreamItem>)>;

/// Waits for an entry of the block list, or for its total.
#[derive(Debug)]
pub struct AwaitBlock {
    pub(super) ram: Box<RamState>,
    /// Each entry ends with the block's guest address (`x-ignore-shared`).
    pub(super) has_addresses: bool,
    /// `None` until the total came.
    pub(super) left: Option<u64>,
    /// Offset of the next item, counted from the file's first byte; only mapped-ram needs it.
    pub(super) file_offset: u64,
}

/// Waits for a record.
#[derive(Debug)]
pub struct AwaitRecord {
    pub(super) ram: Box<RamState>,
    pub(super) section: RamSection,
}

/// Waits for a section's footer.
#[derive(Debug)]
pub struct AwaitFooter {
    pub(super) ram: Box<RamState>,
    pub(super) section: RamSection,
}

/// Device state follows.
#[derive(Debug)]
pub struct Complete {
    pub(super) ram: Box<RamState>,
}

/// State of the `ram` section.
#[derive(Debug)]
pub(super) struct RamState {
    pub(super) id: u32,
    /// True if the pages are elsewhere in the file, so no record names one.
    pub(super) mapped: bool,
    pub(super) blocks: Vec<RamBlock>,
    pub(super) by_name: BTreeMap<String, BlockIndex>,
    pub(super) last: Option<BlockIndex>,
    /// True for the stream of a background snapshot.
    pub(super) is_snapshot: bool,
    /// A PART or END has begun.
    pub(super) has_part: bool,
}
