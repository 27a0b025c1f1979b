//! From the guest's transmit ring to sockets.

use std::io;

use towline_channel::IoBuf;
use towline_vhost_user::Ring;

use super::line::{HELD_MAX, Line, Out, chunk_bytes};
use super::{Engine, SKIP};
use crate::connection::{Id, Inbound};
use crate::packet::{Ends, HEADER_BYTES, Header, Kind, Shut};
use crate::sockets::Sockets;

/// Packets that are looked at together.
const BATCH: usize = 128;
/// Batches before others have a turn.
const ROUNDS: usize = 8;
/// The share of the ring that may be held for sockets which do not take their bytes, or lent to the kernel.
const HELD_SHARE: u16 = 4;

impl<S: Sockets> Engine<S> {
    /// Takes what the guest has to say. True if there is more, and only others should have a turn.
    pub fn take(&mut self, ring: &mut Ring) -> bool {
        for _ in 0..ROUNDS {
            self.give_back(ring);
            // What is not looked at shall not keep us awake either.
            let takes = self.table.takes();
            ring.set_notification(takes);
            if !takes {
                return false;
            }
            let slot = self.shelf.free();
            let count = ring.pop(self.shelf.batch_mut(slot), BATCH);
            self.shelf.measure(slot);
            for chain in 0..count {
                self.packet(slot, chain, ring);
            }
            self.shelf.held_max = usize::from(ring.size() / HELD_SHARE).min(HELD_MAX);
            let mut touched = std::mem::take(&mut self.touched);
            for id in touched.drain(..) {
                if let Some(line) = self.line(id) {
                    line.touched = false;
                }
                self.flush(id);
                self.hold(id);
            }
            self.touched = touched;
            self.give_back(ring);
            self.shelf.trim();
            if count < BATCH {
                return false;
            }
            ring.publish();
        }
        true
    }

    fn packet(&mut self, slot: usize, index: usize, ring: &mut Ring) {
        let chain = self.shelf.batch(slot).chain(index);
        let mut bytes = [0; HEADER_BYTES];
        if chain.read_at(0, &mut bytes) < HEADER_BYTES {
            self.table.drop_packet();
            ring.complete(chain, 0);
            return;
        }
        let header = Header::parse(&bytes);
        let payload = chain.readable_bytes() - HEADER_BYTES as u32;
        let inbound = self.table.from_guest(&header, payload);
        self.traffic.from_guest += u64::from(!matches!(inbound, Inbound::Credit(_)));
        if let Inbound::Payload(id, ends) = inbound {
            self.statistics.lines.packets_from_guest += 1;
            if self.payload(id, (slot, index), header.len.get(), ends) {
                return;
            }
        }
        ring.complete(self.shelf.batch(slot).chain(index), 0);
        match inbound {
            Inbound::Nothing | Inbound::Payload(..) => {}
            Inbound::Connect(id) => self.connect(id),
            Inbound::Accepted(id) => self.accepted(id),
            Inbound::Credit(_) => {}
            Inbound::Shut(id) => self.touch(id),
            Inbound::Gone(id, by_guest) => self.gone(id, by_guest),
        }
        if let Inbound::Credit(id) | Inbound::Shut(id) | Inbound::Payload(id, _) | Inbound::Accepted(id) =
            inbound
        {
            self.resume(id);
        }
    }

    /// Puts a packet's payload in line for its socket. False if its chain is not needed.
    fn payload(&mut self, id: Id, (slot, chain): (usize, usize), len: u32, ends: Ends) -> bool {
        let taken = match Self::line_of(&mut self.lines, id) {
            Some(line) if !line.deaf => {
                line.statistics.packets_from_guest += 1;
                let is_end = line.kind == Kind::Seqpacket && ends.contains(Ends::MESSAGE);
                let end = if is_end { ends } else { Ends::empty() };
                if len == 0 {
                    is_end && line.end_message(end)
                } else {
                    line.out.push_back(Out::Chain { slot, chain, offset: 0, len, end, loan: None });
                    self.shelf.take(slot);
                    true
                }
            }
            // Nobody receives it; the guest was told, or will be.
            _ => {
                self.table.forwarded(id, len);
                false
            }
        };
        if taken {
            self.touch(id);
            self.resume(id);
        }
        taken && len > 0
    }

    /// A guest that had no room may have some.
    fn resume(&mut self, id: Id) {
        let room = self.table.room(id);
        if let Some(line) = self.line(id)
            && line.stalled
            && room > 0
        {
            line.stalled = false;
            self.line_up(id);
        }
    }

    fn touch(&mut self, id: Id) {
        match self.line(id) {
            Some(line) if line.touched => {}
            Some(line) => {
                line.touched = true;
                self.touched.push(id);
            }
            None => self.settle(id),
        }
    }

    fn accepted(&mut self, id: Id) {
        let port = self.table.get(id).map_or(0, |connection| connection.key.peer_port);
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        let Some(socket) = &line.socket else { return };
        if let Err(error) = self.sockets.accepted(id, socket, port) {
            // What it has said before is for the guest all the same.
            tracing::debug!(%error, port, "who asked for this connection has gone");
            self.refused(id, &error);
        }
        self.line_up(id);
    }

    /// The guest has reset it, or has done what none may. What it sent before is still for the host side, if that takes it.
    fn gone(&mut self, id: Id, by_guest: bool) {
        if by_guest && self.line(id).is_some_and(|line| !line.blocked) {
            self.flush(id);
        }
        self.hang_up(id, true);
    }

    /// Sends what waits for a socket, as far as it takes it.
    pub(super) fn flush(&mut self, id: Id) {
        loop {
            let Some(line) = Self::line_of(&mut self.lines, id) else { return };
            let whole = line.kind == Kind::Seqpacket;
            let Some(socket) = line.socket.as_ref().filter(|_| !line.blocked && !line.out.is_empty()) else {
                break;
            };
            let (entries, lends) = if !whole && line.has_large(&self.shelf) && self.sockets.lends(socket) {
                line.lendable(&self.shelf)
            } else {
                (usize::MAX, false)
            };
            let mut bufs: Vec<IoBuf<'_>> = Vec::with_capacity(line.out.len());
            let Some((bytes, ends)) = line.gather(&self.shelf, whole, entries, &mut bufs) else {
                drop(bufs);
                // Copied, a message has a piece for each chunk.
                if self.copy_out(id) == 0 {
                    self.end(id, true);
                    return;
                }
                continue;
            };
            if bytes == 0 {
                break;
            }
            self.statistics.sends += 1;
            let sent = match lends {
                true => self.sockets.lend(socket, &bufs),
                false => self.sockets.send(socket, &bufs, ends).map(|sent| (sent, None)),
            };
            drop(bufs);
            match sent {
                Ok((sent, loan)) => self.sent(id, (sent, loan), sent < bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.sent(id, (0, None), true),
                Err(error) => {
                    self.refused(id, &error);
                    return;
                }
            }
        }
        self.settle(id);
    }

    fn sent(&mut self, id: Id, (bytes, loan): (usize, Option<u64>), blocked: bool) {
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        if let Some(number) = loan {
            line.loans.begin(number);
        }
        line.advance(bytes, loan, &mut self.shelf);
        for statistics in [&mut line.statistics, &mut self.statistics.lines] {
            statistics.bytes_to_host += bytes as u64;
            statistics.bytes_lent += if loan.is_some() { bytes as u64 } else { 0 };
        }
        if blocked {
            line.blocked = true;
            self.statistics.blocked += 1;
            if let Some(socket) = &line.socket {
                self.sockets.watch_writable(id, socket, true);
            }
            self.table.fell_behind(id);
        }
        self.table.forwarded(id, u32::try_from(bytes).expect("a window is shorter"));
    }

    /// The socket takes nothing any more. It may still have something for the guest, unless it was reset.
    fn refused(&mut self, id: Id, error: &io::Error) {
        tracing::debug!(%error, ?id, "a socket of the host takes nothing any more");
        if error.kind() != io::ErrorKind::BrokenPipe {
            self.end(id, true);
            return;
        }
        self.deafen(id);
    }

    /// Nobody is left to receive, which the guest is told.
    pub(super) fn deafen(&mut self, id: Id) {
        let kept = self.table.kept(id);
        if let Some(line) = Self::line_of(&mut self.lines, id) {
            line.discard(&mut self.shelf);
            line.deaf = true;
        }
        self.table.forwarded(id, kept);
        self.table.shut(id, Shut::RECEIVE);
        self.settle(id);
    }

    /// What did not leave with this batch is held or copied.
    fn hold(&mut self, id: Id) {
        let size = chunk_bytes(self.table.window(id));
        let Some(line) = Self::line_of(&mut self.lines, id) else { return };
        if line.settled < line.out.len() {
            let copied = line.settle(&mut self.shelf, size) as u64;
            line.statistics.bytes_copied += copied;
            self.statistics.lines.bytes_copied += copied;
        }
        line.trim();
    }

    /// Copies everything that a connection has in the ring. Returns how many bytes that were.
    pub(super) fn copy_out(&mut self, id: Id) -> usize {
        let size = chunk_bytes(self.table.window(id));
        let Some(line) = Self::line_of(&mut self.lines, id) else { return 0 };
        let copied = line.let_go(&mut self.shelf, size);
        line.statistics.bytes_copied += copied as u64;
        self.statistics.lines.bytes_copied += copied as u64;
        copied
    }
}

impl<S> Line<S> {
    /// The message that began ends, without another byte. False if none began: nobody could tell an empty message from
    /// the end.
    fn end_message(&mut self, ends_with: Ends) -> bool {
        match self.out.back_mut() {
            Some(Out::Chain { end, .. }) if end.is_empty() => {
                *end = ends_with;
                true
            }
            Some(Out::Kept(chunk)) => chunk.end(ends_with),
            _ => false,
        }
    }
}

/// Payload lies behind the header, wherever descriptors end.
const _: () = assert!(SKIP == HEADER_BYTES);
