//! Writing the main channel: the protocol's states, and what they append, sent with pages in vectored calls.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags};
use towline_protocol::configuration::Configuration;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::{AwaitShut, End, Iterating, Part, RamOptions, RamWriter, Setup};
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::classify;
use crate::statistics::Statistics;
use crate::{Error, Guest, Result};

/// Bytes of records that are gathered before they are sent.
const PENDING_BYTES_MAX: usize = 64 << 10;
/// Pages of one vectored call: two buffers each, within the kernel's 1024.
const CALL_PAGES_MAX: usize = 256;
/// How long a command that took the whole stream may take to end.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);

/// The sending side of a main channel.
#[derive(Debug)]
pub(crate) struct MainWriter {
    channel: Arc<dyn Channel>,
    statistics: Arc<Statistics>,
    state: State,
    /// Written and not yet sent.
    pending: Vec<u8>,
}

/// The protocol's state; each step takes it out and puts the next one in.
#[derive(Debug)]
enum State {
    Start,
    Setup(Setup),
    Iterating(Iterating),
    Part(Part),
    End(End),
    AwaitShut(AwaitShut),
}

impl MainWriter {
    pub(crate) fn new(channel: Arc<dyn Channel>, statistics: Arc<Statistics>) -> Self {
        Self { channel, statistics, state: State::Start, pending: Vec::new() }
    }

    /// Sends header and configuration, and opens the return path if asked to.
    pub(crate) fn begin(
        &mut self,
        configuration: &Configuration,
        return_path: bool,
        lanes: usize,
    ) -> Result<()> {
        let out = &mut self.pending;
        self.state = State::Setup(match return_path && lanes > 0 {
            true => Setup::begin_with_lanes(configuration, out),
            false => Setup::begin(configuration, return_path, out),
        });
        self.flush()
    }

    /// Sends START.
    pub(crate) fn blocks(&mut self, options: RamOptions, blocks: &[RamBlock]) -> Result<()> {
        let blocks: Vec<_> = blocks.iter().map(|block| RamBlock { mapped: None, ..block.clone() }).collect();
        self.step(|state, out| match state {
            State::Setup(setup) => State::Iterating(setup.blocks(options, &blocks, out)),
            state => state,
        });
        self.flush()
    }

    /// Opens a PART.
    pub(crate) fn open_part(&mut self) {
        self.step(|state, out| match state {
            State::Iterating(iterating) => State::Part(iterating.part(out)),
            state => state,
        });
    }

    /// Opens END; the guest is stopped.
    pub(crate) fn open_end(&mut self) {
        self.step(|state, out| match state {
            State::Iterating(iterating) => State::End(iterating.end(out)),
            state => state,
        });
    }

    /// Closes the open section and sends what is pending.
    pub(crate) fn close_section(&mut self) -> Result<()> {
        self.step(|state, out| match state {
            State::Part(part) => State::Iterating(part.close(out)),
            State::End(end) => State::AwaitShut(end.close(out)),
            state => state,
        });
        self.flush()
    }

    /// Every lane has sent SYNC: makes the destination wait for them.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.records(|records, out| records.barrier(out))?;
        self.flush()
    }

    /// Sends pages as zero.
    pub(crate) fn zero(&mut self, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.records(|records, out| {
            for &offset in offsets {
                records.zero(PageRef { block, offset }, out);
            }
        })?;
        Statistics::add(&self.statistics.duplicate, offsets.len() as u64);
        self.flush_if(PENDING_BYTES_MAX)
    }

    /// Sends a unit of a guest's memory; returns the bytes of pages that went with content.
    pub(crate) fn unit(&mut self, guest: &dyn Guest, page: PageRef, length: u64) -> Result<u64> {
        let (mut marks, mut sent, mut zeros) = (Vec::with_capacity(CALL_PAGES_MAX), 0, 0);
        for (offset, is_zero) in classify(guest, page, length) {
            let page = PageRef { offset, ..page };
            if is_zero {
                // Its record goes between those of the pages, in the same call.
                self.records(|records, out| records.zero(page, out))?;
                zeros += 1;
                continue;
            }
            self.records(|records, out| records.page(page, out))?;
            marks.push((self.pending.len(), guest.memory(page, PAGE_SIZE)));
            sent += PAGE_SIZE;
            if marks.len() == CALL_PAGES_MAX {
                self.send_marked(&mut marks)?;
            }
        }
        Statistics::add(&self.statistics.duplicate, zeros);
        self.send_marked(&mut marks)?;
        self.flush_if(PENDING_BYTES_MAX)?;
        Ok(sent)
    }

    /// Sends pages, each with its content, which is one page long.
    pub(crate) fn pages(&mut self, block: BlockIndex, offsets: &[u64], contents: &[IoBuf<'_>]) -> Result<()> {
        let mut marks = Vec::with_capacity(offsets.len().min(CALL_PAGES_MAX));
        for (&offset, &content) in offsets.iter().zip(contents) {
            self.records(|records, out| records.page(PageRef { block, offset }, out))?;
            marks.push((self.pending.len(), content));
            if marks.len() == CALL_PAGES_MAX {
                self.send_marked(&mut marks)?;
            }
        }
        self.send_marked(&mut marks)
    }

    /// Sends what is pending, and behind each mark its page.
    fn send_marked(&mut self, marks: &mut Vec<(usize, IoBuf<'_>)>) -> Result<()> {
        if marks.is_empty() {
            return Ok(());
        }
        let mut buffers = Vec::with_capacity(2 * marks.len() + 1);
        let mut start = 0;
        for &(end, content) in marks.iter() {
            buffers.extend([IoBuf::from(&self.pending[start..end]), content]);
            start = end;
        }
        if start < self.pending.len() {
            buffers.push(IoBuf::from(&self.pending[start..]));
        }
        self.channel.send_all(&buffers, SendFlags::empty())?;
        let (pages, bytes) = (marks.len() as u64, self.pending.len() as u64);
        self.statistics.count_pages(pages, bytes + pages * PAGE_SIZE, buffers.len());
        self.pending.clear();
        marks.clear();
        Ok(())
    }

    /// Closes END and sends the device state: the stream is complete.
    pub(crate) fn finish(&mut self, device_state: &[u8]) -> Result<()> {
        self.close_section()?;
        self.channel.send_all(&[IoBuf::from(device_state)], SendFlags::empty())?;
        Statistics::add(&self.statistics.transferred, device_state.len() as u64);
        Ok(())
    }

    /// Ends a stream that nobody acknowledges: says that nothing follows, and waits for a command that takes it.
    pub(crate) fn end_stream(&mut self) -> Result<()> {
        if let Err(error) = self.channel.shutdown(Shutdown::Write) {
            tracing::debug!(%error, "shutdown");
        }
        Ok(self.channel.finish(Instant::now() + FINISH_TIMEOUT)?)
    }

    /// True until the first PART or END.
    pub(crate) fn is_setting_up(&self) -> bool {
        matches!(self.state, State::Start | State::Setup(_) | State::Iterating(_))
    }

    /// Sends what is pending.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.flush_if(1)
    }

    fn flush_if(&mut self, bytes: usize) -> Result<()> {
        if self.pending.len() >= bytes {
            self.channel.send_all(&[IoBuf::from(&self.pending[..])], SendFlags::empty())?;
            Statistics::add(&self.statistics.transferred, self.pending.len() as u64);
            self.pending.clear();
        }
        Ok(())
    }

    fn step(&mut self, next: impl FnOnce(State, &mut Vec<u8>) -> State) {
        let state = std::mem::replace(&mut self.state, State::Start);
        self.state = next(state, &mut self.pending);
    }

    fn records(&mut self, write: impl FnOnce(&mut RamWriter, &mut Vec<u8>)) -> Result<()> {
        match &mut self.state {
            State::Part(part) => write(part.records(), &mut self.pending),
            State::End(end) => write(end.records(), &mut self.pending),
            _ => return Err(Error::guest(OutsideSection)),
        }
        Ok(())
    }
}

/// A relay's source decides where its pages come.
#[derive(Debug, thiserror::Error)]
#[error(
    "the source sends pages before the first PART section, which no QEMU does and a relay cannot pass on"
)]
struct OutsideSection;
