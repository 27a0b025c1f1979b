//! A reader gets back what was written.

use proptest::prelude::*;
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind, StreamDecoder, StreamItem};
use towline_protocol::machine::BarrierForm;
use towline_protocol::multifd::{HEADER_BYTES, Init, Method, PACKET_PAGES, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::{CommandKind, VmCommand};
use towline_protocol::source::{Iterating, RamOptions, RamWriter, Setup};
use towline_protocol::{BlockIndex, PageRef, RamBlock, Reader, mapped_ram, xbzrle};

use crate::support::*;

/// Every kind of message once.
pub(crate) fn one_of_each_message() -> Vec<ReturnPathMessage> {
    let (start, length) = (0x1000, 0x2000);
    vec![
        ReturnPathMessage::Pong(1),
        ReturnPathMessage::RequestPages { start, length, block: Some("pc.ram".into()) },
        ReturnPathMessage::RequestPages { start, length, block: None },
        ReturnPathMessage::ReceivedBitmap("pc.bios".into()),
        ReturnPathMessage::ResumeAck(1),
        ReturnPathMessage::SwitchoverAck,
        ReturnPathMessage::Other { kind: 9, data: vec![1, 2, 3] },
        ReturnPathMessage::Shut(0),
    ]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![9 => "[ -~]{0,40}", 1 => "[a-z/@]{255}"]
}

fn message() -> impl Strategy<Value = ReturnPathMessage> {
    let request = (any::<u64>(), any::<u32>(), proptest::option::of(name()));
    prop_oneof![
        any::<u32>().prop_map(ReturnPathMessage::Shut),
        any::<u32>().prop_map(ReturnPathMessage::Pong),
        any::<u32>().prop_map(ReturnPathMessage::ResumeAck),
        Just(ReturnPathMessage::SwitchoverAck),
        name().prop_map(ReturnPathMessage::ReceivedBitmap),
        request.prop_map(|(start, length, block)| ReturnPathMessage::RequestPages { start, length, block }),
        (other_kind(), proptest::collection::vec(any::<u8>(), 0..=512))
            .prop_map(|(kind, data)| ReturnPathMessage::Other { kind, data }),
    ]
}

/// A kind that is unknown to QEMU and not the beginning of a TLS record, since that is refused.
fn other_kind() -> impl Strategy<Value = u16> {
    (8..=u16::MAX).prop_filter("a TLS record", |kind| !matches!(kind, 0x1503 | 0x1603))
}

fn configuration() -> impl Strategy<Value = Configuration> {
    let capabilities = prop_oneof![Just(vec![]), Just(vec!["mapped-ram".to_owned()])];
    (name(), proptest::option::of(Just(12)), capabilities, proptest::option::of(any::<[u8; 16]>())).prop_map(
        |(machine_type, target_page_bits, capabilities, uuid)| Configuration {
            machine_type,
            target_page_bits,
            capabilities,
            uuid,
        },
    )
}

fn blocks() -> impl Strategy<Value = Vec<RamBlock>> {
    proptest::collection::btree_map(name(), 1..2000_u64, 1..8).prop_map(|blocks| {
        let block = |(name, pages)| RamBlock { name, length: pages * PAGE_SIZE, mapped: None };
        blocks.into_iter().map(block).collect()
    })
}

/// A page by two numbers that are brought into the guest's range.
fn page(blocks: &[RamBlock], (block, page): (usize, u64)) -> PageRef {
    let index = block % blocks.len();
    let offset = page % blocks[index].pages() * PAGE_SIZE;
    PageRef { block: BlockIndex(u32::try_from(index).unwrap()), offset }
}

type Record = (u8, (usize, u64), Vec<u8>);

fn records() -> impl Strategy<Value = Vec<Vec<Record>>> {
    let data = proptest::collection::vec(any::<u8>(), 0..40);
    let record = (0..4_u8, (any::<usize>(), any::<u64>()), data);
    proptest::collection::vec(proptest::collection::vec(record, 0..20), 1..5)
}

/// Writes sections of records, the last as END, and returns the expected items.
fn write(
    configuration: &Configuration,
    blocks: &[RamBlock],
    sections: &[Vec<Record>],
) -> (Vec<u8>, Vec<Item>) {
    let (mut out, mut items) = (Vec::new(), vec![Item::Configuration(configuration.clone())]);
    let options = RamOptions { section_id: 7, barrier: Some(BarrierForm::FlushRecord) };
    let mut state = Setup::begin(configuration, &mut out).write_ram_start(options, blocks, &mut out);
    let section = |kind| RamSection { kind, id: 7 };
    items.push(Item::SectionStart(section(SectionKind::Start)));
    items.push(Item::Total(blocks.iter().map(|block| block.length).sum()));
    items.extend(blocks.iter().cloned().map(Item::Block));
    items.extend([Item::Flush, Item::SectionEnd(section(SectionKind::Start))]);
    let mut put = |records: &[Record], writer: &mut RamWriter, out: &mut Vec<u8>| {
        for (kind, place, data) in records {
            let page = page(blocks, *place);
            match kind {
                0 => {
                    writer.page(page, out);
                    let bytes = vec![0xa5; PAGE_SIZE as usize];
                    out.extend_from_slice(&bytes);
                    items.push(Item::Page(page, bytes));
                }
                1 => {
                    writer.zero(page, out);
                    items.push(Item::Zero(page));
                }
                2 => {
                    writer.xbzrle(page, data, out);
                    items.push(Item::Xbzrle(page, data.clone()));
                }
                _ => {
                    writer.barrier(out);
                    items.push(Item::Flush);
                }
            }
        }
    };
    let (last, parts) = sections.split_last().unwrap();
    for records in parts {
        let mut part = state.open_part(&mut out);
        put(records, part.records(), &mut out);
        state = part.close(&mut out);
    }
    let mut end = state.end(&mut out);
    put(last, end.records(), &mut out);
    end.close(&mut out);
    items.push(Item::DeviceState);
    (out, items)
}

/// Without what frames a section, which [`write`] does not predict.
fn without_frames(items: Vec<Item>) -> Vec<Item> {
    let framed = |item: &Item| matches!(item, Item::SectionStart(_) | Item::SectionEnd(_));
    items.into_iter().filter(|item| !framed(item)).collect()
}

/// A page's changes as QEMU writes them: from `old` to `new`, alternating runs.
fn changes(old: &[u8], new: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < new.len() {
        let same = old[at..].iter().zip(&new[at..]).take_while(|(a, b)| a == b).count();
        at += same;
        let differs = old[at..].iter().zip(&new[at..]).take_while(|(a, b)| a != b).count();
        if differs == 0 {
            break;
        }
        for length in [same, differs] {
            if length < 0x80 {
                out.push(length as u8);
            } else {
                out.extend([length as u8 | 0x80, (length >> 7) as u8]);
            }
        }
        out.extend_from_slice(&new[at..at + differs]);
        at += differs;
    }
    out
}

proptest! {
    #[test]
    fn messages_are_read_as_written(messages in proptest::collection::vec(message(), 0..8)) {
        let mut out = Vec::new();
        messages.iter().for_each(|message| message.encode(&mut out));
        let mut input = Reader::new(&out);
        for message in messages {
            prop_assert_eq!(ReturnPathMessage::decode(&mut input), Ok(Some(message)));
        }
        prop_assert_eq!(ReturnPathMessage::decode(&mut input), Ok(None));
    }

    #[test]
    fn a_message_cut_off_is_incomplete_and_consumes_nothing(message in message(), cut in any::<usize>()) {
        let mut out = Vec::new();
        message.encode(&mut out);
        let mut input = Reader::new(&out[..cut % out.len()]);
        prop_assert_eq!(ReturnPathMessage::decode(&mut input), Ok(None));
        prop_assert_eq!(input.position(), 0);
    }

    #[test]
    fn streams_are_read_as_written(
        configuration in configuration(), blocks in blocks(), sections in records(), piece in 1..5000_usize,
    ) {
        let configuration = Configuration { capabilities: vec![], ..configuration };
        let (bytes, expected) = write(&configuration, &blocks, &sections);
        let mut driver = Driver::default();
        for piece in bytes.chunks(piece) {
            driver.push(piece).unwrap();
        }
        prop_assert_eq!(without_frames(driver.items), without_frames(expected));
    }

    #[test]
    fn configurations_are_read_as_written(configuration in configuration()) {
        let mut out = Vec::new();
        configuration.encode(&mut out);
        VmCommand::Ping(5).encode(&mut out);
        let mut driver = Driver::default();
        driver.push(&out).unwrap();
        let expected = [Item::Configuration(configuration), Item::Command(VmCommand::Ping(5))];
        prop_assert_eq!(driver.items, expected);
    }

    #[test]
    fn stored_guests_are_placed_so_that_they_are_read(mut blocks in blocks()) {
        let configuration = Configuration {
            machine_type: "x".into(), capabilities: vec!["mapped-ram".into()], ..Configuration::default()
        };
        let mut out = Vec::new();
        let setup = Setup::begin(&configuration, &mut out);
        let list_offset = out.len() as u64 + 1 + 4 + 4 + 4 + 4;
        mapped_ram::place_all(&mut blocks, list_offset);
        let _: Iterating =
            setup.write_ram_start(RamOptions { section_id: 1, barrier: None }, &blocks, &mut out);
        let (mut machine, mut input, mut file) = (StreamDecoder::default(), Reader::new(&out), 0);
        while machine.blocks().len() < blocks.len() {
            machine.at_file_offset(file);
            let start = input.position();
            let (next, event) = machine.handle(&mut input).unwrap();
            machine = next;
            file += (input.position() - start) as u64;
            if let Some(StreamItem::Block(block)) = event {
                file = block.mapped.unwrap().end(block.length);
            }
        }
        prop_assert_eq!(machine.blocks(), &blocks[..]);
    }

    #[test]
    fn packets_are_read_as_written(
        blocks in blocks(), block in any::<usize>(), normal in proptest::collection::vec(any::<u64>(), 0..64),
        zero in proptest::collection::vec(any::<u64>(), 0..=64), sync in any::<bool>(), packet_num in any::<u64>(),
        pages_alloc in 0..=PACKET_PAGES as u32, method in 0..6_usize, compressed in 0..500_000_u32,
    ) {
        let methods = [Method::None, Method::Zlib, Method::Zstd, Method::Qpl, Method::Uadk, Method::Qatzip];
        let method = methods[method];
        let block = block % blocks.len();
        let offsets = |pages: Vec<u64>| -> Vec<_> {
            pages.into_iter().map(|number| page(&blocks, (block, number)).offset).collect()
        };
        let (normal, zero) = (offsets(normal), offsets(zero));
        let data_bytes = match (normal.len(), method) {
            (0, _) => 0,
            (pages, Method::None) => pages as u32 * PAGE_SIZE as u32,
            _ => compressed,
        };
        let block = (!normal.is_empty() || !zero.is_empty()).then_some(BlockIndex(block as u32));
        let packet = Packet { sync, method, block, data_bytes, packet_num, pages_alloc, normal, zero };
        let mut header = [0xff; HEADER_BYTES];
        packet.encode(&blocks, &mut header);
        prop_assert_eq!(Packet::decode(&header, &blocks), Ok(packet));
    }

    #[test]
    fn lanes_announce_themselves(uuid in any::<[u8; 16]>(), id in any::<u8>()) {
        let init = Init { uuid, id };
        prop_assert_eq!(Init::decode(&init.encode()), Ok(init));
    }

    #[test]
    fn commands_are_kept(kind in 12..u16::MAX, data in proptest::collection::vec(any::<u8>(), 0..40)) {
        let mut out = Vec::new();
        VmCommand::Other { kind: CommandKind(kind), data: data.clone() }.encode(&mut out);
        let expected = [&[8], &kind.to_be_bytes()[..], &(data.len() as u16).to_be_bytes(), &data].concat();
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn changes_make_the_new_page_of_the_old(
        old in proptest::collection::vec(0..3_u8, 4096), edits in proptest::collection::vec((0..4096_usize, 1..600_usize), 0..9),
    ) {
        let mut new = old.clone();
        for (at, length) in edits {
            let end = new.len().min(at + length);
            new[at..end].iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        let mut page = old.clone();
        xbzrle::decode(&changes(&old, &new), &mut page).unwrap();
        prop_assert_eq!(page, new);
    }
}
