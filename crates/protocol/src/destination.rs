//! The reading end of a main channel.
//!
//! Out of scope: lanes ([`crate::multifd`]), and the use of pages. The machine consumes itself at each step,
//! so a state that was left cannot be used again:
//!
//! ```text
//!   Header → Configuration → Sections ⇄ Commands
//!                               │ ram START          ram PART, END
//!                               ▼                    │
//!                             Blocks → Records → Footer → Sections → … → DeviceState
//! ```
//! The memory of a background snapshot ([`StreamDecoder::of_snapshot`]) has no END: after a PART, a device's
//! FULL section begins the device state.
//!
//! [`StreamDecoder::handle`] consumes one item of the input. After [`StreamItem::Page`] the page's bytes
//! follow: the driver consumes them itself (from its buffer, or straight from the channel) and continues
//! after them. After [`StreamItem::DeviceState`] the rest of the stream belongs to a
//! [`crate::device_state::Collector`]. In a mapped-ram file the driver seeks to
//! [`crate::mapped_ram::MappedRamHeader::end`] after each [`StreamItem::Block`].

use alloc::boxed::Box;
use alloc::format;

use crate::configuration::{self, Configuration};
use crate::limits;
use crate::machine::BarrierForm;
use crate::ram::{self, PAGE_SIZE, RamBlock};
use crate::section::{CommandKind, SectionHeader, SectionType, VmCommand};
use crate::session;
use crate::wire::{Reader, Stop};
use crate::{InvalidMessage, PeerIncompatible, PeerMisbehaved, Result};

mod memory;
mod states;

pub use states::{
    AwaitBlock, AwaitFooter, AwaitHeader, AwaitMachine, AwaitRecord, AwaitSection, AwaitSubsection, Barriers,
    Complete, RamSection, SectionKind, SharedMemory, Step, StreamDecoder, StreamItem,
};
use states::{Checkpoints, RamState, StreamKind};

/// Maximum length of one item in bytes: a command with its data.
pub const ITEM_BYTES_MAX: usize = limits::COMMAND_BYTES_MAX + 5;

/// The capability with which a source leaves out shared memory.
const IGNORE_SHARED: &str = "x-ignore-shared";

impl Barriers {
    /// Records a FLUSH record, which is a barrier. Returns true if it also ends a pass, as all do but that of
    /// START.
    pub fn on_flush_record(&mut self) -> bool {
        self.0.replace(BarrierForm::FlushRecord).is_some()
    }

    /// Handles the end of a section. Returns true if it is a barrier. Call it only with lanes.
    pub fn on_section_end(&mut self) -> bool {
        *self.0.get_or_insert(BarrierForm::EachSection) == BarrierForm::EachSection
    }
}

impl Default for StreamDecoder {
    fn default() -> Self {
        Self::Header(AwaitHeader::default())
    }
}

impl StreamDecoder {
    /// For a stream of QEMU's background-snapshot: its memory has no END. The device state, which was taken
    /// first, follows the last PART.
    pub fn of_snapshot() -> Self {
        Self::Header(AwaitHeader { kind: StreamKind { is_snapshot: true, ..StreamKind::default() } })
    }

    /// For the first copy of a guest that is protected by COLO, which its checkpoints follow
    /// ([`crate::colo`]). Up to QEMU 10 it announces them by a command.
    pub fn with_checkpoints() -> Self {
        let checkpoints = Checkpoints::Expected;
        Self::Header(AwaitHeader { kind: StreamKind { checkpoints, ..StreamKind::default() } })
    }

    /// For a stream whose source may leave out shared memory, which the destination has.
    /// [`StreamItem::Configuration`] does not list `x-ignore-shared` then: a forwarded stream is one without
    /// it.
    pub fn with_shared_memory(shared_memory: SharedMemory) -> Self {
        Self::Header(AwaitHeader { kind: StreamKind { shared_memory, ..StreamKind::default() } })
    }

    /// Decodes one item. `None` in the result: `input` ends inside it, and nothing was consumed.
    pub fn handle(self, input: &mut Reader<'_>) -> Step {
        match self {
            Self::Header(state) => state.handle(input),
            Self::Machine(state) => state.handle(input),
            Self::Subsections(state) => state.handle(input),
            Self::Sections(state) => state.handle(input),
            Self::Blocks(state) => state.handle(input),
            Self::Records(state) => state.handle(input),
            Self::Footer(state) => state.handle(input),
            state @ Self::DeviceState(_) => Ok((state, None)),
        }
    }

    /// The blocks read so far.
    pub fn blocks(&self) -> &[RamBlock] {
        match self {
            Self::Sections(AwaitSection { ram: Some(ram), .. })
            | Self::Blocks(AwaitBlock { ram, .. })
            | Self::Records(AwaitRecord { ram, .. })
            | Self::Footer(AwaitFooter { ram, .. })
            | Self::DeviceState(Complete { ram }) => &ram.blocks,
            _ => &[],
        }
    }

    /// For mapped-ram: sets the offset of the next item in the file, which only the driver knows.
    pub fn at_file_offset(&mut self, offset: u64) {
        if let Self::Blocks(state) = self {
            state.file_offset = offset;
        }
    }

    /// The expected item, for messages about a stream that ends too early.
    pub fn awaits(&self) -> &'static str {
        match self {
            Self::Header(_) => "the stream's header",
            Self::Machine(_) | Self::Subsections(_) => "the configuration section",
            Self::Sections(_) => "the memory (between its sections)",
            Self::Blocks(_) => "the list of RAM blocks",
            Self::Records(_) | Self::Footer(_) => "a section of the memory",
            Self::DeviceState(_) => "the device state",
        }
    }
}

impl AwaitHeader {
    fn handle(self, input: &mut Reader<'_>) -> Step {
        match input.whole(configuration::decode_header)? {
            None => Ok((StreamDecoder::Header(self), None)),
            Some(()) => AwaitMachine { kind: self.kind }.handle(input),
        }
    }
}

impl AwaitMachine {
    fn handle(self, input: &mut Reader<'_>) -> Step {
        let Some(machine_type) = input.whole(configuration::decode_machine)? else {
            return Ok((StreamDecoder::Machine(self), None));
        };
        let configuration = Configuration { machine_type, ..Configuration::default() };
        AwaitSubsection { configuration, count: 0, kind: self.kind }.handle(input)
    }
}

impl AwaitSubsection {
    fn handle(mut self, input: &mut Reader<'_>) -> Step {
        while let Some(&kind) = input.rest().first() {
            if kind != SectionType::Subsection as u8 {
                return self.complete();
            }
            if self.count == limits::SUBSECTIONS_MAX {
                let found = format!("configuration subsection {}", self.count + 1);
                return Err(PeerMisbehaved::Unexpected { found, expected: "`ram` or a command" }.into());
            }
            let configuration = &mut self.configuration;
            if input.whole(|input| configuration::decode_subsection(input, configuration))?.is_none() {
                break;
            }
            self.count += 1;
        }
        Ok((StreamDecoder::Subsections(self), None))
    }

    fn complete(self) -> Step {
        let mut configuration = self.configuration;
        if configuration.target_page_bits.is_some_and(|bits| bits != PAGE_SIZE.trailing_zeros()) {
            let what = "a target page size other than 4096 bytes";
            return Err(PeerIncompatible::Feature { what, switch: "the machine's larger pages" }.into());
        }
        let has_addresses = configuration.capabilities.iter().any(|name| name == IGNORE_SHARED);
        if has_addresses && self.kind.shared_memory == SharedMemory::Refused {
            let what = "memory that is left out of the stream because it is shared";
            return Err(PeerIncompatible::Feature { what, switch: IGNORE_SHARED }.into());
        }
        configuration.capabilities.retain(|name| name != IGNORE_SHARED);
        let mapped_ram = configuration.is_mapped_ram();
        let StreamKind { is_snapshot, checkpoints, .. } = self.kind;
        let next = AwaitSection { ram: None, mapped_ram, is_snapshot, has_addresses, checkpoints };
        Ok((StreamDecoder::Sections(next), Some(StreamItem::Configuration(configuration))))
    }
}

impl AwaitSection {
    fn handle(mut self, input: &mut Reader<'_>) -> Step {
        match input.whole(|input| self.item(input))? {
            Some((Some(next), item)) => Ok((next, Some(item))),
            Some((None, item)) => Ok((StreamDecoder::Sections(self), Some(item))),
            None => Ok((StreamDecoder::Sections(self), None)),
        }
    }

    /// The next item, and the state behind it if it is another one.
    fn item(&mut self, input: &mut Reader<'_>) -> Result<(Option<StreamDecoder>, StreamItem), Stop> {
        let start = input.position();
        let kind = input.u8()?;
        let expected = if self.ram.is_some() { "a `ram` section or a command" } else { "`ram` or a command" };
        let (section, next) = match SectionType::decode(kind, expected)? {
            SectionType::Command => {
                let command = VmCommand::decode(input)?;
                self.check_command(&command)?;
                return Ok((None, StreamItem::Command(command)));
            }
            SectionType::Start if self.ram.is_none() => self.start(SectionHeader::decode(input)?)?,
            SectionType::Full if self.ram.as_ref().is_some_and(|ram| ram.is_complete_snapshot()) => {
                input.rewind(start);
                let ram = self.ram.take().expect("just seen");
                return Ok((Some(StreamDecoder::DeviceState(Complete { ram })), StreamItem::DeviceState));
            }
            SectionType::Start | SectionType::Full => {
                return Err(foreign_section(SectionHeader::decode(input)?, kind).into());
            }
            SectionType::Part | SectionType::End if self.ram.is_some() => {
                let id = input.be32()?;
                resume(self.ram.take().expect("just seen"), kind, id)?
            }
            _ => return Err(InvalidMessage::SectionType { found: kind, expected }.into()),
        };
        Ok((Some(next), StreamItem::SectionStart(section)))
    }

    fn check_command(&mut self, command: &VmCommand) -> Result<()> {
        match command {
            VmCommand::Other { kind: CommandKind::ENABLE_COLO, data }
                if self.checkpoints == Checkpoints::Expected =>
            {
                self.checkpoints = Checkpoints::Refused;
                let (command, found) = (CommandKind::ENABLE_COLO.0, data.len());
                match found {
                    0 => Ok(()),
                    _ => Err(InvalidMessage::CommandLength { command, found, expected: 0 }.into()),
                }
            }
            _ => refuse_unsupported_command(command),
        }
    }

    fn start(&self, header: SectionHeader) -> Result<(RamSection, StreamDecoder)> {
        if header.name != ram::SECTION_NAME {
            return Err(foreign_section(header, SectionType::Start as u8).into());
        }
        if header.version > ram::SECTION_VERSION {
            let (name, found) = (header.name, header.version);
            return Err(PeerIncompatible::SectionVersion { name, found, known: ram::SECTION_VERSION }.into());
        }
        let ram = Box::new(RamState::new(header.id, self.mapped_ram, self.is_snapshot));
        let section = RamSection { kind: SectionKind::Start, id: header.id };
        let next = AwaitBlock { ram, has_addresses: self.has_addresses, left: None, file_offset: 0 };
        Ok((section, StreamDecoder::Blocks(next)))
    }
}

fn foreign_section(header: SectionHeader, kind: u8) -> PeerIncompatible {
    let SectionHeader { name, instance, .. } = header;
    if kind == SectionType::Full as u8 {
        PeerIncompatible::EarlyDevice { name, instance }
    } else {
        PeerIncompatible::IterableSection { name, instance }
    }
}

fn resume(mut ram: Box<RamState>, kind: u8, id: u32) -> Result<(RamSection, StreamDecoder)> {
    if id != ram.id {
        return Err(PeerMisbehaved::UnknownSection { id, expected: ram.id }.into());
    }
    let kind = if kind == SectionType::Part as u8 { SectionKind::Part } else { SectionKind::End };
    ram.has_part = true;
    let section = RamSection { kind, id };
    Ok((section, StreamDecoder::Records(AwaitRecord { ram, section })))
}

fn refuse_unsupported_command(command: &VmCommand) -> Result<()> {
    let VmCommand::Other { kind, .. } = command else { return Ok(()) };
    let feature = |what, switch| Err(PeerIncompatible::Feature { what, switch }.into());
    match *kind {
        CommandKind(session::KIND) => Ok(()),
        CommandKind::POSTCOPY_ADVISE => {
            feature("postcopy, which needs a destination that runs the guest", "postcopy-ram")
        }
        CommandKind::ENABLE_COLO => feature("COLO", "x-colo"),
        CommandKind(number) => {
            let found = format!("command {number}");
            Err(PeerMisbehaved::Unexpected { found, expected: "a command that belongs to precopy" }.into())
        }
    }
}
