//! Session with a towline at the other end, after the end of the stream: frames over its main channel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{
    Channel, ChannelExt as _, Error as ChannelError, IoBuf, IoBufMut, RecvFlags, SendFlags,
};
use towline_protocol::Reader;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::session::{FromDestination, FromSource};

use super::error::Error;
use crate::switchover::PeerMessage;

/// Longest wait for a frame in one call.
const RECEIVE_TIME: Duration = Duration::from_millis(50);
/// Timeout for sending a frame.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// More bytes than any frame has.
const INPUT_BYTES: usize = 1024;

/// A session with another towline.
#[derive(Debug)]
pub(super) struct PeerSession {
    channel: Arc<dyn Channel>,
    input: Vec<u8>,
    /// Reason for which the destination's towline could not run the guest.
    pub(super) not_run: Option<String>,
}

/// Result of receiving a frame.
#[derive(Debug)]
pub(super) enum PeerReply<T> {
    Frame(T),
    /// No frame has arrived yet.
    Nothing,
    /// The connection is lost, or the received bytes are not a frame.
    Lost(Error),
}

impl PeerSession {
    /// A session over this channel, the main one of a migration that has ended.
    pub(super) fn new(channel: Arc<dyn Channel>) -> Self {
        Self { channel, input: Vec::new(), not_run: None }
    }

    /// Sends a frame to the destination's towline.
    pub(super) fn send_outcome(&self, frame: FromSource) -> Result<(), Error> {
        let mut bytes = Vec::new();
        frame.to_command().encode(&mut bytes);
        self.send(&bytes)
    }

    /// Sends a frame to the source's towline.
    pub(super) fn send_report(&self, frame: &FromDestination) -> Result<(), Error> {
        let mut bytes = Vec::new();
        frame.to_message().encode(&mut bytes);
        self.send(&bytes)
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Error> {
        self.channel.set_timeouts(None, Some(SEND_TIMEOUT))?;
        Ok(self.channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty())?)
    }

    /// Receives a message from the source's towline.
    pub(super) fn receive_outcome(&mut self) -> PeerReply<PeerMessage> {
        self.receive(FromSource::decode).map(from_wire_outcome)
    }

    /// Receives a message from the destination's towline. Other frames, which a relay forwards, are skipped.
    pub(super) fn receive_report(&mut self) -> PeerReply<PeerMessage> {
        let frame = self.receive(|reader| {
            loop {
                match ReturnPathMessage::decode(reader)? {
                    None => return Ok(None),
                    Some(message) => {
                        if let Some(frame) = FromDestination::of(&message) {
                            return Ok(Some(frame));
                        }
                    }
                }
            }
        });
        if let PeerReply::Frame(FromDestination::NotRun(reason)) = &frame {
            self.not_run = Some(reason.clone());
        }
        frame.map(|frame| from_wire_report(&frame))
    }

    fn receive<T>(
        &mut self,
        decode: impl Fn(&mut Reader<'_>) -> towline_protocol::Result<Option<T>>,
    ) -> PeerReply<T> {
        let until = Instant::now() + RECEIVE_TIME;
        loop {
            let mut reader = Reader::new(&self.input);
            match decode(&mut reader) {
                Ok(Some(frame)) => {
                    let taken = reader.position();
                    self.input.drain(..taken);
                    return PeerReply::Frame(frame);
                }
                Ok(None) if self.input.len() < INPUT_BYTES => {}
                Ok(None) => return PeerReply::Lost(self.closed()),
                Err(source) => {
                    let peer = self.channel.peer().to_owned();
                    return PeerReply::Lost(towline_migration::Error::Protocol { peer, source }.into());
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return PeerReply::Nothing;
            }
            match self.more(left) {
                Ok(()) => {}
                Err(ChannelError::Timeout { .. }) => return PeerReply::Nothing,
                Err(error) => return PeerReply::Lost(error.into()),
            }
        }
    }

    fn more(&mut self, within: Duration) -> Result<(), ChannelError> {
        self.channel.set_timeouts(Some(within), None)?;
        let mut bytes = [0; INPUT_BYTES];
        match self.channel.recv(&mut [IoBufMut::from(&mut bytes[..])], RecvFlags::empty())? {
            0 => Err(ChannelError::Cut { peer: self.channel.peer().to_owned() }),
            received => {
                self.input.extend_from_slice(&bytes[..received]);
                Ok(())
            }
        }
    }

    fn closed(&self) -> Error {
        ChannelError::Cut { peer: self.channel.peer().to_owned() }.into()
    }
}

impl<T> PeerReply<T> {
    fn map<U>(self, to: impl FnOnce(T) -> U) -> PeerReply<U> {
        match self {
            Self::Frame(frame) => PeerReply::Frame(to(frame)),
            Self::Nothing => PeerReply::Nothing,
            Self::Lost(error) => PeerReply::Lost(error),
        }
    }
}

fn from_wire_outcome(frame: FromSource) -> PeerMessage {
    match frame {
        FromSource::Completed(run) => PeerMessage::Completed(run),
        // A second greeting carries no outcome, and no towline sends it.
        FromSource::Aborted | FromSource::Hello(_) => PeerMessage::Aborted,
    }
}

fn from_wire_report(frame: &FromDestination) -> PeerMessage {
    match frame {
        FromDestination::Placed(placement) => PeerMessage::Placed(*placement),
        FromDestination::NotRun(_) => PeerMessage::NotRun,
    }
}
