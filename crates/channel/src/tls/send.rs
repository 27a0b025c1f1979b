//! What is sent: pages are gathered into records, a batch of records goes out in one call.
//!
//! ```text
//!   guest's pages ──gather──▶ │h│content│t│h│content│t│…   one batch, sealed in place ──▶ channel below
//! ```
//!
//! Bytes that are in a sealed record are taken, as those in a socket's own buffer are: what the channel below does not take
//! in time stays in the batch and goes first in the next call.

use super::keys::Keys;
use super::record::{CONTENT_BYTES_MAX, Content, HEADER_BYTES, Protection, RECORD_BYTES_MAX, TRAILER_BYTES};
use crate::{Channel, Error, IoBuf, IoCursor, Result, SendFlags, gather};
use std::ops::Range;

/// Records of one batch: what they take stays in a processor's second-level cache beside the pages that go into it.
const BATCH_RECORDS: usize = 16;
/// QEMU's own name of the alert that ends a stream in order (RFC 8446, section 6.1).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
/// A KeyUpdate that asks for none in return (RFC 8446, section 4.6.3).
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// The sending half.
#[derive(Debug)]
pub(super) struct Sender {
    protection: Protection,
    batch: Box<[u8]>,
    /// What of the batch is sealed and not sent.
    pending: Range<usize>,
    /// Nothing may follow the close_notify.
    closed: bool,
}

impl Sender {
    pub(super) fn new(protection: Protection) -> Self {
        let batch = vec![0; BATCH_RECORDS * RECORD_BYTES_MAX].into();
        Self { protection, batch, pending: 0..0, closed: false }
    }

    /// Sends a prefix of the buffers, which are not all empty.
    pub(super) fn send(
        &mut self,
        channel: &dyn Channel,
        keys: &Keys,
        bufs: &[IoBuf<'_>],
        flags: SendFlags,
    ) -> Result<usize> {
        if self.closed {
            return Err(Error::io("send", channel.peer(), rustix::io::Errno::PIPE));
        }
        self.drain(channel, SendFlags::MORE)?;
        self.renew_key(channel, keys)?;
        let mut cursor = IoCursor::new(bufs);
        let taken = self.seal(&mut cursor);
        let flags = if cursor.is_empty() { flags } else { flags | SendFlags::MORE };
        match self.drain(channel, flags) {
            Ok(()) | Err(Error::Timeout { .. }) => Ok(taken),
            Err(error) => Err(error),
        }
    }

    /// Sends what is sealed.
    pub(super) fn drain(&mut self, channel: &dyn Channel, flags: SendFlags) -> Result<()> {
        while !self.pending.is_empty() {
            self.pending.start += channel.send(&[IoBuf::from(&self.batch[self.pending.clone()])], flags)?;
        }
        Ok(())
    }

    /// Ends the stream, as far as the channel below takes that `now`, which it is asked before each call.
    pub(super) fn close(&mut self, channel: &dyn Channel, now: impl Fn() -> bool) {
        if !self.closed && self.pending.is_empty() {
            self.seal_one(&CLOSE_NOTIFY, Content::Alert);
        }
        self.closed = true;
        while !self.pending.is_empty() && now() {
            let rest = IoBuf::from(&self.batch[self.pending.clone()]);
            match channel.send(&[rest], SendFlags::empty()) {
                Ok(sent) => self.pending.start += sent,
                Err(_) => return,
            }
        }
    }

    /// Fills a batch; returns how many bytes it took.
    fn seal(&mut self, cursor: &mut IoCursor<'_, '_>) -> usize {
        let (before, mut end) = (cursor.remaining(), 0);
        while !cursor.is_empty() && end + RECORD_BYTES_MAX <= self.batch.len() && !self.protection.is_worn() {
            let record = &mut self.batch[end..end + RECORD_BYTES_MAX];
            let content = &mut record[HEADER_BYTES..HEADER_BYTES + CONTENT_BYTES_MAX];
            let mut length = 0;
            while length < CONTENT_BYTES_MAX && !cursor.is_empty() {
                let gathered = gather(cursor.chunk(), &mut content[length..]);
                cursor.advance(gathered);
                length += gathered;
            }
            let record = &mut record[..HEADER_BYTES + length + TRAILER_BYTES];
            self.protection.seal(record, Content::Data);
            end += record.len();
        }
        self.pending = 0..end;
        before - cursor.remaining()
    }

    /// Before a key is worn, or when the peer asked for it.
    fn renew_key(&mut self, channel: &dyn Channel, keys: &Keys) -> Result<()> {
        if !keys.take_request() && !self.protection.is_worn() {
            return Ok(());
        }
        self.seal_one(&KEY_UPDATE, Content::Handshake);
        self.protection = keys.next_to_send(channel.peer())?;
        self.drain(channel, SendFlags::MORE)
    }

    fn seal_one(&mut self, content: &[u8], kind: Content) {
        let record = &mut self.batch[..HEADER_BYTES + content.len() + TRAILER_BYTES];
        record[HEADER_BYTES..HEADER_BYTES + content.len()].copy_from_slice(content);
        self.protection.seal(record, kind);
        self.pending = 0..record.len();
    }
}
