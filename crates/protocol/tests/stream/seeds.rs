//! The fuzz targets' seeds (`fuzz/seeds`), made of the recordings: cut down to what makes a difference,
//! without pages.

use std::collections::BTreeMap;
use std::path::PathBuf;

use towline_protocol::BlockIndex;
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::multifd::{HEADER_BYTES, Init, Method, PACKET_PAGES, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::{CommandKind, VmCommand};

use crate::device_state::{description, section};
use crate::goldens::write_main;
use crate::harness::lane_blocks;
use crate::mapped::stored_items;
use crate::support::*;

/// Records of one kind that a section of a seed has at most.
const RECORDS_MAX: usize = 3;

/// The seeds of a target, by name.
pub(crate) fn seeds(target: &str) -> BTreeMap<String, Vec<u8>> {
    match target {
        "main_channel" => main_channels(),
        "lane" => WITH_LANES.iter().flat_map(|name| lanes(name)).chain(full_packets()).collect(),
        "return_path" => return_path(),
        "device_state" => STREAMS.map(|name| (name.into(), device_state(name))).into(),
        "mapped_ram" => FILES.map(|name| (name.into(), cut_down(stored_items(name)))).into(),
        "xbzrle" => changes(),
        "colo" => crate::colo::seeds(),
        _ => panic!("no target {target}"),
    }
}

fn main_channels() -> BTreeMap<String, Vec<u8>> {
    let with_pieces = |stream: Vec<u8>| [&[7], &stream[..]].concat();
    let recorded = |name: &str| with_pieces(cut_down(read_main(&golden(name, "main"))));
    let mut seeds: BTreeMap<String, Vec<u8>> = STREAMS.map(|name| (name.into(), recorded(name))).into();
    let mut stream = Vec::new();
    Configuration {
        machine_type: "virt-9.1".into(),
        target_page_bits: Some(12),
        capabilities: vec!["a".into(), "b".into()],
        uuid: Some([7; 16]),
    }
    .encode(&mut stream);
    for command in [VmCommand::OpenReturnPath, VmCommand::Ping(1), VmCommand::SwitchoverStart] {
        command.encode(&mut stream);
    }
    VmCommand::Other { kind: CommandKind::POSTCOPY_ADVISE, data: vec![0; 16] }.encode(&mut stream);
    seeds.insert("subsections-and-commands".into(), with_pieces(stream));
    seeds
}

fn cut_down(mut items: Vec<Item>) -> Vec<u8> {
    let mut run = (None, 0);
    items.retain_mut(|item| {
        if let Item::Page(_, bytes) = item {
            bytes.clear();
        }
        let kind = std::mem::discriminant(item);
        run = if run.0 == Some(kind) { (run.0, run.1 + 1) } else { (Some(kind), 1) };
        let record = matches!(item, Item::Page(..) | Item::Zero(_) | Item::Xbzrle(..));
        !record || run.1 <= RECORDS_MAX
    });
    let tail =
        [section(3, "timer", b"0123"), section(4, "cpu", b"4567"), description(&["timer", "cpu"])].concat();
    *items.last_mut().unwrap() = Item::Complete(DeviceState::parse(&tail).unwrap());
    write_main(&items, if items.contains(&Item::Flush) { 2 } else { 0 })
}

fn lanes(name: &str) -> Vec<(String, Vec<u8>)> {
    let blocks = blocks_of(&read_main(&golden(name, "main")));
    let seed = |(index, lane): (usize, Vec<u8>)| {
        let (init, packets) = read_lane(&lane, &blocks);
        let mut seed = init.encode().to_vec();
        for (packet, _) in packets.iter().take(4) {
            let mut header = [0; HEADER_BYTES];
            packet.encode(&blocks, &mut header);
            seed.extend_from_slice(&header);
        }
        (format!("{name}-{index}"), seed)
    };
    golden_lanes(name).into_iter().enumerate().map(seed).collect()
}

/// Packets with as many pages as there may be, with and without compression.
fn full_packets() -> Vec<(String, Vec<u8>)> {
    let normal: Vec<u64> = (0..100).map(|page| page * PAGE_SIZE).collect();
    let zero: Vec<u64> = (100..PACKET_PAGES as u64).map(|page| page * PAGE_SIZE).collect();
    let seed = |(method, data_bytes): (Method, u32)| {
        let (block, normal, zero) = (Some(BlockIndex(0)), normal.clone(), zero.clone());
        let packet =
            Packet { method, block, data_bytes, pages_alloc: 128, normal, zero, ..Packet::default() };
        let mut header = [0; HEADER_BYTES];
        packet.encode(&lane_blocks(), &mut header);
        let init = Init { uuid: [0; 16], id: 3 };
        (format!("full-{}", method.name()), [&init.encode()[..], &header].concat())
    };
    [(Method::None, 100 << 12), (Method::Zlib, 12_345), (Method::Zstd, 0)].map(seed).into()
}

fn return_path() -> BTreeMap<String, Vec<u8>> {
    let mut seeds: BTreeMap<String, Vec<u8>> =
        STREAMS.map(|name| (name.into(), golden(name, "return"))).into();
    let mut all = Vec::new();
    for message in crate::properties::one_of_each_message() {
        ReturnPathMessage::encode(&message, &mut all);
    }
    seeds.insert("one-of-each".into(), all);
    seeds
}

fn device_state(name: &str) -> Vec<u8> {
    let Some(Item::Complete(state)) = read_main(&golden(name, "main")).pop() else { panic!("{name}") };
    let devices = state.devices();
    let names = [&devices[0].name[..], &devices[1].name];
    [&[3], &state.bytes()[..devices[2].offset], &description(&names)].concat()
}

fn changes() -> BTreeMap<String, Vec<u8>> {
    let items = read_main(&golden("xbzrle-10.0", "main"));
    let data =
        items.iter().filter_map(|item| if let Item::Xbzrle(_, data) = item { Some(data) } else { None });
    let seed = |data: &Vec<u8>| [&[0x10, 0x00], &data[..]].concat();
    data.take(4).enumerate().map(|(index, data)| (format!("page-{index}"), seed(data))).collect()
}

fn directory(target: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "..", "fuzz", "seeds", target].iter().collect()
}

#[test]
fn the_fuzz_targets_start_from_these() {
    for (target, _) in crate::harness::TARGETS {
        let source = directory("..").join("fuzz_targets").join(target).with_extension("rs");
        assert!(source.exists(), "{}", source.display());
        for (name, seed) in seeds(target) {
            let path = directory(target).join(name);
            if std::env::var_os("BLESS").is_some() {
                std::fs::create_dir_all(directory(target)).unwrap();
                std::fs::write(&path, &seed).unwrap();
            }
            assert!(std::fs::read(&path).unwrap() == seed, "{}: BLESS=1 rewrites it", path.display());
        }
    }
}
