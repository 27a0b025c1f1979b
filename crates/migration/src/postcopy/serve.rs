//! One connection's work: requests are served, the background fills in, until every page was sent.

use std::io;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::Duration;

use towline_channel::Error as ChannelError;
use towline_protocol::PageRef;
use towline_protocol::postcopy::{PING_LOADED, Preempt, Serving};
use towline_protocol::source::RamWriter;

use super::connection::{Postcopy, PostcopyConnection};
use super::demand::Background;
use super::inbox::PageRequest;
use super::priority_lock::PriorityLock;
use super::scheduler::{BlockRange, Item, ItemKind, SendScheduler};
use crate::limiter::Limiter;
use crate::outgoing::RecordSender;
use crate::{Result, Session};

/// Threads that serve requests: as many units may be prepared at once for guests that wait.
const REQUEST_WORKERS: usize = 4;
/// Number of units on each side of a fault that are prepared for the next faults.
const FAULT_AROUND_UNITS: u64 = 8;
/// Bytes that the background sends between checks for faults, with and without a preempt channel: a fault
/// waits for these.
const SEND_STEP_BYTES: u64 = 256 << 10;
const SEND_STEP_BYTES_SHARED: u64 = 128 << 10;

/// The parts that all threads share.
struct ServeState<'a> {
    of: &'a Postcopy<'a>,
    connection: &'a PostcopyConnection<'a>,
    scheduler: SendScheduler,
    main: PriorityLock<(RecordSender, Serving)>,
    preempt: Option<PriorityLock<(RecordSender, Preempt)>>,
    limiter: Limiter,
}

/// See [`Running::serve`](super::Running::serve).
pub(super) fn serve(
    connection: &PostcopyConnection<'_>,
    writer: RecordSender,
    serving: Serving,
    preempt: Option<(RecordSender, Preempt)>,
) -> Result<()> {
    let of = connection.of;
    let service = ServeState {
        of,
        connection,
        scheduler: of.scheduler(),
        main: PriorityLock::new((writer, serving)),
        preempt: preempt.map(PriorityLock::new),
        limiter: Limiter::new(of.options.max_bandwidth),
    };
    let session = &connection.session;
    thread::scope(|scope| {
        let serve = || service.guarded(|| service.serve_requests());
        let prepare = || service.guarded(|| service.run_preparer());
        // One of each is enough.
        let workers = start(REQUEST_WORKERS, || Builder::new().spawn_scoped(scope, serve));
        let preparers = start(service.scheduler.preparers(), || Builder::new().spawn_scoped(scope, prepare));
        let filled = workers.and(preparers).and_then(|()| {
            let _guard = session.guard();
            service.fill()
        });
        if let Err(error) = filled {
            session.fail(error);
        }
        service.connection.inbox.close();
        service.scheduler.close();
    });
    while let Some((page, length)) = service.scheduler.next_neighbours() {
        // Already sent, as everything is, or the connection is lost.
        of.units.put(of.guest.0, page, length);
    }
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
    connection.inbox.expect_shut();
    serving.end(writer.pending());
    writer.flush()?;
    connection.inbox.wait_shut(session)
}

/// Starts as many threads of this number as there is room for, at least one.
fn start<T>(count: usize, mut one: impl FnMut() -> io::Result<T>) -> Result<()> {
    one().map_err(ChannelError::NoThread)?;
    (1..count).map_while(|_| one().ok()).for_each(drop);
    Ok(())
}

impl ServeState<'_> {
    /// Runs a thread's work; its error, or its panic, is the connection's.
    fn guarded(&self, work: impl FnOnce() -> Result<()>) {
        let session: &Arc<Session> = &self.connection.session;
        let _guard = session.guard();
        let result = work();
        if let Err(error) = result {
            session.fail(error);
        }
        if session.is_failed() {
            self.scheduler.close();
            self.connection.inbox.close();
        }
    }

    /// A request worker.
    fn serve_requests(&self) -> Result<()> {
        let map = &self.of.map;
        while let Some(request) = self.connection.inbox.next_request() {
            self.connection.session.check()?;
            self.scheduler.request_received();
            let size = map.page_bytes(request.page.block);
            let end = request.page.offset + request.length;
            for offset in (request.page.offset..end).step_by(size as usize) {
                let page = PageRef { offset, ..request.page };
                self.of.faults.request(page);
                if map.is_claimed(page) {
                    self.of.faults.late();
                } else {
                    self.serve_page(page, size.min(end - offset), &request)?;
                }
            }
            self.scheduler.request_served();
            self.scheduler.notify();
        }
        // The listener ended, or everything was sent.
        Ok(())
    }

    fn serve_page(&self, page: PageRef, length: u64, request: &PageRequest) -> Result<()> {
        let mut is_around_requested = false;
        // As long as the guest waits for the page.
        let mut requested = || {
            is_around_requested = true;
            self.prepare_around(page);
        };
        self.of.units.prepare_then(self.of.guest.0, page, length, &mut requested)?;
        if !is_around_requested {
            self.prepare_around(page);
        }
        let send = |writer: &mut RecordSender, records: &mut RamWriter| -> Result<()> {
            // Claimed at the latest possible moment, with the channel locked: a claim is followed by its send
            // at once.
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
        self.of.units.put(self.of.guest.0, page, length);
        self.queue_neighbours(page);
        Ok(())
    }

    /// The neighbours of a requested page are next: its unit, which is prepared, and, without pending faults,
    /// the one after it.
    fn queue_neighbours(&self, page: PageRef) {
        let (unit, length) = self.of.units.of(page);
        self.prepare_neighbours((unit, length));
        if let Some(behind) = self.of.units.behind(unit, length)
            && self.of.options.background == Background::AtOnce
            && !self.connection.inbox.has_requests()
        {
            self.prepare_neighbours(behind);
        }
    }

    /// Has the units around a requested page prepared, if memory comes from far away.
    fn prepare_around(&self, page: PageRef) {
        if self.of.options.background == Background::AfterFaults {
            let units = &self.of.units;
            self.scheduler.prepare_around(units.around(units.of(page).0, FAULT_AROUND_UNITS).into_iter());
        }
    }

    fn prepare_neighbours(&self, (page, length): BlockRange) {
        let (units, guest) = (&self.of.units, self.of.guest.0);
        if self.of.map.is_whole(page, length) {
            return;
        }
        if let Err(error) = units.prepare(guest, page, length) {
            // No fault waits for it yet; a later one will report the error.
            tracing::debug!(%error, "a page's neighbours");
            return;
        }
        if let Some((page, length)) = self.scheduler.queue_neighbours((page, length)) {
            units.put(guest, page, length);
        }
    }

    /// Waits until the destination has loaded its devices: pages needed for that are requested, and come
    /// first. A connection that breaks before ends QEMU, so nothing is done until then that could break it.
    fn wait_loaded(&self) -> Result<()> {
        if self.connection.had_loaded {
            Ok(())
        } else {
            self.connection.inbox.wait_pong(PING_LOADED, &self.connection.session, Duration::MAX)
        }
    }

    /// A preparer. It begins while the destination loads its devices; only pages that it cannot accept yet
    /// wait until that is over.
    fn run_preparer(&self) -> Result<()> {
        while let Some(item) = self.scheduler.next_to_prepare(&self.of.map) {
            if let Err(error) = self.of.units.prepare(self.of.guest.0, item.run.0, item.run.1) {
                if item.kind == ItemKind::Neighbour {
                    // No fault waits for it; a later one will report the error.
                    tracing::debug!(%error, "memory around a requested page");
                    self.scheduler.not_prepared();
                    continue;
                }
                self.wait_loaded()?;
                return Err(error);
            }
            self.scheduler.prepared(item);
        }
        Ok(())
    }

    /// The sender: all background pages. Returns when all pages are sent, by any thread.
    fn fill(&self) -> Result<()> {
        let session = &self.connection.session;
        self.wait_loaded()?;
        while let Some(item) = self.scheduler.next() {
            self.fill_run(item)?;
        }
        let all_sent = || session.is_failed() || self.of.is_all_sent();
        self.scheduler.wait_until(all_sent);
        session.check()
    }

    /// Sends a run step by step; neighbours of new faults go in between.
    fn fill_run(&self, Item { run: (page, length), kind }: Item) -> Result<()> {
        let step_bytes = if self.preempt.is_some() { SEND_STEP_BYTES } else { SEND_STEP_BYTES_SHARED };
        let step_bytes = step_bytes.max(self.of.map.page_bytes(page.block));
        let end = page.offset + length;
        let mut offset = page.offset;
        while offset < end {
            self.connection.session.check()?;
            let step = (step_bytes - offset % step_bytes).min(end - offset);
            self.send_unsent(PageRef { offset, ..page }, step, kind)?;
            offset += step;
            while let Some((near, length)) = self.scheduler.next_neighbours() {
                // At most a step or two.
                self.send_unsent(near, length, ItemKind::Neighbour)?;
                self.of.units.put(self.of.guest.0, near, length);
            }
        }
        self.of.units.put(self.of.guest.0, page, length);
        Ok(())
    }

    /// Sends the pages of this range that are not sent yet. Only pages for which no fault waits count towards
    /// the rate.
    fn send_unsent(&self, page: PageRef, length: u64, kind: ItemKind) -> Result<()> {
        if self.of.map.is_whole(page, length) {
            return Ok(());
        }
        if kind != ItemKind::Needed {
            self.limiter.reserve(length, &self.connection.session)?;
        }
        // A huge page reaches beyond what was prepared for it.
        let (first, whole) = self.of.map.whole_pages(page, length);
        self.of.units.prepare(self.of.guest.0, first, whole)?;
        let send = |(writer, serving): &mut (RecordSender, Serving)| {
            self.of.send_free(writer, serving.records(), first, whole)
        };
        let sent = self.main.background(send)?;
        self.of.units.put(self.of.guest.0, first, whole);
        if kind != ItemKind::Needed {
            self.limiter.refund(length.saturating_sub(sent));
        }
        Ok(())
    }
}
