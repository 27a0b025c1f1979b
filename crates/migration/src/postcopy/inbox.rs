//! Dispatches the messages of a postcopy destination to the threads that wait for them, from a reader thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use towline_channel::{Channel, Error as ChannelError, IoBufMut, RecvFlags};
use towline_protocol::postcopy::{PostcopyBlock, PostcopyReturnPathReader, ReturnMessage, decode_bitmap};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::{BlockIndex, PageRef, Reader};

use crate::lock::lock;
use crate::session::{LastWords, POLL_INTERVAL};
use crate::{Error, Result, Session};

/// Size of one receive.
const INPUT_BYTES: usize = 64 << 10;
/// Requests that wait to be served. A destination has at most one for each stopped thread.
const REQUESTS_MAX: usize = 1 << 16;

/// A request for pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageRequest {
    pub(super) page: PageRef,
    pub(super) length: u64,
    pub(super) at: Instant,
}

/// Messages received on one connection.
#[derive(Debug)]
pub(super) struct Inbox {
    peer: String,
    blocks: Arc<[PostcopyBlock]>,
    /// A thread that panics leaves lists and flags, all consistent at each step.
    state: Mutex<InboxState>,
    changed: Condvar,
    /// For the request workers: one is woken for each request.
    requested: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    answers: PostcopyReturnPathReader,
    pongs: Vec<u32>,
    shut: bool,
    resume_ack: bool,
    bitmaps: Vec<(BlockIndex, Vec<u8>)>,
    /// The block whose bitmap comes next.
    bitmap: Option<BlockIndex>,
    requests: VecDeque<PageRequest>,
    /// No further requests are served.
    closed: bool,
    /// The listener has ended.
    ended: bool,
}

impl Inbox {
    /// Starts listening; the thread ends with the connection, which `session` shuts down on failure.
    pub(super) fn listen(
        channel: &Arc<dyn Channel>,
        session: &Arc<Session>,
        blocks: &Arc<[PostcopyBlock]>,
    ) -> Result<Arc<Self>> {
        let (peer, blocks) = (channel.peer().to_owned(), Arc::clone(blocks));
        let (state, changed, requested) = (Mutex::default(), Condvar::new(), Condvar::new());
        let inbox = Arc::new(Self { peer, blocks, state, changed, requested });
        let (listener, session, channel) = (Arc::clone(&inbox), Arc::clone(session), Arc::clone(channel));
        let listen = move || {
            let _guard = session.guard();
            if let Err(error) = listener.receive(channel.as_ref()) {
                session.fail(error);
            }
            lock(&listener.state).ended = true;
            listener.changed.notify_all();
            listener.requested.notify_all();
        };
        Builder::new().spawn(listen).map_err(ChannelError::NoThread)?;
        Ok(inbox)
    }

    /// Waits for the answer to this PING.
    pub(super) fn wait_pong(&self, ping: u32, session: &Session, within: Duration) -> Result<()> {
        self.wait(session, within, |state| state.pongs.contains(&ping))
    }

    /// Returns true if this PING was answered. After the end, all messages have been counted.
    pub(super) fn has_pong(&self, ping: u32) -> bool {
        lock(&self.state).pongs.contains(&ping)
    }

    /// Waits until the listener has read everything received before the connection ended.
    pub(super) fn wait_end(&self) {
        let mut last_words = LastWords::default();
        let mut state = lock(&self.state);
        while !state.ended && !last_words.are_over() {
            state = self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the bitmaps of all blocks, and returns them.
    pub(super) fn wait_bitmaps(
        &self,
        session: &Session,
        within: Duration,
    ) -> Result<Vec<(BlockIndex, Vec<u8>)>> {
        let all = self.blocks.len();
        self.wait(session, within, |state| state.bitmaps.len() >= all)?;
        Ok(std::mem::take(&mut lock(&self.state).bitmaps))
    }

    /// Waits for RESUME_ACK.
    pub(super) fn wait_resume_ack(&self, session: &Session, within: Duration) -> Result<()> {
        self.wait(session, within, |state| state.resume_ack)
    }

    /// Allows SHUT from here on.
    pub(super) fn expect_shut(&self) {
        lock(&self.state).answers.expect_shut();
    }

    /// Waits for SHUT.
    pub(super) fn wait_shut(&self, session: &Session) -> Result<()> {
        self.wait(session, Duration::MAX, |state| state.shut)
    }

    /// The next request; `None` when no further ones are served.
    pub(super) fn next_request(&self) -> Option<PageRequest> {
        let mut state = lock(&self.state);
        loop {
            if state.closed || state.ended && !state.shut {
                return None;
            }
            if let Some(request) = state.requests.pop_front() {
                return Some(request);
            }
            state = self.requested.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns true if a request waits to be served.
    pub(super) fn has_requests(&self) -> bool {
        !lock(&self.state).requests.is_empty()
    }

    /// Ends the waits for requests.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.requested.notify_all();
    }

    fn wait(&self, session: &Session, within: Duration, done: impl Fn(&InboxState) -> bool) -> Result<()> {
        let begun = Instant::now();
        let mut last_words = LastWords::default();
        let mut state = lock(&self.state);
        while !done(&state) {
            if state.ended || session.is_failed() && last_words.are_over() {
                return Err(Error::Cancelled);
            }
            if begun.elapsed() >= within {
                return Err(Error::NoAnswer { peer: self.peer.clone(), waited: within, lanes: 0 });
            }
            state = self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn receive(&self, channel: &dyn Channel) -> Result<()> {
        let mut input = Vec::new();
        let mut chunk = vec![0; INPUT_BYTES];
        loop {
            let received = channel.recv(&mut [IoBufMut::from(&mut chunk[..])], RecvFlags::empty())?;
            if received == 0 {
                return Err(Error::Ended {
                    peer: self.peer.clone(),
                    awaiting: "a request for pages, or the end",
                });
            }
            input.extend_from_slice(&chunk[..received]);
            let (consumed, shut) =
                self.process_messages(&input, Instant::now()).map_err(Error::protocol(&self.peer))?;
            self.changed.notify_all();
            if shut {
                return Ok(());
            }
            // The remainder is a part of one message, or of a bitmap, whose length its block bounds.
            input.drain(..consumed);
        }
    }

    /// Processes all whole messages. Returns their length in bytes, and true if SHUT was one of them.
    fn process_messages(&self, input: &[u8], at: Instant) -> towline_protocol::Result<(usize, bool)> {
        let mut state = lock(&self.state);
        let mut reader = Reader::new(input);
        loop {
            if let Some(index) = state.bitmap {
                let Some(bits) = decode_bitmap(&mut reader, &self.blocks[index.index()])? else { break };
                // Exactly one for each block was requested.
                if state.bitmaps.len() < self.blocks.len() {
                    state.bitmaps.push((index, bits));
                }
                state.bitmap = None;
                continue;
            }
            let Some(message) = ReturnPathMessage::decode(&mut reader)? else { break };
            match state.answers.handle(&message, &self.blocks)? {
                ReturnMessage::Pong(value) if !state.pongs.contains(&value) => state.pongs.push(value),
                ReturnMessage::Request { page, length } if state.requests.len() < REQUESTS_MAX => {
                    state.requests.push_back(PageRequest { page, length, at });
                    self.requested.notify_one();
                }
                ReturnMessage::Request { .. } => {
                    let found = format!("{REQUESTS_MAX} requests for pages and none of them served");
                    let expected = "one for each thread that waits";
                    return Err(towline_protocol::PeerMisbehaved::Unexpected { found, expected }.into());
                }
                ReturnMessage::Bitmap(index) => state.bitmap = Some(index),
                ReturnMessage::ResumeAck => state.resume_ack = true,
                ReturnMessage::Shut => {
                    state.shut = true;
                    return Ok((reader.position(), true));
                }
                ReturnMessage::Pong(_) | ReturnMessage::Other => {}
            }
        }
        Ok((reader.position(), false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::starved;
    use towline_channel::{ChannelExt, IoBuf, SendFlags};
    use towline_protocol::postcopy::PING_LOADED;

    #[test]
    fn a_loaded_guest_is_known_on_a_busy_host() {
        let session = Arc::new(Session::default());
        let (near, far) = starved(&session);
        let inbox = Inbox::listen(&near, &session, &Vec::new().into()).unwrap();
        let mut pong = Vec::new();
        ReturnPathMessage::Pong(PING_LOADED).encode(&mut pong);
        far.send_all(&[IoBuf::from(&pong[..])], SendFlags::empty()).unwrap();
        session.end(Error::Cancelled);
        inbox.wait_end();
        assert!(inbox.has_pong(PING_LOADED));
    }
}
