//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::sync::Arc;

use towline_migration::incoming::{self, Connections, Stage};
use towline_migration::{Incoming, Session, Sink, Statistics};
use towline_protocol::session::Receiver;

use super::context::Run;
use super::error::Error;
use super::progress::{Phase, Progress};
use super::supervise::supervised;
use super::switch::Switch;

/// A stream that comes in.
pub(super) struct Arriving<'a> {
    pub(super) connections: &'a Connections,
    pub(super) session: &'a Arc<Session>,
    pub(super) statistics: &'a Arc<Statistics>,
    pub(super) switch: &'a Switch,
    /// Where it goes.
    pub(super) sink: &'a dyn Sink,
    /// What a towline at the source is told becomes of its guest there.
    pub(super) receiver: Receiver,
}

/// Receives it into a sink, and calls `look` again and again meanwhile.
pub(super) fn receive(
    arriving: &Arriving<'_>,
    run: &Run<'_>,
    look: &mut dyn FnMut() -> Result<Progress, Error>,
) -> Result<(), Error> {
    let Arriving { connections, session, statistics, switch, sink, receiver } = *arriving;
    if let Err(cancelled) = run.check_cancelled() {
        connections.refuse();
        return Err(cancelled);
    }
    run.observer.phase(Phase::Transfer);
    let options = incoming::Options {
        // A source that runs on in any case loses nothing by what it does not hear.
        require_return_path: run.options.return_path && !run.options.is_snapshot(),
        compression: run.options.compression,
        is_snapshot: run.options.is_snapshot(),
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
