//! Postcopy of a running guest between two QEMUs: one pass over its memory while it runs, then it runs at the
//! destination and the rest follows.
//!
//! The QEMUs are connected to each other directly and driven by this process: nothing that it could do with the
//! pages would be worth another hop for every fault. A lost connection between them is recovered.
//!
//! ```text
//!   both set ─► migrate ─► a pass ─► migrate-start-postcopy ─► postcopy-active ─► completed ─► released, or ended
//!                 │ cancel: the guest runs on                    └─ paused ─► migrate-recover · migrate resume ─┘
//! ```

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::moves::MoveEnd;
use crate::switchover::{
    AtDestination, AtSource, Decision, DestinationKind, FinalRunState, GuestState, Placement, SourceKind,
    SwitchoverOutcome, ToDo,
};
use towline_migration::Snapshot;
use towline_qmp::commands::{MigrationInfo, MigrationStatus, RamStats};

use super::super::context::Context;
use super::super::destination::{QmpDestination, RecoveryState};
use super::super::endpoint::{QemuDestination, SourceControl, query_failed};
use super::super::error::{Error, Failure, needs_attention};
use super::super::error_origin;
use super::super::executor::{SwitchoverEnds, conclude};
use super::super::outcomes::{GuestAfterFailure, SourceCategory};
use super::super::preflight::FactsExtent;
use super::super::progress::CopyPhase;
use super::super::recorder::RecordedEnds;
use super::super::report::PostcopyReport;
use super::super::report::{CopyReport, SourceState};
use super::super::request::PostcopyOptions;
use super::super::shared_switchover::SharedSwitchover;
use super::super::source::{CopyEnd, GuestAction, QmpSource};
use super::stored::{BREAK_AFTER, RECOVER_TIMEOUT};

/// Time for which a lost monitor of the source is connected to again.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of queries to the QEMUs.
const QUERY_INTERVAL: Duration = Duration::from_millis(20);

/// Moves or copies the guest of the QEMU at `from` to that at `to`.
pub(in super::super) fn migrate(
    from: &Path,
    to: &Path,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let mut source = QmpSource::prepare(from, context).map_err(query_failed)?;
    context.report_repair(source.qemu());
    let mut target = prepare(to, &mut source, context).map_err(Failure::untouched)?;
    context.report_repair(target.qemu());
    let switchover = SharedSwitchover::new(SourceKind::Qemu, DestinationKind::Qemu, context.options);
    let destination = MoveEnd::qemu(target.qemu().socket(), target.qemu().process());
    switchover.keep_record(RecordedEnds { source: source.recorded(), destination }, context);
    context.observer.phase(CopyPhase::Connect);
    // It stays paused until the source has switched to postcopy, or completes without it.
    let started = target.start_postcopy(
        options.requested_pages,
        FinalRunState::Paused,
        context.lanes(),
        context.options.compression,
    );
    let started = started.and_then(|address| {
        source.start_postcopy(&address, options.requested_pages, context.lanes(), context.options)
    });
    let switched = match started.and_then(|()| switch_over(&mut source, &switchover, context)) {
        Ok(switched) => switched,
        Err(error) => {
            let error = target.explain(error);
            let directive = switchover.failed(&error);
            let (source, destination) = (SourceControl::Qemu(&mut source), &mut QemuDestination::of(target));
            let ends =
                SwitchoverEnds { switchover: &switchover, source, destination, context, error: Some(error) };
            let concluded = conclude(ends, directive)?;
            return Ok(context.build_report(Snapshot::default(), concluded.source, concluded.destination));
        }
    };
    let run_state = FinalRunState::running_if(context.options.run().unwrap_or(switched));
    context.observer.phase(CopyPhase::Switchover);
    let (report, moved) = (PostcopyReport::default(), Snapshot::default());
    let mut live = LivePostcopy {
        source,
        target,
        switchover,
        context,
        report,
        moved,
        run_state,
        late_cancel_reported: false,
        has_switched_over: false,
    };
    match live.wait_until_completed() {
        Ok(downtime_ms) => live.finish(downtime_ms),
        Err(failure) => Err(failure),
    }
}

fn prepare(path: &Path, source: &mut QmpSource, context: &Context<'_>) -> Result<QmpDestination, Error> {
    source.check_postcopy()?;
    context.require_paths(source.qemu())?;
    let mut target = QmpDestination::prepare_postcopy(path, context)?;
    if context.lanes() > 0 {
        source.check_multifd_with_postcopy()?;
        target.check_multifd_with_postcopy()?;
    }
    target.check(&source.guest(FactsExtent::Compared)?, context)?;
    Ok(target)
}

/// Waits for the end of the first pass, and switches to postcopy. Returns true if the guest was live then.
fn switch_over(
    source: &mut QmpSource,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) -> Result<bool, Error> {
    context.observer.phase(CopyPhase::Transfer);
    let (mut cancelled, mut live) = (false, source.was_running);
    loop {
        let Some(migration) = source.migration()? else { continue };
        context.observer.progress(&source.progress);
        match &migration.status {
            Some(status) if *status == MigrationStatus::COMPLETED => return Ok(live),
            Some(status) if status.is_idle() && cancelled => return Err(Error::Cancelled),
            Some(status) if status.is_idle() => return Err(source.failed(&migration)),
            Some(status) if *status == MigrationStatus::ACTIVE => {
                live = source.is_live()?.unwrap_or(live);
                let passed = migration.ram.as_ref().is_some_and(|ram| source.has_passed_once(ram));
                // A paused guest writes nothing: its first pass is its last, and there is no need to switch.
                if live && passed && !cancelled && !context.cancel.is_cancelled() {
                    switchover.record(Decision::Run)?;
                    return match source.switch_to_postcopy() {
                        Err(error) if error_origin::is_refusal(&error) => Err(error),
                        // Without a reply it may have been carried out: from here on the guest is the destination's.
                        Ok(()) | Err(_) => Ok(live),
                    };
                }
            }
            _ => {}
        }
        if context.cancel.is_cancelled() && !cancelled {
            cancelled = true;
            source.cancel_migration()?;
        }
        thread::sleep(QUERY_INTERVAL);
    }
}

/// The phase after the switch: the source holds the guest's memory, and the destination its vCPUs.
struct LivePostcopy<'a> {
    source: QmpSource,
    target: QmpDestination,
    switchover: Arc<SharedSwitchover>,
    context: &'a Context<'a>,
    report: PostcopyReport,
    /// Counters of the source's QEMU.
    moved: Snapshot,
    run_state: FinalRunState,
    late_cancel_reported: bool,
    /// The source was seen to be done with the guest.
    has_switched_over: bool,
}

impl LivePostcopy<'_> {
    /// Waits until the source completes. Returns the downtime in milliseconds.
    fn wait_until_completed(&mut self) -> Result<Option<u64>, Failure> {
        loop {
            // A missing reply is no evidence about the guest.
            let migration = match self.source.migration() {
                Ok(Some(migration)) => migration,
                Ok(None) => continue,
                Err(error) => {
                    self.find_source(error)?;
                    continue;
                }
            };
            self.context.observer.progress(&self.source.progress);
            self.observe_status(&migration);
            match &migration.status {
                Some(status) if *status == MigrationStatus::COMPLETED => {
                    return Ok(migration.downtime.and_then(|downtime| u64::try_from(downtime).ok()));
                }
                Some(status) if *status == MigrationStatus::POSTCOPY_PAUSED => self.recover()?,
                Some(status) if status.is_idle() => {
                    let error = self.source.failed(&migration);
                    return Err(self.failed(error));
                }
                _ => {}
            }
            thread::sleep(QUERY_INTERVAL);
        }
    }

    /// Connects to the source's monitor again: a proxy in front of it may have ended.
    fn find_source(&mut self, error: Error) -> Result<(), Failure> {
        let started = Instant::now();
        while self.source.qemu_mut().reconnect().is_err() {
            if self.source.has_exited() || started.elapsed() >= RECONNECT_TIMEOUT {
                return Err(self.lost(error));
            }
            thread::sleep(QUERY_INTERVAL);
        }
        Ok(())
    }

    fn observe_status(&mut self, migration: &MigrationInfo) {
        if has_switched_over(migration) && !std::mem::replace(&mut self.has_switched_over, true) {
            // The guest has stopped there, which the record proves from now on.
            if let Err(error) = self.switchover.record(Decision::Run) {
                tracing::warn!(%error, "a later towline cannot prove that the source is done with the guest");
            }
        }
        if self.run_state == FinalRunState::Running
            && self.report.running_after.is_none()
            && has_switched_over(migration)
            && self.starts()
        {
            self.report.running_after = Some(self.context.elapsed());
            self.context.observer.phase(CopyPhase::Running);
        }
        if let Some(ram) = &migration.ram {
            self.report.faults.requests = ram.postcopy_requests;
            self.moved = moved(ram);
        }
        if self.context.cancel.is_cancelled() && !self.late_cancel_reported {
            self.late_cancel_reported = true;
            let text = "the guest runs at its destination, so it is too late to cancel: the rest of its memory is still sent";
            self.context.observer.notice(text);
        }
    }

    /// Starts the guest as soon as the destination has its devices: the source cannot run it any more.
    fn starts(&mut self) -> bool {
        match self.target.start_if_loaded() {
            Ok(runs) => runs,
            Err(error) => {
                tracing::debug!(%error, "the destination does not run the guest yet");
                false
            }
        }
    }

    /// Recovers the connection between the QEMUs: the destination listens again, and the source resumes.
    fn recover(&mut self) -> Result<(), Failure> {
        let started = Instant::now();
        let mut was_told = false;
        self.report.recoveries += 1;
        loop {
            match self.target.recovery_state() {
                Ok(RecoveryState::Completed) => return Ok(()),
                Ok(RecoveryState::Failed(text)) => {
                    let error = self.target.failed(&text);
                    return Err(self.failed(error));
                }
                Ok(RecoveryState::Listening(address)) => match self.source.resume_to(&address) {
                    Ok(()) => {
                        self.context.observer.notice("the QEMUs lost their connection; connected again");
                        return Ok(());
                    }
                    Err(error) if error_origin::is_monitor_lost(&error) => return Err(self.lost(error)),
                    Err(error) => tracing::debug!(%error, "the source does not resume yet"),
                },
                Ok(RecoveryState::NotReady) if started.elapsed() >= BREAK_AFTER && !was_told => {
                    was_told = true;
                    self.target.pause_migration();
                }
                Ok(RecoveryState::NotReady) => {}
                Err(error) => return Err(self.lost(error)),
            }
            if started.elapsed() >= RECOVER_TIMEOUT {
                let error = Error::NotConnectedAgain { waited: started.elapsed() };
                return Err(self.lost(error));
            }
            thread::sleep(QUERY_INTERVAL);
        }
    }

    /// The source reported a failure. It keeps its guest until the destination has all device state.
    fn failed(&mut self, error: Error) -> Failure {
        self.undecided(error, AtDestination::Unknown, ToDo::LookAtDestination)
    }

    /// A monitor, or the connection between the QEMUs, is lost.
    fn lost(&mut self, error: Error) -> Failure {
        self.undecided(error, AtDestination::Runs, ToDo::Reconnect)
    }

    fn undecided(&mut self, error: Error, destination: AtDestination, to_do: ToDo) -> Failure {
        self.source.keep_settings();
        self.target.keep_settings();
        let state = GuestState::new(AtSource::Paused, destination, to_do);
        let guest = GuestAfterFailure::unresolved(state);
        let outcome = SwitchoverOutcome::Unresolved(state);
        let notes = self.switchover.ended(outcome, &guest.sentence(SourceCategory::Qemu));
        Failure { error: Box::new(error), guest, notes: notes.into_iter().collect() }
    }

    fn finish(mut self, downtime_ms: Option<u64>) -> Result<CopyReport, Failure> {
        self.context.observer.phase(CopyPhase::Release);
        let runs = self.run_state == FinalRunState::Running;
        let finished = self.target.wait_completed();
        let finished = finished.and_then(|()| if runs { self.target.ensure_running() } else { Ok(()) });
        let notes = match finished.and_then(|()| self.target.restore_settings()) {
            Ok(notes) => notes,
            Err(error) => return Err(self.undecided(error, AtDestination::MayRun, ToDo::KeepDestination)),
        };
        notes.iter().for_each(|note| self.context.observer.notice(note));
        if runs && self.report.running_after.is_none() {
            self.report.running_after = Some(self.context.elapsed());
            self.context.observer.phase(CopyPhase::Running);
        }
        let placement = if runs { Placement::Running } else { Placement::Paused };
        let (source, exact_ms) = release_source(&mut self.source, placement, self.context)?;
        let notice = self.switchover.ended(SwitchoverOutcome::Completed(placement), "");
        notice.iter().for_each(|notice| self.context.observer.notice(notice));
        let downtime_ms = exact_ms.or(downtime_ms);
        let report = self.context.build_report(self.moved, source, self.run_state.into());
        Ok(CopyReport { downtime_ms, postcopy: Some(self.report), ..report })
    }
}

/// Restores or ends the source of a guest that runs elsewhere. Returns its state and the downtime in
/// milliseconds.
fn release_source(
    source: &mut QmpSource,
    placement: Placement,
    context: &Context<'_>,
) -> Result<(SourceState, Option<u64>), Failure> {
    if context.options.ends_source() {
        let ended =
            source.quit().map_err(|error| needs_attention(error, GuestState::not_ended(placement)))?;
        return Ok((SourceState::Ended, ended));
    }
    let released = source.restore(GuestAction::Leave, CopyEnd::Complete).map_err(|error| {
        needs_attention(error, GuestState { source: AtSource::Unknown, ..GuestState::not_ended(placement) })
    })?;
    released.notes.iter().for_each(|note| context.observer.notice(note));
    Ok((SourceState::Paused, released.downtime_ms))
}

/// Returns true if the source has sent everything except memory, and cannot run its guest any more.
fn has_switched_over(migration: &MigrationInfo) -> bool {
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
