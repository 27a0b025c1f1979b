//! What is received: many records with one call, each opened where it lies and copied to where it goes.
//!
//! ```text
//!   channel below ──▶ [ done │ content of an open record, not taken │ records that came │ room ]
//!                            ▲ plain                                 ▲ start             ▲ end
//! ```

use super::keys::Keys;
use super::record::{Content, INCOMING_BYTES_MAX, Protection, record_length};
use crate::{Channel, Error, IoBufMut, IoCursorMut, RecvFlags, Result, scatter, total_len_mut};
use std::ops::Range;

/// Room for what came: some records, so that one call brings many.
const BUFFER_BYTES: usize = 16 * INCOMING_BYTES_MAX;
/// Records without data that may come one behind the other (empty ones, new keys, tickets): they cost us work and tell
/// nothing.
const IDLE_RECORDS_MAX: u32 = 64;
/// Handshake messages that may come on a connection that lives (RFC 8446, section 4.6).
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The receiving half.
#[derive(Debug)]
pub(super) struct Receiver {
    protection: Protection,
    buffer: Box<[u8]>,
    plain: Range<usize>,
    start: usize,
    end: usize,
    idle_records: u32,
    finished: Option<Finished>,
}

/// How the stream ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Finished {
    /// The peer said so.
    Closed,
    /// It cannot go on; the text is for [`Error::Tls`].
    Failed(String),
}

impl Receiver {
    /// Begins with what came behind the handshake: contents, and records that are not opened.
    pub(super) fn new(protection: Protection, contents: &[u8], records: &[u8]) -> Self {
        let mut buffer = vec![0; BUFFER_BYTES.max(contents.len() + records.len())];
        buffer[..contents.len()].copy_from_slice(contents);
        let (start, end) = (contents.len(), contents.len() + records.len());
        buffer[start..end].copy_from_slice(records);
        let buffer = buffer.into();
        Self { protection, buffer, plain: 0..start, start, end, idle_records: 0, finished: None }
    }

    /// Fills a prefix of the buffers, which are not all empty; 0 at the end that the peer has told. `ended_here` says that the
    /// end is our own doing.
    pub(super) fn recv(
        &mut self,
        channel: &dyn Channel,
        keys: &Keys,
        bufs: &mut [IoBufMut<'_>],
        flags: RecvFlags,
        ended_here: impl Fn() -> bool,
    ) -> Result<usize> {
        if !self.fill(channel, keys, &ended_here)? {
            return Ok(0);
        }
        if flags.contains(RecvFlags::PEEK) {
            let wanted = total_len_mut(bufs);
            while self.plain.len() < wanted && self.open_next(channel.peer(), keys)? {}
            return Ok(scatter(&self.buffer[self.plain.clone()], bufs));
        }
        let mut cursor = IoCursorMut::new(bufs);
        let wanted = cursor.remaining();
        loop {
            let taken = scatter(&self.buffer[self.plain.clone()], cursor.chunk());
            self.plain.start += taken;
            cursor.advance(taken);
            // What fails behind bytes that are good is the next call's.
            if cursor.is_empty()
                || (self.plain.is_empty() && !matches!(self.open_next(channel.peer(), keys), Ok(true)))
            {
                return Ok(wanted - cursor.remaining());
            }
        }
    }

    /// Whether the next call gives something without asking the channel below.
    pub(super) fn has_buffered(&self) -> bool {
        let whole = || match record_length(&self.buffer[self.start..self.end]) {
            Ok(length) => length.is_some_and(|length| length <= self.end - self.start),
            Err(_) => true,
        };
        !self.plain.is_empty() || self.finished.is_some() || whole()
    }

    /// Waits until there is content; false at the end.
    fn fill(&mut self, channel: &dyn Channel, keys: &Keys, ended_here: &impl Fn() -> bool) -> Result<bool> {
        loop {
            if !self.plain.is_empty() || self.open_next(channel.peer(), keys)? {
                return Ok(true);
            }
            if self.finished == Some(Finished::Closed) {
                return Ok(false);
            }
            match self.receive_more(channel)? {
                0 if ended_here() => return Ok(false),
                0 => return Err(Error::Cut { peer: channel.peer().to_owned() }),
                _ => {}
            }
        }
    }

    /// One call to the channel below, when all content is taken.
    pub(super) fn receive_more(&mut self, channel: &dyn Channel) -> Result<usize> {
        self.make_room();
        let room = IoBufMut::from(&mut self.buffer[self.end..]);
        let received = channel.recv(&mut [room], RecvFlags::empty())?;
        self.end += received;
        Ok(received)
    }

    /// Whether there is content, or something to say of the end.
    pub(super) fn has_something(&mut self, peer: &str, keys: &Keys) -> bool {
        if !self.plain.is_empty() {
            return true;
        }
        !matches!(self.open_next(peer, keys), Ok(false)) || self.finished.is_some()
    }

    /// Opens records up to the next one with data; false if none is there. Its content joins what was not taken.
    fn open_next(&mut self, peer: &str, keys: &Keys) -> Result<bool> {
        match &self.finished {
            None => {}
            Some(Finished::Closed) => return Ok(false),
            Some(Finished::Failed(why)) => return Err(Error::tls(peer, why.clone())),
        }
        let opened = self.try_open_next(peer, keys);
        if let Err(Error::Tls { why, .. }) = &opened {
            self.finished = Some(Finished::Failed(why.clone()));
        }
        opened
    }

    fn try_open_next(&mut self, peer: &str, keys: &Keys) -> Result<bool> {
        let fault = |fault: super::record::Fault| Error::tls(peer, fault.to_string());
        while self.finished.is_none() {
            let bytes = &mut self.buffer[self.start..self.end];
            let length = match record_length(bytes).map_err(fault)? {
                Some(length) if length <= bytes.len() => length,
                _ => return Ok(false),
            };
            let (content, range) = self.protection.open(&mut bytes[..length]).map_err(fault)?;
            let range = self.start + range.start..self.start + range.end;
            self.start += length;
            if content == Content::Data && !range.is_empty() {
                self.idle_records = 0;
                self.join(range);
                return Ok(true);
            }
            self.idle_records += 1;
            if self.idle_records > IDLE_RECORDS_MAX {
                return Err(Error::tls(peer, format!("it sent {IDLE_RECORDS_MAX} TLS records without data")));
            }
            match content {
                Content::Data => {}
                Content::Alert => self.alert(range, peer)?,
                Content::Handshake => self.handshake(range, peer, keys)?,
            }
        }
        Ok(false)
    }

    /// Moves what was not taken up to new content, over the header between them.
    fn join(&mut self, content: Range<usize>) {
        let start = content.start - self.plain.len();
        self.buffer.copy_within(self.plain.clone(), start);
        self.plain = start..content.end;
    }

    fn make_room(&mut self) {
        debug_assert!(self.plain.is_empty());
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < INCOMING_BYTES_MAX || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.plain = self.start..self.start;
    }

    fn alert(&mut self, range: Range<usize>, peer: &str) -> Result<()> {
        match self.buffer[range] {
            [_, 0] => {
                self.finished = Some(Finished::Closed);
                Ok(())
            }
            [_, alert] => Err(super::failure::alert(peer, alert.into())),
            _ => Err(Error::tls(peer, "it sent a TLS alert that is none")),
        }
    }

    /// Tickets are of no use: no session is resumed.
    fn handshake(&mut self, range: Range<usize>, peer: &str, keys: &Keys) -> Result<()> {
        match self.buffer[range] {
            [KEY_UPDATE, 0, 0, 1, request @ (0 | 1)] => {
                self.protection = keys.next_to_receive(peer)?;
                if request == 1 {
                    keys.request();
                }
                Ok(())
            }
            [NEW_SESSION_TICKET, ..] => Ok(()),
            _ => Err(Error::tls(peer, "it sent a handshake message that has no place behind a handshake")),
        }
    }
}
