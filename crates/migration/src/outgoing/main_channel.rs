//! Writing the main channel: the protocol's states, and what they append, sent with pages in vectored calls.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Channel, IoBuf, SendFlags};
use towline_protocol::configuration::Configuration;
use towline_protocol::section::VmCommand;
use towline_protocol::session::{self, FromSource};
use towline_protocol::source::{End, Iterating, PING_LOADED, Part, RamOptions, RamWriter, Setup};
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::records::RecordSender;
use crate::statistics::Statistics;
use crate::{Error, Guest, Result};

/// Bytes of records that are gathered before they are sent.
const PENDING_BYTES_MAX: usize = 64 << 10;
/// Timeout for a command to end once it has read the whole stream.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);

/// The sending side of a main channel.
#[derive(Debug)]
pub(crate) struct MainWriter {
    writer: RecordSender,
    state: State,
}

/// The protocol's state; each step takes it out and puts the next one in.
#[derive(Debug)]
enum State {
    Start,
    Setup(Setup),
    Iterating(Iterating),
    Part(Part),
    End(End),
    Complete,
}

impl MainWriter {
    pub(crate) fn new(channel: Arc<dyn Channel>, statistics: Arc<Statistics>) -> Self {
        Self { writer: RecordSender::new(channel, statistics), state: State::Start }
    }

    /// Sends header and configuration. With a return path it opens that and sends the PING of a towline.
    pub(crate) fn begin(&mut self, configuration: &Configuration, return_path: bool) -> Result<()> {
        let out = self.writer.pending();
        self.state = State::Setup(if return_path {
            Setup::begin_with_return_path(configuration, &[session::ping()], out)
        } else {
            Setup::begin(configuration, out)
        });
        self.flush()
    }

    /// Sends START.
    pub(crate) fn write_ram_start(&mut self, options: RamOptions, blocks: &[RamBlock]) -> Result<()> {
        let blocks: Vec<_> = blocks.iter().map(|block| RamBlock { mapped: None, ..block.clone() }).collect();
        self.step(|state, out| match state {
            State::Setup(setup) => State::Iterating(setup.write_ram_start(options, &blocks, out)),
            state => state,
        });
        self.flush()
    }

    /// Opens a PART.
    pub(crate) fn open_part(&mut self) {
        self.step(|state, out| match state {
            State::Iterating(iterating) => State::Part(iterating.open_part(out)),
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
            State::End(end) => {
                end.close(out);
                State::Complete
            }
            state => state,
        });
        self.flush()
    }

    /// Every lane has sent SYNC: makes the destination wait for them.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        let (records, writer) = self.section()?;
        records.barrier(writer.pending());
        writer.flush()
    }

    /// Sends pages as zero.
    pub(crate) fn zero(&mut self, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        let (records, writer) = self.section()?;
        writer.zero(records, block, offsets);
        writer.flush_if(PENDING_BYTES_MAX)
    }

    /// Sends a unit of a guest's memory; returns the bytes of pages sent with content.
    pub(crate) fn unit(&mut self, guest: &dyn Guest, page: PageRef, length: u64) -> Result<u64> {
        let (records, writer) = self.section()?;
        let sent = writer.unit(records, guest, page, length)?;
        writer.flush_if(PENDING_BYTES_MAX)?;
        Ok(sent)
    }

    /// Sends pages, each with its content, which is one page long.
    pub(crate) fn pages(&mut self, block: BlockIndex, offsets: &[u64], contents: &[IoBuf<'_>]) -> Result<()> {
        let (records, writer) = self.section()?;
        writer.pages(records, block, offsets, contents)
    }

    /// Sends pages of `block` whose records, which continue it, come next on `from`. Returns the number of
    /// calls; `None` if the destination does not know which block they continue, or they cannot be spliced.
    pub(crate) fn splice(
        &mut self,
        from: &dyn Channel,
        block: BlockIndex,
        offsets: &[u64],
    ) -> Result<Option<u64>> {
        let (records, writer) = self.section()?;
        if records.continues(block) { writer.splice(from, offsets.len()) } else { Ok(None) }
    }

    /// Sends a frame of a session between two towlines; between two sections.
    pub(crate) fn send_session_frame(&mut self, frame: FromSource) -> Result<()> {
        frame.to_command().encode(self.writer.pending());
        self.flush()
    }

    /// Closes END and sends the devices' sections, followed by the PING whose reply shows that everything is
    /// loaded.
    pub(crate) fn devices(&mut self, sections: &[u8]) -> Result<()> {
        self.close_section()?;
        self.send(sections)?;
        VmCommand::Ping(PING_LOADED).encode(self.writer.pending());
        self.flush()
    }

    /// Closes END and sends the device state: the stream is complete.
    pub(crate) fn finish(&mut self, device_state: &[u8]) -> Result<()> {
        self.close_section()?;
        self.send(device_state)
    }

    /// Sends a part of the device state, after END: the last one follows [`Self::devices`].
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<()> {
        self.writer.send_bytes(bytes, SendFlags::empty())
    }

    /// Ends a stream without acknowledgement: sends the end, and waits for a command that reads it.
    pub(crate) fn shutdown_and_wait(&mut self) -> Result<()> {
        if let Err(error) = self.writer.channel().shutdown(Shutdown::Write) {
            tracing::debug!(%error, "shutdown");
        }
        Ok(self.writer.channel().finish(Instant::now() + FINISH_TIMEOUT)?)
    }

    /// True until the first PART or END.
    pub(crate) fn is_setting_up(&self) -> bool {
        matches!(self.state, State::Start | State::Setup(_) | State::Iterating(_))
    }

    /// Sends what is pending.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.writer.flush()
    }

    fn step(&mut self, next: impl FnOnce(State, &mut Vec<u8>) -> State) {
        let state = std::mem::replace(&mut self.state, State::Start);
        self.state = next(state, self.writer.pending());
    }

    /// The open section's records, and where they are written.
    fn section(&mut self) -> Result<(&mut RamWriter, &mut RecordSender)> {
        match &mut self.state {
            State::Part(part) => Ok((part.records(), &mut self.writer)),
            State::End(end) => Ok((end.records(), &mut self.writer)),
            _ => Err(Error::guest(OutsideSection)),
        }
    }
}

/// A relay's source decides the order of its pages.
#[derive(Debug, thiserror::Error)]
#[error(
    "the source sends pages before the first PART section, which no QEMU does and a relay cannot pass on"
)]
struct OutsideSection;
