//! From sockets to the guest's receive ring.

use std::io;

use towline_channel::{IOV_MAX, IoBufMut};
use towline_vhost_user::{Batch, Ring};
use zerocopy::IntoBytes as _;

use super::line::{is_heavy, pieces};
use super::{Engine, SKIP, STALL_MS};
use crate::connection::Id;
use crate::packet::{Ends, HEADER_BYTES, Kind, Operation, PAYLOAD_BYTES_MAX, Shut};
use crate::sockets::{Front, Received, Sockets};

/// Buffers of the guest's that are taken together.
const BATCH: usize = 256;
/// Batches before others have a turn.
const ROUNDS: usize = 8;
/// Bytes that one connection may send before the next has its turn.
const QUANTUM: usize = 256 << 10;
/// Turns of connections that turned out to have nothing, before the rings are looked at again.
const IDLE_TURNS: usize = 64;
/// Pieces of memory that one call receives into: one is left for the mark of a message.
const PIECES_MAX: usize = IOV_MAX - 1;

impl<S: Sockets> Engine<S> {
    /// Tells the guest what there is to tell, and fills its buffers. True if there is more, and only others should have a
    /// turn.
    pub fn fill(&mut self, ring: &mut Ring) -> bool {
        for _ in 0..ROUNDS {
            let wanted = self.wanted();
            if wanted == 0 {
                ring.set_notification(false);
                return false;
            }
            let mut buffers = std::mem::take(&mut self.buffers);
            let count = ring.pop(&mut buffers, wanted);
            self.buffers = buffers;
            if count == 0 {
                // Only now does it matter that the guest has new ones.
                self.statistics.starved += 1;
                ring.set_notification(true);
                return false;
            }
            let heavy = is_heavy(pieces(&self.buffers));
            let used = self.fill_batch(ring, count);
            ring.rewind(&mut self.buffers, used);
            if heavy {
                self.buffers = Batch::new();
            }
            if used == count {
                ring.publish();
            }
        }
        true
    }

    /// How many buffers there is use for.
    fn wanted(&mut self) -> usize {
        let control = self.table.control_len();
        let appetite = match self.ready.front().copied() {
            Some(id) => self.line(id).map_or(1, |line| line.appetite),
            None => 0,
        };
        (control + appetite).min(BATCH)
    }

    fn fill_batch(&mut self, ring: &mut Ring, count: usize) -> usize {
        let (mut used, mut idle) = (0, 0);
        while used < count && idle < IDLE_TURNS {
            let chain = self.buffers.chain(used);
            if (chain.writable_bytes() as usize) < HEADER_BYTES {
                // Of no use to anybody, as the guest sees by its length.
                ring.complete(chain, 0);
                used += 1;
            } else if let Some(header) = self.table.next_control() {
                let credit = header.operation == Operation::CreditUpdate.number();
                self.traffic.to_guest += u64::from(!credit);
                chain.write_at(0, header.as_bytes());
                ring.complete(chain, HEADER_BYTES as u32);
                used += 1;
            } else if let Some(id) = self.ready.pop() {
                let filled = self.fill_from(id, ring, used);
                used += filled;
                idle += usize::from(filled == 0);
            } else {
                break;
            }
        }
        used
    }

    /// Lets one connection have its turn. Returns how many buffers it filled.
    fn fill_from(&mut self, id: Id, ring: &mut Ring, first: usize) -> usize {
        let room = self.table.room(id) as usize;
        let Some(connection) = self.table.get(id) else { return 0 };
        let kind = connection.kind;
        let deaf = connection.guest_shut.contains(Shut::RECEIVE);
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        line.in_line = false;
        if deaf || line.ended || !(line.readable || line.message.is_some()) {
            return 0;
        }
        let used = match kind {
            Kind::Stream => self.fill_stream(id, ring, first, room),
            Kind::Seqpacket => self.fill_message(id, ring, first, room),
        };
        self.line_up(id);
        used
    }

    fn stall(&mut self, id: Id) {
        self.statistics.stalled += 1;
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        line.stalled = true;
        if !std::mem::replace(&mut line.stall_noted, true) {
            self.stalls.push((self.now_ms + STALL_MS, id), |(_, id)| self.table.get(*id).is_some());
        }
    }

    fn fill_stream(&mut self, id: Id, ring: &mut Ring, first: usize, room: usize) -> usize {
        if room == 0 {
            // An end needs no room, and the guest may be waiting for it.
            if self.line(id).is_some_and(|line| line.ending) && self.is_at_end(id) {
                self.ended(id);
            } else {
                self.stall(id);
            }
            return 0;
        }
        let most = room.min(QUANTUM);
        let mut bufs = Vec::with_capacity(BATCH);
        let (mut offered, mut buffers) = (0, first);
        while buffers < self.buffers.len() && offered < most && bufs.len() < PIECES_MAX {
            let here = payload_bufs(&self.buffers, buffers, most - offered, &mut bufs);
            offered += here;
            buffers += 1;
        }
        if offered == 0 {
            return self.pass_over(ring, first);
        }
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        let Some(socket) = &line.socket else { return 0 };
        self.statistics.receives += 1;
        let received = self.sockets.receive(socket, &mut bufs);
        drop(bufs);
        let offered_buffers = buffers - first;
        match received {
            Ok(Received { bytes: 0, .. }) => {
                self.ended(id);
                0
            }
            Ok(Received { bytes, more, .. }) => {
                line.readable = more || bytes == offered || line.ending || line.urgent;
                let used = self.write_headers(id, ring, first, bytes, Ends::empty());
                if let Some(line) = self.line(id) {
                    line.appetite = if used == offered_buffers { 2 * used } else { used + 1 }.min(BATCH);
                }
                used
            }
            Err(error) => self.failed(id, &error),
        }
    }

    /// Whether nothing but its end is left in a socket.
    fn is_at_end(&mut self, id: Id) -> bool {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return false };
        line.socket.as_ref().is_some_and(|socket| matches!(self.sockets.front(socket), Ok(Front::End)))
    }

    /// A buffer with room for a header only.
    fn pass_over(&mut self, ring: &mut Ring, index: usize) -> usize {
        ring.complete(self.buffers.chain(index), 0);
        1
    }

    fn failed(&mut self, id: Id, error: &io::Error) -> usize {
        if error.kind() == io::ErrorKind::WouldBlock {
            if let Some(line) = self.line(id) {
                line.readable = false;
            }
        } else {
            tracing::debug!(%error, ?id, "a socket of the host failed");
            self.end(id, true);
        }
        0
    }

    /// The socket has sent all.
    fn ended(&mut self, id: Id) {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        line.ended = true;
        line.readable = false;
        // Nobody is left to receive either.
        let hung_up = line.hung_up && !line.write_shut;
        self.table.shut(id, Shut::SEND);
        if hung_up { self.deafen(id) } else { self.settle(id) }
    }

    /// Puts headers in front of what was received. Returns how many buffers it took.
    fn write_headers(&mut self, id: Id, ring: &mut Ring, first: usize, bytes: usize, ends: Ends) -> usize {
        let (mut left, mut index) = (bytes, first);
        while left > 0 {
            let chain = self.buffers.chain(index);
            index += 1;
            let here = left.min(capacity(chain.writable_bytes()));
            if here == 0 {
                ring.complete(chain, 0);
                continue;
            }
            left -= here;
            let len = u32::try_from(here).expect("at most `PAYLOAD_BYTES_MAX`");
            let header = self.table.data(id, len, if left == 0 { ends } else { Ends::empty() });
            chain.write_at(0, header.as_bytes());
            ring.complete(chain, HEADER_BYTES as u32 + len);
        }
        let (used, bytes) = ((index - first) as u64, bytes as u64);
        if let Some(line) = Self::line_of(&mut self.lines, id) {
            line.statistics.bytes_to_guest += bytes;
            line.statistics.packets_to_guest += used;
        }
        self.statistics.lines.bytes_to_guest += bytes;
        self.statistics.lines.packets_to_guest += used;
        index - first
    }

    /// One message, whole: the guest is given its packets only when it has room for all.
    fn fill_message(&mut self, id: Id, ring: &mut Ring, first: usize, room: usize) -> usize {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        let Some(socket) = &line.socket else { return 0 };
        if line.message.is_some() {
            return self.fill_rest(id, ring, first, room);
        }
        let len = match self.sockets.front(socket) {
            Ok(Front::Bytes(len)) => len,
            Ok(Front::End) => {
                self.ended(id);
                return 0;
            }
            // It stays readable, behind the others.
            Ok(Front::Skipped) => return 0,
            Err(error) => return self.failed(id, &error),
        };
        if len > self.table.room_at_most(id) as usize {
            tracing::warn!(
                len,
                ?id,
                "a message is longer than the guest's buffer for the connection; it is reset"
            );
            self.end(id, true);
            return 0;
        }
        if len > room {
            self.stall(id);
            // It may have room for the whole of it that it did not think worth telling.
            self.table.ask_credit(id);
            return 0;
        }
        let mut bufs = Vec::with_capacity(BATCH);
        let (mut offered, mut buffers) = (0, first);
        while buffers < self.buffers.len() && offered < len && bufs.len() < PIECES_MAX {
            offered += payload_bufs(&self.buffers, buffers, len - offered, &mut bufs);
            buffers += 1;
        }
        self.statistics.receives += 1;
        if offered < len {
            drop(bufs);
            return self.receive_long(id, ring, (first, room), len);
        }
        match self.sockets.receive(socket, &mut bufs) {
            Ok(received) => {
                drop(bufs);
                self.write_headers(id, ring, first, received.bytes, received.ends())
            }
            Err(error) => {
                drop(bufs);
                self.failed(id, &error)
            }
        }
    }

    /// A message that does not fit into the buffers that were taken: it is copied, and goes piece by piece.
    fn receive_long(&mut self, id: Id, ring: &mut Ring, (first, room): (usize, usize), len: usize) -> usize {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        let Some(socket) = &line.socket else { return 0 };
        let mut message = Vec::new();
        message.reserve_exact(len);
        let bytes = message.capacity() as u64;
        if !self.table.reserve(bytes) {
            self.statistics.memory_waits += 1;
            line.in_line = true;
            self.waiting.push(id, |id| self.table.get(*id).is_some());
            return 0;
        }
        self.messages += bytes;
        message.resize(len, 0);
        let received = match self.sockets.receive(socket, &mut [IoBufMut::from(&mut message[..])]) {
            Ok(received) => received,
            Err(error) => {
                self.free_message(&message);
                return self.failed(id, &error);
            }
        };
        message.truncate(received.bytes);
        line.appetite = (2 * line.appetite).min(BATCH);
        line.statistics.bytes_copied += message.len() as u64;
        self.statistics.lines.bytes_copied += message.len() as u64;
        line.message = Some((message, 0, received.ends()));
        self.fill_rest(id, ring, first, room)
    }

    fn fill_rest(&mut self, id: Id, ring: &mut Ring, first: usize, room: usize) -> usize {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        let Some((message, mut offset, end)) = line.message.take() else { return 0 };
        let (mut index, mut room) = (first, room);
        while index < self.buffers.len() && offset < message.len() && room > 0 {
            let chain = self.buffers.chain(index);
            index += 1;
            let here = (message.len() - offset).min(capacity(chain.writable_bytes())).min(room);
            if here == 0 {
                ring.complete(chain, 0);
                continue;
            }
            chain.write_at(SKIP, &message[offset..offset + here]);
            offset += here;
            room -= here;
            let ends = if offset == message.len() { end } else { Ends::empty() };
            let len = u32::try_from(here).expect("at most `PAYLOAD_BYTES_MAX`");
            let header = self.table.data(id, len, ends);
            chain.write_at(0, header.as_bytes());
            ring.complete(chain, HEADER_BYTES as u32 + len);
            self.statistics.lines.bytes_to_guest += here as u64;
            self.statistics.lines.packets_to_guest += 1;
            if let Some(line) = Self::line_of(&mut self.lines, id) {
                line.statistics.bytes_to_guest += here as u64;
                line.statistics.packets_to_guest += 1;
            }
        }
        let stalls = room == 0 && offset < message.len();
        match self.line(id).filter(|_| offset < message.len()) {
            Some(line) => line.message = Some((message, offset, end)),
            None => self.free_message(&message),
        }
        if stalls {
            self.stall(id);
        }
        index - first
    }
}

/// What fits behind the header in a chain of so many bytes.
fn capacity(writable: u32) -> usize {
    writable.saturating_sub(HEADER_BYTES as u32).min(PAYLOAD_BYTES_MAX) as usize
}

/// Appends the room for payload in one chain, at most `most` bytes of it and [`PIECES_MAX`] pieces in all. Returns its
/// bytes.
fn payload_bufs<'b>(batch: &'b Batch, index: usize, most: usize, bufs: &mut Vec<IoBufMut<'b>>) -> usize {
    let chain = batch.chain(index);
    let (mut skip, mut left) = (SKIP, most.min(capacity(chain.writable_bytes())));
    let mut offered = 0;
    for buf in chain.writable() {
        if bufs.len() == PIECES_MAX || left == 0 {
            break;
        }
        let here = skip.min(buf.len());
        skip -= here;
        let buf = buf.skip(here).into_prefix(left);
        if !buf.is_empty() {
            left -= buf.len();
            offered += buf.len();
            bufs.push(buf);
        }
    }
    offered
}
