//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::sync::Arc;

use towline_channel::Channel;
use towline_migration::incoming::{self, Connections, Stage};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};
use towline_protocol::session::Receiver;

use super::context::Run;
use super::error::Error;
use super::progress::{Phase, Progress};
use super::supervise::supervised;
use super::switch::Switch;

/// A stream that comes in: its connections from [`Arrival::connected`] to [`Arrival::disconnect`], and what was counted.
#[derive(Debug, Default)]
pub(super) struct Arrival {
    stream: Option<Stream>,
    statistics: Arc<Statistics>,
}

#[derive(Debug)]
struct Stream {
    session: Arc<Session>,
    connections: Connections,
}

impl Arrival {
    /// The source is at the other end of these connections. `session` is that of the incoming migration.
    pub(super) fn connected(&mut self, session: Arc<Session>, connections: Connections) {
        self.stream = Some(Stream { session, connections });
    }

    /// Receives it into a sink, and calls `look` again and again meanwhile. A towline at the source is told that `receiver` is what
    /// becomes of its guest here.
    ///
    /// # Panics
    /// It is not connected.
    pub(super) fn receive(
        &self,
        sink: &dyn Sink,
        receiver: Receiver,
        switch: &Switch,
        run: &Run<'_>,
        look: &mut dyn FnMut() -> Result<Progress, Error>,
    ) -> Result<(), Error> {
        let Stream { session, connections } = self.stream.as_ref().expect("connected before it is received");
        let statistics = &self.statistics;
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

    /// What has moved.
    pub(super) fn moved(&self) -> Snapshot {
        self.statistics.snapshot()
    }

    /// The main channel, while it is connected.
    pub(super) fn main_channel(&self) -> Option<Arc<dyn Channel>> {
        self.stream.as_ref().map(|stream| stream.connections.main_channel())
    }

    /// Lets go of the connections, which are closed when they are dropped.
    pub(super) fn disconnect(&mut self) -> Option<Connections> {
        self.stream.take().map(|stream| stream.connections)
    }
}
