//! Postcopy: a [`Guest`] that does not change runs at its destination at once, and its memory follows, faults
//! first.
//!
//! ```text
//!   Postcopy::offer ──► Offered ──run()──► Running ──serve()──► done          each on one connection; the map of what
//!        nothing runs      │  the package's   │                               was sent outlives them
//!        anywhere yet      │  last byte       └─ lost ──► Postcopy::recover ──► Running …
//!
//!   return path ──► inbox ──► request workers: prepare the unit · claim · send ──► preempt channel (or main, ahead of the rest)
//!                                    └─ neighbours ─┐
//!   preparers: working set · all memory ──► ready ──┴─► the sender: claim · send ──► main channel
//! ```
//!
//! - Each page is claimed in the sent map before it is sent; each claim succeeds once: a destination never
//!   gets a page twice. A claim is made when its unit is prepared, so a page whose unit takes long to fetch
//!   is never claimed by a thread that has to wait for it.
//! - The point of no return is [`Offered::run`]. An [`Offered`] that is dropped leaves no guest running; a
//!   [`Running`] may have a guest at its destination, so losing its connection is [`ConnectionLost`], which
//!   reports whether the destination had loaded all devices.
//! - Pages of the working set of earlier restores, and their neighbours, are prefetched before the guest
//!   runs, where that costs next to nothing.
//! - A lost connection is recovered from the destination's bitmaps of received pages, by this process or by
//!   another one.
//!
//! Out of scope: QMP and images. Limits: the guest does not change (an image, not live memory); two channels
//! carry pages, main and preempt, as no QEMU supports more.

mod connection;
mod demand;
mod faults;
mod inbox;
mod prefetch;
mod priority_lock;
mod scheduler;
mod sent_map;
mod serve;
mod units;

use std::sync::Arc;

use towline_channel::Channel;
use towline_protocol::device_state::DeviceState;
use towline_protocol::postcopy::{PING_LOADED, Packaged, PostcopyBlock, Preempt, Recovery, Serving};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::{PING_SETUP, RamWriter, Setup};
use towline_protocol::{PageRef, RamBlock, machine};

pub use connection::{Options, Postcopy};
pub use demand::Background;
pub use faults::{FaultCounts, LatencyHistogram, LatencyRange};

use crate::outgoing::RecordSender;
use crate::{Error, Guest, Result, Session, Statistics, present};
use connection::{GuestRef, PostcopyConnection};
use faults::Faults;
use inbox::Inbox;
use scheduler::{RUN_BYTES, SendScheduler};
use sent_map::SentMap;
use units::Units;

/// Minimum size that is prepared and released separately.
const UNIT_BYTES_MIN: u64 = 64 << 10;

/// A connection that is made.
pub struct PostcopyChannels<'a> {
    /// The main channel.
    pub main: Arc<dyn Channel>,
    /// Connects the preempt channel when the destination accepts it; `None`: without.
    pub preempt: Option<&'a (dyn Fn() -> Result<Arc<dyn Channel>> + Sync)>,
}

impl std::fmt::Debug for PostcopyChannels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostcopyChannels")
            .field("main", &self.main)
            .field("preempt", &self.preempt.is_some())
            .finish()
    }
}

/// The destination has everything but the package's last byte: it runs nothing, and a connection that ends
/// here leaves the guest where it is.
#[derive(Debug)]
pub struct Offered<'p> {
    connection: PostcopyConnection<'p>,
    writer: RecordSender,
    packaged: Packaged,
}

/// The guest may run at its destination.
#[derive(Debug)]
pub struct Running<'p> {
    connection: PostcopyConnection<'p>,
    writer: RecordSender,
    serving: Serving,
    /// The last byte could not be sent, or it is unknown if it was.
    broken: Option<Error>,
}

/// A connection that was lost when the guest may have run at its destination.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ConnectionLost {
    /// The error.
    pub error: Error,
    /// The destination had loaded all of the device state, so it ran the guest, or was about to. False: it
    /// did not.
    pub had_loaded: bool,
}

impl<'g> Postcopy<'g> {
    /// `page_bytes` has the size of the pages that back each of the guest's blocks at the destination.
    ///
    /// # Panics
    /// If it has not one for each block.
    pub fn new(
        guest: &'g dyn Guest,
        page_bytes: &[u64],
        mut options: Options,
        statistics: Arc<Statistics>,
    ) -> Self {
        assert_eq!(page_bytes.len(), guest.blocks().len(), "one page size for each block");
        let block = |(block, &page_bytes): (&RamBlock, &u64)| PostcopyBlock {
            ram: RamBlock { mapped: None, ..block.clone() },
            page_bytes: page_bytes.max(PAGE_SIZE),
        };
        let blocks: Arc<[PostcopyBlock]> = guest.blocks().iter().zip(page_bytes).map(block).collect();
        options.working_set = prefetch::neighbourhoods(&options.working_set, &blocks);
        let unit_bytes = guest.unit_bytes().next_power_of_two().clamp(UNIT_BYTES_MIN, RUN_BYTES);
        let (map, units) = (SentMap::new(&blocks), Units::new(&blocks, unit_bytes));
        statistics.set_total(blocks.iter().map(|block| block.ram.length).sum());
        Self { guest: GuestRef(guest), blocks, options, statistics, map, units, faults: Faults::default() }
    }

    /// Counters of the guest's faults so far.
    pub fn faults(&self) -> FaultCounts {
        self.faults.counts()
    }

    /// The requested pages, in order.
    pub fn demanded(&self) -> Vec<PageRef> {
        self.faults.demanded()
    }

    /// Bytes that are not yet claimed.
    pub fn remaining(&self) -> u64 {
        self.total() - self.map.claimed_bytes()
    }

    /// Sends the guest to a destination, up to the last byte before it runs.
    ///
    /// # Errors
    /// Nothing runs there, and nothing will.
    pub fn offer<'p>(&'p self, session: &Arc<Session>, link: &PostcopyChannels<'_>) -> Result<Offered<'p>> {
        session.watch(&link.main);
        self.try_offer(session, link).map_err(|error| session.end(error))
    }

    fn try_offer<'p>(&'p self, session: &Arc<Session>, link: &PostcopyChannels<'_>) -> Result<Offered<'p>> {
        if let Some(block) = present::first(self.guest.0) {
            return Err(Error::PresentInPostcopy { block: block.name.clone() });
        }
        let mut connection = self.connect(session, link)?;
        let mut writer = self.writer(&link.main);
        let advised = Setup::advise(self.guest.0.configuration(), &self.blocks, writer.pending());
        writer.flush()?;
        if self.preempts_at_once() {
            connection.connect_preempt(link)?;
        }
        connection.inbox.wait_pong(PING_SETUP, session, self.options.answer_timeout)?;
        if !self.preempts_at_once() {
            connection.connect_preempt(link)?;
        }
        let loading = advised.write_ram_start(self.guest.0.ram_section_id(), &self.blocks, writer.pending());
        let mut discarded = loading.discard(&self.blocks, writer.pending());
        if !self.options.working_set.is_empty() {
            let mut part = discarded.open_part(writer.pending());
            self.send_prefetched(&mut writer, part.records())?;
            discarded = part.close(writer.pending());
        }
        let state = self.guest.0.device_state()?;
        let state = DeviceState::parse(&state).map_err(Error::protocol("the guest's device state"))?;
        let packaged = discarded.package(state.sections(), writer.pending());
        let packaged = packaged.map_err(Error::protocol("the guest's device state"))?;
        writer.flush()?;
        session.check()?;
        Ok(Offered { connection, writer, packaged })
    }

    /// Resumes over a new connection, where a destination that lost the one before listens again: it sends
    /// its bitmaps of received pages, and gets the rest.
    ///
    /// # Errors
    /// This connection was lost as well. The guest still waits at its destination.
    pub fn recover<'p>(&'p self, session: &Arc<Session>, link: &PostcopyChannels<'_>) -> Result<Running<'p>> {
        session.watch(&link.main);
        self.try_recover(session, link).map_err(|error| session.end(error))
    }

    fn try_recover<'p>(&'p self, session: &Arc<Session>, link: &PostcopyChannels<'_>) -> Result<Running<'p>> {
        let mut connection = self.connect(session, link)?;
        connection.had_loaded = true;
        let mut writer = self.writer(&link.main);
        let timeout = self.options.answer_timeout;
        let recovery = Recovery::ask(self.guest.0.ram_section_id(), &self.blocks, writer.pending());
        if self.preempts_at_once() {
            connection.connect_preempt(link)?;
        }
        writer.flush()?;
        for (block, bits) in connection.inbox.wait_bitmaps(session, timeout)? {
            self.map.set_received(block, &bits);
        }
        self.units.reset(self.guest.0, |page, length| self.map.free_bytes(page, length));
        if !self.preempts_at_once() {
            connection.connect_preempt(link)?;
        }
        let resuming = recovery.resume(writer.pending());
        writer.flush()?;
        connection.inbox.wait_resume_ack(session, timeout)?;
        let serving = resuming.acknowledged(writer.pending());
        Ok(Running { connection, writer, serving, broken: None })
    }

    fn connect<'p>(
        &'p self,
        session: &Arc<Session>,
        link: &PostcopyChannels<'_>,
    ) -> Result<PostcopyConnection<'p>> {
        let (session, inbox) = (Arc::clone(session), Inbox::listen(&link.main, session, &self.blocks)?);
        Ok(PostcopyConnection { of: self, session, inbox, preempt: None, had_loaded: false })
    }

    fn writer(&self, channel: &Arc<dyn Channel>) -> RecordSender {
        self.statistics.count_sends_of(channel.as_ref());
        RecordSender::new(Arc::clone(channel), Arc::clone(&self.statistics))
    }

    fn preempts_at_once(&self) -> bool {
        machine::preempt_connects_at_once(&self.guest.0.configuration().machine_type)
    }

    fn total(&self) -> u64 {
        self.blocks.iter().map(|block| block.ram.length).sum()
    }

    /// Sends what is prepared and claimed. Returns the bytes of pages with content.
    fn send(
        &self,
        writer: &mut RecordSender,
        records: &mut RamWriter,
        page: PageRef,
        length: u64,
    ) -> Result<u64> {
        let sent = writer.unit(records, self.guest.0, page, length)?;
        writer.flush()?;
        self.units.sent(page, length);
        Ok(sent)
    }

    /// Claims and sends the unclaimed part of these bytes, which are prepared.
    fn send_free(
        &self,
        writer: &mut RecordSender,
        records: &mut RamWriter,
        page: PageRef,
        length: u64,
    ) -> Result<u64> {
        let mut runs = Vec::new();
        self.map.claim_run(page, length, |offset, bytes| runs.push((PageRef { offset, ..page }, bytes)));
        runs.into_iter()
            .try_fold(0, |sent, (page, bytes)| Ok(sent + self.send(writer, records, page, bytes)?))
    }

    fn is_all_sent(&self) -> bool {
        self.map.claimed_bytes() == self.total() && self.units.is_all_sent()
    }

    fn scheduler(&self) -> SendScheduler {
        let (working_set, needed) = (&self.options.working_set, self.head().len());
        let background = self.options.background;
        SendScheduler::new(&self.blocks, working_set, needed, background)
    }
}

impl PostcopyConnection<'_> {
    fn connect_preempt(&mut self, link: &PostcopyChannels<'_>) -> Result<()> {
        if let Some(connect) = link.preempt {
            let channel = connect()?;
            self.session.watch(&channel);
            self.preempt = Some((self.of.writer(&channel), Preempt::new(&self.of.blocks)));
        }
        Ok(())
    }

    /// The connection is lost: the state at that time.
    fn lost(&self, error: Error) -> ConnectionLost {
        let error = self.session.end(error);
        self.inbox.wait_end();
        ConnectionLost { error, had_loaded: self.had_loaded || self.inbox.has_pong(PING_LOADED) }
    }
}

impl<'p> Offered<'p> {
    /// Sends the last byte. From here on the guest may run at its destination, even if the connection is
    /// lost.
    pub fn run(self) -> Running<'p> {
        let Self { connection, mut writer, packaged } = self;
        let serving = packaged.run(writer.pending());
        let broken = writer.flush().err();
        Running { connection, writer, serving, broken }
    }

    /// Abandons the offer: the destination loads nothing.
    pub fn withdraw(self, error: Error) -> Error {
        self.connection.session.end(error)
    }
}

impl Running<'_> {
    /// Sends all pages, requested ones first; returns when the destination acknowledges them all.
    ///
    /// # Errors
    /// The connection was lost. The guest waits at its destination for the missing pages.
    pub fn serve(self) -> Result<(), ConnectionLost> {
        let Self { mut connection, writer, serving, broken } = self;
        let preempt = connection.preempt.take();
        let result = match broken {
            Some(error) => Err(error),
            None => serve::serve(&connection, writer, serving, preempt),
        };
        match result {
            Ok(()) => {
                connection.session.succeed();
                Ok(())
            }
            Err(error) => Err(connection.lost(error)),
        }
    }
}
