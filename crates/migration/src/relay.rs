//! A sink that forwards: two QEMUs meet, with towline between them.
//!
//! ```text
//!   source ─► Incoming ─► Relay ─► destination       each page goes out of the buffer it was received into, if any
//!          ◄─ SHUT 0 ◄──  commit() ◄─ SHUT 0         only acknowledged after the destination did
//! ```
//!
//! Lane i goes to lane i, records to records, a barrier follows wherever the source had one, sections keep
//! their bounds, so the destination reads the source's order. Between bare sockets, pages move within the
//! kernel (`splice(2)`): those of lanes where zero-copy sends are off or do not cost less, so only headers
//! are seen here, and runs of records of the main channel, which are peeked before they are forwarded. The
//! relay holds no guest memory; a slow destination slows the source down through its socket. Both sides have
//! the same number of lanes, the same compression and the same machine type. Compressed pages are
//! decompressed and compressed again: a lane's stream depends on all its packets before, and the relay splits
//! packets with both zero pages and others.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use towline_channel::{Channel, IoBuf, Splice, ZeroCopyTicket};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::machine::BarrierForm;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::RamOptions;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::guest::{BaseId, ReturnPathWriter};
use crate::lock::lock;
use crate::outgoing::{
    Connections, Forwarding, LaneOptions, LaneWriter, MainWriter, ReturnPath, check_zero_copy, greet,
    send_device_state,
};
use crate::{ChannelId, Error, Pages, Result, Session, Sink, Statistics};

/// Timeout of the destination's reply to the head of the stream.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A sink that forwards a migration to another destination.
#[derive(Debug)]
pub struct Relay {
    session: Arc<Session>,
    main: Mutex<MainWriter>,
    lanes: Vec<Mutex<LaneWriter>>,
    connections: Connections,
    blocks: OnceLock<Vec<RamBlock>>,
    section: OnceLock<u32>,
    form: OnceLock<BarrierForm>,
    sent: OnceLock<()>,
    answers: Arc<ReturnPath>,
    statistics: Arc<Statistics>,
    pauses: bool,
}

impl Relay {
    /// A relay to a destination that is connected. `session` is that of the incoming migration.
    ///
    /// # Errors
    /// [`Error::Compressor`]: out of memory. [`Error::NoZeroCopy`]. No thread can be started.
    pub fn new(session: Arc<Session>, connections: Connections, options: LaneOptions) -> Result<Self> {
        check_zero_copy(options.zero_copy_send, options.compression, &connections.lanes)?;
        let statistics = Arc::new(Statistics::default());
        connections.watch(&session, &statistics);
        let lanes = connections.lane_writers(&statistics, options)?;
        let forwarding = Forwarding::Buffered(Vec::new());
        let answers = ReturnPath::start(Arc::clone(&connections.main), Arc::clone(&session), forwarding)?;
        Ok(Self {
            main: Mutex::new(MainWriter::new(Arc::clone(&connections.main), Arc::clone(&statistics))),
            lanes: lanes.into_iter().map(Mutex::new).collect(),
            blocks: OnceLock::new(),
            section: OnceLock::new(),
            form: OnceLock::new(),
            sent: OnceLock::new(),
            answers,
            session,
            connections,
            statistics,
            pauses: false,
        })
    }

    /// Lets a guest that ran arrive paused at a QEMU whose monitor starts it: a `cont` of another client
    /// while it loads would run it there before its source is done.
    #[must_use]
    pub fn arriving_paused(mut self) -> Self {
        self.pauses = true;
        self
    }

    /// Statistics of the sending side; the incoming migration counts the receiving side.
    pub fn statistics(&self) -> &Arc<Statistics> {
        &self.statistics
    }

    /// The channel to the destination that carries everything but lanes: after the end of the stream, for a
    /// session with a towline.
    pub fn main_channel(&self) -> Arc<dyn Channel> {
        Arc::clone(&self.connections.main)
    }

    /// Returns true if the whole guest was sent: from then on the destination may have it.
    pub fn is_sent(&self) -> bool {
        self.sent.get().is_some()
    }

    fn lane(&self, lane: usize) -> Result<MutexGuard<'_, LaneWriter>> {
        let expected = self.lanes.len();
        let Some(writer) = self.lanes.get(lane) else {
            return Err(Error::LaneTooMany { id: u8::try_from(lane).unwrap_or(u8::MAX), expected });
        };
        Ok(lock(writer))
    }

    fn blocks(&self) -> &[RamBlock] {
        self.blocks.get().map_or(&[], Vec::as_slice)
    }

    fn sync_lanes(&self) -> Result<()> {
        for lane in 0..self.lanes.len() {
            self.lane(lane)?.sync(self.blocks()).map_err(Error::lane(lane))?;
        }
        for lane in 0..self.lanes.len() {
            self.lane(lane)?.flush().map_err(Error::lane(lane))?;
        }
        Ok(())
    }
}

impl Sink for Relay {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        self.form.get_or_init(|| BarrierForm::of(&configuration.machine_type));
        lock(&self.main).begin(configuration, true)?;
        for lane in 0..self.lanes.len() {
            self.lane(lane)?
                .init(lane, self.connections.uuid, self.connections.introduced)
                .map_err(Error::lane(lane))?;
        }
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        self.blocks.get_or_init(|| blocks.to_vec());
        self.sync_lanes()?;
        let section_id = *self.section.get_or_init(|| crate::guest::RAM_SECTION_ID);
        let barrier = self.form.get().filter(|_| !self.lanes.is_empty()).copied();
        lock(&self.main).write_ram_start(RamOptions { section_id, barrier }, blocks)?;
        self.answers.wait_pong(&self.session, ANSWER_TIMEOUT, self.lanes.len())?;
        greet(&self.session, &mut lock(&self.main), &self.answers)
    }

    fn bases(&self) -> Vec<BaseId> {
        self.answers.bases()
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        match stream {
            ChannelId::Lane(lane) => {
                self.lane(lane)?.forward(pages.block, pages.offsets, pages.contents, self.blocks())
            }
            ChannelId::Main => {
                let page = PAGE_SIZE as usize;
                let contents = pages.contents.iter().flat_map(|slice| slice.chunks(page));
                let contents: Vec<_> = contents.map(IoBuf::from).collect();
                lock(&self.main).pages(pages.block, pages.offsets, &contents)
            }
        }
    }

    fn zero_copy_ticket(&self, stream: ChannelId) -> ZeroCopyTicket {
        match stream {
            ChannelId::Lane(lane) => {
                self.connections.lanes.get(lane).map(|lane| lane.zero_copy_ticket()).unwrap_or_default()
            }
            ChannelId::Main => ZeroCopyTicket::default(),
        }
    }

    fn splice_from(
        &self,
        stream: ChannelId,
        from: &dyn Channel,
        block: BlockIndex,
        offsets: &[u64],
    ) -> Option<Result<u64>> {
        let ChannelId::Lane(lane) = stream else { return None };
        match self.lane(lane) {
            Ok(mut writer) => writer.splice(from, block, offsets, self.blocks()),
            Err(error) => Some(Err(error)),
        }
    }

    fn splices_records(&self, from: &dyn Channel) -> bool {
        Splice::joins(from, self.connections.main.as_ref())
    }

    fn splice_records(&self, from: &dyn Channel, block: BlockIndex, offsets: &[u64]) -> Option<Result<u64>> {
        lock(&self.main).splice(from, block, offsets).transpose()
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        match stream {
            ChannelId::Lane(lane) => self.lane(lane)?.forward_zero(block, offsets, self.blocks()),
            ChannelId::Main => lock(&self.main).zero(block, offsets),
        }
    }

    fn current(&self, _page: PageRef, _content: &mut [u8]) -> Result<()> {
        Err(Error::guest(XbzrleRelayed))
    }

    fn barrier(&self) -> Result<()> {
        if lock(&self.main).is_setting_up() {
            // START's own barrier, which `blocks` has sent.
            return Ok(());
        }
        self.sync_lanes()?;
        lock(&self.main).barrier()
    }

    fn section_start(&self, section: RamSection) -> Result<()> {
        match section.kind {
            SectionKind::Start => {
                self.section.get_or_init(|| section.id);
            }
            SectionKind::Part => lock(&self.main).open_part(),
            SectionKind::End => lock(&self.main).open_end(),
        }
        Ok(())
    }

    fn section_end(&self, kind: SectionKind) -> Result<()> {
        match kind {
            SectionKind::Part => lock(&self.main).close_section(),
            SectionKind::Start | SectionKind::End => Ok(()),
        }
    }

    fn device_state(&self, mut state: DeviceState) -> Result<()> {
        let run_state = state.run_state().map(str::to_owned);
        if self.pauses {
            state.pause();
        }
        let (mut main, answers) = (lock(&self.main), Some(&*self.answers));
        send_device_state(&self.session, &mut main, answers, &state, run_state.as_deref())?;
        self.sent.get_or_init(|| ());
        Ok(())
    }

    fn commit(&self) -> Result<()> {
        self.answers.wait_shut(&self.session)
    }

    fn return_path(&self, writer: ReturnPathWriter) {
        if let Err(error) = self.answers.forward_to(writer) {
            self.session.fail(error);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The buffers that it sent from are the incoming migration's, which has ended.
        if self.session.is_failed() {
            self.connections.drain_zero_copy();
        }
    }
}

/// XBZRLE needs the page's old content, which a relay does not have.
#[derive(Debug, thiserror::Error)]
#[error(
    "the source sends XBZRLE, which only a destination with memory can read: set the capability xbzrle off at the source"
)]
struct XbzrleRelayed;
