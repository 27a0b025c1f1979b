//! Reads the return path while everything is sent.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use towline_channel::{Channel, Error as ChannelError, IoBufMut, RecvFlags};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::session::{FromDestination, ReceiverMode};
use towline_protocol::source::ReturnPathReader;
use towline_protocol::{PeerMisbehaved, Reader};

use crate::guest::{BaseId, ReturnPathWriter};
use crate::heartbeat::HEARTBEAT_INTERVAL;
use crate::lock::lock;
use crate::session::{LastWords, POLL_INTERVAL};
use crate::{Error, Result, Session};

/// Room for one message, the largest of which is 516 bytes.
const INPUT_BYTES: usize = 1024;
/// Number of messages that are kept until the source's return path is open. A destination sends one,
/// SWITCHOVER_ACK.
const WAITING_MAX: usize = 16;

/// Number of blocks of images that are kept; of further ones all is sent.
const BASES_MAX: usize = 64;

/// State of the return path, which has its own reader thread.
#[derive(Debug)]
pub(crate) struct ReturnPath {
    peer: String,
    /// A thread that panics leaves flags, all consistent at each step.
    state: Mutex<ReturnPathState>,
    changed: Condvar,
}

#[derive(Debug)]
struct ReturnPathState {
    answers: ReturnPathReader,
    /// Time of the last message.
    heard: Instant,
    /// Blocks of images that the destination has reported.
    bases: Vec<BaseId>,
    /// The listener has ended; the session has its error, if any.
    ended: bool,
    forwarding: Forwarding,
}

/// Forwarding of the destination's messages.
#[derive(Debug)]
pub(crate) enum Forwarding {
    /// None: irrelevant messages are dropped.
    Disabled,
    /// A relay's source, which has not opened its return path; these messages are kept for it.
    Buffered(Vec<ReturnPathMessage>),
    /// A relay's source.
    Source(ReturnPathWriter),
}

impl ReturnPath {
    /// Starts listening. The thread ends with the connection, which `session` shuts down on failure.
    pub(crate) fn start(
        channel: Arc<dyn Channel>,
        session: Arc<Session>,
        forwarding: Forwarding,
    ) -> Result<Arc<Self>> {
        let (answers, bases) = (ReturnPathReader::default(), Vec::new());
        let state = ReturnPathState { answers, heard: Instant::now(), bases, ended: false, forwarding };
        let (peer, changed) = (channel.peer().to_owned(), Condvar::new());
        let path = Arc::new(Self { peer, state: Mutex::new(state), changed });
        let listener = Arc::clone(&path);
        let listen = move || {
            let _guard = session.guard();
            if let Err(error) = listener.listen(channel.as_ref()) {
                session.fail(error);
            }
            lock(&listener.state).ended = true;
            listener.changed.notify_all();
        };
        Builder::new().spawn(listen).map_err(ChannelError::NoThread)?;
        Ok(path)
    }

    /// Forwards the messages that are meant for the source.
    pub(crate) fn forward_to(&self, source: ReturnPathWriter) -> Result<()> {
        let mut state = lock(&self.state);
        if let Forwarding::Buffered(messages) = &state.forwarding {
            for message in messages {
                source.send(message)?;
            }
        }
        state.forwarding = Forwarding::Source(source);
        Ok(())
    }

    /// Allows SHUT from here on. Call it before the last bytes are sent.
    pub(crate) fn expect_shut(&self) {
        lock(&self.state).answers.expect_shut();
    }

    /// Waits until the destination has loaded everything but the end of the stream.
    pub(crate) fn wait_loaded(&self, session: &Session) -> Result<()> {
        self.wait(session, None, |state| state.answers.has_loaded()).map(drop)
    }

    /// Use of the guest by a towline at the destination; `None` of a QEMU. Known after [`Self::wait_pong`].
    pub(crate) fn receiver(&self) -> Option<ReceiverMode> {
        lock(&self.state).answers.receiver()
    }

    /// Blocks of images that the destination's memory is. Known after [`Self::wait_pong`].
    pub(crate) fn bases(&self) -> Vec<BaseId> {
        lock(&self.state).bases.clone()
    }

    /// Waits for the answer to the first PING.
    pub(crate) fn wait_pong(&self, session: &Session, timeout: Duration, lanes: usize) -> Result<()> {
        let deadline = Instant::now() + timeout;
        if self.wait(session, Some(deadline), |state| state.answers.has_pong())? {
            Ok(())
        } else {
            Err(Error::NoAnswer { peer: self.peer.clone(), waited: timeout, lanes })
        }
    }

    /// Waits until the destination acknowledges the guest. Once it does, it has the guest, even if the
    /// migration was cancelled in between.
    pub(crate) fn wait_shut(&self, session: &Session) -> Result<()> {
        self.wait(session, None, |state| state.answers.has_shut()).map(drop)
    }

    fn wait(
        &self,
        session: &Session,
        deadline: Option<Instant>,
        done: impl Fn(&ReturnPathState) -> bool,
    ) -> Result<bool> {
        let (mut last_words, mut polled) = (LastWords::default(), Instant::now());
        let mut state = lock(&self.state);
        while !done(&state) {
            if state.ended {
                return Err(Error::Cancelled);
            }
            if session.is_failed() && last_words.are_over() {
                return Err(Error::Cancelled);
            }
            let now = Instant::now();
            // After this process was stopped itself, the listener may not have read what has come since.
            if now.saturating_duration_since(polled) > HEARTBEAT_INTERVAL {
                state.heard = now;
            }
            polled = now;
            let silence = now.saturating_duration_since(state.heard);
            let beats = state.answers.receiver() == Some(ReceiverMode::Waits);
            if beats && silence > session.silence_max() {
                return Err(Error::PeerStopped { peer: self.peer.clone(), silence });
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            let waited = self.changed.wait_timeout(state, POLL_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    fn listen(&self, channel: &dyn Channel) -> Result<()> {
        let (mut input, mut end) = ([0; INPUT_BYTES], 0);
        loop {
            let received = channel.recv(&mut [IoBufMut::from(&mut input[end..])], RecvFlags::empty())?;
            if received == 0 {
                return Err(Error::NotAcknowledged { peer: self.peer.clone() });
            }
            end += received;
            let mut reader = Reader::new(&input[..end]);
            while let Some(message) =
                ReturnPathMessage::decode(&mut reader).map_err(Error::protocol(&self.peer))?
            {
                if self.process_message(message)? {
                    return Ok(());
                }
            }
            let taken = reader.position();
            input.copy_within(taken..end, 0);
            end -= taken;
        }
    }

    /// Processes a message; true after the last one.
    fn process_message(&self, message: ReturnPathMessage) -> Result<bool> {
        let mut state = lock(&self.state);
        state.heard = Instant::now();
        state.answers.handle(&message).map_err(Error::protocol(&self.peer))?;
        if let Some(FromDestination::Base(id)) = FromDestination::of(&message)
            && state.bases.len() < BASES_MAX
        {
            state.bases.push(id);
        }
        // A relay's source gets heartbeats from the relay, and no report of memory that it may not know of.
        if message == ReturnPathMessage::SwitchoverAck {
            match &mut state.forwarding {
                Forwarding::Disabled => {}
                Forwarding::Buffered(messages) if messages.len() < WAITING_MAX => messages.push(message),
                Forwarding::Buffered(_) => {
                    let (found, expected) = ("one message after the other".to_owned(), "PONG");
                    let error = PeerMisbehaved::Unexpected { found, expected };
                    return Err(Error::protocol(&self.peer)(error.into()));
                }
                Forwarding::Source(source) => {
                    // Not under the lock: a source that does not read would block the waiting threads.
                    let source = source.clone();
                    drop(state);
                    source.send(&message)?;
                    return Ok(false);
                }
            }
        }
        self.changed.notify_all();
        Ok(state.answers.has_shut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::starved;
    use towline_channel::{ChannelExt, IoBuf, SendFlags};

    #[test]
    fn an_acknowledgement_that_was_received_counts_on_a_busy_host() {
        let session = Arc::new(Session::default());
        let (near, far) = starved(&session);
        let path = ReturnPath::start(near, Arc::clone(&session), Forwarding::Disabled).unwrap();
        path.expect_shut();
        let mut shut = Vec::new();
        ReturnPathMessage::Shut(0).encode(&mut shut);
        far.send_all(&[IoBuf::from(&shut[..])], SendFlags::empty()).unwrap();
        session.fail(Error::Cancelled);
        path.wait_shut(&session).unwrap();
    }
}
