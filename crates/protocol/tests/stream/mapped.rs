//! Stored guests: recorded mapped-ram files, read as an image reader does and written again to the byte.

use towline_protocol::configuration::MAPPED_RAM;
use towline_protocol::destination::{StreamDecoder, StreamItem};
use towline_protocol::device_state::DeviceState;
use towline_protocol::mapped_ram::{self, MappedRamHeader};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::section::VmCommand;
use towline_protocol::{BlockIndex, PageRef, RamBlock, Reader};

use crate::goldens::{assert_filled, write_main};
use crate::support::*;

/// The guest in a file: the stream's items, the offset of its list, and its memory.
struct Stored {
    items: Vec<Item>,
    blocks: Vec<RamBlock>,
    list_offset: u64,
    memory: Memory,
}

/// Reads a file in the order of [`StreamDecoder`]'s requests.
fn read(file: &[u8]) -> Stored {
    let (mut machine, mut at, mut list_offset) = (StreamDecoder::default(), 0, 0);
    let (mut items, mut memory) = (Vec::new(), Memory::new());
    while items.last() != Some(&Item::DeviceState) {
        machine.at_file_offset(at as u64);
        let mut input = Reader::new(&file[at..]);
        let (next, event) = machine.handle(&mut input).unwrap();
        machine = next;
        at += input.position();
        let event = event.expect("the file is whole");
        match &event {
            StreamItem::Total(_) => list_offset = at as u64 - 8,
            StreamItem::Block(block) => {
                let index = machine.blocks().len() - 1;
                pages(file, block, u32::try_from(index).unwrap(), &mut memory);
                at = usize::try_from(block.mapped.unwrap().end(block.length)).unwrap();
            }
            _ => {}
        }
        items.push(Item::of(event));
    }
    items.push(Item::Complete(DeviceState::parse(&file[at..]).unwrap()));
    Stored { blocks: blocks_of(&items), items, list_offset, memory }
}

/// The items of a recorded file's stream.
pub(crate) fn stored_items(name: &str) -> Vec<Item> {
    read(&golden(name, "file")).items
}

fn pages(file: &[u8], block: &RamBlock, index: u32, memory: &mut Memory) {
    let header = block.mapped.unwrap();
    let (bitmap, first) = (header.bitmap_offset as usize, header.pages_offset as usize);
    let mut stored = 0;
    for page in 0..block.pages() as usize {
        let at = first + page * PAGE_SIZE as usize;
        let bytes = &file[at..at + PAGE_SIZE as usize];
        if file[bitmap + page / 8] >> (page % 8) & 1 == 1 {
            stored += 1;
            let offset = page as u64 * PAGE_SIZE;
            memory.insert(PageRef { block: BlockIndex(index), offset }, bytes.to_vec());
        } else {
            assert!(bytes.iter().all(|byte| *byte == 0), "a page that is not in the bitmap is a hole");
        }
    }
    assert!(stored <= block.pages());
}

#[test]
fn each_file_is_read_as_it_was_stored() {
    for name in FILES {
        let stored = read(&golden(name, "file"));
        let configuration = configuration_of(&stored.items);
        assert_eq!(configuration.machine_type, "pc-q35-10.0");
        assert_eq!(configuration.capabilities, [MAPPED_RAM]);
        let others = stored.items.iter().filter(|item| matches!(item, Item::Command(_)));
        assert_eq!(others.collect::<Vec<_>>(), [&Item::Command(VmCommand::SwitchoverStart)], "{name}");
        let blocks: Vec<_> = stored.blocks.iter().map(|block| (&block.name[..], block.length)).collect();
        let expected = [
            ("pc.ram", 2 << 20),
            ("/rom@etc/acpi/tables", 128 << 10),
            ("pc.rom", 128 << 10),
            ("pc.bios", 64 << 10),
            ("/rom@etc/table-loader", 4096),
            ("/rom@etc/acpi/rsdp", 4096),
        ];
        assert_eq!(blocks, expected, "{name}");
        let Some(Item::Complete(state)) = stored.items.last() else { panic!("{name}: no device state") };
        let (devices, last) = (state.devices(), state.devices().last().unwrap());
        assert_eq!((devices.len(), &devices[0].name[..], &last.name[..]), (29, "timer", "globalstate"));
        assert_filled(&stored.memory, name);
    }
}

#[test]
fn blocks_are_placed_where_qemu_places_them() {
    for name in FILES {
        let stored = read(&golden(name, "file"));
        let mut placed: Vec<_> =
            stored.blocks.iter().map(|block| RamBlock { mapped: None, ..block.clone() }).collect();
        let end = mapped_ram::place_all(&mut placed, stored.list_offset);
        assert_eq!(placed, stored.blocks, "{name}");
        let last = placed.last().unwrap();
        assert_eq!(end, last.mapped.unwrap().end(last.length));
    }
}

#[test]
fn each_file_is_written_again_to_the_byte() {
    for name in FILES {
        let file = golden(name, "file");
        let Stored { items, blocks, memory, .. } = read(&file);
        let stream = write_main(&items, 0);
        let mut out = vec![0; file.len()];
        let mut place = |at: u64, bytes: &[u8]| out[at as usize..][..bytes.len()].copy_from_slice(bytes);
        // The stream lies in as many pieces as there are blocks, and one more, each after the pages before
        // it.
        let (mut written, mut at) = (0, 0);
        for block in &blocks {
            let header = block.mapped.unwrap();
            let n = (header.bitmap_offset - at) as usize;
            place(at, &stream[written..written + n]);
            (written, at) = (written + n, header.end(block.length));
        }
        place(at, &stream[written..]);
        for (PageRef { block, offset }, bytes) in &memory {
            place(blocks[block.index()].mapped.unwrap().pages_offset + offset, bytes);
        }
        for (index, block) in blocks.iter().enumerate() {
            place(block.mapped.unwrap().bitmap_offset, &bitmap(block, BlockIndex(index as u32), &memory));
        }
        assert!(out == file, "{name}: {:?}", out.iter().zip(&file).position(|(a, b)| a != b));
    }
}

fn bitmap(block: &RamBlock, index: BlockIndex, memory: &Memory) -> Vec<u8> {
    let mut bits = vec![0; mapped_ram::bitmap_bytes(block.length, PAGE_SIZE) as usize];
    for page in 0..block.pages() {
        if memory.contains_key(&PageRef { block: index, offset: page * PAGE_SIZE }) {
            bits[page as usize / 8] |= 1 << (page % 8);
        }
    }
    bits
}

#[test]
fn a_header_error_names_its_offset() {
    let header = MappedRamHeader::place(100, 65 * PAGE_SIZE);
    assert_eq!((header.bitmap_offset, header.pages_offset), (128, 1 << 20));
    assert_eq!(header.end(65 * PAGE_SIZE), (1 << 20) + 65 * PAGE_SIZE);
    assert_eq!(MappedRamHeader::place((1 << 20) - 28 - 8, PAGE_SIZE).pages_offset, 1 << 20);
    assert_eq!(MappedRamHeader::place((1 << 20) - 28 - 7, PAGE_SIZE).pages_offset, 2 << 20);
}
