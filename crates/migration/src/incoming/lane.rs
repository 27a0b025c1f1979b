//! One lane's thread: packets come in, pages go to the sink, SYNC waits for the barrier.
//!
//! A lane is not shut down at the stream's end: a QEMU before 9.0 may still have an empty packet to send
//! after its last SYNC, and a source whose lane breaks then reports a failure.

use std::time::Instant;

use towline_channel::{Channel, ChannelExt, Error as ChannelError, IoBufMut};
use towline_protocol::multifd::{HEADER_BYTES, Method, Packet};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PeerMisbehaved};
use towline_protocol::{limits, machine};

use super::refuse::{REFUSE_TIMEOUT, drain};
use super::shared::{Shared, ended};
use crate::buffer::Buffers;
use crate::compression::Decompressor;
use crate::guest::runs_of;
use crate::session::Released;
use crate::statistics::Statistics;
use crate::{ChannelId, Error, Pages, Result};

/// Runs lane `index` until its connection ends or the migration does.
pub(super) fn run(index: usize, channel: &dyn Channel, shared: &Shared<'_>) {
    let _guard = shared.session.guard();
    match Lane::new(index, channel, shared).and_then(|mut lane| lane.run()) {
        Ok(()) => shared.session.leave(index),
        Err(error) => {
            shared.session.fail(Error::lane(index)(error));
            drain(channel, Instant::now() + REFUSE_TIMEOUT);
            shared.session.leave(index);
        }
    }
}

struct Lane<'a> {
    index: usize,
    channel: &'a dyn Channel,
    shared: &'a Shared<'a>,
    buffers: Buffers,
    decompressor: Option<Decompressor>,
    /// Pages came since the last barrier.
    outstanding: bool,
}

impl<'a> Lane<'a> {
    fn new(index: usize, channel: &'a dyn Channel, shared: &'a Shared<'a>) -> Result<Self> {
        let buffers = Buffers::new(limits::PACKET_DATA_BYTES_MAX, shared.lanes)?;
        let decompressor = Decompressor::new(shared.options.compression)?;
        Ok(Self { index, channel, shared, buffers, decompressor, outstanding: false })
    }

    fn run(&mut self) -> Result<()> {
        let mut header = [0; HEADER_BYTES];
        loop {
            self.shared.session.check()?;
            if !self.channel.wait_recv(&self.shared.complete)? {
                return if self.outstanding { Err(Error::BehindBarrier) } else { Ok(()) };
            }
            match self.channel.recv_exact(&mut [IoBufMut::from(&mut header[..])]) {
                Ok(()) => {}
                Err(ChannelError::Closed { got: 0, .. }) if !self.outstanding => return Ok(()),
                Err(ChannelError::Cut { .. }) if !self.outstanding && self.may_be_cut() => return Ok(()),
                Err(ChannelError::Closed { .. }) if self.shared.session.is_closed() => {
                    return Err(Error::BehindBarrier);
                }
                Err(ChannelError::Closed { .. }) => return Err(ended(self.channel, "a lane's next packet")),
                Err(error) => return Err(error.into()),
            }
            let packet = Packet::decode(&header, self.shared.blocks());
            let packet = packet.map_err(Error::protocol(self.channel.peer()))?;
            if self.process_packet(&packet)? == Released::Closed {
                return Ok(());
            }
        }
    }

    /// Returns true if the source ends its lanes without close_notify. The next barrier detects what is
    /// missing.
    fn may_be_cut(&self) -> bool {
        self.shared.machine_type.get().is_some_and(|name| !machine::has_clean_tls_termination(name))
    }

    fn process_packet(&mut self, packet: &Packet) -> Result<Released> {
        let statistics = self.shared.statistics;
        statistics.count_lane(HEADER_BYTES);
        Statistics::add(&statistics.multifd_bytes, packet.data_bytes.into());
        self.check_method(packet)?;
        self.shared.reserve(HEADER_BYTES as u64 + u64::from(packet.data_bytes))?;
        if let Some(block) = packet.block {
            self.outstanding = true;
            self.contents(block, packet)?;
            if !packet.zero.is_empty() {
                Statistics::add(&statistics.duplicate, packet.zero.len() as u64);
                self.shared.sink.zero(ChannelId::Lane(self.index), block, &packet.zero)?;
            }
        }
        if packet.sync {
            let released = self.shared.session.arrive()?;
            self.outstanding = false;
            return Ok(released);
        }
        Ok(Released::GoOn)
    }

    /// A packet without pages need not have a method: SYNC packets have none.
    fn check_method(&self, packet: &Packet) -> Result<()> {
        let (found, expected) = (packet.method, self.shared.options.compression.method());
        if found == expected || (packet.block.is_none() && found == Method::None) {
            return Ok(());
        }
        let error = PeerMisbehaved::Compression { found: found.name(), expected: expected.name() };
        Err(Error::protocol(self.channel.peer())(error.into()))
    }

    /// Receives the contents of a packet's pages: into the sink's own memory where it has any, else into the
    /// buffer.
    fn contents(&mut self, block: BlockIndex, packet: &Packet) -> Result<()> {
        let offsets = &packet.normal[..];
        if offsets.is_empty() {
            return Ok(());
        }
        let (sink, stream) = (self.shared.sink, ChannelId::Lane(self.index));
        let (pages, length) = (offsets.len() as u64, offsets.len() * PAGE_SIZE as usize);
        if let Some(decompressor) = &mut self.decompressor {
            let compressed = packet.data_bytes as usize;
            self.channel.recv_exact_unauthenticated(&mut [decompressor.receive(compressed)])?;
            let decompressed = decompressor.decompress(compressed, self.buffers.current.bytes_mut(length));
            decompressed.map_err(Error::protocol(self.channel.peer()))?;
            self.shared.statistics.count_content_pages(pages, compressed as u64);
            return self.deliver(block, offsets, length);
        }
        if let Some(passed) = sink.splice_from(stream, self.channel, block, offsets) {
            self.shared.statistics.count_spliced(pages, length as u64, passed?);
            return Ok(());
        }
        let runs = runs_of(block, offsets);
        let rooms: Option<Vec<_>> = runs.map(|(page, length)| sink.buffer_for(page, length)).collect();
        if let Some(mut rooms) = rooms {
            // Memory that nothing uses before the migration has completed.
            self.channel.recv_exact_unauthenticated(&mut rooms)?;
            self.shared.statistics.count_content_pages(pages, length as u64);
            return sink.pages_received_in_place(stream, block, offsets);
        }
        self.channel.recv_exact_unauthenticated(&mut [self.buffers.current.receive(length)])?;
        self.shared.statistics.count_content_pages(pages, length as u64);
        self.deliver(block, offsets, length)
    }

    /// Delivers the current buffer's pages to the sink.
    fn deliver(&mut self, block: BlockIndex, offsets: &[u64], length: usize) -> Result<()> {
        let (sink, stream) = (self.shared.sink, ChannelId::Lane(self.index));
        let contents = [self.buffers.current.bytes(length)];
        sink.pages(stream, &Pages { block, offsets, contents: &contents })?;
        self.buffers.rotate(sink.zero_copy_ticket(stream), self.shared.session)
    }
}
