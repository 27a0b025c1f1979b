//! The sending half: data is gathered into packets; one call sends a batch of packets.
//!
//! Bytes in a packet count as sent, like those in a socket's own buffer: data that the channel below does not
//! accept in time stays here and is sent first in the next call.

use super::packet::Pack;
use crate::{Channel, Error, IoBuf, IoCursor, Result, SendFlags};
use std::ops::Range;

/// The sending half.
#[derive(Debug)]
pub(super) struct Outbox<P> {
    pack: P,
    room: Box<[u8]>,
    /// Range of the packed and unsent bytes.
    pending: Range<usize>,
    /// Nothing may follow the end.
    closed: bool,
}

impl<P: Pack> Outbox<P> {
    pub(super) fn new(pack: P, room: usize) -> Self {
        Self { pack, room: vec![0; room].into(), pending: 0..0, closed: false }
    }

    /// Sends a prefix of the buffers, which are not all empty.
    pub(super) fn send(
        &mut self,
        channel: &dyn Channel,
        bufs: &[IoBuf<'_>],
        flags: SendFlags,
    ) -> Result<usize> {
        if self.closed {
            return Err(Error::io("send", channel.peer(), rustix::io::Errno::PIPE));
        }
        self.drain(channel, SendFlags::MORE)?;
        if let Some(due) = self.pack.due(&mut self.room, channel.peer())? {
            self.pending = due;
            self.drain(channel, SendFlags::MORE)?;
        }
        let mut cursor = IoCursor::new(bufs);
        let before = cursor.remaining();
        self.pending = self.pack.pack(&mut cursor, &mut self.room);
        let flags = if cursor.is_empty() { flags } else { flags | SendFlags::MORE };
        match self.drain(channel, flags) {
            Ok(()) | Err(Error::Timeout { .. }) => Ok(before - cursor.remaining()),
            Err(error) => Err(error),
        }
    }

    /// Sends due control packets. `now` returns true while the channel below accepts data.
    pub(super) fn send_due_control_packets(&mut self, channel: &dyn Channel, now: impl Fn() -> bool) {
        if self.closed || !self.pending.is_empty() || !now() {
            return;
        }
        // The next send of data reports the error.
        if let Ok(Some(due)) = self.pack.due(&mut self.room, channel.peer()) {
            self.pending = due;
            self.send_now(channel, now);
        }
    }

    /// Sends what is packed.
    pub(super) fn drain(&mut self, channel: &dyn Channel, flags: SendFlags) -> Result<()> {
        while !self.pending.is_empty() {
            self.pending.start += channel.send(&[IoBuf::from(&self.room[self.pending.clone()])], flags)?;
        }
        Ok(())
    }

    /// Ends the stream. `now` returns true while the channel below accepts data.
    pub(super) fn close(&mut self, channel: &dyn Channel, now: impl Fn() -> bool) {
        if !self.closed && self.pending.is_empty() {
            self.pending = self.pack.end(&mut self.room);
        }
        self.closed = true;
        self.send_now(channel, now);
    }

    fn send_now(&mut self, channel: &dyn Channel, now: impl Fn() -> bool) {
        while !self.pending.is_empty() && now() {
            let rest = IoBuf::from(&self.room[self.pending.clone()]);
            match channel.send(&[rest], SendFlags::empty()) {
                Ok(sent) => self.pending.start += sent,
                Err(_) => return,
            }
        }
    }
}
