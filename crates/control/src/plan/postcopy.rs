//! An image's guest runs at its destination at once, and its memory follows.
//!
//! ```text
//!   prepare ─► offer ─► run ─► serve ─► completed ─► release
//!      │undo     │undo    │       └─ lost ─► migrate-recover ─► serve …   (as often as it takes)
//!      └─────────┴────────┘ from `run` on the guest may run there: a failure says where it is and how it is gone on with
//! ```
//! The image stays as it is. Before `run` nothing runs anywhere, and whatever fails leaves the guest in its image; after it
//! the guest lives at the destination, which waits for its pages, and this process or another one (`--recover`) brings them.
//! A running guest's two QEMUs do it themselves, see [`live`].

mod address;
mod end;
mod live;
mod qemu;
mod stored;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, connect_with};
use towline_image::{StoredGuest, WorkingSet};
use towline_migration::postcopy::{ConnectionLost, Options as EngineOptions, PostcopyChannels, Running};
use towline_migration::{Postcopy, Session, Statistics};

use super::context::Run;
use super::destination::Fate;
use super::endpoint;
use super::ends::Destination;
use super::error::{Error, Failure, look_at};
use super::outcomes::{GuestState, Place};
use super::progress::{Phase, Progress};
use super::report::PostcopyReport;
use super::report::{Report, SourceState};
use super::request::PostcopyOptions;
use super::supervise::supervised;
use super::switch::Switch;
use super::{blame, tls};
use crate::switchover::{DestinationKind, SourceKind};
use address::AddressEnd;
use end::End;
pub(super) use live::migrate;
use qemu::QemuEnd;
use stored::{BREAK_AFTER, RECOVER_TIMEOUT, Stored};

/// How often a guest that is to run is looked at, and how often one that runs.
const STARTS_INTERVAL: Duration = Duration::from_millis(1);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// How long it is looked at so closely.
const STARTS_MAX: Duration = Duration::from_secs(2);
/// How often that is tried.
const RECOVER_INTERVAL: Duration = Duration::from_millis(20);
/// Connections in a row that bring nothing forward.
const IDLE_RECOVERIES_MAX: u32 = 5;

/// Runs the guest of an image at `destination`.
pub(super) fn restore(
    image: &dyn StoredGuest,
    destination: &Destination,
    options: PostcopyOptions,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let ran = image.devices().run_state().is_none_or(|state| state == "running");
    let stored = Stored { guest: image, ran, path: image.local_path() };
    let restored = restore_stored(&stored, destination, options, run);
    restored.and_then(|report| intact(image, report)).map_err(|failure| endpoint::lost(image, failure))
}

/// A guest that runs before its memory has come got zeros where the image was cut short meanwhile.
fn intact(image: &dyn StoredGuest, report: Report) -> Result<Report, Failure> {
    match image.check_intact() {
        Ok(()) => Ok(report),
        Err(error) => Err(look_at(error.into(), Place::ImageCutShort)),
    }
}

/// The destination, checked as far as it can be; nothing is changed.
fn end(
    destination: &Destination,
    stored: &Stored<'_>,
    options: PostcopyOptions,
    run: &Run<'_>,
) -> Result<Box<dyn End>, Error> {
    Ok(match (destination.monitor(), destination.stream()) {
        (Some(path), _) => Box::new(QemuEnd::prepare(path, stored, options, run)?),
        (None, Some(address)) => Box::new(AddressEnd(address.clone())),
        (None, None) => return Err(Error::Usage(format!("--postcopy to {destination}: it runs no guest"))),
    })
}

fn restore_stored(
    stored: &Stored<'_>,
    destination: &Destination,
    options: PostcopyOptions,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let end = end(destination, stored, options, run).map_err(Failure::untouched)?;
    let working_set = working_set(stored, options).map_err(Failure::untouched)?;
    let statistics = Arc::new(Statistics::default());
    let engine_options = EngineOptions {
        max_bandwidth: run.options.means().max_bandwidth,
        answer_timeout: run.options.connect_timeout,
        working_set: working_set.as_ref().map(|set| set.runs().to_vec()).unwrap_or_default(),
    };
    let page_bytes = end.page_bytes(stored.guest.blocks());
    let engine = Postcopy::new(stored.guest, &page_bytes, engine_options, Arc::clone(&statistics));
    let pages =
        working_set.as_ref().map_or(0, |set| set.runs().iter().map(|(_, length)| length / 4096).sum());
    let report = PostcopyReport { working_set_pages: pages, ..PostcopyReport::default() };
    let restore =
        Restore { engine: &engine, statistics: &statistics, options, run, end, report, told: false };
    let restored = restore.go(stored.ran);
    if let Some(mut set) = working_set
        && set.add(&engine.demanded())
        && let Err(error) = set.store()
    {
        run.observer.notice(&format!("the next restore will not know what this one needed: {error}"));
    }
    restored
}

fn working_set(stored: &Stored<'_>, options: PostcopyOptions) -> Result<Option<WorkingSet>, Error> {
    let Some(path) = stored.path.filter(|_| options.record_working_set) else { return Ok(None) };
    let state = stored.guest.device_state()?;
    Ok(Some(WorkingSet::load(path, stored.guest.blocks(), &state)))
}

struct Restore<'a> {
    engine: &'a Postcopy<'a>,
    statistics: &'a Statistics,
    options: PostcopyOptions,
    run: &'a Run<'a>,
    end: Box<dyn End>,
    report: PostcopyReport,
    /// The user was told that it is too late to cancel.
    told: bool,
}

impl<'a> Restore<'a> {
    fn go(mut self, ran: bool) -> Result<Report, Failure> {
        let runs = match self.options.recover {
            true => self.end.ran(),
            false => self.run.options.run().unwrap_or(ran),
        };
        let mut running = match self.options.recover {
            true => self.recover(None)?,
            false => self.start(runs).map(Some)?,
        };
        let (mut idle, mut left) = (0, u64::MAX);
        while let Some(connection) = running {
            let Err(lost) = self.serve(connection, runs) else { break };
            // What is wrong with the image, or with every connection alike, no further one makes right.
            idle = if self.engine.remaining() < left { 0 } else { idle + 1 };
            left = self.engine.remaining();
            if blame::is_of_guest(&lost.error) && !lost.had_loaded {
                let (error, notes) = (Box::new(lost.error.into()), self.end.give_back());
                return Err(Failure { error, guest: GuestState::Safe, notes });
            }
            if blame::is_of_guest(&lost.error) || idle == IDLE_RECOVERIES_MAX {
                return Err(self.end.left(lost.error.into()));
            }
            running = self.recover(Some(lost))?;
        }
        self.finish(runs)
    }

    /// Up to the point of no return, and over it.
    fn start(&mut self, runs: bool) -> Result<Running<'a>, Failure> {
        let (run, engine) = (self.run, self.engine);
        let session = Arc::new(Session::default());
        let offered = (|| {
            run.observer.phase(Phase::Connect);
            let address = self.end.listen(self.options, runs)?;
            let (main, preempt) = self.connect(&address)?;
            run.check_cancelled()?;
            run.observer.phase(Phase::Transfer);
            let link = PostcopyChannels { main, preempt: self.options.preempt.then_some(&preempt) };
            let mut look = || {
                run.report(self.statistics, Progress::default());
                Ok(())
            };
            let switch = Switch::new(SourceKind::Stored, DestinationKind::Stored, run.options);
            supervised(run, &session, &switch, &mut look, || engine.offer(&session, &link))
        })();
        let offered = offered.and_then(|offered| match run.check_cancelled() {
            Ok(()) => Ok(offered),
            Err(error) => {
                drop(offered.withdraw(towline_migration::Error::Cancelled));
                Err(error)
            }
        });
        match offered {
            Ok(offered) => {
                run.observer.phase(Phase::Switchover);
                Ok(offered.run())
            }
            Err(error) => {
                let (error, notes) = self.end.undo(error);
                Err(Failure { error: Box::new(error), guest: GuestState::Safe, notes })
            }
        }
    }

    /// Serves the guest over one connection, and watches it.
    fn serve(&mut self, running: Running<'a>, runs: bool) -> Result<(), ConnectionLost> {
        let (watcher, done, begun) = (thread::current(), AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let served = running.serve();
                done.store(true, Ordering::Release);
                watcher.unpark();
                served
            });
            while !done.load(Ordering::Acquire) && !worker.is_finished() {
                self.look(runs);
                let starts = runs && self.end.is_driven() && self.report.running_after.is_none();
                let closely = starts && begun.elapsed() < STARTS_MAX;
                thread::park_timeout(if closely { STARTS_INTERVAL } else { LOOK_INTERVAL });
            }
            match worker.join() {
                Ok(served) => served,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn look(&mut self, runs: bool) {
        if runs && self.report.running_after.is_none() && self.end.runs_now() {
            self.report.running_after = Some(self.run.elapsed());
            self.run.observer.phase(Phase::Running);
        }
        self.tell_progress();
        if self.run.cancel.is_cancelled() && !self.told {
            self.told = true;
            let text = "the guest runs at its destination, so it is too late to cancel: the rest of its memory is still sent";
            self.run.observer.notice(text);
        }
    }

    fn tell_progress(&self) {
        let (faults, remaining) = (self.engine.faults(), self.engine.remaining());
        let progress = Progress { remaining: Some(remaining), faults: Some(faults), ..Progress::default() };
        self.run.report(self.statistics, progress);
    }

    /// Makes a lost connection again; `None` if it is not needed any more.
    fn recover(&mut self, lost: Option<ConnectionLost>) -> Result<Option<Running<'a>>, Failure> {
        let begun = Instant::now();
        let mut had_loaded = true;
        let mut why = match lost {
            Some(ConnectionLost { error, had_loaded: loaded }) => {
                had_loaded = loaded;
                self.report.recoveries += 1;
                error
            }
            None => towline_migration::Error::Cancelled,
        };
        let mut was_told = false;
        loop {
            match self.end.fate() {
                Ok(Fate::Complete) => return Ok(None),
                Ok(Fate::Failed(text)) => return Err(self.end.given_up(why, &text, had_loaded)),
                Ok(Fate::Listens(address)) => match self.try_recover(&address) {
                    Ok(running) => {
                        self.run.observer.notice(&format!("{why}; connected again"));
                        return Ok(Some(running));
                    }
                    Err(Error::Migration(error)) => why = error,
                    Err(error) => tracing::debug!(%error, "not recovered yet"),
                },
                Ok(Fate::NotYet) => {}
                Err(error) => return Err(self.end.ended(error, had_loaded)),
            }
            if begun.elapsed() >= BREAK_AFTER && !was_told {
                was_told = true;
                self.end.wait_for_help(&why, self.run);
            }
            let is_over = self.end.is_driven() && begun.elapsed() >= RECOVER_TIMEOUT;
            if is_over || self.run.cancel.is_cancelled() && begun.elapsed() >= BREAK_AFTER {
                let error = Error::NotRecovered { source: why, waited: begun.elapsed() };
                return Err(self.end.left(error));
            }
            thread::sleep(RECOVER_INTERVAL);
        }
    }

    fn try_recover(&mut self, address: &Address) -> Result<Running<'a>, Error> {
        let session = Arc::new(Session::default());
        session.follow(&self.run.options.tuning);
        let (main, preempt) = self.connect(address)?;
        let link = PostcopyChannels { main, preempt: self.options.preempt.then_some(&preempt) };
        Ok(self.engine.recover(&session, &link)?)
    }

    /// The main channel, and how the preempt channel is connected.
    #[allow(clippy::type_complexity, reason = "a closure behind a name would be boxed")]
    fn connect(
        &self,
        address: &Address,
    ) -> Result<
        (Arc<dyn Channel>, impl Fn() -> towline_migration::Result<Arc<dyn Channel>> + Sync + use<'a>),
        Error,
    > {
        let (run, address) = (self.run, address.clone());
        let options = tls::connecting(run.options)?;
        let connect = move || -> towline_migration::Result<Arc<dyn Channel>> {
            let deadline = Instant::now() + run.options.connect_timeout;
            // Not the user's cancellation: a guest that runs is to get its memory.
            let never = towline_channel::Cancel::new()?;
            Ok(connect_with(&address, deadline, &never, &options)?.into())
        };
        Ok((connect()?, connect))
    }

    fn finish(mut self, runs: bool) -> Result<Report, Failure> {
        self.run.observer.phase(Phase::Release);
        self.report.faults = self.engine.faults();
        self.tell_progress();
        let state = self.end.state(runs);
        let notes = self.end.finish(runs)?;
        if runs && self.report.running_after.is_none() && self.end.is_driven() {
            self.report.running_after = Some(self.run.elapsed());
            self.run.observer.phase(Phase::Running);
        }
        notes.iter().for_each(|note| self.run.observer.notice(note));
        let moved = self.statistics.snapshot();
        let report = self.run.done(moved, SourceState::Unchanged, state);
        Ok(Report { postcopy: Some(self.report), ..report })
    }
}
