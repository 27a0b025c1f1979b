//! A lane's packets, written as the engine and QEMU do.

use towline_protocol::multifd::{HEADER_BYTES, Init, PACKET_PAGES, Packet};
use towline_protocol::{BlockIndex, RamBlock};

use super::guest::PAGE;
use super::out::Out;

pub(crate) const UUID: [u8; 16] = [7; 16];

#[derive(Debug)]
pub(crate) struct LaneOut {
    pub(crate) out: Out,
    /// True if SYNC was sent in this pass.
    pub(crate) synced: bool,
    /// An empty packet follows, which the main channel does not wait for.
    pub(crate) trails: bool,
}

impl LaneOut {
    pub(crate) fn new(out: Out) -> Self {
        Self { out, synced: false, trails: false }
    }

    pub(crate) fn init(&mut self, index: usize) {
        self.out.bytes(Init { uuid: UUID, id: index as u8 }.encode().to_vec());
    }

    pub(crate) fn header(&mut self, packet: &Packet, blocks: &[RamBlock]) {
        let mut header = [0; HEADER_BYTES];
        packet.encode(blocks, &mut header);
        self.out.bytes(header.to_vec());
    }

    pub(crate) fn sync(&mut self, blocks: &[RamBlock]) {
        self.header(&Packet::sync(0), blocks);
        self.synced = true;
    }
}

/// A packet of pages of one block.
pub(crate) fn packet(block: BlockIndex, normal: Vec<u64>, zero: Vec<u64>) -> Packet {
    let data_bytes = (normal.len() * PAGE) as u32;
    let pages_alloc = PACKET_PAGES as u32;
    Packet { block: Some(block), data_bytes, pages_alloc, normal, zero, ..Packet::default() }
}
