//! Instant restore: the guest of an image runs at its destination at once, and its memory follows.
//!
//! ```text
//!   prepare ─► offer ─► run ─► serve ─► the switchover (`executor`)
//!                               └─ lost ─► migrate-recover ─► serve …   (as often as it takes)
//! ```
//! The image stays as it is. Nothing is decided here: [`crate::switchover`] decides where the guest is after a
//! failure. The QEMUs of a running guest send its memory themselves, see [`live`].

mod live;
mod target;
mod unreadable;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, connect_with};
use towline_image::{Image, StoredGuest, WorkingSet};
use towline_migration::postcopy::{
    Background, ConnectionLost, Options as EngineOptions, PostcopyChannels, Running,
};
use towline_migration::{Postcopy, Session, Statistics};

use super::context::{Context, connect_options};
use super::destination::{BREAK_AFTER, RECOVER_INTERVAL, RecoveryState};
use super::endpoint::{self, SourceControl};
use super::ends::{Destination, Source};
use super::engine::{run_supervised, watch};
use super::error::{Error, Failure};
use super::executor::Executor;
use super::progress::{CopyPhase, CopyReport, DestinationState, PostcopyReport, Progress};
use super::request::{PostcopyOptions, RequestedPages};
use super::shared_switchover::SharedSwitchover;
use crate::switchover::{
    Directive, FinalRunState, GuestRunState, Input, LossCause, MemoryLoss, MemorySharing, SourceKind,
};
use target::Target;
use unreadable::Attempts;

/// Interval of queries to a guest that is starting, and to one that runs.
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which a starting guest is queried at the short interval.
const START_POLL_TIME: Duration = Duration::from_secs(2);
/// Maximum number of consecutive connections without progress.
const IDLE_RECOVERIES_MAX: u32 = 5;

/// Runs the guest at its destination before its memory is there.
pub(super) fn copy(
    source: &Source,
    destination: &Destination,
    how: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    if let (Some(from), Some(to)) = (source.monitor(), destination.monitor()) {
        return live::migrate(from, to, how, context);
    }
    let image = endpoint::open(source, context.options, context.cancel, context.observer);
    restore(image.map_err(Failure::unopened)?.as_ref(), destination, how, context)
}

/// Runs the guest of an image at `destination`.
pub(super) fn restore(
    image: &dyn StoredGuest,
    destination: &Destination,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    restore_stored(image, destination, options, context)
        .map_err(|failure| endpoint::explain_truncation(image, failure))
}

fn restore_stored(
    image: &dyn StoredGuest,
    destination: &Destination,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let target = Target::open(destination, image, options, context).map_err(Failure::untouched)?;
    let ran_when_stored = image.devices().run_state().is_none_or(|state| state == "running");
    let is_live = if options.recover { target.was_running() } else { ran_when_stored };
    let working_set = working_set(image).map_err(Failure::untouched)?;
    let statistics = Arc::new(Statistics::default());
    let engine_options = EngineOptions {
        max_bandwidth: context.options.transfer_options().max_bandwidth,
        answer_timeout: context.options.connect_timeout,
        working_set: working_set.as_ref().map(|set| set.runs().to_vec()).unwrap_or_default(),
        // An image without a path is in a store.
        background: image.image().map_or(Background::AfterFaults, |_| Background::AtOnce),
    };
    let page_bytes = target.page_bytes(image.blocks());
    let engine = Postcopy::new(image, &page_bytes, engine_options, Arc::clone(&statistics));
    let pages =
        working_set.as_ref().map_or(0, |set| set.runs().iter().map(|(_, length)| length / 4096).sum());
    let report = PostcopyReport { working_set_pages: pages, ..PostcopyReport::default() };
    let (kind, memory) = (target.kind(), MemorySharing::Postcopy);
    let restore = Restore {
        engine: &engine,
        statistics: &statistics,
        image,
        options,
        context,
        target,
        switchover: SharedSwitchover::new(SourceKind::Stored, kind, memory, context.options),
        guest: if is_live { GuestRunState::Running } else { GuestRunState::Stopped },
        report,
        running: None,
        attempts: Attempts::new(),
        left: u64::MAX,
        idle: 0,
        reason: towline_migration::Error::Cancelled,
        error: None,
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

fn working_set(image: &dyn StoredGuest) -> Result<Option<WorkingSet>, Error> {
    let Some(path) = image.image().map(Image::path) else { return Ok(None) };
    let state = image.device_state()?;
    Ok(Some(WorkingSet::load(path, image.blocks(), &state)))
}

/// Drives one restore: it carries out the directives that need the engine, and leaves the others to the executor.
struct Restore<'a> {
    engine: &'a Postcopy<'a>,
    statistics: &'a Statistics,
    image: &'a dyn StoredGuest,
    options: PostcopyOptions,
    context: &'a Context<'a>,
    target: Target,
    switchover: Arc<SharedSwitchover>,
    /// Run state of the guest when it was stored, or at the destination whose memory is missing.
    guest: GuestRunState,
    report: PostcopyReport,
    /// The connection that memory is sent over.
    running: Option<Running<'a>>,
    attempts: Attempts,
    /// Bytes that were left when the last connection was lost.
    left: u64,
    /// Number of consecutive connections without progress.
    idle: u32,
    /// Reason for which the last connection was lost.
    reason: towline_migration::Error,
    /// The error of the restore, once it has failed.
    error: Option<Error>,
    /// The user was notified that it is too late to cancel.
    late_cancel_reported: bool,
}

impl<'a> Restore<'a> {
    fn run(mut self) -> Result<CopyReport, Failure> {
        let mut directive = match self.start() {
            Ok(directive) => directive,
            Err(error) => {
                let directive = self.switchover.failed(&error);
                self.error = Some(error);
                directive
            }
        };
        loop {
            let input = match directive {
                Directive::ServeMemory => self.serve(),
                Directive::Recover => self.recover(),
                directive => return self.conclude(directive),
            };
            directive = self.switchover.handle(input);
        }
    }

    /// Offers the guest, and passes the point of no return.
    fn start(&mut self) -> Result<Directive, Error> {
        let (context, engine) = (self.context, self.engine);
        if self.options.recover {
            return Ok(self.switchover.handle(Input::CommitRequested(self.guest)));
        }
        let session = Arc::new(Session::default());
        context.observer.phase(CopyPhase::Connect);
        let address = self.target.listen(self.options, self.final_run_state())?;
        let (main, preempt) = self.connect(&address)?;
        context.check_cancelled()?;
        context.observer.phase(CopyPhase::Transfer);
        let link = PostcopyChannels { main, preempt: self.preempts().then_some(&preempt) };
        let mut look = || {
            context.report_progress(self.statistics, Progress::default());
            Ok(())
        };
        let offer = || engine.offer(&session, &link);
        let offered = run_supervised(context, &session, &self.switchover, &mut look, offer)?;
        if context.cancel.is_cancelled() {
            self.switchover.cancel();
        }
        let directive = self.switchover.handle(Input::CommitRequested(self.guest));
        if directive != Directive::ServeMemory {
            drop(offered.withdraw(towline_migration::Error::Cancelled));
            return Err(Error::Cancelled);
        }
        context.observer.phase(CopyPhase::Switchover);
        self.running = Some(offered.run());
        Ok(directive)
    }

    fn final_run_state(&self) -> FinalRunState {
        FinalRunState::requested(self.switchover.state().request().run, self.guest)
    }

    /// Sends memory over one connection, for as long as that lasts.
    fn serve(&mut self) -> Input {
        let lost = |cause, has_loaded| Input::MemoryLost(MemoryLoss { cause, has_loaded });
        // A guest that another towline has started has no connection.
        let Some(running) = self.running.take() else { return lost(LossCause::Connection, true) };
        let Err(ConnectionLost { error, had_loaded: has_loaded }) = self.watch(running) else {
            self.report.faults = self.engine.faults();
            self.report_progress();
            self.context.observer.phase(CopyPhase::Release);
            let Err(error) = self.image.check_not_truncated() else { return Input::Delivered };
            self.error = Some(error.into());
            return lost(LossCause::Truncated, true);
        };
        let has_progressed = self.engine.remaining() < self.left;
        self.left = self.engine.remaining();
        let is_unreadable = matches!(error, towline_migration::Error::Guest(_));
        let is_read_again =
            (has_loaded || !is_unreadable) && self.attempts.wait(&error, has_progressed, self.context);
        if is_unreadable && !is_read_again {
            self.error = Some(error.into());
            return lost(LossCause::Unreadable, has_loaded);
        }
        if !is_read_again {
            self.idle = if has_progressed { 0 } else { self.idle + 1 };
        }
        self.report.recoveries += 1;
        self.reason = error;
        lost(LossCause::Connection, has_loaded)
    }

    /// Sends memory, and watches the guest.
    fn watch(&mut self, running: Running<'a>) -> Result<(), ConnectionLost> {
        let started = Instant::now();
        let mut running = Some(running);
        let mut serve = || running.take().expect("it is served once").serve();
        let served = watch(&mut serve, |_| {
            self.poll();
            let closely = self.is_starting() && started.elapsed() < START_POLL_TIME;
            thread::park_timeout(if closely { START_POLL_INTERVAL } else { POLL_INTERVAL });
        });
        // Its own threads cannot be started either, by which the connection is lost.
        served.unwrap_or_else(|_| serve())
    }

    /// Returns true if the guest will run and was not seen to run yet.
    fn is_starting(&self) -> bool {
        self.final_run_state() == FinalRunState::Running
            && self.report.running_after.is_none()
            && self.target.is_driven()
    }

    fn poll(&mut self) {
        if self.is_starting() && self.target.runs_now() {
            self.report.running_after = Some(self.context.elapsed());
            self.context.observer.phase(CopyPhase::Running);
        }
        self.report_progress();
        if self.context.cancel.is_cancelled() && !self.late_cancel_reported {
            self.late_cancel_reported = true;
            self.switchover.cancel_late(self.context.observer);
        }
    }

    fn report_progress(&self) {
        let (faults, remaining) = (self.engine.faults(), self.engine.remaining());
        let progress = Progress { remaining: Some(remaining), faults: Some(faults), ..Progress::default() };
        self.context.report_progress(self.statistics, progress);
    }

    /// Connects again after a lost connection.
    fn recover(&mut self) -> Input {
        let started = Instant::now();
        let mut was_notified = false;
        while self.idle < IDLE_RECOVERIES_MAX {
            match self.target.recovery_state() {
                RecoveryState::Ended { status, error } => {
                    self.error = error;
                    return Input::Destination(status);
                }
                RecoveryState::Listening(address) => match self.try_recover(&address) {
                    Ok(running) => {
                        self.running = Some(running);
                        self.context.observer.notice(&format!("{}; connected again", self.reason));
                        return Input::Done;
                    }
                    Err(Error::Migration(error)) => self.reason = error,
                    Err(error) => tracing::debug!(%error, "not recovered yet"),
                },
                RecoveryState::NotReady => {}
            }
            if started.elapsed() >= BREAK_AFTER && !was_notified {
                was_notified = true;
                self.target.reconnect_manually(&self.reason, self.context);
            }
            let is_over =
                self.target.is_driven() && started.elapsed() >= self.context.options.recover_timeout;
            if is_over || self.context.cancel.is_cancelled() && started.elapsed() >= BREAK_AFTER {
                return self.not_recovered(Some(started.elapsed()));
            }
            thread::sleep(RECOVER_INTERVAL);
        }
        self.not_recovered(None)
    }

    /// There is no further attempt; `waited`: after this time.
    fn not_recovered(&mut self, waited: Option<Duration>) -> Input {
        let reason = std::mem::replace(&mut self.reason, towline_migration::Error::Cancelled);
        self.error = Some(match waited {
            Some(waited) => Error::NotRecovered { source: reason, waited },
            None => reason.into(),
        });
        let is_intact = self.image.check_not_truncated().is_ok();
        let cause = if is_intact { LossCause::Connection } else { LossCause::Unreadable };
        Input::MemoryLost(MemoryLoss { cause, has_loaded: true })
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
        let options = connect_options(context.options)?;
        let connect = move || -> towline_migration::Result<Arc<dyn Channel>> {
            let deadline = Instant::now() + context.options.connect_timeout;
            // Not the user's cancellation: a running guest needs its memory.
            let never = towline_channel::Cancel::new()?;
            Ok(connect_with(&address, deadline, &never, &options)?.into())
        };
        Ok((connect()?, connect))
    }

    /// Carries out all other directives.
    fn conclude(self, directive: Directive) -> Result<CopyReport, Failure> {
        let Self { statistics, context, target, switchover, mut report, error, .. } = self;
        let mut destination = target.into_endpoint();
        let mut executor = Executor::new(&switchover, SourceControl::Stored, destination.as_mut(), context);
        executor.error = error;
        let concluded = executor.run(directive)?;
        if concluded.destination == DestinationState::Running && report.running_after.is_none() {
            report.running_after = Some(context.elapsed());
            context.observer.phase(CopyPhase::Running);
        }
        Ok(CopyReport { moved: statistics.snapshot(), postcopy: Some(report), ..concluded })
    }
}
