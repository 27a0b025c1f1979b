//! Session with a towline at the other end, after the end of the stream: frames over its main channel.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{
    Cancel, Channel, ChannelExt as _, Error as ChannelError, IoBuf, IoBufMut, RecvFlags, SendFlags,
};
use towline_migration::{Heartbeat, silence_max};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::session::{FromDestination, FromSource};
use towline_protocol::{PeerMisbehaved, Reader};

use super::context::Context;
use super::error::{Error, check_cancelled};
use crate::switchover::PeerMessage;

/// Longest wait for a frame in one call.
const RECEIVE_TIME: Duration = Duration::from_millis(50);
/// The same of a glance.
const GLANCE_TIME: Duration = Duration::from_millis(1);
/// Timeout for sending a frame.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which the other towline has a QEMU listen, and records that it awaits the guest.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// More bytes than any frame has.
const INPUT_BYTES: usize = 1024;

/// A session with another towline.
#[derive(Debug)]
pub(super) struct PeerSession {
    channel: Arc<dyn Channel>,
    input: Vec<u8>,
    /// Time of the last frame.
    heard: Instant,
    /// Until the next frame of another kind.
    heartbeat: Option<Heartbeat>,
    /// Reason for which the destination's towline could not run the guest.
    pub(super) not_run: Option<String>,
    /// The other towline has ended it in order, after it had received everything.
    pub(super) is_ended: bool,
}

/// The frame that has arrived, if any.
///
/// # Errors
/// The connection is lost, or the received bytes are not a frame.
pub(super) type PeerReply<T = PeerMessage> = Result<Option<T>, Error>;

impl PeerSession {
    /// A session over this channel, the main one of a migration that has ended.
    pub(super) fn new(channel: Arc<dyn Channel>) -> Self {
        Self {
            channel,
            input: Vec::new(),
            heard: Instant::now(),
            heartbeat: None,
            not_run: None,
            is_ended: false,
        }
    }

    /// Tells the destination's towline every second that this one is at work, until the outcome.
    pub(super) fn beat_until_outcome(&mut self) {
        self.beat(outcome_bytes(FromSource::Alive));
    }

    /// Tells the source's towline every second that this one is at work, until the report.
    pub(super) fn beat_until_report(&mut self) {
        self.beat(report_bytes(&FromDestination::Alive));
    }

    fn beat(&mut self, frame: Vec<u8>) {
        if let Err(error) = self.channel.set_timeouts(Some(RECEIVE_TIME), Some(SEND_TIMEOUT)) {
            tracing::debug!(%error, "no heartbeats");
            return;
        }
        let channel = Arc::clone(&self.channel);
        let beat = move || Ok(channel.send_all(&[IoBuf::from(&frame[..])], SendFlags::empty())?);
        self.heartbeat =
            Heartbeat::start(beat).inspect_err(|error| tracing::warn!(%error, "no heartbeats")).ok();
    }

    /// Closes the connection, also for other owners of its channel.
    pub(super) fn close(self) {
        if let Err(error) = self.channel.shutdown(Shutdown::Both) {
            tracing::debug!(%error, "closing a session");
        }
    }

    /// Sends the outcome to the destination's towline.
    pub(super) fn send_outcome(&mut self, frame: FromSource) -> Result<(), Error> {
        self.send(&outcome_bytes(frame))
    }

    /// Sends the report to the source's towline.
    pub(super) fn send_report(&mut self, frame: &FromDestination) -> Result<(), Error> {
        self.send(&report_bytes(frame))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.heartbeat = None;
        self.heard = Instant::now();
        self.channel.set_timeouts(Some(RECEIVE_TIME), Some(SEND_TIMEOUT))?;
        Ok(self.channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty())?)
    }

    /// Time since the last frame, or since this end sent its own.
    pub(super) fn silence(&self) -> Duration {
        self.heard.elapsed()
    }

    /// Receives a message from the source's towline.
    pub(super) fn receive_outcome(&mut self) -> PeerReply {
        self.receive(RECEIVE_TIME, FromSource::decode, |frame| match frame {
            FromSource::Alive => None,
            FromSource::Completed(run) => Some(PeerMessage::Completed(run)),
            // What precedes the outcome carries none, and no towline sends it a second time.
            FromSource::Aborted | FromSource::Hello(_) | FromSource::Stopped(_) => Some(PeerMessage::Aborted),
        })
    }

    /// Receives a frame that precedes the outcome from the source's towline.
    pub(super) fn receive_from_source(&mut self) -> PeerReply<FromSource> {
        self.receive(RECEIVE_TIME, FromSource::decode, |frame| {
            Some(frame).filter(|frame| *frame != FromSource::Alive)
        })
    }

    /// Receives a frame that precedes the report from the destination's towline.
    pub(super) fn receive_from_destination(&mut self) -> PeerReply<FromDestination> {
        self.receive(RECEIVE_TIME, ReturnPathMessage::decode, |message| without_heartbeat(&message))
    }

    /// As [`Self::receive_from_destination`], without waiting.
    pub(super) fn glance_at_destination(&mut self) -> PeerReply<FromDestination> {
        self.receive(GLANCE_TIME, ReturnPathMessage::decode, |message| without_heartbeat(&message))
    }

    /// The error of a frame that was not to be sent now.
    pub(super) fn unexpected(&self, frame: &impl std::fmt::Debug) -> Error {
        let found = format!("{frame:?}");
        let source = PeerMisbehaved::Unexpected { found, expected: "another frame of the session" }.into();
        towline_migration::Error::Protocol { peer: self.channel.peer().to_owned(), source }.into()
    }

    /// Receives a message from the destination's towline. Other frames, which a relay forwards, are skipped.
    pub(super) fn receive_report(&mut self) -> PeerReply {
        let mut not_run = None;
        let report = self.receive(RECEIVE_TIME, ReturnPathMessage::decode, |message| {
            match FromDestination::of(&message)? {
                FromDestination::Alive
                | FromDestination::Base(_)
                | FromDestination::Listens(_)
                | FromDestination::Awaits => None,
                FromDestination::Placed(placement) => Some(PeerMessage::Placed(placement)),
                FromDestination::NotRun(reason) => {
                    not_run = Some(reason);
                    Some(PeerMessage::NotRun)
                }
            }
        });
        self.not_run = not_run;
        report
    }

    fn receive<F, T>(
        &mut self,
        time: Duration,
        decode: impl Fn(&mut Reader<'_>) -> towline_protocol::Result<Option<F>>,
        mut message: impl FnMut(F) -> Option<T>,
    ) -> PeerReply<T> {
        let until = Instant::now() + time;
        loop {
            let mut reader = Reader::new(&self.input);
            match decode(&mut reader) {
                Ok(Some(frame)) => {
                    let taken = reader.position();
                    self.input.drain(..taken);
                    self.heard = Instant::now();
                    match message(frame) {
                        Some(message) => return Ok(Some(message)),
                        None => continue,
                    }
                }
                Ok(None) if self.input.len() < INPUT_BYTES => {}
                Ok(None) => return Err(self.closed().into()),
                Err(source) => {
                    let peer = self.channel.peer().to_owned();
                    return Err(towline_migration::Error::Protocol { peer, source }.into());
                }
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            match self.more(time) {
                Ok(()) => {}
                Err(ChannelError::Timeout { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn more(&mut self, time: Duration) -> Result<(), ChannelError> {
        self.channel.set_timeouts(Some(time), Some(SEND_TIMEOUT))?;
        let mut bytes = [0; INPUT_BYTES];
        match self.channel.recv(&mut [IoBufMut::from(&mut bytes[..])], RecvFlags::empty())? {
            0 => {
                self.is_ended = true;
                Err(self.closed())
            }
            received => {
                self.input.extend_from_slice(&bytes[..received]);
                Ok(())
            }
        }
    }

    fn closed(&self) -> ChannelError {
        ChannelError::Cut { peer: self.channel.peer().to_owned() }
    }
}

/// Waits for a frame of the other towline, for this time at most, unless it is cancelled.
pub(super) fn await_frame<T>(
    cancel: &Cancel,
    peer: &mut PeerSession,
    within: Option<Duration>,
    context: &Context<'_>,
    receive: impl Fn(&mut PeerSession) -> PeerReply<T>,
) -> Result<T, Error> {
    let begun = Instant::now();
    loop {
        check_cancelled(cancel)?;
        if let Some(frame) = received(peer, context, &receive)? {
            return Ok(frame);
        }
        if within.is_some_and(|within| begun.elapsed() >= within) {
            return Err(Error::PeerSilent { waited: begun.elapsed() });
        }
    }
}

/// The frame that the other towline has sent, if any.
///
/// # Errors
/// It is lost, or silent.
pub(super) fn received<T>(
    peer: &mut PeerSession,
    context: &Context<'_>,
    receive: impl Fn(&mut PeerSession) -> PeerReply<T>,
) -> PeerReply<T> {
    let frame = receive(peer)?;
    let waited = peer.silence();
    if frame.is_none() && waited >= silence_max(context.options.peer_timeout) {
        return Err(Error::PeerSilent { waited });
    }
    Ok(frame)
}

fn without_heartbeat(message: &ReturnPathMessage) -> Option<FromDestination> {
    FromDestination::of(message).filter(|frame| *frame != FromDestination::Alive)
}

fn outcome_bytes(frame: FromSource) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.to_command().encode(&mut bytes);
    bytes
}

fn report_bytes(frame: &FromDestination) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.to_message().encode(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use towline_channel::UnixChannel;
    use towline_migration::HEARTBEAT_INTERVAL;
    use towline_protocol::session::{Placement, RunRequest};

    use super::*;

    fn sessions() -> (PeerSession, PeerSession) {
        let (here, there) = UnixChannel::pair().unwrap();
        (PeerSession::new(Arc::new(here)), PeerSession::new(Arc::new(there)))
    }

    /// Waits for a message; returns it with the longest silence before it.
    fn next(mut receive: impl FnMut() -> (PeerReply, Duration), until: Duration) -> (PeerReply, Duration) {
        let (since, mut longest) = (Instant::now(), Duration::ZERO);
        loop {
            let (reply, silence) = receive();
            longest = longest.max(silence);
            if !matches!(reply, Ok(None)) || since.elapsed() >= until {
                return (reply, longest);
            }
        }
    }

    #[test]
    fn a_peer_at_work_is_not_silent_and_its_message_comes_after_the_heartbeats() {
        let within = HEARTBEAT_INTERVAL * 3;
        let (mut source, mut destination) = sessions();
        source.beat_until_outcome();
        let (reply, longest) = next(|| (destination.receive_outcome(), destination.silence()), within);
        assert!(matches!(reply, Ok(None)), "{reply:?}");
        assert!(longest < within, "{longest:?}");
        source.send_outcome(FromSource::Completed(RunRequest::Run)).unwrap();
        let (reply, _) = next(|| (destination.receive_outcome(), destination.silence()), within);
        assert!(matches!(reply, Ok(Some(PeerMessage::Completed(RunRequest::Run)))), "{reply:?}");

        destination.beat_until_report();
        let (_, longest) = next(|| (source.receive_report(), source.silence()), within);
        assert!(longest < within, "{longest:?}");
        destination.send_report(&FromDestination::Placed(Placement::Running)).unwrap();
        let (reply, _) = next(|| (source.receive_report(), source.silence()), within);
        assert!(matches!(reply, Ok(Some(PeerMessage::Placed(Placement::Running)))), "{reply:?}");
    }

    #[test]
    fn a_peer_without_heartbeats_is_silent() {
        let (_source, mut destination) = sessions();
        let within = HEARTBEAT_INTERVAL;
        let (reply, longest) = next(|| (destination.receive_outcome(), destination.silence()), within);
        assert!(matches!(reply, Ok(None)), "{reply:?}");
        assert!(longest >= within, "{longest:?}");
    }
}
