//! Each recording decodes to the items that its QEMU, machine and capabilities imply, and encodes to the same
//! bytes.

use std::fmt::Write as _;

use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::machine::{BarrierForm, lanes_carry_zero_pages};
use towline_protocol::multifd::{HEADER_BYTES, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::VmCommand;
use towline_protocol::source::{self, PING_SETUP, RamOptions};
use towline_protocol::{BlockIndex, PageRef, Reader};

use crate::support::*;

/// A stream's items, a line each; the expected text is beside the recording.
fn summary(items: &[Item], lanes: &[Vec<u8>]) -> String {
    let mut text = String::new();
    let mut counts = [0; 4];
    for item in items {
        match item {
            Item::Configuration(configuration) => writeln!(text, "{configuration:?}").unwrap(),
            Item::Command(command) => writeln!(text, "{command:?}").unwrap(),
            Item::Total(total) => writeln!(text, "  total {total}").unwrap(),
            Item::Block(block) => {
                writeln!(text, "  {} {} {:?}", block.name, block.length, block.mapped).unwrap();
            }
            Item::Page(..) => counts[0] += 1,
            Item::Zero(_) => counts[1] += 1,
            Item::Xbzrle(..) => counts[2] += 1,
            Item::Flush => counts[3] += 1,
            Item::SectionStart(section) => {
                writeln!(text, "{} {}", section_name(section.kind), section.id).unwrap();
            }
            Item::SectionEnd(_) => {
                let [pages, zero, xbzrle, flush] = std::mem::take(&mut counts);
                writeln!(text, "  pages {pages} zero {zero} xbzrle {xbzrle} flush {flush}").unwrap();
            }
            Item::DeviceState => writeln!(text, "device state").unwrap(),
            Item::Complete(state) => {
                for device in state.devices() {
                    let (name, instance, version) = (&device.name, device.instance, device.version);
                    writeln!(text, "  {name} {instance} v{version}").unwrap();
                }
            }
        }
    }
    let blocks = blocks_of(items);
    for lane in lanes {
        let (init, packets) = read_lane(lane, &blocks);
        writeln!(text, "{init:?}").unwrap();
        for (packet, data) in packets {
            let block = packet.block.map_or("-", |block| &blocks[block.index()].name);
            let Packet { sync, packet_num, pages_alloc, normal, zero, .. } = &packet;
            let (sync, method) = (if *sync { " SYNC" } else { "" }, packet.method.name());
            write!(text, "  {packet_num}{sync} {method} {block} alloc {pages_alloc} ").unwrap();
            writeln!(text, "normal {} zero {} data {}", normal.len(), zero.len(), data.len()).unwrap();
        }
    }
    text
}

#[test]
fn each_recording_decodes_to_its_contents() {
    for name in STREAMS {
        let items = read_main(&golden(name, "main"));
        let lanes = if WITH_LANES.contains(&name) { golden_lanes(name) } else { Vec::new() };
        let found = summary(&items, &lanes);
        let path = golden_directory().join(format!("{name}.txt"));
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &found).unwrap();
        }
        assert_eq!(found, std::fs::read_to_string(path).unwrap(), "{name}");
    }
}

/// Where a stream is being written.
enum Writer {
    Setup(source::Setup),
    Iterating(source::Iterating),
    Part(source::Part),
    End(source::End),
    Complete,
}

impl Writer {
    fn records(&mut self) -> &mut source::RamWriter {
        match self {
            Self::Part(part) => part.records(),
            Self::End(end) => end.records(),
            _ => panic!("a record outside a section"),
        }
    }

    fn open(self, kind: SectionKind, options: RamOptions, items: &[Item], out: &mut Vec<u8>) -> Self {
        match (self, kind) {
            (Self::Setup(setup), SectionKind::Start) => {
                Self::Iterating(setup.write_ram_start(options, &blocks_of(items), out))
            }
            (Self::Iterating(iterating), SectionKind::Part) => Self::Part(iterating.open_part(out)),
            (Self::Iterating(iterating), SectionKind::End) => Self::End(iterating.end(out)),
            _ => panic!("{kind:?} out of order"),
        }
    }

    fn close(self, out: &mut Vec<u8>) -> Self {
        match self {
            Self::Part(part) => Self::Iterating(part.close(out)),
            Self::End(end) => {
                end.close(out);
                Self::Complete
            }
            state => state,
        }
    }
}

/// Writes what was read again.
pub(crate) fn write_main(items: &[Item], lanes: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let configuration = configuration_of(items);
    let return_path =
        items[1..3] == [Item::Command(VmCommand::OpenReturnPath), Item::Command(VmCommand::Ping(PING_SETUP))];
    let mut writer = Writer::Setup(if return_path {
        source::Setup::begin_with_return_path(configuration, &[], &mut out)
    } else {
        source::Setup::begin(configuration, &mut out)
    });
    let barrier = (lanes > 0).then(|| BarrierForm::of(&configuration.machine_type));
    let mut in_start = false;
    for item in &items[if return_path { 3 } else { 1 }..] {
        match item {
            Item::SectionStart(RamSection { kind, id }) => {
                in_start = *kind == SectionKind::Start;
                writer = writer.open(*kind, RamOptions { section_id: *id, barrier }, items, &mut out);
            }
            // The START section is written by one call, with the barrier in it.
            Item::Flush if in_start => {}
            Item::Flush => writer.records().barrier(&mut out),
            Item::Page(page, bytes) => {
                writer.records().page(*page, &mut out);
                out.extend_from_slice(bytes);
            }
            Item::Zero(page) => writer.records().zero(*page, &mut out),
            Item::Xbzrle(page, data) => writer.records().xbzrle(*page, data, &mut out),
            Item::SectionEnd(_) => writer = writer.close(&mut out),
            Item::Command(command) => command.encode(&mut out),
            Item::Complete(state) => out.extend_from_slice(state.bytes()),
            Item::Configuration(_) | Item::Total(_) | Item::Block(_) | Item::DeviceState => {}
        }
    }
    assert!(matches!(writer, Writer::Complete));
    out
}

fn assert_same(found: &[u8], expected: &[u8], name: &str) {
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((differs, found.len()), (None, expected.len()), "{name}: first difference, length");
}

#[test]
fn each_main_channel_is_written_again_to_the_byte() {
    for name in STREAMS {
        let bytes = golden(name, "main");
        let lanes = if WITH_LANES.contains(&name) { 2 } else { 0 };
        assert_same(&write_main(&read_main(&bytes), lanes), &bytes, name);
    }
}

/// Before 9.0 unused fields of a header are not cleared: the size where no pages follow, the name where there
/// are no pages, and the offsets after those in use.
fn put_left_over(packet: &Packet, before: &[u8; HEADER_BYTES], header: &mut [u8; HEADER_BYTES]) {
    let used = packet.normal.len() + packet.zero.len();
    if packet.normal.is_empty() {
        header[20..24].copy_from_slice(&before[20..24]);
    }
    if used == 0 {
        header[64..320].copy_from_slice(&before[64..320]);
    }
    header[320 + 8 * used..].copy_from_slice(&before[320 + 8 * used..]);
}

#[test]
fn each_lane_is_written_again_to_the_byte() {
    for name in WITH_LANES {
        let blocks = blocks_of(&read_main(&golden(name, "main")));
        for lane in golden_lanes(name) {
            let (init, packets) = read_lane(&lane, &blocks);
            let mut out = init.encode().to_vec();
            let mut before = [0; HEADER_BYTES];
            for (packet, data) in &packets {
                let mut header = [0xff; HEADER_BYTES];
                packet.encode(&blocks, &mut header);
                if name == "multifd-7.2" {
                    put_left_over(packet, &before, &mut header);
                }
                before = header;
                out.extend_from_slice(&header);
                out.extend_from_slice(data);
            }
            assert_same(&out, &lane, name);
        }
    }
}

#[test]
fn each_packet_has_the_array_size_of_its_qemu() {
    for name in WITH_LANES {
        let blocks = blocks_of(&read_main(&golden(name, "main")));
        for lane in golden_lanes(name) {
            for (packet, _) in read_lane(&lane, &blocks).1 {
                let alone = packet.block.is_none();
                let expected = if alone && name != "multifd-7.2" { 0 } else { 128 };
                assert_eq!(packet.pages_alloc, expected, "{name}: {packet:?}");
            }
        }
    }
}

#[test]
fn each_return_path_is_read_and_written_again() {
    for name in STREAMS {
        let bytes = golden(name, "return");
        let (mut input, mut messages, mut out) = (Reader::new(&bytes), Vec::new(), Vec::new());
        while let Some(message) = ReturnPathMessage::decode(&mut input).unwrap() {
            message.encode(&mut out);
            messages.push(message);
        }
        let expected = [
            ReturnPathMessage::SwitchoverAck,
            ReturnPathMessage::Pong(PING_SETUP),
            ReturnPathMessage::Shut(0),
        ];
        assert_eq!(messages, expected[usize::from(name != "precopy-10.0")..], "{name}");
        assert_eq!(out, bytes, "{name}");
    }
}

#[test]
fn barriers_follow_the_machine_type() {
    for name in WITH_LANES {
        let items = read_main(&golden(name, "main"));
        let (_, barriers) = load(&items, &golden_lanes(name));
        let blocks = blocks_of(&items);
        for lane in golden_lanes(name) {
            let syncs = read_lane(&lane, &blocks).1.iter().filter(|(packet, _)| packet.sync).count();
            assert_eq!(syncs, barriers, "{name}");
        }
        let flushes = items.iter().filter(|item| **item == Item::Flush).count();
        let sections = items.iter().filter(|item| matches!(item, Item::SectionEnd(_))).count();
        let (expected, machine) = match name {
            "multifd-10.0" => ((flushes, flushes), "pc-q35-10.0"),
            _ => ((sections, 0), "pc-q35-7.2"),
        };
        assert_eq!((barriers, flushes), expected, "{name}");
        assert_eq!(configuration_of(&items).machine_type, machine);
        let zero_records = items.iter().any(|item| matches!(item, Item::Zero(_)));
        assert_eq!(zero_records, !lanes_carry_zero_pages(machine), "{name}");
    }
}

/// Content that the recorded guest's firmware leaves in its memory, but for the two places in each page where
/// it counts.
pub(crate) fn assert_filled(memory: &Memory, name: &str) {
    for index in 0..40_u16 {
        let segment = 0x1000 + 0x200 * index;
        let page = PageRef { block: BlockIndex(0), offset: u64::from(segment) << 4 };
        let mut expected = segment.to_le_bytes().repeat(PAGE_SIZE as usize / 2);
        let found = &memory.get(&page).unwrap_or_else(|| panic!("{name}: {page:?} is missing"))[..];
        for counter in [0x10, 0x11, 0x800] {
            expected[counter] = found[counter];
        }
        assert_eq!(found, expected, "{name}: {page:?}");
    }
    let others =
        memory.iter().filter(|(page, bytes)| page.block.0 == 0 && bytes.iter().any(|byte| *byte != 0));
    assert_eq!(others.count(), 40, "{name}");
}

#[test]
fn each_recording_holds_the_memory_that_its_guest_had() {
    for name in STREAMS {
        let lanes = if WITH_LANES.contains(&name) { golden_lanes(name) } else { Vec::new() };
        assert_filled(&load(&read_main(&golden(name, "main")), &lanes).0, name);
    }
}
