//! One connection's work: requests are served, the background fills in, until every page has gone.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use towline_protocol::PageRef;
use towline_protocol::postcopy::{PING_LOADED, Preempt, Serving};
use towline_protocol::source::RamWriter;

use super::feed::{Feed, Run};
use super::inbox::Request;
use super::turn::Shared;
use super::writer::Writer;
use super::{Conversation, Postcopy};
use crate::outgoing::Limiter;
use crate::{Result, Session};

/// Threads that serve requests: as many units may be prepared at once for guests that wait.
const REQUEST_WORKERS: usize = 4;
/// Threads that prepare for the background.
const PREPARERS: usize = 4;
/// What the background sends before it looks who waits, with a preempt channel and without: a fault waits for it.
const PIECE_BYTES: u64 = 256 << 10;
const PIECE_BYTES_SHARED: u64 = 128 << 10;

/// The parts that all threads share.
struct Service<'a> {
    of: &'a Postcopy<'a>,
    conversation: &'a Conversation<'a>,
    feed: Feed,
    main: Shared<(Writer, Serving)>,
    preempt: Option<Shared<(Writer, Preempt)>>,
    limiter: Limiter,
}

/// See [`Running::serve`](super::Running::serve).
pub(super) fn serve(
    conversation: &Conversation<'_>,
    writer: Writer,
    serving: Serving,
    preempt: Option<(Writer, Preempt)>,
) -> Result<()> {
    let of = conversation.of;
    let service = Service {
        of,
        conversation,
        feed: of.feed(),
        main: Shared::new((writer, serving)),
        preempt: preempt.map(Shared::new),
        limiter: Limiter::new(of.options.max_bandwidth),
    };
    let session = &conversation.session;
    thread::scope(|scope| {
        for _ in 0..REQUEST_WORKERS {
            scope.spawn(|| service.guarded(|| service.serve_requests()));
        }
        for _ in 0..PREPARERS {
            scope.spawn(|| service.guarded(|| service.prepare()));
        }
        let filled = {
            let _guard = session.guard();
            service.fill()
        };
        if let Err(error) = filled {
            session.fail(error);
        }
        service.conversation.inbox.close();
        service.feed.close();
    });
    session.check()?;
    if let Some(preempt) = service.preempt
        && of.preempts_at_once()
    {
        // The destinations of that time wait for it.
        let (mut writer, preempt) = preempt.into_inner();
        preempt.end(writer.pending());
        writer.flush()?;
    }
    let (mut writer, serving) = service.main.into_inner();
    conversation.inbox.expect_shut();
    let _end = serving.end(writer.pending());
    writer.flush()?;
    conversation.inbox.wait_shut(session)
}

impl Service<'_> {
    /// Runs a thread's work; its error, or its panic, is the connection's.
    fn guarded(&self, work: impl FnOnce() -> Result<()>) {
        let session: &Arc<Session> = &self.conversation.session;
        let _guard = session.guard();
        let result = work();
        if let Err(error) = result {
            session.fail(error);
        }
        if session.is_failed() {
            self.feed.close();
            self.conversation.inbox.close();
        }
    }

    /// A request worker.
    fn serve_requests(&self) -> Result<()> {
        let map = &self.of.map;
        while let Some(request) = self.conversation.inbox.next_request() {
            self.conversation.session.check()?;
            let size = map.page_bytes(request.page.block);
            let end = request.page.offset + request.length;
            for offset in (request.page.offset..end).step_by(size as usize) {
                let page = PageRef { offset, ..request.page };
                self.of.faults.request(page);
                match map.is_claimed(page) {
                    true => self.of.faults.late(),
                    false => self.serve_page(page, size.min(end - offset), &request)?,
                }
            }
            self.feed.notify();
        }
        // The listener ended, or everything has gone.
        Ok(())
    }

    fn serve_page(&self, page: PageRef, length: u64, request: &Request) -> Result<()> {
        self.of.units.prepare(self.of.guest.0, page, length)?;
        let send = |writer: &mut Writer, records: &mut RamWriter| -> Result<()> {
            // Here at the latest, with the channel ours: who claims sends at once.
            if !self.of.map.claim(page) {
                self.of.faults.late();
                return Ok(());
            }
            self.of.send(writer, records, page, length)?;
            self.of.faults.served(request.at.elapsed());
            Ok(())
        };
        match &self.preempt {
            Some(preempt) => preempt.urgent(|(writer, preempt)| send(writer, preempt.records()))?,
            None => self.main.urgent(|(writer, serving)| send(writer, serving.records()))?,
        }
        self.feed.fault(page, self.of.units.of(page));
        Ok(())
    }

    /// Waits until the destination has loaded its devices: what it needs for that is asked for, and comes first. A connection
    /// that breaks before ends QEMU, so nothing is done until then that could break it.
    fn wait_loaded(&self) -> Result<()> {
        match self.conversation.had_loaded {
            true => Ok(()),
            false => {
                self.conversation.inbox.wait_pong(PING_LOADED, &self.conversation.session, Duration::MAX)
            }
        }
    }

    /// A preparer.
    fn prepare(&self) -> Result<()> {
        self.wait_loaded()?;
        while let Some((page, length)) = self.feed.next_to_prepare(&self.of.map) {
            let prepared = self.of.units.prepare(self.of.guest.0, page, length);
            self.feed.prepared((page, length));
            prepared?;
        }
        Ok(())
    }

    /// The sender: everything that nobody asks for. Returns when all pages are sent, whoever sent them.
    fn fill(&self) -> Result<()> {
        let session = &self.conversation.session;
        self.wait_loaded()?;
        while let Some(run) = self.feed.next() {
            self.fill_run(run)?;
        }
        let all_sent = || session.is_failed() || self.of.is_all_sent();
        self.feed.wait_until(all_sent);
        session.check()
    }

    /// Sends a run piece by piece; neighbours of faults that come meanwhile go in between.
    fn fill_run(&self, (page, length): Run) -> Result<()> {
        let piece_bytes = if self.preempt.is_some() { PIECE_BYTES } else { PIECE_BYTES_SHARED };
        let piece_bytes = piece_bytes.max(self.of.map.page_bytes(page.block));
        let end = page.offset + length;
        let mut offset = page.offset;
        while offset < end {
            self.conversation.session.check()?;
            let piece = (piece_bytes - offset % piece_bytes).min(end - offset);
            self.fill_piece(PageRef { offset, ..page }, piece)?;
            offset += piece;
            while let Some((near, length)) = self.feed.next_near() {
                // At most a piece or two.
                self.of.units.prepare(self.of.guest.0, near, length)?;
                self.fill_piece(near, length)?;
            }
        }
        Ok(())
    }

    fn fill_piece(&self, page: PageRef, length: u64) -> Result<()> {
        let map = &self.of.map;
        if map.is_whole(page, length) {
            return Ok(());
        }
        self.limiter.take(length, &self.conversation.session)?;
        let size = map.page_bytes(page.block);
        if size > PIECE_BYTES {
            // A huge page reaches beyond what was prepared.
            let start = page.offset / size * size;
            let whole = size.min(self.of.blocks[page.block.index()].ram.length - start);
            self.of.units.prepare(self.of.guest.0, PageRef { offset: start, ..page }, whole)?;
        }
        let sent = self.main.background(|(writer, serving)| -> Result<u64> {
            let mut runs = Vec::new();
            map.claim_run(page, length, |offset, bytes| runs.push((PageRef { offset, ..page }, bytes)));
            runs.into_iter().try_fold(0, |sent, (page, bytes)| {
                Ok(sent + self.of.send(writer, serving.records(), page, bytes)?)
            })
        })?;
        self.limiter.give_back(length.saturating_sub(sent));
        self.feed.notify();
        Ok(())
    }
}
