//! A copy within this process: one half of the engine sends and the other receives, over memory or, with
//! lanes, over TCP on the loopback interface, so lanes are the same as between two hosts.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, ConnectOptions, Listener, connect_with, pair};
use towline_migration::{Guest, Incoming, Session, Sink, Snapshot, incoming, outgoing};

use super::context::Context;
use super::error::Error;
use super::shared_switchover::TransferContext;
use super::{error_origin, send, zero_copy};

/// Size of the buffer between the two halves of a copy without lanes.
const PAIR_BYTES: usize = 4 << 20;
/// Timeout of a connection to ourselves.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Copies `guest` into `sink` over `lanes` lanes.
pub(super) fn copy(
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
        let received = scope.spawn(|| {
            let into = incoming::Connections::connected(main, &lanes, CONNECT_TIMEOUT)?;
            receiver.run(&into, sink)
        });
        let sent = send::send(guest, &out, run, &mut || Ok(()));
        // Nothing more is sent, whether it failed or not.
        drop(out);
        if sent.is_err() {
            session.fail(towline_migration::Error::Cancelled);
        }
        (sent, received.join())
    });
    match received {
        Ok(Ok(())) => sent,
        // Either thread may see the cancellation first.
        Ok(Err(error)) if context.cancel.is_cancelled() && error_origin::is_cancelled(&error) => {
            Err(Error::Cancelled)
        }
        // The half that failed by itself has the reason; the other one only lost its connection.
        Ok(Err(error)) => Err(match sent {
            Err(reason)
                if error_origin::is_local(&reason)
                    || matches!(error, towline_migration::Error::Cancelled) =>
            {
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
        let out = outgoing::Connections {
            main: Arc::new(left),
            lanes: Vec::new(),
            uuid: [0; 16],
            introduced: false,
        };
        return Ok((out, (Arc::new(right), Vec::new())));
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
    let (mut out_lanes, mut in_lanes) = (Vec::new(), Vec::new());
    for _ in 0..lanes {
        let (out, into) = one(zero_copy::is_wanted(context.options))?;
        out_lanes.push(out);
        in_lanes.push(into);
    }
    Ok((
        outgoing::Connections { main, lanes: out_lanes, uuid: [0; 16], introduced: false },
        (arriving, in_lanes),
    ))
}
