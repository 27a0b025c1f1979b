//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Listener};
use towline_image::Origin;
use towline_migration::incoming::{self, Connections, Stage, gather};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};
use towline_protocol::session::Receiver;

use super::conclude::{self as ends, Concluded, Conclusion, conclude};
use super::context::Run;
use super::endpoint::Destination;
use super::error::{Error, Failure, GuestState};
use super::progress::{Phase, Progress};
use super::report::{DestinationState, Report, SourceState};
use super::source::{LANES_TIMEOUT, QmpSource};
use super::supervise::supervised;
use super::survey::Survey;
use super::switch::Switch;
use super::target::Target;
use super::{blame, postcopy, recorder, tls};
use crate::moves::End;
use crate::switchover::{DestinationKind, Directive, Input, SourceKind};

/// A listener without a partner waits this long: until somebody comes or the user ends it.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a source that has its answer may take to close its connections.
const LINGER: Duration = Duration::from_secs(1);

/// Copies a running QEMU's guest.
pub(super) fn from_qemu(path: &Path, destination: &Destination, run: &Run<'_>) -> Result<Report, Failure> {
    if let Some(options) = run.options.postcopy {
        return postcopy::migrate(path, destination, options, run);
    }
    let asked = |error| {
        let guest = if blame::is_unreached(&error) { GuestState::Unreached } else { GuestState::Safe };
        Failure { guest, ..Failure::untouched(error) }
    };
    let mut source = QmpSource::prepare(path, run.options).map_err(asked)?;
    run.tell_repaired(source.qemu());
    // Nothing is changed before a device is detached, so that nothing has to be put back.
    let compared = matches!(destination, Destination::Qmp(_));
    let guest = source.guest(compared).map_err(asked)?;
    let guest = if run.options.detach_vsock { guest.without_vsocks() } else { guest };
    let how = if run.options.live { "qmp (background-snapshot)" } else { "qmp" };
    let origin = Origin { source: how.into(), qemu: Some(source.version_text()), ..Origin::default() };
    let mut target = Target::prepare(destination, Some(&guest), origin, run).map_err(Failure::untouched)?;
    let switch = Switch::new(SourceKind::Qemu, target.kind(), run.options);
    switch.keep_record(source.end_of_move(), recorder::destination(&target), run);
    let session = switch.session();
    let connections = match connect(&mut source, &mut target, &session, run) {
        Ok(connections) => connections,
        Err(error) => {
            // A relay's destination waits for its first bytes.
            session.fail(towline_migration::Error::Cancelled);
            let directive = switch.failed(&error);
            let origin = ends::Origin::Qemu(Box::new(source));
            let ends = Conclusion { switch: &switch, origin, target, run, error: Some(error) };
            return finished(conclude(ends, directive)?, &Statistics::default(), run);
        }
    };
    switch.connected(connections.main_channel());
    let statistics = Arc::new(Statistics::default());
    let arriving =
        Arriving { connections: &connections, session: &session, statistics: &statistics, switch: &switch };
    let received = receive(&arriving, target.sink(), target.receiver(), run, &mut || source.look());
    if received.is_err() && target.surveyed() {
        drop(connections);
        return finish_survey(source, target, &switch, &statistics, run);
    }
    let (directive, error) = match received {
        Ok(()) => {
            run.observer.phase(Phase::Release);
            (switch.handle(Input::Delivered), None)
        }
        Err(error) => {
            // Asked before anything is closed: which end it was says most then.
            let error = if target.is_to_blame(&error) { error } else { source.explain(error) };
            (switch.failed(&error), Some(error))
        }
    };
    // A source whose connections break before it says that it is done would have failed.
    let mut held = Some(connections);
    if error.is_some() && directive != Directive::Hold {
        held = None;
        target.disconnect();
    }
    let origin = ends::Origin::Qemu(Box::new(source));
    let concluded = conclude(Conclusion { switch: &switch, origin, target, run, error }, directive);
    drop(held);
    finished(concluded?, &statistics, run)
}

/// Takes out of the guest what cannot be migrated, and connects both ends: the source last, because a destination that was set to
/// load and is not needed can be started again.
fn connect(
    source: &mut QmpSource,
    target: &mut Target,
    session: &Arc<Session>,
    run: &Run<'_>,
) -> Result<Connections, Error> {
    target.check_vsocks(&source.vsocks)?;
    source.detach(run.cancel)?;
    run.observer.phase(Phase::Connect);
    target.connect(session, run)?;
    source.start(run.lanes, run.options, run.cancel)
}

fn finished(concluded: Concluded, statistics: &Statistics, run: &Run<'_>) -> Result<Report, Failure> {
    let Concluded { source, destination, downtime_ms } = concluded;
    Ok(Report { downtime_ms, ..run.done(statistics.snapshot(), source, destination) })
}

/// Copies what somebody sends to `address`.
pub(super) fn from_stream(
    address: &Address,
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let origin = Origin { source: format!("stream to {address}"), ..Origin::default() };
    let mut target = Target::prepare(destination, None, origin, run).map_err(Failure::untouched)?;
    let switch = Switch::new(SourceKind::Stream, target.kind(), run.options);
    let session = switch.session();
    run.observer.phase(Phase::Connect);
    // The destination is as it was until somebody connects.
    let connected = listen(address, run);
    let connected = connected.and_then(|connections| target.connect_for(connections, &session, run));
    let statistics = Arc::new(Statistics::default());
    let connections = match connected {
        Ok(connections) => connections,
        Err(error) => {
            let directive = switch.failed(&error);
            let origin = ends::Origin::Stored;
            let ends = Conclusion { switch: &switch, origin, target, run, error: Some(error) };
            return finished(conclude(ends, directive)?, &statistics, run);
        }
    };
    let channel = connections.main_channel();
    let from = End::Peer { address: channel.peer().to_owned() };
    switch.keep_record(from, recorder::destination(&target), run);
    switch.connected(channel);
    let arriving =
        Arriving { connections: &connections, session: &session, statistics: &statistics, switch: &switch };
    let look = &mut || Ok(Progress::default());
    let received = receive(&arriving, target.sink(), target.receiver(), run, look);
    if received.is_err() && target.surveyed() {
        return Ok(run.done(statistics.snapshot(), SourceState::Unchanged, DestinationState::Dropped));
    }
    let directive = match &received {
        Ok(()) => {
            run.observer.phase(Phase::Release);
            switch.handle(Input::Delivered)
        }
        Err(error) => switch.failed(error),
    };
    let origin = ends::Origin::Stream(connections.main_channel());
    let ends = Conclusion { switch: &switch, origin, target, run, error: received.err() };
    let concluded = conclude(ends, directive);
    connections.linger(LINGER);
    finished(concluded?, &statistics, run)
}

/// A stream that comes in.
struct Arriving<'a> {
    connections: &'a Connections,
    session: &'a Arc<Session>,
    statistics: &'a Arc<Statistics>,
    switch: &'a Switch,
}

fn listen(address: &Address, run: &Run<'_>) -> Result<Connections, Error> {
    let listener = Listener::bind_with(address, &tls::listening(run.options)?)?;
    run.observer.notice(&format!("listening on {}", listener.local_address()));
    run.observer.listening(listener.local_address());
    let deadline = Instant::now() + LISTEN_TIMEOUT;
    Ok(gather(listener, run.lanes, deadline, LANES_TIMEOUT, run.cancel)?)
}

fn receive(
    arriving: &Arriving<'_>,
    sink: &dyn Sink,
    receiver: Receiver,
    run: &Run<'_>,
    look: &mut dyn FnMut() -> Result<Progress, Error>,
) -> Result<(), Error> {
    let Arriving { connections, session, statistics, switch } = arriving;
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
        receiver,
    };
    let engine = Incoming::new(Arc::clone(session), Arc::clone(statistics), options);
    let result = supervised(
        run,
        session,
        switch,
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
    let switch = Switch::new(SourceKind::Stream, DestinationKind::Stored, run.options);
    let session = switch.session();
    run.observer.phase(Phase::Connect);
    let connections = listen(address, run).map_err(Failure::untouched)?;
    let statistics = Arc::new(Statistics::default());
    let arriving =
        Arriving { connections: &connections, session: &session, statistics: &statistics, switch: &switch };
    match receive(&arriving, survey, Receiver::Stores, run, &mut || Ok(Progress::default())) {
        Err(_) if survey.is_complete() => Ok(statistics.snapshot()),
        Err(error) => Err(Failure::untouched(error)),
        Ok(()) => Ok(statistics.snapshot()),
    }
}

/// The source sees that nothing keeps its guest, which runs on.
fn finish_survey(
    source: QmpSource,
    target: Target,
    switch: &Switch,
    statistics: &Statistics,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    let ran = source.ran;
    let error = Error::Cancelled;
    let directive = switch.failed(&error);
    let origin = ends::Origin::Qemu(Box::new(source));
    let failure = match conclude(Conclusion { switch, origin, target, run, error: Some(error) }, directive) {
        Err(failure) => failure,
        Ok(concluded) => return finished(concluded, statistics, run),
    };
    if failure.guest != GuestState::Safe {
        return Err(failure);
    }
    failure.notes.iter().for_each(|note| run.observer.notice(note));
    let source = if ran { SourceState::Running } else { SourceState::Paused };
    Ok(run.done(statistics.snapshot(), source, DestinationState::Dropped))
}
