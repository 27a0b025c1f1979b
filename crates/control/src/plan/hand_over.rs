//! The destination has everything: the source says that it is done, the destination runs, the source is put in order or ended.
//!
//! ```text
//!   SHUT forwarded ─► destination: loaded ─► source: completed ─► destination: cont, running ─► source: as it was set, or quit
//!        └─ the source has ended ─► destination: loaded ────────────────┘      from `cont` on nobody runs it at the source
//! ```
//! Up to `cont` the guest stands still at both ends and may go on at either; who fails meanwhile leaves it at the other. A
//! source that ends when the destination has everything is no failure: nobody else can run the guest, so the destination does.

use towline_migration::Statistics;

use super::copy::Run;
use super::source::QmpSource;
use super::target::Target;
use super::{Error, Failure, GuestState, Phase, Report, SourceState, blame};

/// Where a guest is that came without its vsock.
const WITHOUT_VSOCK: &str = "at its destination, whole, but for its vsock, which could not be put in there (`device_add`); its source has ended";

/// The source was told that the guest is safe.
pub(super) fn hand_over(
    mut source: QmpSource,
    mut target: Target,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    // Asked while the source finishes, so that `cont` follows at once. Until then the source may have its guest back.
    if let Err(error) = target.wait_loaded() {
        return Err(match blame::is_gone(&error) && source.is_gone() {
            true => both_ended(source, error),
            false => fail(error, Some(source), Some(target), run),
        });
    }
    let downtime_ms = match source.completed() {
        Ok(downtime_ms) => downtime_ms,
        Err(error) if blame::is_gone(&error) && source.has_ended() => {
            return take_over(source, target, statistics, run);
        }
        Err(error) if run.options.live => {
            return Err(look_at(
                error,
                "the image is complete, and the guest runs on at its source, which did not say that it is done: look whether its migration settings are as they were",
            ));
        }
        Err(error) if blame::is_gone(&error) => {
            return Err(look_at(
                error,
                "the destination has the whole guest, but the source's monitor is lost before it said that it is done: look at both, and run only one",
            ));
        }
        // Nothing runs at the destination unless it decides itself; what it has is complete.
        Err(error) if target.runs_by_itself() => {
            return Err(look_at(
                error,
                "the destination has acknowledged the guest and may run it; the source did not say that it is done: look at both, and run only one",
            ));
        }
        Err(error) => return Err(fail(error, Some(source), Some(target), run)),
    };
    run.observer.phase(Phase::CutOver);
    let runs = run.options.run.unwrap_or(source.ran);
    let state = match target.release(runs, run) {
        Ok(state) => state,
        Err(error) if blame::is_gone(&error) && source.is_gone() => return Err(both_ended(source, error)),
        Err(error) => {
            let text = match &error {
                error if blame::is_gone(error) => {
                    "paused at its source (postmigrate); the destination was lost when it was to run it, so it may have run there: if not, run it on at the source (`cont`)"
                }
                Error::NotRunning { .. } => {
                    "it was run at the destination, which stopped it again; its source still holds it as it was before that, paused (postmigrate): run only one of them"
                }
                error if blame::is_refusal(error) => {
                    "paused at both ends: run it on where you want it (`cont`), not at both"
                }
                _ => {
                    "paused at its source (postmigrate); whether it runs at the destination is not known: look there, and run only one of them (`cont`)"
                }
            };
            let notes = source.release(false).unwrap_or_default().notes;
            return Err(Failure { notes, ..look_at(error, text) });
        }
    };
    let attached = target.attach(&source.vsocks);
    let (source, exact_ms) = release(source, run)?;
    let downtime_ms = exact_ms.or(downtime_ms);
    attached.map_err(|error| look_at(error, WITHOUT_VSOCK))?;
    Ok(Report { downtime_ms, ..run.done(statistics.snapshot(), source, state) })
}

/// The source has ended, and the destination, asked before, has the whole guest: it must not be lost.
pub(super) fn take_over(
    mut source: QmpSource,
    mut target: Target,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    source.forget();
    run.observer.notice("the source's QEMU ended when the destination had the whole guest");
    run.observer.phase(Phase::CutOver);
    let runs = run.options.run.unwrap_or(source.ran);
    match target.release(runs, run) {
        Ok(state) => {
            target.attach(&source.vsocks).map_err(|error| look_at(error, WITHOUT_VSOCK))?;
            Ok(run.done(statistics.snapshot(), SourceState::Ended, state))
        }
        Err(error) if blame::is_gone(&error) => Err(both_ended(source, error)),
        Err(error) => {
            Err(look_at(error, "paused at the destination, whole (`cont` runs it on); its source has ended"))
        }
    }
}

/// Whether a copy that failed did so because its source ended, when the destination had everything.
pub(super) fn can_take_over(
    source: &mut QmpSource,
    target: &mut Target,
    is_finished: bool,
    error: &Error,
) -> bool {
    let may_have_it = target.has_it(is_finished && !blame::is_ours(error));
    may_have_it && source.is_gone() && target.wait_loaded().is_ok()
}

/// The guest runs elsewhere, or is stored: the source is put in order, runs on (`--resume`), or is ended. Says how long the guest
/// stood still, in milliseconds, if the source knows.
pub(super) fn release(source: QmpSource, run: &Run<'_>) -> Result<(SourceState, Option<u64>), Failure> {
    if run.options.end_source {
        return match source.end() {
            Ok(ended) => Ok((SourceState::Ended, ended.downtime_ms)),
            Err(error) => Err(look_at(
                error,
                "at its destination; its source could not be ended and holds it paused (postmigrate): end it (`quit`), and do not run it there",
            )),
        };
    }
    let resumes = (run.options.resume || run.options.live) && source.ran;
    let released = source.release(run.options.resume).map_err(|error| {
        look_at(error, "the copy is complete; the source's guest is still paused (`cont`)")
    })?;
    released.notes.iter().for_each(|note| run.observer.notice(note));
    Ok((if resumes { SourceState::Running } else { SourceState::Paused }, released.downtime_ms))
}

fn both_ended(mut source: QmpSource, error: Error) -> Failure {
    source.forget();
    look_at(error, "both QEMUs have ended, and the guest with them")
}

/// A failure after which somebody must look.
pub(super) fn look_at(error: Error, text: &str) -> Failure {
    Failure { error: Box::new(error), guest: GuestState::LookAt(text.into()), notes: Vec::new() }
}

/// A failure before the cut-over: everything is put back.
pub(super) fn fail(
    error: Error,
    source: Option<QmpSource>,
    target: Option<Target>,
    run: &Run<'_>,
) -> Failure {
    let part = match &target {
        Some(target) if target.has_it(false) => "the destination may have all of it, paused: look there",
        _ => "the destination has only a part of it, which does not run",
    };
    let (error, mut notes) = match target {
        Some(target) => target.undo(error, run),
        None => (error, Vec::new()),
    };
    let guest = match source {
        Some(source) => {
            let (guest, more) = source.undo(part);
            notes.extend(more);
            guest
        }
        None => GuestState::Safe,
    };
    Failure { error: Box::new(error), guest, notes }
}
