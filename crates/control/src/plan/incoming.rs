//! A guest comes in as a stream, from a QEMU that we drive or from whoever connects, and goes on into a sink.

use std::sync::Arc;

use towline_channel::Channel;
use towline_migration::incoming::{self, Connections, Stage};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};
use towline_protocol::session::Receiver;

use super::context::Context;
use super::error::Error;
use super::progress::{Phase, Progress};
use super::shared_switchover::SharedSwitchover;
use super::supervise::run_supervised;

/// A stream that comes in: its connections from [`IncomingStream::connected`] to [`IncomingStream::disconnect`], and what was counted.
#[derive(Debug, Default)]
pub(super) struct IncomingStream {
    stream: Option<Stream>,
    statistics: Arc<Statistics>,
}

#[derive(Debug)]
struct Stream {
    session: Arc<Session>,
    connections: Connections,
}

impl IncomingStream {
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
        switchover: &SharedSwitchover,
        context: &Context<'_>,
        poll: &mut dyn FnMut() -> Result<Progress, Error>,
    ) -> Result<(), Error> {
        let Stream { session, connections } = self.stream.as_ref().expect("connected before it is received");
        let statistics = &self.statistics;
        if let Err(cancelled) = context.check_cancelled() {
            connections.refuse();
            return Err(cancelled);
        }
        context.observer.phase(Phase::Transfer);
        let options = incoming::Options {
            // A source that runs on in any case loses nothing by what it does not hear.
            require_return_path: context.options.return_path && !context.options.is_snapshot(),
            compression: context.options.compression,
            is_snapshot: context.options.is_snapshot(),
            receiver,
        };
        let engine = Incoming::new(Arc::clone(session), Arc::clone(statistics), options);
        let result = run_supervised(
            context,
            session,
            switchover,
            &mut || {
                let progress = poll()?;
                context.report_progress(statistics, progress);
                Ok(())
            },
            || {
                engine.run_watched(connections, sink, &|stage| {
                    context.observer.phase(match stage {
                        Stage::Switchover => Phase::Switchover,
                        Stage::Committed => Phase::Loaded,
                    });
                })
            },
        );
        context.report_progress(statistics, Progress::default());
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
