//! Instant restore: the guest of an image runs at its destination at once, and its memory follows.
//!
//! ```text
//!   prepare ─► offer ─► run ─► serve ─► completed ─► release
//!      │         │       │       └─ lost ─► migrate-recover ─► serve …   (as often as it takes)
//!      └ roll back ┘     └ from here on the guest may run there: a failure describes where it is and how to recover
//! ```
//! The image stays as it is. Before `run` nothing runs anywhere, and a failure leaves the guest in its image;
//! after it the guest is at the destination, which waits for its pages, and this process or another one
//! (`--recover`) sends them. The QEMUs of a running guest do it themselves, see [`live`].

mod address;
mod destination;
mod live;
mod qemu;
mod stored;
mod unreadable;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, connect_with};
use towline_image::{Image, StoredGuest, WorkingSet};
use towline_migration::postcopy::{
    Background, ConnectionLost, Options as EngineOptions, PostcopyChannels, Running,
};
use towline_migration::{Postcopy, Session, Statistics};

use super::context::Context;
use super::destination::RecoveryState;
use super::endpoint;
use super::ends::Destination;
use super::error::{Error, Failure, needs_attention};
use super::outcomes::GuestAfterFailure;
use super::progress::{CopyPhase, Progress};
use super::report::PostcopyReport;
use super::report::{CopyReport, SourceState};
use super::request::{PostcopyOptions, RequestedPages};
use super::shared_switchover::SharedSwitchover;
use super::supervise::run_supervised;
use super::{error_origin, tls};
use crate::switchover::{DestinationKind, FinalRunState, GuestState, SourceKind};
use address::AddressDestination;
use destination::PostcopyDestination;
pub(super) use live::migrate;
use qemu::DrivenDestination;
use stored::{BREAK_AFTER, RECOVER_TIMEOUT, RestoreSource};
use unreadable::Attempts;

/// Interval of queries to a guest that is starting, and to one that runs.
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which a starting guest is queried at the short interval.
const START_POLL_TIME: Duration = Duration::from_secs(2);
/// Interval of attempts to recover.
const RECOVER_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of consecutive connections without progress.
const IDLE_RECOVERIES_MAX: u32 = 5;

/// Runs the guest of an image at `destination`.
pub(super) fn restore(
    image: &dyn StoredGuest,
    destination: &Destination,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let was_running = image.devices().run_state().is_none_or(|state| state == "running");
    let stored = RestoreSource { guest: image, was_running, path: image.image().map(Image::path) };
    let restored = restore_stored(&stored, destination, options, context);
    restored
        .and_then(|report| intact(image, report))
        .map_err(|failure| endpoint::explain_truncation(image, failure))
}

/// Returns an error if the image was truncated meanwhile: the running guest then got zeros.
fn intact(image: &dyn StoredGuest, report: CopyReport) -> Result<CopyReport, Failure> {
    match image.check_not_truncated() {
        Ok(()) => Ok(report),
        Err(error) => Err(needs_attention(error.into(), GuestState::TRUNCATED)),
    }
}

/// Opens the destination and checks it; nothing is changed.
fn open(
    destination: &Destination,
    stored: &RestoreSource<'_>,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<Box<dyn PostcopyDestination>, Error> {
    Ok(match (destination.monitor(), destination.stream()) {
        (Some(path), _) => Box::new(DrivenDestination::prepare(path, stored, options, context)?),
        (None, Some(address)) => Box::new(AddressDestination(address.clone())),
        (None, None) => {
            return Err(Error::Usage(format!("--postcopy to {destination}: it cannot run a guest")));
        }
    })
}

fn restore_stored(
    stored: &RestoreSource<'_>,
    destination: &Destination,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let destination = open(destination, stored, options, context).map_err(Failure::untouched)?;
    let run_state = FinalRunState::running_if(if options.recover {
        destination.was_running()
    } else {
        context.options.run().unwrap_or(stored.was_running)
    });
    let working_set = working_set(stored).map_err(Failure::untouched)?;
    let statistics = Arc::new(Statistics::default());
    let engine_options = EngineOptions {
        max_bandwidth: context.options.transfer_options().max_bandwidth,
        answer_timeout: context.options.connect_timeout,
        working_set: working_set.as_ref().map(|set| set.runs().to_vec()).unwrap_or_default(),
        // An image without a path is in a store.
        background: stored.path.map_or(Background::AfterFaults, |_| Background::AtOnce),
    };
    let page_bytes = destination.page_bytes(stored.guest.blocks());
    let engine = Postcopy::new(stored.guest, &page_bytes, engine_options, Arc::clone(&statistics));
    let pages =
        working_set.as_ref().map_or(0, |set| set.runs().iter().map(|(_, length)| length / 4096).sum());
    let report = PostcopyReport { working_set_pages: pages, ..PostcopyReport::default() };
    let restore = Restore {
        engine: &engine,
        statistics: &statistics,
        options,
        context,
        destination,
        run_state,
        report,
        late_cancel_reported: false,
    };
    let restored = restore.run();
    if let Some(mut set) = working_set
        && set.add(&engine.demanded())
        && let Err(error) = set.store()
    {
        context.observer.notice(&format!("the next restore will not know what this one needed: {error}"));
    }
    restored
}

fn working_set(stored: &RestoreSource<'_>) -> Result<Option<WorkingSet>, Error> {
    let Some(path) = stored.path else { return Ok(None) };
    let state = stored.guest.device_state()?;
    Ok(Some(WorkingSet::load(path, stored.guest.blocks(), &state)))
}

struct Restore<'a> {
    engine: &'a Postcopy<'a>,
    statistics: &'a Statistics,
    options: PostcopyOptions,
    context: &'a Context<'a>,
    destination: Box<dyn PostcopyDestination>,
    run_state: FinalRunState,
    report: PostcopyReport,
    /// The user was notified that it is too late to cancel.
    late_cancel_reported: bool,
}

impl<'a> Restore<'a> {
    fn run(mut self) -> Result<CopyReport, Failure> {
        let mut running = if self.options.recover { self.recover(None)? } else { self.start().map(Some)? };
        let (mut idle, mut left, mut attempts) = (0, u64::MAX, Attempts::new());
        while let Some(connection) = running {
            let Err(lost) = self.serve(connection) else { break };
            // A further connection does not help against a damaged image, or a failure of every connection.
            let has_progressed = self.engine.remaining() < left;
            left = self.engine.remaining();
            if error_origin::is_guest_error(&lost.error) && !lost.had_loaded {
                let (error, notes) = (Box::new(lost.error.into()), self.destination.restore_unstarted());
                return Err(Failure { error, guest: GuestAfterFailure::SAFE, notes });
            }
            if attempts.wait(&lost.error, has_progressed, self.context) {
                running = self.recover(Some(lost))?;
                continue;
            }
            idle = if has_progressed { 0 } else { idle + 1 };
            if error_origin::is_guest_error(&lost.error) || idle == IDLE_RECOVERIES_MAX {
                return Err(self.destination.interrupted(lost.error.into()));
            }
            running = self.recover(Some(lost))?;
        }
        self.finish()
    }

    /// Offers the guest, and passes the point of no return.
    fn start(&mut self) -> Result<Running<'a>, Failure> {
        let (context, engine) = (self.context, self.engine);
        let session = Arc::new(Session::default());
        let offered = (|| {
            context.observer.phase(CopyPhase::Connect);
            let address = self.destination.listen(self.options, self.run_state)?;
            let (main, preempt) = self.connect(&address)?;
            context.check_cancelled()?;
            context.observer.phase(CopyPhase::Transfer);
            let link = PostcopyChannels { main, preempt: self.preempts().then_some(&preempt) };
            let mut look = || {
                context.report_progress(self.statistics, Progress::default());
                Ok(())
            };
            let switchover =
                SharedSwitchover::new(SourceKind::Stored, DestinationKind::Stored, context.options);
            run_supervised(context, &session, &switchover, &mut look, || engine.offer(&session, &link))
        })();
        let offered = offered.and_then(|offered| match context.check_cancelled() {
            Ok(()) => Ok(offered),
            Err(error) => {
                drop(offered.withdraw(towline_migration::Error::Cancelled));
                Err(error)
            }
        });
        match offered {
            Ok(offered) => {
                context.observer.phase(CopyPhase::Switchover);
                Ok(offered.run())
            }
            Err(error) => {
                let (error, notes) = self.destination.roll_back(error);
                Err(Failure { error: Box::new(error), guest: GuestAfterFailure::SAFE, notes })
            }
        }
    }

    /// Serves the guest over one connection, and watches it.
    fn serve(&mut self, running: Running<'a>) -> Result<(), ConnectionLost> {
        let (watcher, done, started) = (thread::current(), AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let served = running.serve();
                done.store(true, Ordering::Release);
                watcher.unpark();
                served
            });
            while !done.load(Ordering::Acquire) && !worker.is_finished() {
                self.poll();
                let closely =
                    self.is_starting() && self.destination.is_driven() && started.elapsed() < START_POLL_TIME;
                thread::park_timeout(if closely { START_POLL_INTERVAL } else { POLL_INTERVAL });
            }
            match worker.join() {
                Ok(served) => served,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Returns true if the guest is to run and was not seen to run yet.
    fn is_starting(&self) -> bool {
        self.run_state == FinalRunState::Running && self.report.running_after.is_none()
    }

    fn set_running(&mut self) {
        self.report.running_after = Some(self.context.elapsed());
        self.context.observer.phase(CopyPhase::Running);
    }

    fn poll(&mut self) {
        if self.is_starting() && self.destination.runs_now() {
            self.set_running();
        }
        self.report_progress();
        if self.context.cancel.is_cancelled() && !self.late_cancel_reported {
            self.late_cancel_reported = true;
            let text = "the guest runs at its destination, so it is too late to cancel: the rest of its memory is still sent";
            self.context.observer.notice(text);
        }
    }

    fn report_progress(&self) {
        let (faults, remaining) = (self.engine.faults(), self.engine.remaining());
        let progress = Progress { remaining: Some(remaining), faults: Some(faults), ..Progress::default() };
        self.context.report_progress(self.statistics, progress);
    }

    /// Connects again after a lost connection; `None` if the destination has everything.
    fn recover(&mut self, lost: Option<ConnectionLost>) -> Result<Option<Running<'a>>, Failure> {
        let started = Instant::now();
        let mut had_loaded = true;
        let mut reason = match lost {
            Some(ConnectionLost { error, had_loaded: loaded }) => {
                had_loaded = loaded;
                self.report.recoveries += 1;
                error
            }
            None => towline_migration::Error::Cancelled,
        };
        let mut was_notified = false;
        loop {
            match self.destination.recovery_state() {
                Ok(RecoveryState::Completed) => return Ok(None),
                Ok(RecoveryState::Failed(text)) => {
                    return Err(self.destination.load_failure(reason, &text, had_loaded));
                }
                Ok(RecoveryState::Listening(address)) => match self.try_recover(&address) {
                    Ok(running) => {
                        self.context.observer.notice(&format!("{reason}; connected again"));
                        return Ok(Some(running));
                    }
                    Err(Error::Migration(error)) => reason = error,
                    Err(error) => tracing::debug!(%error, "not recovered yet"),
                },
                Ok(RecoveryState::NotReady) => {}
                Err(error) => return Err(self.destination.monitor_failure(error, had_loaded)),
            }
            if started.elapsed() >= BREAK_AFTER && !was_notified {
                was_notified = true;
                self.destination.reconnect_manually(&reason, self.context);
            }
            let is_over = self.destination.is_driven() && started.elapsed() >= RECOVER_TIMEOUT;
            if is_over || self.context.cancel.is_cancelled() && started.elapsed() >= BREAK_AFTER {
                let error = Error::NotRecovered { source: reason, waited: started.elapsed() };
                return Err(self.destination.interrupted(error));
            }
            thread::sleep(RECOVER_INTERVAL);
        }
    }

    fn try_recover(&mut self, address: &Address) -> Result<Running<'a>, Error> {
        let session = Arc::new(Session::default());
        session.set_tuning(&self.context.options.tuning);
        let (main, preempt) = self.connect(address)?;
        let link = PostcopyChannels { main, preempt: self.preempts().then_some(&preempt) };
        Ok(self.engine.recover(&session, &link)?)
    }

    fn preempts(&self) -> bool {
        self.options.requested_pages == RequestedPages::PreemptChannel
    }

    /// The main channel, and a function that connects the preempt channel.
    #[allow(clippy::type_complexity, reason = "a closure behind a name would be boxed")]
    fn connect(
        &self,
        address: &Address,
    ) -> Result<
        (Arc<dyn Channel>, impl Fn() -> towline_migration::Result<Arc<dyn Channel>> + Sync + use<'a>),
        Error,
    > {
        let (context, address) = (self.context, address.clone());
        let options = tls::connecting(context.options)?;
        let connect = move || -> towline_migration::Result<Arc<dyn Channel>> {
            let deadline = Instant::now() + context.options.connect_timeout;
            // Not the user's cancellation: a running guest needs its memory.
            let never = towline_channel::Cancel::new()?;
            Ok(connect_with(&address, deadline, &never, &options)?.into())
        };
        Ok((connect()?, connect))
    }

    fn finish(mut self) -> Result<CopyReport, Failure> {
        self.context.observer.phase(CopyPhase::Release);
        self.report.faults = self.engine.faults();
        self.report_progress();
        let state = self.destination.state(self.run_state);
        let notes = self.destination.finish(self.run_state)?;
        if self.is_starting() && self.destination.is_driven() {
            self.set_running();
        }
        notes.iter().for_each(|note| self.context.observer.notice(note));
        let moved = self.statistics.snapshot();
        let report = self.context.build_report(moved, SourceState::Unchanged, state);
        Ok(CopyReport { postcopy: Some(self.report), ..report })
    }
}
