//! Bodies of the fuzz targets: each decodes its input, and checks invariants of the result. The tests run the
//! same over the seeds and over changed seeds. A body that returns has found nothing.
#![allow(unreachable_pub, reason = "the fuzz crate includes this file as its own")]

use std::collections::VecDeque;

use towline_protocol::colo::{Awaits, CheckpointBuffer, FirstCopy, Progress};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{StreamDecoder, StreamItem};
use towline_protocol::device_state::{self, Collector, DeviceState};
use towline_protocol::limits;
use towline_protocol::multifd::{HEADER_BYTES, INIT_BYTES, Init, Method, PACKET_PAGES, Packet};
use towline_protocol::postcopy::{PostcopyBlock, PostcopyReturnPathReader, ReturnMessage, decode_bitmap};
use towline_protocol::ram::{self, PAGE_SIZE, RamFlags};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::{CommandKind, SectionHeader, SectionType, VmCommand, put_footer};
use towline_protocol::{
    Error, InvalidMessage, PageRef, PeerMisbehaved, RamBlock, Reader, mapped_ram, xbzrle,
};

/// A target's name and body.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 7] = [
    ("main_channel", main_channel),
    ("lane", lane),
    ("return_path", return_path),
    ("device_state", device_state),
    ("mapped_ram", mapped_ram),
    ("xbzrle", xbzrle),
    ("colo", colo),
];

/// The sizes of pieces that the input's first byte stands for.
fn pieces(seed: u8) -> impl FnMut() -> usize {
    let mut state = u32::from(seed) + 1;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match seed {
            0 => 1,
            _ => 1 + (state >> 24) as usize % (1 + usize::from(seed)),
        }
    }
}

/// A main channel's outcome: its events as text (they borrow), the tail, and how it ended.
#[derive(Debug, Default)]
struct Outcome {
    events: Vec<String>,
    state: Option<DeviceState>,
    error: Option<Error>,
}

/// Byte 0: how the rest comes in pieces. The rest: a main channel whose pages' contents are left out, as if
/// the driver had taken them from the channel itself.
pub fn main_channel(data: &[u8]) {
    let Some((seed, stream)) = data.split_first() else { return };
    for begin in [StreamDecoder::default, StreamDecoder::of_snapshot] {
        main_channel_of(*seed, stream, begin);
    }
}

fn main_channel_of(seed: u8, stream: &[u8], begin: fn() -> StreamDecoder) {
    let whole = read_pieces(begin(), stream, || stream.len().max(1));
    let split = read_pieces(begin(), stream, pieces(seed));
    assert_eq!(whole.events, split.events, "pieces make a difference");
    match (split.state, split.error) {
        // A description before the end is seen only where a piece ends with it.
        (Some(_), _) | (None, Some(Error::Invalid(InvalidMessage::DeviceMissing { .. }))) => {}
        (None, error) => assert_eq!((whole.state, whole.error), (None, error), "pieces make a difference"),
    }
}

fn read_pieces(mut machine: StreamDecoder, stream: &[u8], mut piece: impl FnMut() -> usize) -> Outcome {
    let (mut outcome, mut collector) = (Outcome::default(), Collector::default());
    let (mut consumed, mut come) = (0, 0);
    while come < stream.len() && outcome.error.is_none() && outcome.state.is_none() {
        come = stream.len().min(come + piece());
        let mut input = Reader::new(&stream[consumed..come]);
        while !matches!(machine, StreamDecoder::DeviceState(_)) {
            match machine.handle(&mut input) {
                Err(error) => {
                    outcome.error = Some(error);
                    return outcome;
                }
                Ok((next, event)) => {
                    machine = next;
                    let Some(event) = event else { break };
                    check_event(&event, &machine);
                    outcome.events.push(format!("{event:?}"));
                }
            }
        }
        consumed += input.position();
        assert!(!machine.awaits().is_empty());
        if matches!(machine, StreamDecoder::DeviceState(_)) {
            let tail = collector.push(&stream[consumed..come]).and_then(|()| collector.complete());
            consumed = come;
            match tail {
                Ok(state) => outcome.state = state,
                Err(error) => outcome.error = Some(error),
            }
        } else {
            assert!(
                come - consumed <= towline_protocol::destination::ITEM_BYTES_MAX,
                "too much is held back"
            );
        }
    }
    outcome
}

fn check_event(event: &StreamItem, machine: &StreamDecoder) {
    let (page, data) = match event {
        StreamItem::Page(page) | StreamItem::ZeroPage(page) => (page, 0),
        StreamItem::Xbzrle { page, data } => (page, data.len() as u64),
        StreamItem::Block(block) => {
            assert!(machine.blocks().len() <= limits::BLOCKS_MAX);
            assert_eq!(machine.blocks().last(), Some(block));
            return;
        }
        _ => return,
    };
    let block = &machine.blocks()[page.block.index()];
    assert!(page.offset.is_multiple_of(PAGE_SIZE) && page.offset < block.length && data <= PAGE_SIZE);
}

/// The guest that the lanes' packets are about.
pub fn lane_blocks() -> Vec<RamBlock> {
    let block = |name: &str, pages| RamBlock { name: name.into(), length: pages * PAGE_SIZE, mapped: None };
    vec![block("pc.ram", 512), block("/rom@etc/acpi/tables", 32), block("pc.bios", 16), block("x", 1 << 36)]
}

/// An init packet, then headers whose contents are left out.
pub fn lane(data: &[u8]) {
    let mut input = Reader::new(data);
    let Ok(init) = input.array::<INIT_BYTES>() else { return };
    if let Ok(init) = Init::decode(&init) {
        assert_eq!(Init::decode(&init.encode()), Ok(init));
    }
    let blocks = lane_blocks();
    while !input.rest().is_empty() {
        // A truncated header counts as filled up with zeros, so small inputs reach the offsets.
        let mut header = [0; HEADER_BYTES];
        let n = input.rest().len().min(HEADER_BYTES);
        header[..n].copy_from_slice(input.take(n).expect("no more than there is"));
        let Ok(packet) = Packet::decode(&header, &blocks) else { continue };
        let pages = packet.normal.len() + packet.zero.len();
        assert!(pages <= PACKET_PAGES && (pages > 0) == packet.block.is_some());
        assert!(packet.data_bytes as usize <= limits::PACKET_COMPRESSED_BYTES_MAX);
        if packet.method == Method::None {
            assert_eq!(u64::from(packet.data_bytes), packet.normal.len() as u64 * PAGE_SIZE);
        }
        for offset in packet.normal.iter().chain(&packet.zero) {
            let block = &blocks[packet.block.expect("it has pages").index()];
            assert!(offset.is_multiple_of(PAGE_SIZE) && *offset < block.length);
        }
        packet.encode(&blocks, &mut header);
        assert_eq!(Packet::decode(&header, &blocks), Ok(packet));
    }
}

/// Messages one after the other.
pub fn return_path(data: &[u8]) {
    let mut input = Reader::new(data);
    loop {
        let start = input.position();
        let Ok(Some(message)) = ReturnPathMessage::decode(&mut input) else { break };
        let used = &data[start..input.position()];
        let mut out = Vec::new();
        // Names that are not UTF-8 are shown with replacement characters, which may be too long.
        let (ReturnPathMessage::ReceivedBitmap(name)
        | ReturnPathMessage::RequestPages { block: Some(name), .. }) = &message
        else {
            message.encode(&mut out);
            assert_eq!(out, used);
            continue;
        };
        if !name.contains('\u{fffd}') {
            message.encode(&mut out);
            assert_eq!(out, used);
        }
    }
    postcopy_answers(data);
}

/// The same as a postcopy source reads it: bitmaps follow their messages, and requests lie within their
/// blocks.
fn postcopy_answers(data: &[u8]) {
    let block = |name: &str, length, page_bytes| PostcopyBlock {
        ram: RamBlock { name: name.into(), length, mapped: None },
        page_bytes,
    };
    let blocks = [block("pc.ram", 64 << 20, 2 << 20), block("pc.bios", 256 << 10, PAGE_SIZE)];
    let (mut input, mut answers) = (Reader::new(data), PostcopyReturnPathReader::default());
    answers.expect_shut();
    while let Ok(Some(message)) = ReturnPathMessage::decode(&mut input) {
        match answers.handle(&message, &blocks) {
            Ok(ReturnMessage::Request { page, length }) => {
                let block = &blocks[page.block.index()];
                assert!(length > 0 && page.offset.is_multiple_of(block.page_bytes));
                assert!(page.offset + length <= block.ram.length);
            }
            Ok(ReturnMessage::Bitmap(index)) => match decode_bitmap(&mut input, &blocks[index.index()]) {
                Ok(Some(bits)) => assert_eq!(bits.len() as u64 * 8, blocks[index.index()].ram.pages()),
                Ok(None) | Err(_) => return,
            },
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// Byte 0: how the rest comes in pieces. The rest: device sections, EOF, description.
pub fn device_state(data: &[u8]) {
    let Some((seed, tail)) = data.split_first() else { return };
    let whole = DeviceState::parse(tail);
    let (mut collector, mut piece, mut come) = (Collector::default(), pieces(*seed), 0);
    let mut found = None;
    while come < tail.len() && found.is_none() {
        let next = tail.len().min(come + piece());
        collector.push(&tail[come..next]).expect("fuzz inputs are small");
        come = next;
        match collector.complete() {
            Ok(state) => found = state,
            Err(_) => return,
        }
    }
    match (&whole, found) {
        (Err(error), None) => assert!(tail.is_empty() || collector.len() == tail.len(), "{error}"),
        (_, Some(state)) => {
            assert_eq!(state.bytes(), &tail[..come]);
            check_devices(&state);
        }
        (Ok(_), None) => panic!("whole it is complete, in pieces it is not"),
    }
}

fn check_devices(state: &DeviceState) {
    let mut least = 0;
    for (index, device) in state.devices().iter().enumerate() {
        assert!(device.offset >= least && (index > 0 || device.offset == 0));
        assert_eq!(state.bytes()[device.offset], 4, "a device begins with FULL");
        least = device.offset + 5;
    }
}

/// A stored guest's head without its bitmaps and pages: after each block, the file continues at the block's
/// end.
pub fn mapped_ram(data: &[u8]) {
    let mut input = Reader::new(data);
    let (mut machine, mut file, mut before) = (StreamDecoder::default(), 0_u64, 0_u64);
    loop {
        let start = input.position();
        machine.at_file_offset(file);
        let Ok((next, event)) = machine.handle(&mut input) else { return };
        machine = next;
        file += (input.position() - start) as u64;
        let Some(event) = event else { return };
        check_event(&event, &machine);
        assert!(!event_names_page(&event, &machine), "{event:?}");
        if let StreamItem::Block(RamBlock { length, mapped: Some(header), .. }) = event {
            let bitmap_end = header.bitmap_offset + mapped_ram::bitmap_bytes(length, PAGE_SIZE);
            assert!(before < header.bitmap_offset && bitmap_end <= header.pages_offset);
            file = header.end(length);
            before = file;
            assert!(file <= limits::FILE_BYTES_MAX);
        }
    }
}

fn event_names_page(event: &StreamItem, machine: &StreamDecoder) -> bool {
    let mapped = machine.blocks().first().is_some_and(|block| block.mapped.is_some());
    let named = matches!(
        event,
        StreamItem::Page(_) | StreamItem::ZeroPage(_) | StreamItem::Xbzrle { .. } | StreamItem::Flush
    );
    mapped && named
}

/// Bytes 0 and 1: the page's length. The rest: what changed.
pub fn xbzrle(data: &[u8]) {
    let Some((length, changes)) = data.split_first_chunk() else { return };
    let length = usize::from(u16::from_be_bytes(*length)) % (PAGE_SIZE as usize + 1);
    let mut page = vec![0x5a; length];
    if xbzrle::decode(changes, &mut page).is_err() {
        return;
    }
    let once = page.clone();
    assert_eq!(xbzrle::decode(changes, &mut page), Ok(()));
    assert_eq!(page, once, "the changes are bytes, not differences");
}

/// Number of the section `ram` of the guest of [`first_copy`].
pub const RAM_ID: u32 = 2;

/// Blocks of that guest.
pub fn protected_blocks() -> [RamBlock; 2] {
    let block = |name: &str, pages| RamBlock { name: name.into(), length: pages * PAGE_SIZE, mapped: None };
    [block("pc.ram", 24), block("rom", 4)]
}

/// The device state of that guest, with `value` in each device.
pub fn protected_devices(value: &[u8]) -> DeviceState {
    DeviceState::parse(&device_state::encode(&[
        ("timer", 2, value),
        ("cpu", 12, value),
        ("globalstate", 1, value),
    ]))
    .expect("it was just encoded")
}

/// A first copy without pages.
pub fn first_copy() -> FirstCopy {
    let mut stream = Vec::new();
    Configuration { machine_type: "pc-q35-11.1".into(), ..Configuration::default() }.encode(&mut stream);
    VmCommand::Other { kind: CommandKind::ENABLE_COLO, data: Vec::new() }.encode(&mut stream);
    SectionHeader { id: RAM_ID, name: "ram".into(), instance: 0, version: 4 }
        .encode(SectionType::Start, &mut stream);
    let blocks = protected_blocks();
    ram::put_total(blocks.iter().map(|block| block.length).sum(), &mut stream);
    blocks.iter().for_each(|block| ram::put_block(block, &mut stream));
    ram::put_flag(RamFlags::EOS, &mut stream);
    put_footer(&mut stream, RAM_ID);
    stream.extend([&[SectionType::End as u8][..], &RAM_ID.to_be_bytes()].concat());
    ram::put_flag(RamFlags::EOS, &mut stream);
    put_footer(&mut stream, RAM_ID);
    let (mut decoder, mut input) = (StreamDecoder::with_checkpoints(), Reader::new(&stream));
    loop {
        let (next, item) = decoder.handle(&mut input).expect("the stream is valid");
        match next {
            StreamDecoder::DeviceState(memory) => break FirstCopy::new(memory, &protected_devices(b"0")),
            next => decoder = next,
        }
        assert!(item.is_some(), "the stream is whole");
    }
}

/// A checkpoint as values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub number: u64,
    /// Its pages.
    pub pages: Vec<(PageRef, Option<Vec<u8>>)>,
    /// Its device sections.
    pub devices: Vec<u8>,
}

/// The end of a connection to a primary, and the checkpoints before it.
#[derive(Debug, Default)]
pub struct Protection {
    /// The checkpoints.
    pub taken: Vec<Taken>,
    /// The reason of its end, if not the end of the input.
    pub error: Option<Error>,
    /// All that was sent to the primary.
    pub sent: Vec<u8>,
}

/// Takes checkpoints from a primary's bytes into a buffer of this limit. The bytes of a turn come in pieces;
/// those of the next one come when all of it was received.
pub fn take_checkpoints<T: AsRef<[u8]>>(
    turns: &[T],
    limit: usize,
    mut piece: impl FnMut() -> usize,
) -> Protection {
    let mut protection = Protection::default();
    let mut turns: VecDeque<&[u8]> = turns.iter().map(AsRef::as_ref).collect();
    protection.error = take_all(&mut protection, &mut turns, limit, &mut piece).err();
    protection
}

fn take_all(
    protection: &mut Protection,
    input: &mut VecDeque<&[u8]>,
    limit: usize,
    piece: &mut dyn FnMut() -> usize,
) -> Result<(), Error> {
    let mut waiting = first_copy().ready(&mut protection.sent);
    let mut buffer = CheckpointBuffer::new(limit);
    loop {
        let Some(requested) = feed(waiting, input, piece)? else { return Ok(()) };
        let stopping = requested.reply(buffer, &mut protection.sent);
        let Some(stopped) = feed(stopping, input, piece)? else { return Ok(()) };
        assert_eq!(stopped.number(), protection.taken.len() as u64 + 1);
        let Some(received) = feed(stopped.marked(), input, piece)? else { return Ok(()) };
        let (checkpoint, next) = received.loaded(&mut protection.sent);
        let owned = |(page, content): (PageRef, Option<&[u8]>)| (page, content.map(<[u8]>::to_vec));
        protection.taken.push(Taken {
            number: checkpoint.number(),
            pages: checkpoint.pages().map(owned).collect(),
            devices: checkpoint.device_state().sections().to_vec(),
        });
        assert_eq!(
            DeviceState::parse(checkpoint.device_state().bytes()).as_ref(),
            Ok(checkpoint.device_state())
        );
        (waiting, buffer) = (next, checkpoint.into_buffer());
    }
}

/// Gives a state its bytes; `None` at the end of the input.
fn feed<S: Awaits>(
    mut state: S,
    input: &mut VecDeque<&[u8]>,
    piece: &mut dyn FnMut() -> usize,
) -> Result<Option<S::Next>, Error> {
    while let Some(turn) = input.front_mut() {
        assert!(!state.awaits().is_empty());
        let room = state.room();
        assert!(!room.is_empty(), "it waits for bytes and takes none");
        let (now, later) = turn.split_at(piece().min(room.len()).min(turn.len()));
        room[..now.len()].copy_from_slice(now);
        *turn = later;
        if now.is_empty() {
            input.pop_front();
            continue;
        }
        match state.received(now.len())? {
            Progress::Awaits(same) => state = same,
            Progress::Reached(next) => return Ok(Some(next)),
        }
    }
    Ok(None)
}

/// Byte 0: how the rest comes in pieces. The rest: what a primary sends after the first copy, in turns: be16
/// length, bytes.
pub fn colo(data: &[u8]) {
    const LIMIT: usize = 24 << 10;
    let Some((seed, mut rest)) = data.split_first() else { return };
    let mut turns = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk() {
        let (turn, later) = after.split_at(after.len().min(u16::from_be_bytes(*length).into()));
        turns.push(turn);
        rest = later;
    }
    let whole = take_checkpoints(&turns, LIMIT, || usize::MAX);
    let split = take_checkpoints(&turns, LIMIT, pieces(*seed));
    let blocks = protected_blocks();
    for taken in &whole.taken {
        let bytes =
            taken.pages.iter().map(|(_, content)| content.as_ref().map_or(0, Vec::len)).sum::<usize>();
        assert!(bytes + 24 * taken.pages.len() <= LIMIT, "{} pages", taken.pages.len());
        assert!(taken.pages.iter().all(|(page, _)| page.offset < blocks[page.block.index()].length));
    }
    match whole.error {
        // Bytes after a checkpoint are noticed only if they come with it.
        Some(Error::Misbehaved(PeerMisbehaved::Unexpected { expected: "its acknowledgement", .. })) => {
            assert_eq!(whole.taken[..], split.taken[..whole.taken.len()]);
        }
        error => assert_eq!((whole.taken, error), (split.taken, split.error), "pieces make a difference"),
    }
}
