//! The receiving end: a guest arrives over channels in a [`Sink`].
//!
//! ```text
//!   main channel ─► main_channel::MainChannel ──┐ (the caller's thread)
//!   lane i ───────► lane::Lane ─────────────────┼─► Sink        barrier: every lane waits until the main channel leads
//!                                               └─► return path ─► source: PONG, at the end SHUT 0
//! ```
//!
//! When the main channel has everything, the lanes are ended and waited for; then the sink gets the device
//! state and commits. SHUT 0 is sent only after [`Sink::commit`] returned: until then the source keeps its
//! guest, and any error here closes the connections, which makes the source resume.

mod connect;
mod lane;
mod main_channel;
mod records_ahead;
mod refuse;
mod shared;
mod wait;

use std::net::Shutdown;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Builder};

use towline_channel::{Cancel, Capabilities, Channel, Error as ChannelError};
use towline_protocol::PeerIncompatible;
use towline_protocol::colo::FirstCopy;
use towline_protocol::destination::StreamDecoder;
use towline_protocol::multifd::INIT_BYTES;

pub(crate) use connect::ConnectionKind;
pub use connect::{Connections, connect, gather};
pub use shared::{IncomingStage, Options, Publication};

use crate::limiter::Limiter;
use crate::{Error, Result, Session, Sink, Statistics};
use main_channel::MainChannel;
use refuse::REFUSE_TIMEOUT;
use shared::Shared;

/// A migration that comes in.
#[derive(Debug)]
pub struct Incoming {
    session: Arc<Session>,
    statistics: Arc<Statistics>,
    options: Options,
}

impl Incoming {
    /// A migration whose threads share `session` and are counted in `statistics`.
    pub fn new(session: Arc<Session>, statistics: Arc<Statistics>, options: Options) -> Self {
        Self { session, statistics, options }
    }

    /// Receives the guest into `sink`; returns when it is safe there and the source was acknowledged. The
    /// caller must hold the connections until the source is done with them ([`Connections::linger`]): it may
    /// fail if they break before.
    ///
    /// # Errors
    /// The first error of any thread. The source was not acknowledged, so it keeps its guest, even where
    /// [`Sink::commit`] had returned: a received guest must not be started then.
    pub fn run(&self, connections: &Connections, sink: &dyn Sink) -> Result<()> {
        self.run_watched(connections, sink, &|_| {})
    }

    /// As [`Self::run`]; `watch` is called at each [`IncomingStage`] from the thread of the main channel,
    /// which waits for it.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_watched(
        &self,
        connections: &Connections,
        sink: &dyn Sink,
        watch: &(dyn Fn(IncomingStage) + Sync),
    ) -> Result<()> {
        let begin = match self.options.is_snapshot {
            true => StreamDecoder::of_snapshot(),
            false => StreamDecoder::with_shared_memory(self.options.shared_memory),
        };
        self.receive(connections, sink, watch, begin).map(drop)
    }

    /// As [`Self::run`], for the first copy of a guest that is protected: the source (`x-colo`) then awaits
    /// [`checkpoints::take`](crate::checkpoints::take) on its main channel.
    ///
    /// # Errors
    /// As [`Self::run`]; also if there are lanes.
    pub fn run_first_copy(&self, connections: &Connections, sink: &dyn Sink) -> Result<FirstCopy> {
        if !connections.lanes.is_empty() {
            let error = PeerIncompatible::Feature { what: "lanes with checkpoints", switch: "multifd" };
            return Err(Error::protocol(connections.main.peer())(error.into()));
        }
        self.receive(connections, sink, &|_| {}, StreamDecoder::with_checkpoints())
    }

    fn receive(
        &self,
        connections: &Connections,
        sink: &dyn Sink,
        watch: &(dyn Fn(IncomingStage) + Sync),
        begin: StreamDecoder,
    ) -> Result<FirstCopy> {
        let _guard = self.session.guard();
        check_lanes(&connections.lanes)?;
        let shared = Shared {
            session: &self.session,
            statistics: &self.statistics,
            sink,
            lanes: connections.lanes.len(),
            options: self.options,
            watch,
            blocks: OnceLock::new(),
            machine_type: OnceLock::new(),
            complete: Cancel::new()?,
            limiter: Limiter::new(self.options.max_bandwidth),
        };
        self.session.watch_upstream(&connections.main);
        self.statistics.count_receives_of(connections.main.as_ref());
        for lane in &connections.lanes {
            self.session.watch_lane(lane);
            self.statistics.count_receives_of(lane.as_ref());
        }
        self.statistics.count_lane(INIT_BYTES * connections.lanes.len());
        let mut main = MainChannel::new(connections, &shared);
        // Every lane has ended before the guest is committed, so nothing changes it afterwards.
        let received = thread::scope(|scope| {
            let _guard = self.session.guard();
            let mut unread = Vec::new();
            for (index, channel) in connections.lanes.iter().enumerate() {
                let shared = &shared;
                let run = move || lane::run(index, channel.as_ref(), shared);
                if let Err(error) = Builder::new().spawn_scoped(scope, run) {
                    self.session.fail(ChannelError::NoThread(error).into());
                    unread.push((index, channel));
                }
            }
            let received = main.receive(begin);
            match received {
                Ok(_) => self.session.close(),
                Err(error) => {
                    self.session.fail(error);
                    if !unread.is_empty() {
                        refuse::refuse(&connections.main, unread.iter().map(|(_, lane)| *lane));
                        unread.iter().for_each(|(index, _)| self.session.leave(*index));
                    }
                    self.session.see_out(REFUSE_TIMEOUT);
                    return Err(Error::Cancelled);
                }
            }
            shared.complete.cancel();
            end_lanes(&connections.lanes);
            received
        });
        match received.and_then(|(memory, state)| main.deliver(memory, state)) {
            Ok(copy) => {
                self.session.succeed();
                Ok(copy)
            }
            Err(error) => {
                let error = self.session.end(error);
                if self.session.must_acknowledge_after(&error) {
                    main.acknowledge_regardless();
                } else {
                    connections.refuse();
                }
                Err(error)
            }
        }
    }
}

/// A lane that cannot be shut down could not be ended, neither by an error nor by the end of the stream.
fn check_lanes(lanes: &[Arc<dyn Channel>]) -> Result<()> {
    match lanes.iter().find(|lane| !lane.capabilities().contains(Capabilities::SHUTDOWN)) {
        None => Ok(()),
        Some(lane) => {
            let peer = lane.peer().to_owned();
            Err(ChannelError::Unsupported { peer, what: "lanes; use sockets for them" }.into())
        }
    }
}

/// Wakes lanes that wait for more where [`Shared::complete`] does not.
fn end_lanes(lanes: &[Arc<dyn Channel>]) {
    for lane in lanes.iter().filter(|lane| lane.as_fd().is_none()) {
        if let Err(error) = lane.shutdown(Shutdown::Read) {
            tracing::debug!(peer = lane.peer(), %error, "shutdown");
        }
    }
}
