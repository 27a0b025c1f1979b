//! The secondary against a model of QEMU's primary, whose guest writes between its stops.
//!
//! The property: the memory after checkpoint N is the primary's at its stop N, or there was no such
//! checkpoint, whatever the connection does. The primary writes its bytes by itself, not by the crate.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use towline_protocol::colo::CheckpointBuffer;
use towline_protocol::destination::{StreamDecoder, StreamItem};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{
    BlockIndex, Error, InvalidMessage, PageRef, PeerIncompatible, PeerMisbehaved, Reader,
};

use crate::harness::{
    Protection, RAM_ID, Taken, first_copy, protected_blocks, protected_devices, take_checkpoints,
};
use crate::support::Memory;

/// Enough for all pages of the guest.
const LIMIT: usize = 1 << 20;
const RUNS: u64 = 4000;

/// A part of what the primary sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Request,
    Send,
    SwitchoverStart,
    Memory,
    Eof,
    Size,
    Devices,
}

type Part = (Kind, Vec<u8>);

/// A primary with its guest.
struct Primary {
    random: Rng,
    memory: Memory,
    dirty: BTreeSet<PageRef>,
    /// The block of the last record that it sent.
    last: Option<BlockIndex>,
    /// Memory and device sections at each stop.
    stops: Vec<(Memory, Vec<u8>)>,
    parts: Vec<Part>,
}

impl Primary {
    fn new(seed: u64) -> Self {
        let (memory, dirty, last) = (Memory::new(), BTreeSet::new(), None);
        Self { random: Rng::with_seed(seed), memory, dirty, last, stops: Vec::new(), parts: Vec::new() }
    }

    /// The guest runs.
    fn run(&mut self) {
        let blocks = protected_blocks();
        for _ in 0..self.random.usize(..6) {
            let block = self.random.usize(..blocks.len());
            let offset = self.random.u64(..blocks[block].pages()) * PAGE_SIZE;
            let page = PageRef { block: BlockIndex(block as u32), offset };
            match self.random.u8(..4) {
                0 => drop(self.memory.remove(&page)),
                _ => drop(self.memory.insert(page, vec![self.random.u8(1..); PAGE_SIZE as usize])),
            }
            self.dirty.insert(page);
        }
    }

    /// The guest stops, and all that it has written is sent.
    fn checkpoint(&mut self) {
        let value = self.random.u64(..).to_be_bytes();
        let devices = protected_devices(&value).sections().to_vec();
        self.stops.push((self.memory.clone(), devices.clone()));
        self.parts.push((Kind::Request, be32(1)));
        self.parts.push((Kind::Send, be32(3)));
        if self.random.bool() {
            self.parts.push((Kind::SwitchoverStart, vec![8, 0, 11, 0, 0]));
        }
        let mut memory = [&[3][..], &be32(RAM_ID)].concat();
        for page in std::mem::take(&mut self.dirty) {
            let content = self.memory.get(&page);
            let same = if self.last == Some(page.block) { 0x20 } else { 0 };
            let flags = if content.is_some() { 0x08 } else { 0x02 } | same;
            memory.extend((page.offset | flags).to_be_bytes());
            if same == 0 {
                let name = &protected_blocks()[page.block.index()].name;
                memory.push(name.len() as u8);
                memory.extend(name.as_bytes());
            }
            memory.extend(content.map_or(&[0][..], |content| content));
            self.last = Some(page.block);
        }
        memory.extend(0x10_u64.to_be_bytes());
        memory.extend([&[0x7e][..], &be32(RAM_ID)].concat());
        self.parts.push((Kind::Memory, memory));
        self.parts.push((Kind::Eof, vec![0]));
        let size = devices.len() as u64 + 1;
        self.parts.push((Kind::Size, [&be32(4)[..], &size.to_be_bytes()].concat()));
        self.parts.push((Kind::Devices, [&devices[..], &[0]].concat()));
    }

    fn protected(seed: u64) -> Self {
        let mut primary = Self::new(seed);
        for _ in 0..primary.random.usize(1..5) {
            primary.run();
            primary.checkpoint();
        }
        primary
    }
}

fn be32(value: u32) -> Vec<u8> {
    value.to_be_bytes().into()
}

/// The bytes that the primary sends before it waits for a message.
fn turns(parts: &[Part]) -> Vec<Vec<u8>> {
    let turns = parts.split_inclusive(|(kind, _)| *kind == Kind::Devices);
    turns.map(|turn| turn.iter().flat_map(|(_, bytes)| bytes.clone()).collect()).collect()
}

/// Applies checkpoints in their order, and compares each with the primary at its stop.
fn assert_as_at_the_stops(taken: &[Taken], primary: &Primary, context: &str) {
    let mut memory = Memory::new();
    for (checkpoint, (expected, devices)) in taken.iter().zip(&primary.stops) {
        for (page, content) in &checkpoint.pages {
            match content {
                Some(content) => drop(memory.insert(*page, content.clone())),
                None => drop(memory.remove(page)),
            }
        }
        assert!(memory == *expected, "{context}: checkpoint {} has other memory", checkpoint.number);
        assert!(
            checkpoint.devices == *devices,
            "{context}: checkpoint {} has other devices",
            checkpoint.number
        );
    }
    assert!(taken.len() <= primary.stops.len(), "{context}: more checkpoints than stops");
}

#[test]
fn every_checkpoint_is_the_primary_at_its_stop() {
    for seed in 0..200 {
        let primary = Primary::protected(seed);
        let stream = turns(&primary.parts);
        let mut random = Rng::with_seed(seed);
        let largest = *random.choice(&[1, 9, 5000, usize::MAX - 1]).unwrap();
        let protection = take_checkpoints(&stream, LIMIT, || random.usize(1..=largest));
        assert_eq!(protection.error, None, "seed {seed}");
        assert_eq!(protection.taken.len(), primary.stops.len(), "seed {seed}");
        assert_as_at_the_stops(&protection.taken, &primary, &format!("seed {seed}"));
        // READY, then REPLY, RECEIVED and LOADED for each, and REPLY only after REQUEST.
        let cycle = [be32(2), be32(5), be32(6)].concat();
        assert_eq!(protection.sent, [be32(0), cycle.repeat(primary.stops.len())].concat());
    }
}

#[test]
fn a_connection_that_ends_anywhere_has_delivered_whole_checkpoints_only() {
    for seed in 0..12 {
        let primary = Primary::protected(seed);
        let whole = turns(&primary.parts);
        for (turn, bytes) in whole.iter().enumerate() {
            let cuts = (0..bytes.len()).filter(|cut| cut % 97 == 0 || *cut < 40 || bytes.len() - cut < 200);
            for cut in cuts {
                let mut stream = whole[..=turn].to_vec();
                stream[turn].truncate(cut);
                let protection = take_checkpoints(&stream, LIMIT, || usize::MAX);
                let context = format!("seed {seed}, turn {turn} cut at {cut}");
                assert_eq!((protection.taken.len(), protection.error), (turn, None), "{context}");
                assert_as_at_the_stops(&protection.taken, &primary, &context);
            }
        }
    }
}

/// Changes a primary's bytes; `None` if nothing was there to change.
fn tampered(parts: &[Part], random: &mut Rng) -> Option<(String, Vec<Part>)> {
    let mut parts = parts.to_vec();
    let at = random.usize(..parts.len());
    let (kind, fault) = (parts[at].0, random.u8(..8));
    let context = format!("fault {fault} at part {at}, {kind:?}");
    match fault {
        0 => parts.insert(at, parts[at].clone()),
        1 if at + 1 < parts.len() && parts[at] != parts[at + 1] => parts.swap(at, at + 1),
        2 if kind != Kind::SwitchoverStart => drop(parts.remove(at)),
        // A bit of a frame. Contents have no checksum: a socket of the same host has no such faults.
        3 if !matches!(kind, Kind::Memory | Kind::Devices) => {
            let bit = random.usize(..parts[at].1.len() * 8);
            parts[at].1[bit / 8] ^= 1 << (bit % 8);
        }
        // The section's kind, its number, that of its footer.
        4 if kind == Kind::Memory => parts[at].1[0] = *random.choice(&[1, 2, 4, 7, 8, 0x7e]).unwrap(),
        5 if kind == Kind::Memory => {
            let end = parts[at].1.len();
            *random.choice(&[4, end - 1, end - 5]).and_then(|&byte| parts[at].1.get_mut(byte)).unwrap() ^= 1;
        }
        // The last device without its footer; a device with another one's.
        6 if kind == Kind::Devices => drop(parts[at].1.drain(..random.usize(1..10))),
        7 if kind == Kind::Devices => {
            let footer = parts[at].1.len() - 2;
            parts[at].1[footer] ^= 1;
        }
        _ => return None,
    }
    Some((context, parts))
}

#[test]
fn a_primary_that_breaks_the_protocol_is_refused_and_its_checkpoint_not_delivered() {
    let mut faults = BTreeMap::<_, usize>::new();
    for seed in 0..RUNS {
        let primary = Primary::protected(seed);
        let mut random = Rng::with_seed(seed);
        let Some((context, parts)) = tampered(&primary.parts, &mut random) else { continue };
        let context = format!("seed {seed}, {context}");
        let stream = turns(&parts);
        let whole = random.bool();
        let Protection { taken, error, .. } =
            take_checkpoints(&stream, LIMIT, || if whole { usize::MAX } else { random.usize(1..2000) });
        assert_as_at_the_stops(&taken, &primary, &context);
        let all = taken.len() == primary.stops.len();
        assert!(error.is_some() || !all, "{context}: nothing was noticed");
        *faults.entry(context.rsplit_once(", fault ").unwrap().1[..1].to_owned()).or_default() += 1;
    }
    assert!(faults.len() == 8 && faults.values().all(|&runs| runs > 30), "{faults:?}");
}

fn refused(bytes: &[u8], limit: usize) -> Error {
    take_checkpoints(&[bytes], limit, || usize::MAX).error.expect("it is refused")
}

/// A first checkpoint with this after SEND.
fn after_send(rest: &[&[u8]]) -> Vec<u8> {
    [&be32(1)[..], &be32(3), &rest.concat()].concat()
}

fn memory(records: &[&[u8]]) -> Vec<u8> {
    [&[3][..], &be32(RAM_ID), &records.concat(), &0x10_u64.to_be_bytes(), &[0x7e], &be32(RAM_ID)].concat()
}

#[test]
fn errors_name_what_came_and_what_was_expected() {
    let unexpected =
        |found: &str, expected| PeerMisbehaved::Unexpected { found: found.into(), expected }.into();
    let feature = |what, switch| PeerIncompatible::Feature { what, switch }.into();
    let size = |bytes: u64| [&[0][..], &be32(4), &bytes.to_be_bytes()].concat();
    let word = |offset: u64, flags: u64| (offset | flags).to_be_bytes();
    let cases: [(Vec<u8>, Error); 13] = [
        (be32(3), unexpected("COLO message VMSTATE_SEND", "CHECKPOINT_REQUEST")),
        ([be32(1), be32(77)].concat(), unexpected("COLO message 77", "VMSTATE_SEND")),
        (
            after_send(&[&memory(&[]), &[0], &be32(6)]),
            unexpected("COLO message VMSTATE_LOADED", "VMSTATE_SIZE"),
        ),
        (
            after_send(&[&[2], &be32(RAM_ID)]),
            unexpected("a Part section", "the END section of a checkpoint's memory"),
        ),
        (
            after_send(&[b"\x08\0\x0b\0\0\x08\0\x0b\0\0"]),
            unexpected("SwitchoverStart", "the END section of a checkpoint's memory"),
        ),
        (
            after_send(&[&memory(&[]), &size(65 << 20)]),
            InvalidMessage::TooLong {
                what: "device state of a checkpoint",
                found: 65 << 20,
                limit: 64 << 20,
            }
            .into(),
        ),
        (
            after_send(&[&memory(&[]), &size(0)]),
            InvalidMessage::Truncated { what: "the device state of a checkpoint" }.into(),
        ),
        (
            after_send(&[&memory(&[]), &size(2), b"xx"]),
            InvalidMessage::Truncated { what: "the device state of a checkpoint" }.into(),
        ),
        // Whole, but without the devices of the first copy.
        (
            after_send(&[&memory(&[]), &size(1), &[0]]),
            InvalidMessage::DeviceMissing { name: "timer".into(), instance: 0 }.into(),
        ),
        (
            after_send(&[&memory(&[]), &[9]]),
            InvalidMessage::SectionType { found: 9, expected: "the end of a checkpoint's memory" }.into(),
        ),
        (
            after_send(&[&memory(&[]), &size(3), &[0, 0, 0, 1]]),
            unexpected("1 bytes after a checkpoint", "its acknowledgement"),
        ),
        (after_send(&[&memory(&[&word(0, 0x200)])]), feature("lanes in a checkpoint", "multifd")),
        (
            after_send(&[&memory(&[&word(0, 0x40), b"\x06pc.ram\x01\0\0"])]),
            feature("a page as its changes in a checkpoint", "xbzrle"),
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(refused(&bytes, LIMIT), expected, "{bytes:?}");
    }
}

#[test]
fn a_checkpoint_beyond_its_limit_is_refused() {
    let zero = |page: u64| [&((page * PAGE_SIZE) | 2).to_be_bytes()[..], b"\x06pc.ram\0"].concat();
    let records: Vec<_> = (0..24).map(zero).collect();
    let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
    let devices = [protected_devices(b"1").sections(), &[0]].concat();
    let size = (devices.len() as u64).to_be_bytes();
    let checkpoint = after_send(&[&memory(&records), &[0], &be32(4), &size, &devices]);
    // Without the two messages; 24 bytes of the index for each page.
    let needed = checkpoint.len() - 8 + 24 * records.len();
    assert_eq!(take_checkpoints(&[&checkpoint], needed, || usize::MAX).taken.len(), 1);
    for limit in [needed - 1, 24 * records.len(), 20, 0] {
        assert_eq!(refused(&checkpoint, limit), InvalidMessage::CheckpointTooLarge { limit }.into());
    }
}

#[test]
fn a_buffer_is_used_again_and_has_nothing_of_before() {
    let mut primary = Primary::new(7);
    primary.run();
    primary.checkpoint();
    primary.checkpoint();
    let taken = take_checkpoints(&turns(&primary.parts), LIMIT, || usize::MAX).taken;
    assert!(!taken[0].pages.is_empty() && taken[1].pages.is_empty(), "{taken:?}");
    let buffer = format!("{:?}", CheckpointBuffer::new(9));
    assert_eq!(buffer, "CheckpointBuffer { filled: 0, pages: 0, limit: 9, .. }");
}

#[test]
fn a_first_copy_may_announce_checkpoints_once() {
    let head = b"QEVM\0\0\0\x03\x07\0\0\0\x06virt-9";
    let ram = b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04";
    let ends = |mut decoder: StreamDecoder, rest: &[&[u8]]| {
        let stream = [&head[..], &rest.concat(), &[0; 16]].concat();
        let mut input = Reader::new(&stream);
        loop {
            match decoder.handle(&mut input) {
                Ok((_, Some(StreamItem::SectionStart(_)))) => return None,
                Ok((next, Some(_))) => decoder = next,
                Ok((_, None)) => panic!("the stream is too short"),
                Err(error) => return Some(error),
            }
        }
    };
    let announced = b"\x08\0\x08\0\0";
    let protected = StreamDecoder::with_checkpoints;
    assert_eq!(ends(protected(), &[announced, ram]), None);
    assert_eq!(ends(protected(), &[ram]), None);
    let again = PeerIncompatible::Feature { what: "COLO", switch: "x-colo" };
    assert_eq!(ends(protected(), &[announced, announced]), Some(again.into()));
    let length = InvalidMessage::CommandLength { command: 8, found: 1, expected: 0 };
    assert_eq!(ends(protected(), &[b"\x08\0\x08\0\x01x"]), Some(length.into()));
    assert_eq!(first_copy().blocks(), protected_blocks());
}

/// Seeds of the fuzz target.
pub(crate) fn seeds() -> BTreeMap<String, Vec<u8>> {
    let mut primary = Primary::new(2);
    let page = |block, page| PageRef { block: BlockIndex(block), offset: page * PAGE_SIZE };
    primary.dirty.extend([page(0, 1), page(0, 2), page(1, 0)]);
    primary.checkpoint();
    primary.memory.insert(page(1, 3), vec![9; PAGE_SIZE as usize]);
    primary.dirty.insert(page(1, 3));
    primary.checkpoint();
    primary.checkpoint();
    let mut empty = Primary::new(3);
    empty.checkpoint();
    let turn = |turn: &Vec<u8>| [&(turn.len() as u16).to_be_bytes()[..], turn].concat();
    let seed = |primary: &Primary| [vec![5], turns(&primary.parts).iter().flat_map(turn).collect()].concat();
    [("three-checkpoints".into(), seed(&primary)), ("empty".into(), seed(&empty))].into()
}
