//! The receiving half: one call receives many packets; each is decoded in place and its data copied to its
//! destination, or decoded into its destination if that may be written before the data are authenticated.
//!
//! ```text
//!   channel below ──▶ [ done │ undelivered data       │ received packets   │ room ]
//!                            ▲ plain                    ▲ start             ▲ end
//! ```

use super::packet::{Unpack, Unpacked, UnpackedInto};
use crate::{Channel, Error, IoBufMut, IoCursorMut, RecvFlags, Result, scatter, total_len_mut};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Room for received bytes: at least some of the longest packets, so one call receives many.
const PACKETS: usize = 16;
/// Maximum number of consecutive packets without data (empty ones, key updates, pings) in [`IDLE_INTERVAL`]: they
/// cost work and carry nothing. A proxy sends a ping from time to time for as long as it forwards data the other
/// way.
const IDLE_PACKETS_MAX: u32 = 64;
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// The receiving half.
#[derive(Debug)]
pub(super) struct Inbox<U> {
    unpack: U,
    buffer: Box<[u8]>,
    plain: Range<usize>,
    start: usize,
    end: usize,
    idle: IdlePackets,
    finished: Option<InboxEnd>,
}

/// Packets without data since the last one with data, in one interval.
#[derive(Debug, Default)]
struct IdlePackets {
    count: u32,
    began: Option<Instant>,
}

impl IdlePackets {
    /// Counts one that arrived `now`; false if there are too many.
    fn add(&mut self, now: Instant) -> bool {
        if self.began.is_none_or(|began| now.duration_since(began) >= IDLE_INTERVAL) {
            *self = Self { count: 0, began: Some(now) };
        }
        self.count += 1;
        self.count <= IDLE_PACKETS_MAX
    }
}

/// State of the end of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
enum InboxEnd {
    /// The peer announced it.
    Closed,
    /// The stream cannot continue; the text is for [`Unpack::fault`].
    Failed(String),
}

impl<U: Unpack> Inbox<U> {
    pub(super) fn new(unpack: U, data: &[u8], packets: &[u8]) -> Self {
        let room = PACKETS * U::PACKET_BYTES_MAX;
        let mut buffer = vec![0; room.max(data.len() + packets.len())];
        buffer[..data.len()].copy_from_slice(data);
        let (start, end) = (data.len(), data.len() + packets.len());
        buffer[start..end].copy_from_slice(packets);
        let buffer = buffer.into();
        Self { unpack, buffer, plain: 0..start, start, end, idle: IdlePackets::default(), finished: None }
    }

    /// Fills a prefix of the buffers, which are not all empty; 0 at an end that the peer announced.
    /// `ended_here` means that this end shut the stream down.
    pub(super) fn recv(
        &mut self,
        channel: &dyn Channel,
        bufs: &mut [IoBufMut<'_>],
        flags: RecvFlags,
        ended_here: impl Fn() -> bool,
        before_waiting: impl Fn(),
    ) -> Result<usize> {
        let peer = channel.peer();
        if flags.contains(RecvFlags::PEEK) {
            let wanted = total_len_mut(bufs);
            if self.fill(channel, None, &ended_here, &before_waiting)? {
                while self.plain.len() < wanted && matches!(self.next(None, peer), Ok(true)) {}
            }
            return Ok(scatter(&self.buffer[self.plain.clone()], bufs));
        }
        let mut cursor = IoCursorMut::new(bufs);
        let wanted = cursor.remaining();
        let is_direct = flags.contains(RecvFlags::UNAUTHENTICATED);
        if !self.fill(channel, is_direct.then_some(&mut cursor), &ended_here, &before_waiting)? {
            return Ok(0);
        }
        loop {
            let taken = scatter(&self.buffer[self.plain.clone()], cursor.chunk());
            self.plain.start += taken;
            cursor.advance(taken);
            // An error after valid bytes is reported by the next call.
            if cursor.is_empty() || !matches!(self.next(is_direct.then_some(&mut cursor), peer), Ok(true)) {
                return Ok(wanted - cursor.remaining());
            }
        }
    }

    /// One call to the channel below, when all data are consumed.
    pub(super) fn receive_more(&mut self, channel: &dyn Channel) -> Result<usize> {
        self.make_room();
        let room = IoBufMut::from(&mut self.buffer[self.end..]);
        // Bytes past those received are never read.
        let received = channel.recv(&mut [room], RecvFlags::UNAUTHENTICATED)?;
        self.end += received;
        Ok(received)
    }

    /// Returns true if there are data, or an end to report.
    pub(super) fn has_something(&mut self, peer: &str) -> bool {
        !self.plain.is_empty() || !matches!(self.next(None, peer), Ok(false)) || self.finished.is_some()
    }

    /// Waits until there are data, in the buffer or in `room`; false at the end.
    fn fill(
        &mut self,
        channel: &dyn Channel,
        mut room: Option<&mut IoCursorMut<'_, '_>>,
        ended_here: &impl Fn() -> bool,
        before_waiting: &impl Fn(),
    ) -> Result<bool> {
        loop {
            if !self.plain.is_empty() || self.next(room.as_deref_mut(), channel.peer())? {
                return Ok(true);
            }
            if self.finished == Some(InboxEnd::Closed) {
                return Ok(false);
            }
            before_waiting();
            match self.receive_more(channel)? {
                0 if ended_here() => return Ok(false),
                0 => return Err(Error::Cut { peer: channel.peer().to_owned() }),
                _ => {}
            }
        }
    }

    /// Decodes packets up to the next one with data; false if there is none. Its data are put into `room`,
    /// and the cursor moves over them, or are appended to the unconsumed data.
    fn next(&mut self, room: Option<&mut IoCursorMut<'_, '_>>, peer: &str) -> Result<bool> {
        match &self.finished {
            None => {}
            Some(InboxEnd::Closed) => return Ok(false),
            Some(InboxEnd::Failed(why)) => return Err(U::fault(peer, why.clone())),
        }
        let found = self.try_next(room, peer);
        if let Err(Error::Tls { why, .. } | Error::WebSocket { why, .. }) = &found {
            self.finished = Some(InboxEnd::Failed(why.clone()));
        }
        found
    }

    fn try_next(&mut self, mut room: Option<&mut IoCursorMut<'_, '_>>, peer: &str) -> Result<bool> {
        loop {
            if let Some(room) = room.as_deref_mut()
                && self.try_next_into(room, peer)?
            {
                return Ok(true);
            }
            match self.unpack.unpack(&mut self.buffer[self.start..self.end], peer)? {
                Unpacked::Incomplete => return Ok(false),
                Unpacked::End => {
                    self.finished = Some(InboxEnd::Closed);
                    return Ok(false);
                }
                Unpacked::Data(data, taken) if !data.is_empty() => {
                    self.idle = IdlePackets::default();
                    let data = self.start + data.start..self.start + data.end;
                    self.start += taken;
                    self.join(data);
                    return Ok(true);
                }
                Unpacked::Data(_, taken) | Unpacked::Idle(taken) => {
                    self.start += taken;
                    if !self.idle.add(Instant::now()) {
                        let why =
                            format!("it sent more than {IDLE_PACKETS_MAX} packets without data in a second");
                        return Err(U::fault(peer, why));
                    }
                }
            }
        }
    }

    /// Decodes the first packet at its data's destination; false if that is not possible.
    fn try_next_into(&mut self, room: &mut IoCursorMut<'_, '_>, peer: &str) -> Result<bool> {
        debug_assert!(self.plain.is_empty(), "they come first");
        let packet = self.unpack.unpack_into(&self.buffer[self.start..self.end], room.chunk(), peer)?;
        let Some(UnpackedInto { data, taken }) = packet else { return Ok(false) };
        self.idle = IdlePackets::default();
        self.start += taken;
        self.plain = self.start..self.start;
        room.advance(data);
        Ok(true)
    }

    /// Moves unconsumed data up to new data, over the header between them.
    fn join(&mut self, data: Range<usize>) {
        let start = data.start - self.plain.len();
        self.buffer.copy_within(self.plain.clone(), start);
        self.plain = start..data.end;
    }

    fn make_room(&mut self) {
        debug_assert!(self.plain.is_empty());
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < U::PACKET_BYTES_MAX || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.plain = self.start..self.start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_are_limited_by_their_rate() {
        let began = Instant::now();
        let at = |millis: u32| began + Duration::from_millis(millis.into());
        let mut idle = IdlePackets::default();
        // A day of a ping each 50 ms.
        assert!((0..86_400 * 20).all(|index| idle.add(at(index * 50))));
        let mut idle = IdlePackets::default();
        let taken = (0..200).take_while(|index| idle.add(at(index * 10))).count();
        assert_eq!(taken, 64);
    }
}
