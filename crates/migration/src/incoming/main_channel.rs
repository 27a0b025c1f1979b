//! The main channel's thread: sections, records, barriers, device state, and the messages to the source.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{Channel, ChannelExt, Error as ChannelError, IoBufMut, RecvFlags};
use towline_protocol::colo::FirstCopy;
use towline_protocol::destination::{
    Barriers, Complete, ITEM_BYTES_MAX, SectionKind, StreamDecoder, StreamItem,
};
use towline_protocol::device_state::{Collector, DeviceState};
use towline_protocol::ram::{CONTINUED_RECORD_BYTES, PAGE_SIZE};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::VmCommand;
use towline_protocol::session::{self, FromDestination, FromSource};
use towline_protocol::{BlockIndex, PageRef, PeerIncompatible, RamBlock, Reader, xbzrle};

use super::connect::{Connections, EXTRA_TIMEOUT};
use super::records_ahead::{LOOK_MAX, RecordsAhead};
use super::shared::{IncomingStage, Publication, Shared, ended};
use crate::buffer::AlignedBuffer;
use crate::guest::ReturnPathWriter;
use crate::heartbeat::Heartbeat;
use crate::statistics::Statistics;
use crate::{ChannelId, Error, Pages, Result, Sink};

/// Bytes received ahead. Pages in it are forwarded from there.
const BUFFER_BYTES: usize = 1 << 20;
/// Bytes received at once where runs of pages are searched for: pages received this way are not part of a
/// run.
const BETWEEN_RUNS_BYTES: usize = 32 << 10;
/// Maximum number of pages delivered to a sink at once, so a sink can write each batch with one vectored call
/// (two buffers a page).
const BATCH_PAGES_MAX: usize = 256;
const PAGE: usize = PAGE_SIZE as usize;
const RECORD_AND_PAGE_BYTES: u64 = CONTINUED_RECORD_BYTES as u64 + PAGE_SIZE;

const _: () = assert!(BUFFER_BYTES > ITEM_BYTES_MAX + PAGE);

/// The receiving side of a main channel.
pub(super) struct MainChannel<'a> {
    connections: &'a Connections,
    shared: &'a Shared<'a>,
    input: InputBuffer<'a>,
    batch: PageBatch,
    /// State of the search for runs of pages; see [`Self::receive_run`].
    ahead: Option<RecordsAhead>,
    /// A run of pages for a sink without memory for them.
    run: Option<AlignedBuffer>,
    /// The last item was a page with content.
    is_behind_page: bool,
    return_path: Option<ReturnPathWriter>,
    /// For a towline at the source.
    heartbeat: Option<Heartbeat>,
    /// True while memory arrives, to which the bandwidth limit applies.
    is_iterating: bool,
    /// The announced RAM in bytes.
    total: u64,
    barriers: Barriers,
}

/// Data received and not yet consumed: `bytes[start..end]`.
struct InputBuffer<'a> {
    channel: &'a Arc<dyn Channel>,
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// Pages of one block and kind, to be delivered together.
#[derive(Default)]
struct PageBatch {
    block: Option<BlockIndex>,
    zero: bool,
    offsets: Vec<u64>,
    /// Where each page's content begins in the input, unless they are zero.
    contents: Vec<usize>,
}

impl<'a> MainChannel<'a> {
    pub(super) fn new(connections: &'a Connections, shared: &'a Shared<'a>) -> Self {
        Self {
            connections,
            shared,
            input: InputBuffer { channel: &connections.main, bytes: vec![0; BUFFER_BYTES], start: 0, end: 0 },
            batch: PageBatch::default(),
            ahead: takes_runs(connections.main.as_ref(), shared.sink).then(RecordsAhead::new),
            run: None,
            is_behind_page: false,
            return_path: None,
            heartbeat: None,
            is_iterating: false,
            total: 0,
            barriers: Barriers::default(),
        }
    }

    /// Receives the stream to its end.
    pub(super) fn receive(&mut self, begin: StreamDecoder) -> Result<(Complete, DeviceState)> {
        let memory = self.sections(begin)?;
        Ok((memory, self.device_state()?))
    }

    /// The lanes have ended as well: commits the guest and acknowledges it to the source.
    pub(super) fn deliver(&mut self, memory: Complete, state: DeviceState) -> Result<FirstCopy> {
        self.shared.session.check()?;
        let copy = FirstCopy::new(memory, &state);
        // A connection that was still on its way at the stream's beginning is here by now.
        self.connections.refuse_extra(Duration::ZERO)?;
        let run_state = state.run_state().map(str::to_owned);
        self.shared.sink.device_state(state)?;
        self.shared.sink.commit()?;
        (self.shared.watch)(IncomingStage::Committed);
        self.shared.session.acknowledge(run_state.as_deref(), self.input.channel.as_ref())?;
        if self.shared.options.publication == Publication::BeforeAcknowledgement {
            self.shared.sink.publish()?;
        }
        self.heartbeat = None;
        if let Some(writer) = &self.return_path {
            writer.send(&ReturnPathMessage::Shut(0))?;
        }
        Ok(copy)
    }

    /// Acknowledges the source without an acknowledgement of the destination, which may run the guest: the
    /// source stops for good.
    pub(super) fn acknowledge_regardless(&self) {
        if let Some(writer) = &self.return_path
            && let Err(error) = writer.send(&ReturnPathMessage::Shut(0))
        {
            tracing::debug!(%error, "the source is not acknowledged");
        }
    }

    /// Takes everything up to the device state; returns the memory's last state.
    fn sections(&mut self, begin: StreamDecoder) -> Result<Complete> {
        let mut state = begin;
        loop {
            if let StreamDecoder::DeviceState(memory) = state {
                return Ok(memory);
            }
            let mut reader = Reader::new(&self.input.bytes[self.input.start..self.input.end]);
            let peer = self.input.channel.peer();
            let (next, event) = state.handle(&mut reader).map_err(Error::protocol(peer))?;
            state = next;
            self.input.start += reader.position();
            let Some(event) = event else {
                self.deliver_batch()?;
                state = self.receive_run_or_more(state)?;
                continue;
            };
            self.is_behind_page = matches!(event, StreamItem::Page(_));
            match event {
                StreamItem::Page(page) => self.batch_received_page(page)?,
                StreamItem::ZeroPage(page) => self.batch(page, None)?,
                event => {
                    self.deliver_batch()?;
                    self.apply(&event, &state)?;
                }
            }
        }
    }

    fn apply(&mut self, event: &StreamItem, state: &StreamDecoder) -> Result<()> {
        let sink = self.shared.sink;
        match event {
            StreamItem::Configuration(configuration) => {
                self.shared.machine_type.get_or_init(|| configuration.machine_type.clone());
                sink.configuration(configuration)
            }
            StreamItem::Command(command) => self.command(command),
            StreamItem::Total(total) => {
                self.total = *total;
                self.shared.statistics.set_total(*total);
                if *total == 0 { self.blocks(&[]) } else { Ok(()) }
            }
            StreamItem::Block(_)
                if state.blocks().iter().map(|block| block.length).sum::<u64>() == self.total =>
            {
                self.blocks(state.blocks())
            }
            StreamItem::SectionStart(section) => {
                if self.shared.options.require_return_path && self.return_path.is_none() {
                    let error = PeerIncompatible::NoReturnPath;
                    return Err(Error::protocol(self.input.channel.peer())(error.into()));
                }
                match section.kind {
                    SectionKind::Start => {}
                    SectionKind::Part => self.is_iterating = true,
                    SectionKind::End => {
                        // As QEMU does: the guest is stopped.
                        self.shared.limiter.lift();
                        (self.shared.watch)(IncomingStage::Switchover);
                    }
                }
                sink.section_start(*section)
            }
            StreamItem::Flush => {
                if self.barriers.on_flush_record() {
                    Statistics::add(&self.shared.statistics.dirty_sync_count, 1);
                }
                self.lead()
            }
            StreamItem::SectionEnd(section) => self.section_end(section.kind),
            StreamItem::Xbzrle { page, data } => self.xbzrle(*page, data),
            // An entry of the list before the last one, or an event that `sections` has handled.
            StreamItem::Block(_)
            | StreamItem::Page(_)
            | StreamItem::ZeroPage(_)
            | StreamItem::DeviceState => Ok(()),
        }
    }

    /// The list is complete. Lanes know it, and so may name pages, only when the sink has taken it.
    fn blocks(&mut self, blocks: &[RamBlock]) -> Result<()> {
        self.shared.sink.blocks(blocks)?;
        self.shared.blocks.get_or_init(|| blocks.to_vec());
        Ok(())
    }

    fn section_end(&mut self, kind: SectionKind) -> Result<()> {
        if kind == SectionKind::Start {
            self.connections.refuse_extra(EXTRA_TIMEOUT)?;
        }
        if !self.connections.lanes.is_empty() && self.barriers.on_section_end() {
            self.lead()?;
        }
        self.shared.sink.section_end(kind)
    }

    fn lead(&mut self) -> Result<()> {
        self.shared.session.lead(self.connections.lanes.len(), || self.shared.sink.barrier())
    }

    fn command(&mut self, command: &VmCommand) -> Result<()> {
        match command {
            VmCommand::OpenReturnPath => {
                let writer = ReturnPathWriter::new(Arc::clone(self.input.channel));
                self.shared.sink.return_path(writer.clone());
                self.return_path = Some(writer);
                Ok(())
            }
            VmCommand::Ping(value) => {
                let Some(writer) = &self.return_path else { return Ok(()) };
                let version = session::ping_version(*value);
                // The source waits for the PONG, which is the last.
                if version.is_some_and(session::knows_bases) {
                    for id in self.shared.sink.bases() {
                        writer.send(&FromDestination::Base(id).to_message())?;
                    }
                }
                let answer =
                    version.map_or(*value, |version| session::pong(version, self.shared.options.receiver));
                writer.send(&ReturnPathMessage::Pong(answer))
            }
            VmCommand::Other { .. } => {
                if let Some(FromSource::Hello(id)) = FromSource::of(command) {
                    self.shared.session.gate().source_reports(id);
                    if let Some(writer) = self.return_path.clone() {
                        let beat = move || writer.send(&FromDestination::Alive.to_message());
                        self.heartbeat = Some(Heartbeat::start(beat).map_err(ChannelError::NoThread)?);
                    }
                }
                Ok(())
            }
            VmCommand::SwitchoverStart => Ok(()),
        }
    }

    fn batch_received_page(&mut self, page: PageRef) -> Result<()> {
        if self.input.end - self.input.start < PAGE {
            self.deliver_batch()?;
            while self.input.end - self.input.start < PAGE {
                let missing = PAGE - (self.input.end - self.input.start);
                // A run that will be spliced begins after the page.
                let most = if self.ahead.is_some() { missing } else { BUFFER_BYTES };
                self.receive_more("the rest of a page", most)?;
            }
        }
        self.batch(page, Some(self.input.start))?;
        self.input.start += PAGE;
        Ok(())
    }

    /// Puts a page into the batch; the batch is delivered first if the page does not belong to it.
    fn batch(&mut self, page: PageRef, content: Option<usize>) -> Result<()> {
        let fits = self.batch.block == Some(page.block) && self.batch.zero == content.is_none();
        if !fits || self.batch.offsets.len() == BATCH_PAGES_MAX {
            self.deliver_batch()?;
            (self.batch.block, self.batch.zero) = (Some(page.block), content.is_none());
        }
        self.batch.offsets.push(page.offset);
        self.batch.contents.extend(content);
        Ok(())
    }

    fn deliver_batch(&mut self) -> Result<()> {
        let (Some(block), offsets) = (self.batch.block.take(), &self.batch.offsets) else { return Ok(()) };
        let pages = offsets.len() as u64;
        if self.batch.zero {
            Statistics::add(&self.shared.statistics.duplicate, pages);
            self.shared.sink.zero(ChannelId::Main, block, offsets)?;
        } else {
            let bytes = &self.input.bytes;
            let contents: Vec<&[u8]> =
                self.batch.contents.iter().map(|&start| &bytes[start..start + PAGE]).collect();
            Statistics::add(&self.shared.statistics.normal, pages);
            Statistics::add(&self.shared.statistics.normal_bytes, pages * PAGE_SIZE);
            self.shared.sink.pages(ChannelId::Main, &Pages { block, offsets, contents: &contents })?;
        }
        self.batch.offsets.clear();
        self.batch.contents.clear();
        Ok(())
    }

    fn xbzrle(&mut self, page: PageRef, data: &[u8]) -> Result<()> {
        let mut content = [0; PAGE];
        self.shared.sink.current(page, &mut content)?;
        xbzrle::decode(data, &mut content).map_err(Error::protocol(self.input.channel.peer()))?;
        Statistics::add(&self.shared.statistics.normal, 1);
        Statistics::add(&self.shared.statistics.normal_bytes, PAGE_SIZE);
        let (offsets, contents) = ([page.offset], [&content[..]]);
        self.shared
            .sink
            .pages(ChannelId::Main, &Pages { block: page.block, offsets: &offsets, contents: &contents })
    }

    /// Takes the next run of pages, where runs are searched for; otherwise receives into the buffer.
    fn receive_run_or_more(&mut self, mut state: StreamDecoder) -> Result<StreamDecoder> {
        let most = if self.ahead.is_some() { BETWEEN_RUNS_BYTES } else { BUFFER_BYTES };
        if let Some(mut ahead) = self.ahead.take_if(|_| self.is_behind_page && self.input.is_empty()) {
            let run = self.next_run(&mut state, &mut ahead)?;
            self.ahead = Some(ahead);
            if let Some((block, offsets)) = run {
                let splices = self.shared.sink.splices_records(self.input.channel.as_ref());
                if !(splices && self.splice_run(block, &offsets)?) {
                    self.receive_run(block, &offsets)?;
                }
                return Ok(state);
            }
        }
        self.receive_more(state.awaits(), most)?;
        Ok(state)
    }

    /// The pages that come next on the channel, if any; `state` becomes the one after their records, which
    /// are not yet received.
    fn next_run(
        &self,
        state: &mut StreamDecoder,
        ahead: &mut RecordsAhead,
    ) -> Result<Option<(BlockIndex, Vec<u64>)>> {
        let (mut block, mut offsets) = (None, Vec::new());
        for record in ahead.peek(self.input.channel.as_ref())? {
            let (next, item) = mem::take(state)
                .handle(&mut Reader::new(record))
                .map_err(Error::protocol(self.input.channel.peer()))?;
            *state = next;
            let Some(StreamItem::Page(page)) = item else { break };
            block = Some(page.block);
            offsets.push(page.offset);
        }
        Ok(block.map(|block| (block, offsets)))
    }

    /// Returns false if the sink does not splice these pages.
    fn splice_run(&self, block: BlockIndex, offsets: &[u64]) -> Result<bool> {
        let bytes = offsets.len() as u64 * RECORD_AND_PAGE_BYTES;
        self.shared.reserve(bytes)?;
        let spliced = self.shared.sink.splice_records(self.input.channel.as_ref(), block, offsets);
        let Some(calls) = spliced.transpose()? else {
            self.shared.limiter.refund(bytes);
            return Ok(false);
        };
        self.shared.statistics.count_spliced(offsets.len() as u64, bytes, calls);
        Ok(true)
    }

    /// Receives these pages, and their records again, by one call: into the sink's memory, or else into whole
    /// pages of a buffer, which a file takes as they are.
    fn receive_run(&mut self, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        let (sink, channel) = (self.shared.sink, self.input.channel.as_ref());
        self.shared.reserve(offsets.len() as u64 * RECORD_AND_PAGE_BYTES)?;
        let mut records = vec![[0; CONTINUED_RECORD_BYTES]; offsets.len()];
        let pages = offsets.len() as u64;
        let room = |&offset: &u64| sink.buffer_for(PageRef { block, offset }, PAGE_SIZE);
        let rooms: Option<Vec<_>> = offsets.iter().map(room).collect();
        if let Some(rooms) = rooms {
            receive_between(channel, &mut records, rooms)?;
            self.shared.statistics.count_content_pages(pages, pages * RECORD_AND_PAGE_BYTES);
            return sink.pages_received_in_place(ChannelId::Main, block, offsets);
        }
        let buffer = match &mut self.run {
            Some(buffer) => buffer,
            none => none.insert(AlignedBuffer::new(LOOK_MAX * PAGE)?),
        };
        let length = offsets.len() * PAGE;
        let rooms = buffer.bytes_mut(length).chunks_exact_mut(PAGE).map(IoBufMut::from).collect();
        receive_between(channel, &mut records, rooms)?;
        self.shared.statistics.count_content_pages(pages, pages * RECORD_AND_PAGE_BYTES);
        sink.pages(ChannelId::Main, &Pages { block, offsets, contents: &[buffer.bytes(length)] })
    }

    fn receive_more(&mut self, awaiting: &'static str, most: usize) -> Result<()> {
        let received = self.input.receive(most)?;
        if self.is_iterating {
            self.shared.reserve(received as u64)?;
        }
        if received == 0 {
            return Err(ended(self.input.channel.as_ref(), awaiting));
        }
        Statistics::add(&self.shared.statistics.transferred, received as u64);
        Ok(())
    }

    /// Collects the device state, up to the end of the stream.
    fn device_state(&mut self) -> Result<DeviceState> {
        let mut collector = Collector::default();
        loop {
            let failed = Error::protocol(self.input.channel.peer());
            collector.push(&self.input.bytes[self.input.start..self.input.end]).map_err(&failed)?;
            self.input.start = self.input.end;
            if let Some(state) = collector.complete().map_err(failed)? {
                return Ok(state);
            }
            self.receive_more(
                "the device state's end (its description; suppress-vmdesc must be off at the source)",
                BUFFER_BYTES,
            )?;
        }
    }
}

/// Receives records and the page after each.
fn receive_between(
    channel: &dyn Channel,
    records: &mut [[u8; CONTINUED_RECORD_BYTES]],
    rooms: Vec<IoBufMut<'_>>,
) -> Result<()> {
    let records = records.iter_mut().map(|record| IoBufMut::from(&mut record[..]));
    let mut buffers: Vec<_> = records.zip(rooms).flat_map(|(record, room)| [record, room]).collect();
    Ok(channel.recv_exact(&mut buffers)?)
}

/// Returns true if runs of pages are searched for. On a channel that wraps another, looking ahead would copy
/// once more.
fn takes_runs(main: &dyn Channel, sink: &dyn Sink) -> bool {
    sink.splices_records(main) || main.splice_fd().is_some()
}

impl InputBuffer<'_> {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Receives more, at most `most` bytes; 0 at the stream's end. Moves what is left, always less than an
    /// item, to the front first.
    fn receive(&mut self, most: usize) -> Result<usize> {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let most = most.min(self.bytes.len() - self.end);
        let room = &mut self.bytes[self.end..][..most];
        // Bytes past those received are never read.
        let received = self.channel.recv(&mut [IoBufMut::from(room)], RecvFlags::UNAUTHENTICATED)?;
        self.end += received;
        Ok(received)
    }
}
