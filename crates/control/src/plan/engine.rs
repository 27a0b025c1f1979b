//! Runs the engine, which sends a guest of this process, receives one into a sink, or does both, in a separate
//! thread while the plan's thread watches QMP, cancellation and timeouts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Channel, ConnectOptions, Error as ChannelError, Listener, connect_with, pair,
};
use towline_migration::incoming::{self, Connections, IncomingStage, Publication};
use towline_migration::{
    Error as MigrationError, Guest, Incoming, Outgoing, Session, Sink, Snapshot, Statistics, outgoing,
};
use towline_protocol::destination::SharedMemory;
use towline_protocol::session::ReceiverMode;

use super::context::{Context, wants_zero_copy};
use super::error::Error;
use super::error_origin;
use super::progress::{CopyPhase, Progress};
use super::shared_switchover::{SharedSwitchover, TransferContext};

/// Interval at which the watcher polls.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `work` in another thread. Until it is done this one looks again and again, and parks, from which it is woken.
///
/// # Errors
/// No thread can be started, and nothing was done.
pub(super) fn watch<T: Send>(
    work: impl FnOnce() -> T + Send,
    mut look: impl FnMut(&AtomicBool),
) -> Result<T, ChannelError> {
    let watcher = thread::current();
    // Not the thread's end, which comes a moment after its notification.
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let work = || {
            let result = work();
            done.store(true, Ordering::Release);
            watcher.unpark();
            result
        };
        let worker = Builder::new().spawn_scoped(scope, work).map_err(ChannelError::NoThread)?;
        while !done.load(Ordering::Acquire) && !worker.is_finished() {
            look(&done);
        }
        Ok(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Runs the engine and calls `poll` at intervals until it is done. A cancellation or an error of `poll` fails the session, which ends the
/// engine.
pub(super) fn run_supervised<T: Send>(
    context: &Context<'_>,
    session: &Session,
    switchover: &SharedSwitchover,
    poll: &mut dyn FnMut() -> Result<(), Error>,
    work: impl FnOnce() -> Result<T, MigrationError> + Send,
) -> Result<T, Error> {
    session.set_tuning(&context.options.tuning);
    let mut cancel_handled = false;
    let result = watch(work, |done| {
        thread::park_timeout(WATCH_INTERVAL);
        if done.load(Ordering::Acquire) {
            return;
        }
        if context.cancel.is_cancelled() && !cancel_handled {
            cancel_handled = true;
            // Not if the guest may already run at its destination.
            if switchover.cancel() {
                session.fail(MigrationError::Cancelled);
            }
        }
        if let Err(error) = poll() {
            session.fail(MigrationError::guest(error));
        }
    });
    result.unwrap_or_else(|error| Err(error.into())).map_err(|error| match error {
        MigrationError::Cancelled => Error::Cancelled,
        MigrationError::Guest(error) => match error.downcast::<Error>() {
            Ok(error) => *error,
            Err(error) => Error::Migration(MigrationError::Guest(error)),
        },
        error => Error::Migration(error),
    })
}

/// Sends a guest of this process, and calls `poll` at intervals.
pub(super) fn send(
    guest: &dyn Guest,
    connections: &outgoing::Connections,
    run: TransferContext<'_>,
    poll: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<Snapshot, Error> {
    let TransferContext { switchover, context } = run;
    context.check_cancelled()?;
    context.observer.phase(CopyPhase::Transfer);
    let session = switchover.new_gated_session();
    let statistics = Arc::new(Statistics::default());
    let options = outgoing::Options {
        return_path: context.options.return_path,
        max_bandwidth: context.options.transfer_options().max_bandwidth,
        downtime_limit: context.options.downtime_limit,
        answer_timeout: context.options.connect_timeout,
        compression: context.options.compression,
        zero_copy_send: context.options.zero_copy_send,
        ..outgoing::Options::default()
    };
    let engine = Outgoing::new(Arc::clone(&session), Arc::clone(&statistics), options);
    context.set_sending(&statistics);
    let mut poll = || {
        context.report_progress(&statistics, Progress::default());
        poll()
    };
    run_supervised(context, &session, switchover, &mut poll, || engine.run(connections, guest))?;
    context.report_progress(&statistics, Progress::default());
    Ok(statistics.snapshot())
}

/// An incoming stream: its connections, and its statistics.
#[derive(Debug, Default)]
pub(super) struct IncomingStream {
    stream: Option<ConnectedStream>,
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
        let mut last = Progress::default();
        let result = run_supervised(
            context,
            session,
            switchover,
            &mut || {
                last = poll()?;
                context.report_progress(statistics, last);
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
        if let Err(Error::Migration(MigrationError::Channel(ChannelError::NoThread(_)))) = &result {
            connections.refuse();
        }
        if result.is_ok() {
            // Nothing remains, and no rates are those of the end.
            last = Progress { pass: last.pass, ..Progress::default() };
        }
        context.report_progress(statistics, last);
        result
    }

    /// Counters of the transfer so far.
    pub(super) fn moved(&self) -> Snapshot {
        self.statistics.snapshot()
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

// A copy within this process: one half of the engine sends and the other receives, over memory or, with
// lanes, over TCP on the loopback interface, so lanes are the same as between two hosts.

/// Size of the buffer between the two halves of a copy without lanes.
const PAIR_BYTES: usize = 4 << 20;
/// Timeout of a connection to ourselves.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Copies `guest` into `sink` over `lanes` lanes.
pub(super) fn copy_in_process(
    guest: &dyn Guest,
    sink: &dyn Sink,
    lanes: usize,
    run: TransferContext<'_>,
) -> Result<Snapshot, Error> {
    let context = run.context;
    let (out, into) = connect_to_self(lanes, context)?;
    let options =
        incoming::Options { compression: context.options.compression, ..incoming::Options::default() };
    let session = Arc::new(Session::default());
    let receiver = Incoming::new(Arc::clone(&session), Arc::default(), options);
    let (main, lanes) = into;
    let (sent, received) = thread::scope(|scope| {
        let receive = || {
            let into = incoming::Connections::connected(main, &lanes, CONNECT_TIMEOUT)?;
            receiver.run(&into, sink)
        };
        let received = Builder::new().spawn_scoped(scope, receive).map_err(ChannelError::NoThread)?;
        let sent = send(guest, &out, run, &mut || Ok(()));
        // Nothing more is sent, whether it failed or not.
        drop(out);
        if sent.is_err() {
            session.fail(MigrationError::Cancelled);
        }
        Ok::<_, ChannelError>((sent, received.join()))
    })?;
    match received {
        Ok(Ok(())) => sent,
        // Either thread may see the cancellation first.
        Ok(Err(error)) if context.cancel.is_cancelled() && error_origin::is_cancelled(&error) => {
            Err(Error::Cancelled)
        }
        // The half that failed by itself has the reason; the other one only lost its connection.
        Ok(Err(error)) => Err(match sent {
            Err(reason) if error_origin::is_local(&reason) || matches!(error, MigrationError::Cancelled) => {
                reason
            }
            _ => error.into(),
        }),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

type Shared = Arc<dyn Channel>;
/// Connections to send over, and the main channel and lanes to receive from.
type InProcessConnections = (outgoing::Connections, (Shared, Vec<Shared>));

fn connect_to_self(lanes: usize, context: &Context<'_>) -> Result<InProcessConnections, Error> {
    if lanes == 0 {
        let (left, right) = pair(PAIR_BYTES);
        return Ok((sending(Arc::new(left), Vec::new()), (Arc::new(right), Vec::new())));
    }
    let loopback = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let listener = Listener::bind(&loopback)?;
    let one = |zero_copy| -> Result<(Shared, Shared), Error> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let options = ConnectOptions { zero_copy, ..ConnectOptions::default() };
        let out = connect_with(listener.local_address(), deadline, context.cancel, &options)?;
        Ok((Arc::from(out), Arc::from(listener.accept(deadline, context.cancel)?)))
    };
    let (main, arriving) = one(false)?;
    let lanes = (0..lanes).map(|_| one(wants_zero_copy(context.options)));
    let (out_lanes, in_lanes) = lanes.collect::<Result<(Vec<_>, Vec<_>), _>>()?;
    Ok((sending(main, out_lanes), (arriving, in_lanes)))
}

fn sending(main: Shared, lanes: Vec<Shared>) -> outgoing::Connections {
    outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false }
}
