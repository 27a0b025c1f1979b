//! Helpers shared by the tests: the recorded vectors, and drivers that act as a destination.

use std::collections::BTreeMap;
use std::path::PathBuf;

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind, StreamDecoder, StreamItem};
use towline_protocol::device_state::{Collector, DeviceState};
use towline_protocol::machine::BarrierForm;
use towline_protocol::multifd::{HEADER_BYTES, INIT_BYTES, Init, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::section::VmCommand;
use towline_protocol::{PageRef, RamBlock, Reader, Result, xbzrle};

/// The recordings with a main channel.
pub(crate) const STREAMS: [&str; 6] =
    ["precopy-10.0", "xbzrle-10.0", "multifd-10.0", "multifd-10.0-as-7.2", "precopy-7.2", "multifd-7.2"];
/// The recordings that have lanes.
pub(crate) const WITH_LANES: [&str; 3] = ["multifd-10.0", "multifd-10.0-as-7.2", "multifd-7.2"];
/// The recorded files.
pub(crate) const FILES: [&str; 2] = ["mapped-10.0", "mapped-multifd-10.0"];

/// The directory of the recordings.
pub(crate) fn golden_directory() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "golden"].iter().collect()
}

/// One part of a recording, unpacked.
pub(crate) fn golden(name: &str, part: &str) -> Vec<u8> {
    let path = golden_directory().join(format!("{name}.{part}.z"));
    let packed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    miniz_oxide::inflate::decompress_to_vec_zlib(&packed).unwrap()
}

/// The lanes of a recording.
pub(crate) fn golden_lanes(name: &str) -> Vec<Vec<u8>> {
    (0..2).map(|lane| golden(name, &format!("lane{lane}"))).collect()
}

/// An [`StreamItem`] that owns what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    Configuration(Configuration),
    Command(VmCommand),
    SectionStart(RamSection),
    Total(u64),
    Block(RamBlock),
    Page(PageRef, Vec<u8>),
    Zero(PageRef),
    Xbzrle(PageRef, Vec<u8>),
    Flush,
    SectionEnd(RamSection),
    DeviceState,
    Complete(DeviceState),
}

impl Item {
    pub(crate) fn of(event: StreamItem) -> Self {
        match event {
            StreamItem::Configuration(configuration) => Self::Configuration(configuration),
            StreamItem::Command(command) => Self::Command(command),
            StreamItem::SectionStart(section) => Self::SectionStart(section),
            StreamItem::Total(total) => Self::Total(total),
            StreamItem::Block(block) => Self::Block(block),
            StreamItem::Page(page) => Self::Page(page, Vec::new()),
            StreamItem::ZeroPage(page) => Self::Zero(page),
            StreamItem::Xbzrle { page, data } => Self::Xbzrle(page, data),
            StreamItem::Flush => Self::Flush,
            StreamItem::SectionEnd(section) => Self::SectionEnd(section),
            StreamItem::DeviceState => Self::DeviceState,
        }
    }
}

/// Reads a main channel that comes in pieces.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    machine: StreamDecoder,
    buffer: Vec<u8>,
    collector: Collector,
    /// Items read so far.
    pub(crate) items: Vec<Item>,
}

impl Driver {
    /// Takes a piece.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<()> {
        if self.items.last() == Some(&Item::DeviceState) {
            return self.tail(piece);
        }
        self.buffer.extend_from_slice(piece);
        let buffer = std::mem::take(&mut self.buffer);
        let mut input = Reader::new(&buffer);
        loop {
            if let Some(Item::Page(_, bytes)) = self.items.last_mut()
                && bytes.is_empty()
            {
                let Ok(page) = input.take(PAGE_SIZE as usize) else { break };
                bytes.extend_from_slice(page);
            }
            let (machine, event) = std::mem::take(&mut self.machine).handle(&mut input)?;
            self.machine = machine;
            let Some(event) = event else { break };
            self.items.push(Item::of(event));
        }
        self.buffer = input.rest().to_vec();
        if self.items.last() == Some(&Item::DeviceState) {
            let rest = std::mem::take(&mut self.buffer);
            self.tail(&rest)?;
        }
        Ok(())
    }

    fn tail(&mut self, piece: &[u8]) -> Result<()> {
        self.collector.push(piece)?;
        if let Some(state) = self.collector.complete()? {
            self.items.push(Item::Complete(state));
        }
        Ok(())
    }

    /// True once the device state is complete.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.items.last(), Some(Item::Complete(_)))
    }
}

/// Every item of a main channel.
pub(crate) fn read_main(bytes: &[u8]) -> Vec<Item> {
    let mut driver = Driver::default();
    driver.push(bytes).unwrap();
    assert!(driver.is_complete(), "the stream ends in {:?}", driver.items.last());
    driver.items
}

/// The blocks that a stream lists.
pub(crate) fn blocks_of(items: &[Item]) -> Vec<RamBlock> {
    let block = |item: &Item| if let Item::Block(block) = item { Some(block.clone()) } else { None };
    items.iter().filter_map(block).collect()
}

/// The configuration that a stream begins with.
pub(crate) fn configuration_of(items: &[Item]) -> &Configuration {
    let Some(Item::Configuration(configuration)) = items.first() else { panic!("no configuration") };
    configuration
}

/// Every item of a lane.
pub(crate) fn read_lane<'a>(bytes: &'a [u8], blocks: &[RamBlock]) -> (Init, Vec<(Packet, &'a [u8])>) {
    let mut input = Reader::new(bytes);
    let init = Init::decode(&input.array::<INIT_BYTES>().unwrap()).unwrap();
    let mut packets = Vec::new();
    while !input.rest().is_empty() {
        let packet = Packet::decode(&input.array::<HEADER_BYTES>().unwrap(), blocks).unwrap();
        let data = input.take(packet.data_bytes as usize).unwrap();
        packets.push((packet, data));
    }
    (init, packets)
}

/// A guest's memory at the destination: missing pages are zero.
pub(crate) type Memory = BTreeMap<PageRef, Vec<u8>>;

/// Loads the memory of a recording, lanes and main channel together, as a destination does: at each barrier
/// every lane is read up to its next SYNC. Returns the memory and the number of barriers.
pub(crate) fn load(items: &[Item], lanes: &[Vec<u8>]) -> (Memory, usize) {
    let blocks = blocks_of(items);
    let form = BarrierForm::of(&configuration_of(items).machine_type);
    let mut memory = Memory::new();
    let mut lanes: Vec<_> = lanes.iter().map(|lane| read_lane(lane, &blocks).1.into_iter()).collect();
    let mut barriers = 0;
    for item in items {
        match item {
            Item::Page(page, bytes) => drop(memory.insert(*page, bytes.clone())),
            Item::Zero(page) => drop(memory.remove(page)),
            Item::Xbzrle(page, data) => {
                let bytes = memory.entry(*page).or_insert_with(|| vec![0; PAGE_SIZE as usize]);
                xbzrle::decode(data, bytes).unwrap();
            }
            _ => {}
        }
        let barrier = match form {
            BarrierForm::FlushRecord => matches!(item, Item::Flush),
            BarrierForm::EachSection => matches!(item, Item::SectionEnd(_)),
        };
        if barrier && !lanes.is_empty() {
            barriers += 1;
            lanes.iter_mut().for_each(|lane| until_sync(lane, &mut memory));
        }
    }
    for lane in &mut lanes {
        assert_eq!(lane.next(), None, "a lane carries something after the last barrier");
    }
    (memory, barriers)
}

fn until_sync<'a>(lane: &mut impl Iterator<Item = (Packet, &'a [u8])>, memory: &mut Memory) {
    loop {
        let (packet, data) = lane.next().expect("each lane has a SYNC for each barrier");
        let page = |offset: &u64| PageRef { block: packet.block.expect("it has pages"), offset: *offset };
        for (offset, bytes) in packet.normal.iter().zip(data.chunks_exact(PAGE_SIZE as usize)) {
            memory.insert(page(offset), bytes.to_vec());
        }
        for offset in &packet.zero {
            memory.remove(&page(offset));
        }
        if packet.sync {
            return;
        }
    }
}

/// START, PART and END as one letter each, for summaries.
pub(crate) fn section_name(kind: SectionKind) -> &'static str {
    match kind {
        SectionKind::Start => "START",
        SectionKind::Part => "PART",
        SectionKind::End => "END",
    }
}
