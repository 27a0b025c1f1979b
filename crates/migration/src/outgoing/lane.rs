//! Writing one lane: pages are named, then a packet with them goes out in vectored calls, or compressed in
//! one call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use towline_channel::{Channel, IoBuf, ZeroCopySend, total_len};
use towline_protocol::multifd::{HEADER_BYTES, INIT_BYTES, Init, Method, PACKET_PAGES, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use super::sends::PacketSender;
use crate::compression::{Compression, Compressor};
use crate::guest::runs_of;
use crate::statistics::Statistics;
use crate::{Guest, Result};

/// The sending side of a lane.
#[derive(Debug)]
pub(crate) struct LaneWriter {
    out: PacketWriter,
    compressor: Option<Compressor>,
}

#[derive(Debug)]
struct PacketWriter {
    sender: PacketSender,
    /// Numbers the packets of all lanes.
    packets: Arc<AtomicU64>,
    statistics: Arc<Statistics>,
    /// The compression method of packets with pages.
    method: Method,
    packet: Packet,
    header: Box<[u8; HEADER_BYTES]>,
}

impl LaneWriter {
    pub(crate) fn new(
        channel: Arc<dyn Channel>,
        packets: Arc<AtomicU64>,
        statistics: Arc<Statistics>,
        options: LaneOptions,
    ) -> Result<Self> {
        let LaneOptions { compression, zero_copy_send } = options;
        let sender = PacketSender::new(channel, Arc::clone(&statistics), zero_copy_send, compression);
        let (packet, header) = (Packet::default(), Box::new([0; HEADER_BYTES]));
        let method = compression.method();
        let out = PacketWriter { sender, packets, statistics, method, packet, header };
        let compressor = Compressor::new(compression)?;
        Ok(Self { out, compressor })
    }

    /// Sends the lane's init packet, unless it was sent on connecting.
    pub(crate) fn init(&mut self, index: usize, uuid: [u8; 16], introduced: bool) -> Result<()> {
        let bytes = init(index, uuid);
        if !introduced {
            self.out.sender.send_plain(&bytes)?;
        }
        self.out.statistics.count_lane(bytes.len());
        Ok(())
    }

    /// Names a page to send with content. The caller sends when [`Self::is_full`], and before it changes the
    /// block.
    pub(crate) fn page(&mut self, block: BlockIndex, offset: u64) {
        self.out.packet.block = Some(block);
        self.out.packet.normal.push(offset);
    }

    /// Names a page to go as zero.
    pub(crate) fn zero(&mut self, block: BlockIndex, offset: u64) {
        self.out.packet.block = Some(block);
        self.out.packet.zero.push(offset);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.out.packet.normal.len() + self.out.packet.zero.len() == PACKET_PAGES
    }

    /// Sends the named pages, if any, with their contents from the guest's memory. Returns the bytes of the
    /// contents.
    pub(crate) fn send(&mut self, guest: &dyn Guest) -> Result<u64> {
        let packet = &self.out.packet;
        let Some(block) = packet.block else { return Ok(0) };
        let runs: Vec<_> = runs_of(block, &packet.normal).collect();
        match &mut self.compressor {
            Some(compressor) if !runs.is_empty() => {
                let contents = compressor.compress_memory(guest, &runs)?;
                self.out.send(&[IoBuf::from(contents)], guest.blocks())
            }
            _ => {
                let contents = runs.iter().map(|&(page, length)| guest.memory(page, length));
                self.out.send(&contents.collect::<Vec<_>>(), guest.blocks())
            }
        }
    }

    /// Sends these pages, at least one, whose contents lie in `contents` in the same order.
    pub(crate) fn forward(
        &mut self,
        block: BlockIndex,
        offsets: &[u64],
        contents: &[&[u8]],
        blocks: &[RamBlock],
    ) -> Result<()> {
        self.out.packet.block = Some(block);
        self.out.packet.normal.extend_from_slice(offsets);
        match &mut self.compressor {
            Some(compressor) => {
                let contents = compressor.compress(contents)?;
                self.out.send(&[IoBuf::from(contents)], blocks)?;
            }
            None => {
                let contents = contents.iter().map(|&slice| IoBuf::from(slice));
                self.out.send(&contents.collect::<Vec<_>>(), blocks)?;
            }
        }
        Ok(())
    }

    /// Sends these pages, at least one, whose contents come next on `from`. Returns the number of calls;
    /// `None` where their contents must be received into memory first.
    pub(crate) fn splice(
        &mut self,
        from: &dyn Channel,
        block: BlockIndex,
        offsets: &[u64],
        blocks: &[RamBlock],
    ) -> Option<Result<u64>> {
        if self.compressor.is_some() {
            return None;
        }
        match self.out.sender.splices_from(from, offsets.len() * PAGE_SIZE as usize) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => return Some(Err(error)),
        }
        self.out.packet.block = Some(block);
        self.out.packet.normal.extend_from_slice(offsets);
        Some(self.out.splice(from, blocks))
    }

    /// Sends these pages as zero.
    pub(crate) fn forward_zero(
        &mut self,
        block: BlockIndex,
        offsets: &[u64],
        blocks: &[RamBlock],
    ) -> Result<()> {
        self.out.packet.block = Some(block);
        self.out.packet.zero.extend_from_slice(offsets);
        self.out.send(&[], blocks)?;
        Ok(())
    }

    /// Ends this lane's part of a pass.
    pub(crate) fn sync(&mut self, blocks: &[RamBlock]) -> Result<()> {
        self.out.packet.sync = true;
        self.out.send(&[], blocks)?;
        Ok(())
    }

    /// Waits until the kernel reads none of the memory that was sent.
    pub(crate) fn flush(&self) -> Result<()> {
        self.out.sender.flush()
    }
}

/// A lane's first bytes.
pub(super) fn init(index: usize, uuid: [u8; 16]) -> [u8; INIT_BYTES] {
    let id = u8::try_from(index).expect("bounded by LANES_MAX");
    Init { uuid, id }.encode()
}

impl PacketWriter {
    /// Sends the packet; returns the length of its contents in bytes.
    fn send(&mut self, contents: &[IoBuf<'_>], blocks: &[RamBlock]) -> Result<u64> {
        let data_bytes = total_len(contents) as u64;
        self.encode(data_bytes, blocks);
        self.sender.send(&self.header[..], contents)?;
        let normal = self.packet.normal.len() as u64;
        if normal > 0 {
            self.statistics.count_content_pages(normal, data_bytes);
        }
        self.sent(data_bytes);
        Ok(data_bytes)
    }

    /// Sends the packet, whose contents come next on `from`; returns the number of calls.
    fn splice(&mut self, from: &dyn Channel, blocks: &[RamBlock]) -> Result<u64> {
        let normal = self.packet.normal.len() as u64;
        let data_bytes = normal * PAGE_SIZE;
        self.encode(data_bytes, blocks);
        let calls = self.sender.splice(&self.header[..], from, data_bytes as usize)?;
        self.statistics.count_spliced(normal, data_bytes, calls);
        self.sent(data_bytes);
        Ok(calls)
    }

    fn encode(&mut self, data_bytes: u64, blocks: &[RamBlock]) {
        let packet = &mut self.packet;
        packet.data_bytes = u32::try_from(data_bytes).expect("bounded by PACKET_COMPRESSED_BYTES_MAX");
        // QEMU expects the method in packets with any pages, zero ones too.
        packet.method = if packet.block.is_some() { self.method } else { Method::None };
        packet.packet_num = self.packets.fetch_add(1, Ordering::Relaxed);
        packet.pages_alloc = if packet.sync { 0 } else { PACKET_PAGES as u32 };
        packet.encode(blocks, &mut self.header);
    }

    fn sent(&mut self, data_bytes: u64) {
        let packet = &mut self.packet;
        Statistics::add(&self.statistics.duplicate, packet.zero.len() as u64);
        self.statistics.count_lane(HEADER_BYTES);
        Statistics::add(&self.statistics.multifd_bytes, data_bytes);
        packet.normal.clear();
        packet.zero.clear();
        (packet.block, packet.sync) = (None, false);
    }
}

/// Send method of the lanes.
#[derive(Debug, Clone, Copy, Default)]
pub struct LaneOptions {
    /// See [`Options::compression`](super::Options::compression).
    pub compression: Compression,
    /// See [`Options::zero_copy_send`](super::Options::zero_copy_send).
    pub zero_copy_send: ZeroCopySend,
}
