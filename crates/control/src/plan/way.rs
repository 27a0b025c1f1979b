//! The way between two hosts, made again when it is lost after a switch to postcopy.
//!
//! ```text
//!   source                                            destination
//!   ends its connections; connects, again and again   ends its own; `migrate-recover`; accepts
//!                          ── HELLO of this move ──►
//!                          ◄── LISTENS; AWAITS if it has all memory
//!   `migrate` with `resume`
//! ```
//! Nothing about the guest is decided here: each end has done what it was to do before, and does the rest afterwards.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Address, Cancel, Channel, Listener, connect_with};
use towline_compat::postcopy::RECOVERS_SINCE;
use towline_protocol::session::{FromDestination, FromSource, MoveId};
use towline_qmp::commands::{MigrationStatus, VersionTriple};

use super::context::{Context, connect_options};
use super::destination::{QmpDestination, RecoveryState};
use super::error::Error;
use super::error_origin;
use super::forward::{FarEnds, Forwarder, at_port};
use super::peer::{ANSWER_TIMEOUT, PeerSession, await_frame};
use super::source::QmpSource;
use crate::switchover::{DestinationStatus, Input, SourceStatus};

/// Interval of attempts.
const INTERVAL: Duration = Duration::from_millis(200);
/// Timeout of one attempt to connect, or to be connected to.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time in which a source notices that its connection is lost.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which the other host may refuse connections: its towline, which listens as long as it waits, has ended then.
const REFUSED_MAX: Duration = Duration::from_secs(10);

/// A way to another host that can be made again.
pub(super) enum Way<'a> {
    /// To the guest's destination.
    Departure(DepartingWay<'a>),
    /// From its source.
    Arrival(ArrivingWay),
}

/// The source's end.
pub(super) struct DepartingWay<'a> {
    pub(super) to: &'a Address,
    /// That of its stream, which is encrypted.
    pub(super) forwarder: Option<Forwarder>,
    /// The source's connection may be interrupted: it is this one.
    pub(super) is_own: bool,
}

/// The destination's end.
pub(super) struct ArrivingWay {
    pub(super) listener: Arc<Listener>,
    pub(super) forwarder: Option<Forwarder>,
}

/// A new session.
pub(super) struct Reconnected {
    pub(super) peer: PeerSession,
    /// The destination lacks nothing, and reports that next.
    pub(super) has_everything: bool,
}

/// The ends are not connected again.
pub(super) struct NotReconnected {
    pub(super) error: Box<Error>,
    pub(super) input: Input,
}

impl NotReconnected {
    fn new(error: Error, input: Input) -> Self {
        Self { error: Box::new(error), input }
    }
}

impl DepartingWay<'_> {
    /// Connects to the destination again, and has the source send the rest of its memory. A cancellation that comes meanwhile ends that.
    pub(super) fn reconnect(
        &mut self,
        source: &mut QmpSource,
        id: MoveId,
        context: &Context<'_>,
    ) -> Result<Reconnected, NotReconnected> {
        let begun = Instant::now();
        let mut refused_since = None;
        // That of the copy, unless it has been refused as too late.
        let fresh = Cancel::new().map_err(|error| NotReconnected::new(error.into(), Input::NotDone))?;
        let cancel = if context.cancel.is_cancelled() { &fresh } else { context.cancel };
        loop {
            self.forwarder = None;
            let error = match self.attempt(source, id, context, cancel) {
                Ok(reconnected) => return Ok(reconnected),
                Err(error) => error,
            };
            tracing::debug!(%error, "the hosts are not connected again yet");
            let waited = begun.elapsed();
            let is_refused = error_origin::is_connection_refused(&error);
            refused_since = if is_refused { refused_since.or(Some(waited)) } else { None };
            match source.query_status(context.options) {
                SourceStatus::Exited => {
                    let error = Error::SourceEnded { socket: source.qemu.socket().to_owned() };
                    return Err(NotReconnected::new(error, Input::Source(SourceStatus::Exited)));
                }
                status @ (SourceStatus::HasGuest | SourceStatus::CompletedThenResumed) => {
                    return Err(NotReconnected::new(error, Input::Source(status)));
                }
                _ => {}
            }
            let given_up = if cancel.is_cancelled() {
                Error::Cancelled
            } else if refused_since.is_some_and(|since| waited - since >= REFUSED_MAX) {
                error
            } else if waited >= context.options.recover_timeout {
                Error::NotConnectedAgain { waited }
            } else {
                thread::sleep(INTERVAL);
                continue;
            };
            let has_completed = source.last_status() == Some(&MigrationStatus::COMPLETED);
            let input = if has_completed { Input::Source(SourceStatus::Completed) } else { Input::NotDone };
            return Err(NotReconnected::new(given_up, input));
        }
    }

    fn attempt(
        &mut self,
        source: &mut QmpSource,
        id: MoveId,
        context: &Context<'_>,
        cancel: &Cancel,
    ) -> Result<Reconnected, Error> {
        // One that has completed only lacks the report of the destination.
        source.await_pause(PAUSE_TIMEOUT, self.is_own, context.options)?;
        let until = Instant::now() + ATTEMPT_TIMEOUT;
        let channel = connect_with(self.to, until, cancel, &connect_options(context.options)?)?;
        let mut peer = PeerSession::new(Arc::from(channel));
        peer.send_outcome(FromSource::Hello(id))?;
        peer.beat_until_outcome();
        let receive = PeerSession::receive_from_destination;
        let frame = await_frame(cancel, &mut peer, Some(ANSWER_TIMEOUT), context, receive)?;
        match frame {
            FromDestination::Awaits => Ok(Reconnected { peer, has_everything: true }),
            FromDestination::Listens(port) => {
                self.resume(source, port, context)?;
                Ok(Reconnected { peer, has_everything: false })
            }
            other => Err(peer.unexpected(&other)),
        }
    }

    /// Has the source, whose connection is lost, resume over another one. It is followed afterwards as before.
    fn resume(&mut self, source: &mut QmpSource, port: u16, context: &Context<'_>) -> Result<(), Error> {
        let far = FarEnds::At { address: at_port(self.to, port), options: connect_options(context.options)? };
        let (listener, near) = source.listen()?;
        self.forwarder = Some(Forwarder::start(Arc::new(listener), far, None)?);
        source.resume_to(&near)
    }
}

impl ArrivingWay {
    /// Has the QEMU listen again, and waits for its source. The session that the copy was requested in may have ended, which does not end
    /// this.
    pub(super) fn reconnect(
        &mut self,
        to: &mut QmpDestination,
        id: MoveId,
        context: &Context<'_>,
    ) -> Result<Reconnected, NotReconnected> {
        self.forwarder = None;
        let begun = Instant::now();
        let within = context.options.recover_timeout;
        let listening = match to.listen_again(within) {
            RecoveryState::Listening(address) => Some(address),
            RecoveryState::Ended { error: None, .. } => None,
            RecoveryState::Ended { status, error: Some(error) } => {
                return Err(NotReconnected::new(error, Input::Destination(status)));
            }
            RecoveryState::NotReady => return Err(not_accepted(to, begun)),
        };
        loop {
            match self.accept(listening.as_ref(), id, context) {
                Ok(peer) => return Ok(Reconnected { peer, has_everything: listening.is_none() }),
                Err(error) => tracing::debug!(%error, "its source has not connected again yet"),
            }
            let has_exited = to.query_status() == DestinationStatus::Exited;
            if has_exited || begun.elapsed() >= within {
                return Err(not_accepted(to, begun));
            }
            thread::sleep(INTERVAL);
        }
    }

    fn accept(
        &mut self,
        listening: Option<&Address>,
        id: MoveId,
        context: &Context<'_>,
    ) -> Result<PeerSession, Error> {
        self.forwarder = None;
        let until = Instant::now() + ATTEMPT_TIMEOUT;
        let never = Cancel::new()?;
        let channel: Arc<dyn Channel> = Arc::from(self.listener.accept(until, &never)?);
        let mut peer = PeerSession::new(channel);
        let left = Some(until.saturating_duration_since(Instant::now()));
        let hello = await_frame(&never, &mut peer, left, context, PeerSession::receive_from_source)?;
        if hello != FromSource::Hello(id) {
            return Err(peer.unexpected(&hello));
        }
        match (listening, self.listener.local_address()) {
            (Some(near), Address::Tcp { port, .. }) => {
                // What connects next is a QEMU.
                peer.send_report(&FromDestination::Listens(*port))?;
                let far = FarEnds::to(near.clone());
                self.forwarder = Some(Forwarder::start(Arc::clone(&self.listener), far, None)?);
            }
            _ => peer.send_report(&FromDestination::Awaits)?,
        }
        peer.beat_until_report();
        Ok(peer)
    }
}

/// Returns true if a destination of this version can be connected again: an older one may end if that fails.
pub(crate) fn recovers(version: &VersionTriple) -> bool {
    (version.major, version.minor) >= RECOVERS_SINCE
}

fn not_accepted(to: &mut QmpDestination, begun: Instant) -> NotReconnected {
    let error = Error::NotConnectedAgain { waited: begun.elapsed() };
    NotReconnected::new(error, Input::Destination(to.query_status()))
}
