//! Postcopy of a running guest between two QEMUs: one pass over its memory while it runs, then it runs at the
//! destination and the rest follows.
//!
//! The QEMUs are connected to each other directly and driven by this process: nothing that it could do with the
//! pages would be worth another hop for every fault.
//!
//! ```text
//!   both set ─► migrate ─► a pass ─► the switchover (`executor`)
//! ```
//! Nothing is decided here.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use towline_qmp::commands::MigrationStatus;

use super::super::context::Context;
use super::super::destination::QmpDestination;
use super::super::endpoint::{DestinationEndpoint, QemuDestination, SourceControl, query_failed};
use super::super::error::{Error, Failure};
use super::super::executor::Executor;
use super::super::preflight::{FactsExtent, GuestFacts};
use super::super::progress::{CopyPhase, CopyReport};
use super::super::recorder::RecordedEnds;
use super::super::request::{PostcopyOptions, PostcopySwitch};
use super::super::shared_switchover::SharedSwitchover;
use super::super::source::QmpSource;
use super::super::validate::check_multifd_with_postcopy;
use crate::switchover::{
    DestinationKind, Directive, FinalRunState, GuestRunState, Input, MemorySharing, SourceKind,
};

/// Interval of queries to the source.
const QUERY_INTERVAL: Duration = Duration::from_millis(20);

/// Moves or copies the guest of the QEMU at `from` to that at `to`.
pub(in super::super) fn migrate(
    from: &Path,
    to: &Path,
    options: PostcopyOptions,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let mut source = QmpSource::prepare(from, context).map_err(query_failed)?;
    let mut target = prepare(to, &mut source, context).map_err(Failure::untouched)?;
    let kinds = (SourceKind::Qemu, DestinationKind::Qemu);
    let switchover = SharedSwitchover::new(kinds.0, kinds.1, MemorySharing::Postcopy, context.options);
    context.observer.phase(CopyPhase::Connect);
    // It stays paused until the source has switched to postcopy, or completes without it.
    let started = target.start_postcopy(
        options.requested_pages,
        FinalRunState::Paused,
        context.lanes(),
        context.options.compression,
    );
    let mut destination = QemuDestination::of(target);
    let kept = switchover.keep_record(
        RecordedEnds { source: source.recorded(), destination: destination.move_end() },
        context,
    );
    let guest = if source.was_running { GuestRunState::Running } else { GuestRunState::Stopped };
    let started = kept.and(started).and_then(|address| {
        if !switchover.may_acknowledge(guest) {
            return Err(Error::Cancelled);
        }
        source.start_postcopy(&address, options.requested_pages, context)
    });
    let passed = started.and_then(|()| pass(&mut source, guest, options.switch, &switchover, context));
    let control = SourceControl::Qemu(&mut source);
    let report = Executor::new(&switchover, control, &mut destination, context).conclude(passed)?;
    Ok(CopyReport { moved: source.counted(), ..report })
}

fn prepare(path: &Path, source: &mut QmpSource, context: &Context<'_>) -> Result<QmpDestination, Error> {
    source.check_postcopy()?;
    context.require_paths(&source.qemu)?;
    let mut target = QmpDestination::prepare_postcopy(path, context)?;
    if context.lanes() > 0 {
        check_multifd_with_postcopy(&source.qemu)?;
        check_multifd_with_postcopy(&target.qemu)?;
    }
    GuestFacts::of_qemu(&mut source.qemu, FactsExtent::Compared)?.check(&mut target.qemu, context)?;
    Ok(target)
}

/// Waits for the moment of the switch, and returns the directive that follows.
fn pass(
    source: &mut QmpSource,
    mut guest: GuestRunState,
    switch: PostcopySwitch,
    switchover: &Arc<SharedSwitchover>,
    context: &Context<'_>,
) -> Result<Directive, Error> {
    context.observer.phase(CopyPhase::Transfer);
    loop {
        // Also of a QEMU that does not reply. Its migration is cancelled next.
        context.check_cancelled()?;
        let Some(migration) = source.migration()? else { continue };
        context.observer.progress(&source.progress);
        match &migration.status {
            Some(status) if *status == MigrationStatus::COMPLETED => return Ok(switchover.loaded(guest)),
            Some(status) if status.is_idle() => return Err(source.failure()),
            Some(status) if *status == MigrationStatus::ACTIVE => {
                guest = source.guest_state()?.unwrap_or(guest);
                let passed = source.is_to_switch(&migration, switch, context.observer)?;
                // A paused guest writes nothing: its first pass is its last, and there is no need to switch.
                if guest.is_live() && passed && !context.cancel.is_cancelled() {
                    return match switchover.pass(Input::SwitchRequested(guest)) {
                        Directive::Refuse => Err(Error::Cancelled),
                        directive => Ok(directive),
                    };
                }
            }
            _ => {}
        }
        thread::sleep(QUERY_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use towline_channel::{Address, Cancel};

    use super::super::super::fake_qemu::FakeQemu;
    use super::super::super::request::{CopyRequest, RequestedPages};
    use super::*;

    #[test]
    fn a_pass_over_a_qemu_that_does_not_reply_can_be_cancelled() {
        let (fake, options, cancel) =
            (FakeQemu::start("running"), CopyRequest::default(), Cancel::new().unwrap());
        let context = Context::new(&options, 0, &cancel, &());
        let mut source = QmpSource::prepare(&fake.path(), &context).unwrap();
        source
            .start_postcopy(&Address::Unix("/nowhere".into()), RequestedPages::MainChannel, &context)
            .unwrap();
        fake.script().delayed = Some(("query-migrate", Duration::from_secs(1)));
        cancel.cancel();
        let (from, to) = (SourceKind::Qemu, DestinationKind::Qemu);
        let switchover = SharedSwitchover::new(from, to, MemorySharing::Postcopy, &options);
        let passed = thread::scope(|scope| {
            let ends = || {
                thread::park_timeout(Duration::from_secs(5));
                let mut script = fake.script();
                (script.delayed, script.migration) = (None, Some("failed"));
            };
            let ends = scope.spawn(ends);
            let passed =
                pass(&mut source, GuestRunState::Running, PostcopySwitch::FirstPass, &switchover, &context);
            ends.thread().unpark();
            passed
        });
        assert!(matches!(passed, Err(Error::Cancelled)), "{passed:?}");
    }
}
