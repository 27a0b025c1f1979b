//! An incoming stream, from a QEMU that is driven here or from a peer that connects, which is received into a
//! sink.

use std::sync::Arc;

use towline_channel::Channel;
use towline_migration::incoming::{self, Connections, IncomingStage, Publication};
use towline_migration::{Incoming, Session, Sink, Snapshot, Statistics};
use towline_protocol::destination::SharedMemory;
use towline_protocol::session::ReceiverMode;

use super::error::Error;
use super::progress::{CopyPhase, Progress};
use super::shared_switchover::TransferContext;
use super::supervise::run_supervised;

/// An incoming stream: its connections, and its statistics.
#[derive(Debug, Default)]
pub(super) struct IncomingStream {
    stream: Option<ConnectedStream>,
    was_connected: bool,
    statistics: Arc<Statistics>,
}

#[derive(Debug)]
struct ConnectedStream {
    session: Arc<Session>,
    connections: Connections,
}

impl IncomingStream {
    /// Sets the connections to the source. `session` is that of the incoming migration.
    pub(super) fn connected(&mut self, session: Arc<Session>, connections: Connections) {
        self.stream = Some(ConnectedStream { session, connections });
        self.was_connected = true;
    }

    /// Receives the guest into a sink, and calls `poll` at intervals. `receiver` is reported to a towline at
    /// the source as the use of its guest.
    ///
    /// # Panics
    /// The stream is not connected.
    pub(super) fn receive(
        &self,
        sink: &dyn Sink,
        receiver: ReceiverMode,
        publication: Publication,
        run: TransferContext<'_>,
        poll: &mut dyn FnMut() -> Result<Progress, Error>,
    ) -> Result<(), Error> {
        let TransferContext { switchover, context } = run;
        let ConnectedStream { session, connections } = self.stream.as_ref().expect("connected before");
        let statistics = &self.statistics;
        if let Err(cancelled) = context.check_cancelled() {
            connections.refuse();
            return Err(cancelled);
        }
        context.observer.phase(CopyPhase::Transfer);
        let options = incoming::Options {
            // A source that runs on in any case does not depend on an acknowledgement.
            require_return_path: context.options.return_path && !context.options.is_snapshot(),
            compression: context.options.compression,
            is_snapshot: context.options.is_snapshot(),
            shared_memory: if context.options.leaves_out_shared_memory() {
                SharedMemory::AtDestination
            } else {
                SharedMemory::Refused
            },
            max_bandwidth: context.options.transfer_options().max_bandwidth,
            receiver,
            publication,
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
                        IncomingStage::Switchover => CopyPhase::Switchover,
                        IncomingStage::Committed => CopyPhase::Loaded,
                    });
                })
            },
        );
        context.report_progress(statistics, Progress::default());
        result
    }

    /// Counters of the transfer so far.
    pub(super) fn moved(&self) -> Snapshot {
        self.statistics.snapshot()
    }

    /// Returns true if a source has connected, also after it was disconnected.
    pub(super) fn was_connected(&self) -> bool {
        self.was_connected
    }

    /// The main channel, while it is connected.
    pub(super) fn main_channel(&self) -> Option<Arc<dyn Channel>> {
        self.stream.as_ref().map(|stream| stream.connections.main_channel())
    }

    /// Takes the connections out, which are closed when they are dropped.
    pub(super) fn disconnect(&mut self) -> Option<Connections> {
        self.stream.take().map(|stream| stream.connections)
    }
}
