//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Listener};
use towline_image::Origin;
use towline_migration::incoming::{self, Connections, gather};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};

use super::copy::Run;
use super::fit::Guest;
use super::source::{LANES_TIMEOUT, QmpSource};
use super::survey::Survey;
use super::target::Target;
use super::{
    Destination, DestinationState, Error, Failure, GuestState, Phase, Progress, Report, SourceState, blame,
};

/// A listener without a partner waits this long: until somebody comes or the user ends it.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Copies a running QEMU's guest.
pub(super) fn from_qemu(path: &Path, destination: &Destination, run: &Run<'_>) -> Result<Report, Failure> {
    let mut source = QmpSource::prepare(path, run.options).map_err(|error| {
        let guest = if blame::is_unreached(&error) { GuestState::Unreached } else { GuestState::Safe };
        Failure { guest, ..Failure::untouched(error) }
    })?;
    let guest = Guest::of_qemu(source.facts());
    let origin = Origin { source: "qmp".into(), qemu: Some(source.version_text()), ..Origin::default() };
    let session = Arc::new(Session::default());
    let mut target = match Target::prepare(destination, Some(&guest), origin, run) {
        Ok(target) => target,
        Err(error) => return Err(fail(error, Some(source), None, run)),
    };
    run.observer.phase(Phase::Connect);
    // The source last: a destination that was told to load and is not needed can be started again.
    let connected = target.connect(&session, run);
    let connected = connected.and_then(|()| source.start(run.lanes, run.options, run.cancel));
    let connections = match connected {
        Ok(connections) => connections,
        Err(error) => {
            // A relay's destination waits for its first bytes.
            session.fail(towline_migration::Error::Cancelled);
            return Err(fail(error, Some(source), Some(target), run));
        }
    };
    let statistics = Arc::new(Statistics::default());
    let received = receive(&connections, target.sink(), &session, &statistics, run, &mut || source.look());
    drop(connections);
    if let Err(error) = received {
        if target.is_survey() && target.surveyed() {
            return finish_survey(source, &target, &statistics, run);
        }
        let error = if target.is_to_blame(&error) { error } else { source.explain(error) };
        return Err(fail(error, Some(source), Some(target), run));
    }
    run.observer.phase(Phase::Release);
    hand_over(source, target, &statistics, run)
}

/// Copies what somebody sends to `address`.
pub(super) fn from_stream(
    address: &Address,
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let session = Arc::new(Session::default());
    let origin = Origin { source: format!("stream to {address}"), ..Origin::default() };
    let mut target = match Target::prepare(destination, None, origin, run) {
        Ok(target) => target,
        Err(error) => return Err(fail(error, None, None, run)),
    };
    run.observer.phase(Phase::Connect);
    // The destination is as it was until somebody came.
    let connected = listen(address, run);
    let connected = connected.and_then(|connections| target.connect_for(connections, &session, run));
    let connections = match connected {
        Ok(connections) => connections,
        Err(error) => return Err(fail(error, None, Some(target), run)),
    };
    let statistics = Arc::new(Statistics::default());
    let received =
        receive(&connections, target.sink(), &session, &statistics, run, &mut || Ok(Progress::default()));
    drop(connections);
    let moved = statistics.snapshot();
    match received {
        Err(_) if target.is_survey() && target.surveyed() => {
            Ok(run.done(moved, SourceState::Unchanged, DestinationState::Dropped))
        }
        Err(error) => Err(fail(error, None, Some(target), run)),
        Ok(()) => {
            run.observer.phase(Phase::Release);
            let runs = run.options.run.unwrap_or(target.guest_ran());
            match target.wait_loaded().and_then(|()| target.release(runs, run)) {
                Ok(state) => Ok(run.done(moved, SourceState::Unchanged, state)),
                Err(error) => {
                    let text = match blame::is_gone(&error) {
                        true => {
                            "the destination was lost when it had the whole guest; its source was told that it arrived, and holds it paused (postmigrate): look whether it ran at the destination before it runs on there (`cont`)"
                        }
                        false => {
                            "the destination has the whole guest and its source was told so: run it there (`cont`)"
                        }
                    };
                    Err(look_at(error, text))
                }
            }
        }
    }
}

fn listen(address: &Address, run: &Run<'_>) -> Result<Connections, Error> {
    let listener = Listener::bind(address)?;
    run.observer.notice(&format!("listening on {}", listener.local_address()));
    let deadline = Instant::now() + LISTEN_TIMEOUT;
    Ok(gather(listener, run.lanes, deadline, LANES_TIMEOUT, run.cancel)?)
}

fn receive(
    connections: &Connections,
    sink: &dyn Sink,
    session: &Arc<Session>,
    statistics: &Arc<Statistics>,
    run: &Run<'_>,
    look: &mut dyn FnMut() -> Result<Progress, Error>,
) -> Result<(), Error> {
    if let Err(cancelled) = run.check_cancelled() {
        connections.refuse();
        return Err(cancelled);
    }
    run.observer.phase(Phase::Transfer);
    let options = incoming::Options {
        require_return_path: run.options.return_path,
        compression: run.options.compression,
    };
    let engine = Incoming::new(Arc::clone(session), Arc::clone(statistics), options);
    let result = run.supervise(
        session,
        &mut || {
            let progress = look()?;
            run.report(statistics, progress);
            Ok(())
        },
        || engine.run(connections, sink),
    );
    run.report(statistics, Progress::default());
    result
}

/// Receives the stream that `source` listens for into `survey`, whose source is told that nothing arrived.
pub(super) fn survey(address: &Address, survey: &Survey, run: &Run<'_>) -> Result<Snapshot, Failure> {
    let session = Arc::new(Session::default());
    run.observer.phase(Phase::Connect);
    let connections = listen(address, run).map_err(Failure::untouched)?;
    let statistics = Arc::new(Statistics::default());
    match receive(&connections, survey, &session, &statistics, run, &mut || Ok(Progress::default())) {
        Err(_) if survey.is_complete() => Ok(statistics.snapshot()),
        Err(error) => Err(Failure::untouched(error)),
        Ok(()) => Ok(statistics.snapshot()),
    }
}

/// The guest is safe at the destination and its source knows: the source says that it is done, the destination runs.
fn hand_over(
    mut source: QmpSource,
    mut target: Target,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let runs = run.options.run.unwrap_or(source.ran);
    let (downtime_ms, ended) = match source.completed() {
        Ok(downtime_ms) => (downtime_ms, false),
        // Nobody is left at the source to run it, and nobody told the destination to: it must not be lost.
        Err(error) if blame::is_gone(&error) && source.has_ended() => {
            let text = "the source's QEMU ended when the destination had the whole guest";
            run.observer.notice(text);
            (None, true)
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
    if ended {
        source.forget();
    }
    // Until it is told to run, nothing runs there: the source may have its guest back.
    if let Err(error) = target.wait_loaded() {
        return Err(fail(error, Some(source), Some(target), run));
    }
    let state = match target.release(runs, run) {
        Ok(state) => state,
        Err(error) => {
            let text = match blame::is_gone(&error) {
                true if ended => "both QEMUs have ended, and the guest with them",
                true => {
                    "paused at its source (postmigrate); the destination was lost when it was to run it, so it may have run there: if not, run it on at the source (`cont`)"
                }
                false if ended => {
                    "paused at the destination, whole (`cont` runs it on); its source has ended"
                }
                false => "paused at both ends: run it on where you want it (`cont`), not at both",
            };
            let notes = if ended { Vec::new() } else { source.release(false).unwrap_or_default() };
            return Err(Failure { notes, ..look_at(error, text) });
        }
    };
    if ended {
        return Ok(run.done(statistics.snapshot(), SourceState::Unchanged, state));
    }
    let resumes = run.options.resume && source.ran;
    let notes = source.release(run.options.resume);
    let notes = notes.map_err(|error| {
        look_at(error, "the copy is complete; the source's guest is still paused (`cont`)")
    })?;
    notes.iter().for_each(|note| run.observer.notice(note));
    let source = if resumes { SourceState::Running } else { SourceState::Paused };
    Ok(Report { downtime_ms, ..run.done(statistics.snapshot(), source, state) })
}

fn look_at(error: Error, text: &str) -> Failure {
    Failure { error: Box::new(error), guest: GuestState::LookAt(text.into()), notes: Vec::new() }
}

fn finish_survey(
    source: QmpSource,
    target: &Target,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let ran = source.ran;
    match source.undo() {
        (GuestState::Safe, notes) => {
            notes.iter().for_each(|note| run.observer.notice(note));
            let source = if ran { SourceState::Running } else { SourceState::Paused };
            debug_assert!(target.is_survey());
            Ok(run.done(statistics.snapshot(), source, DestinationState::Dropped))
        }
        (guest, notes) => Err(Failure { error: Box::new(Error::Cancelled), guest, notes }),
    }
}

/// A failure before the cut-over: everything is put back.
fn fail(error: Error, source: Option<QmpSource>, target: Option<Target>, run: &Run<'_>) -> Failure {
    let (error, mut notes) = match target {
        Some(target) => target.undo(error, run),
        None => (error, Vec::new()),
    };
    let guest = match source {
        Some(source) => {
            let (guest, more) = source.undo();
            notes.extend(more);
            guest
        }
        None => GuestState::Safe,
    };
    Failure { error: Box::new(error), guest, notes }
}
