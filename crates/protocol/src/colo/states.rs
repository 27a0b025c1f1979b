//! The secondary's states, each named after the event that it waits for.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::buffer::CheckpointBuffer;
use super::checkpoint::Checkpoint;
use super::message::{Message, PartialMessage};
use crate::destination::{Complete, RamSection, SectionKind, StreamDecoder, StreamItem};
use crate::device_state::{DeviceSection, DeviceState};
use crate::error::check_length;
use crate::limits;
use crate::ram::PAGE_SIZE;
use crate::section::{SectionType, VmCommand};
use crate::{InvalidMessage, PageRef, PeerIncompatible, PeerMisbehaved, RamBlock, Result};

/// A step's result.
#[derive(Debug)]
pub enum Progress<Same, Next> {
    /// More bytes are needed.
    Awaits(Same),
    /// The event has come.
    Reached(Next),
}

/// A state that waits for bytes.
///
/// A driver receives into [`Self::room`], and reports how many bytes came, until [`Progress::Reached`].
pub trait Awaits: Sized {
    /// The state after the event.
    type Next;

    /// Room for the next bytes, never none.
    fn room(&mut self) -> &mut [u8];

    /// Takes this number of bytes, which were received into [`Self::room`].
    ///
    /// # Errors
    /// They are not what may come here, or a checkpoint exceeds the limit of its buffer. The connection cannot be
    /// used any more.
    fn received(self, bytes: usize) -> Result<Progress<Self, Self::Next>>;

    /// The expected item, for messages about a connection that ends.
    fn awaits(&self) -> &'static str;
}

/// State that lasts from one checkpoint to the next.
#[derive(Debug)]
struct Link {
    memory: Complete,
    /// Devices of the first copy. None are added while a guest is protected.
    devices: Vec<DeviceSection>,
    /// Number of the last checkpoint.
    checkpoint: u64,
}

/// The first copy has arrived. Its source must have been acknowledged (SHUT 0) if it opened a return path.
#[derive(Debug)]
pub struct FirstCopy {
    link: Box<Link>,
}

impl FirstCopy {
    /// A first copy whose decoder has ended in `memory`, and whose device state is complete.
    pub fn new(memory: Complete, device_state: &DeviceState) -> Self {
        let devices = device_state.devices().to_vec();
        Self { link: Box::new(Link { memory, devices, checkpoint: 0 }) }
    }

    /// The guest's RAM blocks.
    pub fn blocks(&self) -> &[RamBlock] {
        self.link.memory.blocks()
    }

    /// Announces that checkpoints are taken: the guest runs then. To be called when the primary's monitor
    /// reports the migration as `colo`: a QEMU before 11 may lose a message that comes earlier.
    pub fn ready(self, out: &mut Vec<u8>) -> AwaitRequest {
        Message::Ready.encode(out);
        Requested { link: self.link }.awaited()
    }
}

/// Waits for a message, after which the state is `N`. Its room ends with the message, whose arrival is not
/// delayed so.
#[derive(Debug)]
pub struct AwaitMessage<N> {
    next: N,
    expected: Message,
    awaits: &'static str,
    message: PartialMessage,
}

/// The guest runs. Waits for CHECKPOINT_REQUEST, which comes by the primary's timer (`x-checkpoint-delay`).
pub type AwaitRequest = AwaitMessage<Requested>;

/// Waits for VMSTATE_SEND: the guest has stopped.
pub type AwaitStop = AwaitMessage<Stopped>;

impl<N> AwaitMessage<N> {
    fn new(expected: Message, awaits: &'static str, next: N) -> Self {
        Self { next, expected, awaits, message: PartialMessage::default() }
    }
}

impl<N> Awaits for AwaitMessage<N> {
    type Next = N;

    fn room(&mut self) -> &mut [u8] {
        self.message.room()
    }

    fn received(mut self, bytes: usize) -> Result<Progress<Self, N>> {
        let Some(found) = self.message.received(bytes) else { return Ok(Progress::Awaits(self)) };
        self.expected.expect(found)?;
        Ok(Progress::Reached(self.next))
    }

    fn awaits(&self) -> &'static str {
        self.awaits
    }
}

/// A checkpoint may begin. The guest runs until the reply, however late that is.
#[derive(Debug)]
pub struct Requested {
    link: Box<Link>,
}

impl Requested {
    /// Has the primary stop its guest now. The checkpoint will be received into `buffer`.
    pub fn reply(self, mut buffer: CheckpointBuffer, out: &mut Vec<u8>) -> AwaitStop {
        Message::CheckpointReply.encode(out);
        buffer.clear();
        let next = Stopped { link: self.link, buffer };
        AwaitMessage::new(Message::VmstateSend, "the guest's stop for a checkpoint (VMSTATE_SEND)", next)
    }

    fn awaited(self) -> AwaitRequest {
        let awaits = "the request of a checkpoint (CHECKPOINT_REQUEST)";
        AwaitMessage::new(Message::CheckpointRequest, awaits, self)
    }
}

/// The guest is stopped, and all that it has sent is past its devices: the end of the checkpoint's output.
#[derive(Debug)]
pub struct Stopped {
    link: Box<Link>,
    buffer: CheckpointBuffer,
}

impl Stopped {
    /// Number of the checkpoint that comes.
    pub fn number(&self) -> u64 {
        self.link.checkpoint + 1
    }

    /// Continues when the caller has marked the end of the checkpoint's output: what the guest sends after
    /// [`Received::loaded`] belongs to the next one.
    pub fn marked(self) -> AwaitCheckpoint {
        let Link { memory, devices, checkpoint } = *self.link;
        let stage = Stage::Memory { decoder: memory.reopen(), is_announced: false };
        AwaitCheckpoint { devices, checkpoint, buffer: self.buffer, stage }
    }
}

/// The guest is stopped. Waits for its memory and device state.
#[derive(Debug)]
pub struct AwaitCheckpoint {
    devices: Vec<DeviceSection>,
    checkpoint: u64,
    buffer: CheckpointBuffer,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Memory {
        decoder: StreamDecoder,
        /// SWITCHOVER_START has come.
        is_announced: bool,
    },
    /// EOF of the memory, VMSTATE_SIZE and the size.
    Size(Complete),
    /// This number of bytes.
    Devices(Complete, usize),
}

impl Awaits for AwaitCheckpoint {
    type Next = Received;

    fn room(&mut self) -> &mut [u8] {
        self.buffer.room()
    }

    fn received(mut self, bytes: usize) -> Result<Progress<Self, Received>> {
        self.buffer.received(bytes);
        loop {
            self.stage = match self.stage {
                Stage::Memory { decoder, is_announced } => {
                    match decode_memory(decoder, is_announced, &mut self.buffer)? {
                        Progress::Reached(memory) => Stage::Size(memory),
                        Progress::Awaits(stage) => return Self { stage, ..self }.more(),
                    }
                }
                Stage::Size(memory) => match decode_size(&mut self.buffer)? {
                    Some(size) => Stage::Devices(memory, size),
                    None => return Self { stage: Stage::Size(memory), ..self }.more(),
                },
                Stage::Devices(memory, size) => {
                    let reader = self.buffer.reader().expect("no page is outstanding");
                    let missing = size.saturating_sub(reader.rest().len());
                    if missing > 0 {
                        return Self { stage: Stage::Devices(memory, size), ..self }.more();
                    }
                    self.buffer.check_limit()?;
                    let device_state = decode_devices(reader.rest(), size, &self.devices)?;
                    let number = self.checkpoint + 1;
                    let link = Box::new(Link { memory, devices: self.devices, checkpoint: number });
                    let checkpoint = Checkpoint { number, buffer: self.buffer, device_state };
                    return Ok(Progress::Reached(Received { link, checkpoint }));
                }
            }
        }
    }

    fn awaits(&self) -> &'static str {
        match &self.stage {
            Stage::Memory { .. } => "the memory of a checkpoint",
            Stage::Size(_) => "the size of a checkpoint's device state (VMSTATE_SIZE)",
            Stage::Devices(..) => "the device state of a checkpoint",
        }
    }
}

/// The checkpoint has arrived and was checked. The guest is stopped.
#[derive(Debug)]
pub struct Received {
    link: Box<Link>,
    checkpoint: Checkpoint,
}

impl Received {
    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Takes the checkpoint; the primary's guest runs on.
    pub fn loaded(self, out: &mut Vec<u8>) -> (Checkpoint, AwaitRequest) {
        Message::VmstateReceived.encode(out);
        Message::VmstateLoaded.encode(out);
        (self.checkpoint, Requested { link: self.link }.awaited())
    }
}

impl AwaitCheckpoint {
    fn more(self) -> Result<Progress<Self, Received>> {
        self.buffer.check_limit()?;
        Ok(Progress::Awaits(self))
    }
}

/// Decodes the END section of the memory into the index of the buffer.
fn decode_memory(
    mut decoder: StreamDecoder,
    mut is_announced: bool,
    buffer: &mut CheckpointBuffer,
) -> Result<Progress<Stage, Complete>> {
    while let Some(mut input) = buffer.reader() {
        let (next, item) = decoder.handle(&mut input)?;
        let taken = input.position();
        decoder = next;
        let step = match item {
            None => {
                buffer.decoded(taken);
                break;
            }
            Some(item) => step_of(item, is_announced)?,
        };
        buffer.decoded(taken);
        match step {
            Step::Page(page, length) => buffer.add(page, length),
            Step::Announced => is_announced = true,
            Step::Frame => {}
        }
        // Not at the end only: the index of zero pages is larger than their stream.
        buffer.check_limit()?;
        decoder = match decoder {
            StreamDecoder::DeviceState(memory) => return Ok(Progress::Reached(memory)),
            decoder => decoder,
        };
    }
    Ok(Progress::Awaits(Stage::Memory { decoder, is_announced }))
}

/// Effect of an item of a checkpoint's memory.
enum Step {
    /// A page whose content of this length follows.
    Page(PageRef, usize),
    Announced,
    /// A beginning or an end.
    Frame,
}

fn step_of(item: StreamItem, is_announced: bool) -> Result<Step> {
    let unexpected = |found: String| {
        let expected = "the END section of a checkpoint's memory";
        Err(PeerMisbehaved::Unexpected { found, expected }.into())
    };
    let feature = |what, switch| Err(PeerIncompatible::Feature { what, switch }.into());
    match item {
        StreamItem::Page(page) => Ok(Step::Page(page, PAGE_SIZE as usize)),
        StreamItem::ZeroPage(page) => Ok(Step::Page(page, 0)),
        StreamItem::Command(VmCommand::SwitchoverStart) if !is_announced => Ok(Step::Announced),
        StreamItem::SectionStart(RamSection { kind: SectionKind::End, .. })
        | StreamItem::SectionEnd(_)
        | StreamItem::DeviceState => Ok(Step::Frame),
        StreamItem::Xbzrle { .. } => feature("a page as its changes in a checkpoint", "xbzrle"),
        StreamItem::Flush => feature("lanes in a checkpoint", "multifd"),
        StreamItem::SectionStart(section) => unexpected(format!("a {:?} section", section.kind)),
        StreamItem::Command(command) => unexpected(format!("{command:?}")),
        item @ (StreamItem::Configuration(_) | StreamItem::Total(_) | StreamItem::Block(_)) => {
            unexpected(format!("{item:?}"))
        }
    }
}

/// Decodes EOF, the message and the size of the device state; `None`: more bytes are needed.
fn decode_size(buffer: &mut CheckpointBuffer) -> Result<Option<usize>> {
    let mut input = buffer.reader().expect("no page is outstanding");
    let size = input.whole(|input| {
        let eof = input.u8()?;
        if eof != SectionType::Eof as u8 {
            let expected = "the end of a checkpoint's memory";
            return Err(InvalidMessage::SectionType { found: eof, expected }.into());
        }
        Message::VmstateSize.expect(input.be32()?)?;
        let size = input.be64()?;
        check_length("device state of a checkpoint", size, limits::DEVICE_STATE_BYTES_MAX)?;
        Ok(size as usize)
    })?;
    let taken = input.position();
    buffer.decoded(taken);
    Ok(size)
}

/// Checks the device state, of `size` bytes, which nothing may follow: all `known` devices are in it.
fn decode_devices(bytes: &[u8], size: usize, known: &[DeviceSection]) -> Result<DeviceState> {
    let (state, surplus) = bytes.split_at(size);
    if !surplus.is_empty() {
        let found = format!("{} bytes after a checkpoint", surplus.len());
        return Err(PeerMisbehaved::Unexpected { found, expected: "its acknowledgement" }.into());
    }
    let sections = state.strip_suffix(&[SectionType::Eof as u8]);
    let sections = sections.ok_or(InvalidMessage::Truncated { what: "the device state of a checkpoint" })?;
    let state = DeviceState::of_sections(sections, known)?;
    // They come in the order of the first copy.
    let is_missing = |(place, device): &(usize, &DeviceSection)| {
        let found = state.devices().get(*place);
        found.is_none_or(|found| (&found.name, found.instance) != (&device.name, device.instance))
    };
    match known.iter().enumerate().find(is_missing) {
        Some((_, DeviceSection { name, instance, .. })) => {
            Err(InvalidMessage::DeviceMissing { name: name.clone(), instance: *instance }.into())
        }
        None => Ok(state),
    }
}
