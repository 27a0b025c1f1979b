//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Listener};
use towline_image::Origin;
use towline_migration::incoming::{self, Connections, Stage, gather};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};

use super::copy::Run;
use super::hand_over::{can_take_over, fail, hand_over, look_at, take_over};
use super::source::{LANES_TIMEOUT, QmpSource};
use super::survey::Survey;
use super::target::Target;
use super::{
    Destination, DestinationState, Error, Failure, GuestState, Phase, Progress, Report, SourceState, blame,
    postcopy, tls,
};

/// A listener without a partner waits this long: until somebody comes or the user ends it.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a source that has its answer may take to close its connections.
const LINGER: Duration = Duration::from_secs(1);

/// Copies a running QEMU's guest.
pub(super) fn from_qemu(path: &Path, destination: &Destination, run: &Run<'_>) -> Result<Report, Failure> {
    if let Some(options) = run.options.postcopy {
        return postcopy::migrate(path, destination, options, run);
    }
    let mut source = QmpSource::prepare(path, run.options).map_err(|error| {
        let guest = if blame::is_unreached(&error) { GuestState::Unreached } else { GuestState::Safe };
        Failure { guest, ..Failure::untouched(error) }
    })?;
    let guest = match source.guest(matches!(destination, Destination::Qmp(_))) {
        Ok(guest) if run.options.detach_vsock => guest.without_vsocks(),
        Ok(guest) => guest,
        Err(error) => return Err(fail(error, Some(source), None, run)),
    };
    let how = if run.options.live { "qmp (background-snapshot)" } else { "qmp" };
    let origin = Origin { source: how.into(), qemu: Some(source.version_text()), ..Origin::default() };
    let session = Arc::new(Session::default());
    let mut target = match Target::prepare(destination, Some(&guest), origin, run) {
        Ok(target) => target,
        Err(error) => return Err(fail(error, Some(source), None, run)),
    };
    if let Err(error) = target.check_vsocks(&source.vsocks).and_then(|()| source.detach(run.cancel)) {
        return Err(fail(error, Some(source), Some(target), run));
    }
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
    if let Err(error) = received {
        drop(connections);
        if target.is_survey() && target.surveyed() {
            return finish_survey(source, &target, &statistics, run);
        }
        if can_take_over(&mut source, &mut target, session.is_finished(), &error) {
            return take_over(source, target, &statistics, run);
        }
        let error = if target.is_to_blame(&error) { error } else { source.explain(error) };
        return Err(fail(error, Some(source), Some(target), run));
    }
    run.observer.phase(Phase::Release);
    // With its connections open: one that breaks before the source says that it is done would make it fail.
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
    let moved = statistics.snapshot();
    match received {
        Err(_) if target.is_survey() && target.surveyed() => {
            Ok(run.done(moved, SourceState::Unchanged, DestinationState::Dropped))
        }
        Err(error) => {
            drop(connections);
            Err(fail(error, None, Some(target), run))
        }
        Ok(()) => {
            run.observer.phase(Phase::Release);
            let runs = run.options.run.unwrap_or(target.guest_ran());
            let released = target.wait_loaded().and_then(|()| {
                run.observer.phase(Phase::CutOver);
                target.release(runs, run)
            });
            connections.linger(LINGER);
            match released {
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
    let listener = Listener::bind_with(address, &tls::listening(run.options)?)?;
    run.observer.notice(&format!("listening on {}", listener.local_address()));
    run.observer.listening(listener.local_address());
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
        // A source that runs on in any case loses nothing by what it does not hear.
        require_return_path: run.options.return_path && !run.options.live,
        compression: run.options.compression,
        is_snapshot: run.options.live,
    };
    let engine = Incoming::new(Arc::clone(session), Arc::clone(statistics), options);
    let result = run.supervise(
        session,
        &mut || {
            let progress = look()?;
            run.report(statistics, progress);
            Ok(())
        },
        || {
            engine.run_watched(connections, sink, &|stage| {
                run.observer.phase(match stage {
                    Stage::Switchover => Phase::Switchover,
                    Stage::Committed => Phase::Loaded,
                });
            })
        },
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

fn finish_survey(
    source: QmpSource,
    target: &Target,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let ran = source.ran;
    match source.undo("nothing keeps it (null:)") {
        (GuestState::Safe, notes) => {
            notes.iter().for_each(|note| run.observer.notice(note));
            let source = if ran { SourceState::Running } else { SourceState::Paused };
            debug_assert!(target.is_survey());
            Ok(run.done(statistics.snapshot(), source, DestinationState::Dropped))
        }
        (guest, notes) => Err(Failure { error: Box::new(Error::Cancelled), guest, notes }),
    }
}
