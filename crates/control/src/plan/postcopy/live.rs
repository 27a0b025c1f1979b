//! A running guest goes from a QEMU to another one by postcopy: a pass over its memory while it runs, then it runs over there and
//! the rest follows.
//!
//! The two QEMUs are connected to each other directly, and this process drives them: nothing that it could do with the pages on
//! their way is worth another hop for every fault. A connection between them that breaks is made again.
//!
//! ```text
//!   both set ─► migrate ─► a pass ─► migrate-start-postcopy ─► postcopy-active ─► completed ─► released, or ended
//!                 │ cancel: the guest runs on                    └─ paused ─► migrate-recover · migrate resume ─┘
//! ```

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::switchover::{DestinationKind, SourceKind};
use towline_migration::Snapshot;
use towline_qmp::commands::{MigrationInfo, MigrationStatus, RamStats};

use super::super::blame;
use super::super::conclude::{self as ends, Conclusion, conclude};
use super::super::context::Run;
use super::super::destination::{Fate, QmpDestination};
use super::super::endpoint::{Origin, QemuDestination, asked};
use super::super::error::{Error, Failure, look_at};
use super::super::outcomes::Place;
use super::super::progress::Phase;
use super::super::report::PostcopyReport;
use super::super::report::{DestinationState, Report};
use super::super::request::PostcopyOptions;
use super::super::source::QmpSource;
use super::super::switch::Switch;
use super::stored::{BREAK_AFTER, RECOVER_TIMEOUT};

/// How often the QEMUs are asked.
const ASK_INTERVAL: Duration = Duration::from_millis(20);

/// Moves or copies the guest of the QEMU at `from` to that at `to`.
pub(in super::super) fn migrate(
    from: &Path,
    to: &Path,
    options: PostcopyOptions,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let mut source = QmpSource::prepare(from, run.options).map_err(asked)?;
    run.tell_repaired(source.qemu());
    let mut target = prepare(to, &mut source, run).map_err(Failure::untouched)?;
    run.tell_repaired(target.qemu());
    let switch = Switch::new(SourceKind::Qemu, DestinationKind::Qemu, run.options);
    run.observer.phase(Phase::Connect);
    // It stays paused until the source has switched, or says that it is done without.
    let begun = target.start_postcopy(options.preempt, false, run.lanes, run.options.compression);
    let begun =
        begun.and_then(|address| source.start_postcopy(&address, options.preempt, run.lanes, run.options));
    let switched = match begun.and_then(|()| switch_over(&mut source, run)) {
        Ok(switched) => switched,
        Err(error) => {
            let error = target.explain(error);
            let directive = switch.failed(&error);
            let (origin, target) = (Origin::Qemu(&mut source), &mut QemuDestination::of(target));
            let ends = Conclusion { switch: &switch, origin, target, run, error: Some(error) };
            let concluded = conclude(ends, directive)?;
            return Ok(run.done(Snapshot::default(), concluded.source, concluded.destination));
        }
    };
    let runs = run.options.run().unwrap_or(switched);
    run.observer.phase(Phase::Switchover);
    let (report, moved) = (PostcopyReport::default(), Snapshot::default());
    let mut live = Live { source, target, run, report, moved, runs, told: false };
    match live.follow() {
        Ok(downtime_ms) => live.finish(downtime_ms),
        Err(failure) => Err(failure),
    }
}

fn prepare(path: &Path, source: &mut QmpSource, run: &Run<'_>) -> Result<QmpDestination, Error> {
    source.check_postcopy()?;
    let mut target = QmpDestination::prepare_postcopy(path)?;
    if run.lanes > 0 {
        source.takes_lanes_beside_postcopy()?;
        target.takes_lanes_beside_postcopy()?;
    }
    target.check(&source.guest(true)?, run)?;
    Ok(target)
}

/// Waits for the end of the first pass, and switches. Returns whether the guest was live then.
fn switch_over(source: &mut QmpSource, run: &Run<'_>) -> Result<bool, Error> {
    run.observer.phase(Phase::Transfer);
    let (mut cancelled, mut live) = (false, source.ran);
    loop {
        let Some(migration) = source.migration()? else { continue };
        run.observer.progress(&source.progress);
        match &migration.status {
            Some(status) if *status == MigrationStatus::COMPLETED => return Ok(live),
            Some(status) if status.is_final() && cancelled => return Err(Error::Cancelled),
            Some(status) if status.is_final() => return Err(source.failed(&migration)),
            Some(status) if *status == MigrationStatus::ACTIVE => {
                live = source.is_live()?.unwrap_or(live);
                let passed = migration.ram.as_ref().is_some_and(|ram| source.has_passed_once(ram));
                // A guest that is paused writes nothing: its first pass is its last, and there is nothing to switch for.
                if live && passed && !cancelled && !run.cancel.is_cancelled() {
                    source.switch()?;
                    return Ok(live);
                }
            }
            _ => {}
        }
        if run.cancel.is_cancelled() && !cancelled {
            cancelled = true;
            source.cancel_own()?;
        }
        thread::sleep(ASK_INTERVAL);
    }
}

/// From the switch on: the source holds the guest's memory, and the destination its processors.
struct Live<'a> {
    source: QmpSource,
    target: QmpDestination,
    run: &'a Run<'a>,
    report: PostcopyReport,
    /// What the source's QEMU counted.
    moved: Snapshot,
    runs: bool,
    told: bool,
}

impl Live<'_> {
    /// Until the source says that it is done. Returns how long the guest stood still, in milliseconds.
    fn follow(&mut self) -> Result<Option<u64>, Failure> {
        loop {
            // A QEMU that does not answer just now says nothing of its guest.
            let Some(migration) = self.source.migration().map_err(|error| self.lost(error))? else {
                continue;
            };
            self.run.observer.progress(&self.source.progress);
            self.look(&migration);
            match &migration.status {
                Some(status) if *status == MigrationStatus::COMPLETED => {
                    return Ok(migration.downtime.and_then(|downtime| u64::try_from(downtime).ok()));
                }
                Some(status) if *status == MigrationStatus::POSTCOPY_PAUSED => self.recover()?,
                Some(status) if status.is_final() => {
                    let error = self.source.failed(&migration);
                    return Err(self.failed(error));
                }
                _ => {}
            }
            thread::sleep(ASK_INTERVAL);
        }
    }

    fn look(&mut self, migration: &MigrationInfo) {
        if self.runs && self.report.running_after.is_none() && is_over_there(migration) && self.starts() {
            self.report.running_after = Some(self.run.elapsed());
            self.run.observer.phase(Phase::Running);
        }
        if let Some(ram) = &migration.ram {
            self.report.faults.requests = ram.postcopy_requests;
            self.moved = moved(ram);
        }
        if self.run.cancel.is_cancelled() && !self.told {
            self.told = true;
            let text = "the guest runs at its destination, so it is too late to cancel: the rest of its memory is still sent";
            self.run.observer.notice(text);
        }
    }

    /// The source has given its guest away: the destination runs it as soon as it has its devices.
    fn starts(&mut self) -> bool {
        match self.target.start_loaded() {
            Ok(runs) => runs,
            Err(error) => {
                tracing::debug!(%error, "the destination does not run the guest yet");
                false
            }
        }
    }

    /// Both QEMUs lost their connection: the destination listens again, and the source goes on.
    fn recover(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut was_told = false;
        self.report.recoveries += 1;
        loop {
            match self.target.fate() {
                Ok(Fate::Complete) => return Ok(()),
                Ok(Fate::Failed(text)) => {
                    let error = self.target.failed(&text);
                    return Err(self.failed(error));
                }
                Ok(Fate::Listens(address)) => match self.source.resume_to(&address) {
                    Ok(()) => {
                        self.run.observer.notice("the QEMUs lost their connection; connected again");
                        return Ok(());
                    }
                    Err(error) if blame::is_gone(&error) => return Err(self.lost(error)),
                    Err(error) => tracing::debug!(%error, "the source does not resume yet"),
                },
                Ok(Fate::NotYet) if begun.elapsed() >= BREAK_AFTER && !was_told => {
                    was_told = true;
                    self.target.break_connection();
                }
                Ok(Fate::NotYet) => {}
                Err(error) => return Err(self.lost(error)),
            }
            if begun.elapsed() >= RECOVER_TIMEOUT {
                let error = Error::NotConnectedAgain { waited: begun.elapsed() };
                return Err(self.lost(error));
            }
            thread::sleep(ASK_INTERVAL);
        }
    }

    /// The source gave up, by its own word. Until the destination had all device state it keeps its guest.
    fn failed(&mut self, error: Error) -> Failure {
        self.source.forget();
        self.target.leave();
        look_at(error, Place::PostcopyRefused)
    }

    /// One of the monitors is lost, or the connection.
    fn lost(&mut self, error: Error) -> Failure {
        self.source.forget();
        self.target.leave();
        look_at(error, Place::PostcopySplit)
    }

    fn finish(mut self, downtime_ms: Option<u64>) -> Result<Report, Failure> {
        self.run.observer.phase(Phase::Release);
        let runs = self.runs;
        let finished = self.target.wait_completed();
        let finished = finished.and_then(|()| if runs { self.target.run_after_all() } else { Ok(()) });
        let notes = match finished.and_then(|()| self.target.release()) {
            Ok(notes) => notes,
            Err(error) => {
                self.source.forget();
                return Err(look_at(error, Place::PostcopyArrived));
            }
        };
        notes.iter().for_each(|note| self.run.observer.notice(note));
        if runs && self.report.running_after.is_none() {
            self.report.running_after = Some(self.run.elapsed());
            self.run.observer.phase(Phase::Running);
        }
        let (source, exact_ms) = ends::release_source(&mut self.source, self.run)?;
        let downtime_ms = exact_ms.or(downtime_ms);
        let state = if runs { DestinationState::Running } else { DestinationState::Paused };
        let report = self.run.done(self.moved, source, state);
        Ok(Report { downtime_ms, postcopy: Some(self.report), ..report })
    }
}

/// Whether the source has sent everything but memory, and cannot run its guest any more.
fn is_over_there(migration: &MigrationInfo) -> bool {
    let status = migration.status.as_ref().map_or("", MigrationStatus::as_str);
    status.starts_with("postcopy-") && status != "postcopy-device" || status == "completed"
}

fn moved(ram: &RamStats) -> Snapshot {
    Snapshot {
        total: ram.total,
        transferred: ram.transferred,
        normal: ram.normal,
        duplicate: ram.duplicate,
        normal_bytes: ram.normal_bytes,
        dirty_sync_count: ram.dirty_sync_count,
        ..Snapshot::default()
    }
}
