//! From sockets to the guest's receive ring.

use std::io;

use towline_channel::{IOV_MAX, IoBufMut};
use towline_vhost_user::{Batch, Chain, Next, Ring};

use super::Engine;
use super::batch_pool::{SEGMENTS_RETAINED_MAX, segments};
use super::host_end::{PartialMessage, Queues};
use super::lifecycle::{LifecycleEvent, ReceiveState};
use crate::connection::ConnectionId;
use crate::credit::CreditNeed;
use crate::packet::{
    HEADER_BYTES, Operation, PAYLOAD_BYTES_MAX, PacketHeader, SeqFlags, ShutdownFlags, SocketType,
};
use crate::sockets::{CloseMode, Peeked, ReceiveOutcome, Sockets};

/// Maximum number of the guest's buffers that are popped together.
const BATCH: usize = 256;
/// Number of batches before other work has its turn.
const ROUNDS: usize = 8;
/// Maximum number of bytes that one connection sends before the next has its turn.
const QUANTUM: usize = 256 << 10;
/// Number of bytes that are sent before the guest is notified, while more follow at once. A notification can
/// take as long as many KiB of data, and Linux sends no credit update before it has received three quarters
/// of its window of 256 KiB.
const QUIET_BYTES_MAX: u64 = 192 << 10;
/// Number of connections without data that are read before the rings are processed again.
const IDLE_TURNS: usize = 64;
/// Maximum number of segments that one call receives into; one is left for the flags of a message.
const SEGMENTS_MAX: usize = IOV_MAX - 1;

/// The guest's buffers for one connection: those of the present batch from `first` on, within the guest's
/// credit.
#[derive(Debug, Clone, Copy)]
struct Space {
    first: usize,
    credit: usize,
    packets: usize,
}

impl<S: Sockets> Engine<S> {
    /// Sends queued control packets and data of sockets to the guest. [`Next::Again`]: there is more.
    pub fn process_rx(&mut self, ring: &mut Ring) -> Next {
        let mut notified_at = self.statistics.totals.bytes_to_guest;
        for _ in 0..ROUNDS {
            let wanted = self.wanted_buffers();
            if wanted == 0 {
                ring.set_notification(false);
                return Next::Wait;
            }
            let mut batch = std::mem::take(&mut self.rx_batch);
            let count = ring.pop(&mut batch, wanted);
            self.rx_batch = batch;
            if count == 0 {
                // Notifications of new buffers matter only now.
                self.statistics.rx_ring_empty += 1;
                ring.set_notification(true);
                return Next::Wait;
            }
            let is_large = segments(&self.rx_batch) > SEGMENTS_RETAINED_MAX;
            let used = self.fill_batch(ring, count);
            ring.rewind(&mut self.rx_batch, used);
            if is_large {
                self.rx_batch = Batch::new();
            }
            if used == count {
                let bytes = self.statistics.totals.bytes_to_guest;
                if bytes - notified_at < QUIET_BYTES_MAX {
                    ring.publish_quietly();
                } else {
                    ring.publish();
                    notified_at = bytes;
                }
            }
        }
        Next::Again
    }

    /// Returns the number of buffers to pop.
    fn wanted_buffers(&mut self) -> usize {
        let control = self.table.control_queue_len();
        let data = match self.ready.front().copied() {
            Some(id) => self.host_ends.get_mut(id).map_or(1, |end| end.rx_batch_hint),
            None => 0,
        };
        (control + data).min(BATCH)
    }

    fn fill_batch(&mut self, ring: &mut Ring, count: usize) -> usize {
        let (mut used, mut idle) = (0, 0);
        while used < count && idle < IDLE_TURNS {
            let chain = self.rx_batch.chain(used);
            if (chain.writable_bytes() as usize) < HEADER_BYTES {
                // Too short for a header: the driver gets it back empty.
                ring.complete(chain, 0);
                used += 1;
            } else if let Some(header) = self.table.next_control() {
                self.traffic.to_guest += u64::from(may_be_awaited(&header));
                chain.write_at(0, &header.to_bytes());
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

    /// Reads one connection. Returns the number of buffers that it filled.
    fn fill_from(&mut self, id: ConnectionId, ring: &mut Ring, first: usize) -> usize {
        let (credit, packets) = (self.table.peer_credit(id), self.table.available_packets(id));
        let space = Space { first, credit: credit as usize, packets: packets as usize };
        let Some(connection) = self.table.get(id) else { return 0 };
        let kind = connection.kind;
        let receives = !connection.guest_shutdown.contains(ShutdownFlags::RECEIVE);
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        end.queues.remove(Queues::READ);
        if !receives || end.lifecycle.receive != ReceiveState::Readable {
            return 0;
        }
        let used = match kind {
            SocketType::Stream => self.fill_stream(id, ring, space),
            SocketType::Seqpacket => self.deliver_message(id, ring, space),
        };
        self.schedule_read(id);
        used
    }

    /// Stops reading a connection until the guest has this credit.
    fn wait_for_credit(&mut self, id: ConnectionId, need: CreditNeed) {
        self.statistics.out_of_credit += 1;
        self.on_event(id, LifecycleEvent::OutOfCredit);
        let Some(end) = self.host_ends.get_mut(id) else { return };
        (end.credit_need, end.credit_polls) = (need, 0);
        self.start_credit_timer(id);
    }

    fn fill_stream(&mut self, id: ConnectionId, ring: &mut Ring, space: Space) -> usize {
        let Space { first, credit, packets } = space;
        if credit == 0 || packets == 0 {
            // The end of the stream needs no credit, and the guest may wait for it.
            if self.is_read_closed(id) && self.is_at_eof(id) {
                self.on_event(id, LifecycleEvent::Eof);
            } else {
                self.wait_for_credit(id, CreditNeed::ONE);
            }
            return 0;
        }
        let most = credit.min(QUANTUM);
        let mut bufs = Vec::with_capacity(BATCH);
        let (mut offered, mut next) = (0, first);
        let end = self.rx_batch.len().min(first.saturating_add(packets));
        while next < end && offered < most && bufs.len() < SEGMENTS_MAX {
            offered += append_payload_bufs(self.rx_batch.chain(next), most - offered, &mut bufs);
            next += 1;
        }
        if offered == 0 {
            // The buffer has space for a header only.
            ring.complete(self.rx_batch.chain(first), 0);
            return 1;
        }
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        let Some(socket) = &end.socket else { return 0 };
        self.statistics.receives += 1;
        let received = self.sockets.receive(socket, &mut bufs);
        drop(bufs);
        match received {
            Ok(ReceiveOutcome { bytes: 0, .. }) => {
                self.on_event(id, LifecycleEvent::Eof);
                0
            }
            Ok(ReceiveOutcome { bytes, more, .. }) => {
                let may_have_more = more || bytes == offered || end.has_urgent;
                if !may_have_more && !self.is_read_closed(id) {
                    self.on_event(id, LifecycleEvent::Drained);
                }
                let used = self.send_headers(id, ring, first, bytes, SeqFlags::empty());
                if let Some(end) = self.host_ends.get_mut(id) {
                    // One short read is not a reason to begin with small ones again.
                    let hint = if used == next - first {
                        2 * used
                    } else {
                        (used + 1).max(end.rx_batch_hint - end.rx_batch_hint / 4)
                    };
                    end.rx_batch_hint = hint.min(BATCH);
                }
                used
            }
            Err(error) => self.receive_failed(id, &error),
        }
    }

    /// Returns true if only the end of the stream is left in a socket.
    fn is_at_eof(&mut self, id: ConnectionId) -> bool {
        let Some(end) = self.host_ends.get_mut(id) else { return false };
        end.socket.as_ref().is_some_and(|socket| matches!(self.sockets.peek(socket), Ok(Peeked::Eof)))
    }

    /// Returns 0: no buffer was filled.
    fn receive_failed(&mut self, id: ConnectionId, error: &io::Error) -> usize {
        if error.kind() == io::ErrorKind::WouldBlock {
            self.on_event(id, LifecycleEvent::Drained);
        } else {
            tracing::debug!(%error, ?id, "a socket of the host failed");
            self.reset(id, CloseMode::Reset);
        }
        0
    }

    /// Writes headers for `bytes` that were received into buffers. Returns the number of buffers; the last
    /// one has `flags`.
    fn send_headers(
        &mut self,
        id: ConnectionId,
        ring: &mut Ring,
        first: usize,
        bytes: usize,
        flags: SeqFlags,
    ) -> usize {
        let Some(mut headers) = self.table.data_headers(id) else { return 0 };
        let (mut left, mut next) = (bytes, first);
        while left > 0 {
            let chain = self.rx_batch.chain(next);
            next += 1;
            let here = left.min(payload_capacity(chain.writable_bytes()));
            if here == 0 {
                ring.complete(chain, 0);
                continue;
            }
            left -= here;
            let len = u32::try_from(here).expect("at most `PAYLOAD_BYTES_MAX`");
            let header = headers.next(len, if left == 0 { flags } else { SeqFlags::empty() });
            chain.write_at(0, &header.to_bytes());
            ring.complete(chain, HEADER_BYTES as u32 + len);
        }
        self.count_sent(id, bytes, next - first);
        next - first
    }

    fn count_sent(&mut self, id: ConnectionId, bytes: usize, packets: usize) {
        self.table.request_credit_early(id);
        let end = self.host_ends.get_mut(id).map(|end| &mut end.statistics);
        for statistics in end.into_iter().chain([&mut self.statistics.totals]) {
            statistics.bytes_to_guest += bytes as u64;
            statistics.packets_to_guest += packets as u64;
        }
    }

    /// Returns the length of the next message to send, if there is one and the guest's buffer is not smaller.
    fn next_message(&mut self, id: ConnectionId) -> Option<usize> {
        let end = self.host_ends.get_mut(id)?;
        let partial = end.message.as_ref().map(|message| Ok(Peeked::Bytes(message.bytes.len())));
        let socket = end.socket.as_ref()?;
        let len = match partial.unwrap_or_else(|| self.sockets.peek(socket)) {
            Ok(Peeked::Bytes(len)) => len,
            Ok(Peeked::Eof) => {
                self.on_event(id, LifecycleEvent::Eof);
                return None;
            }
            // It stays readable, after the others.
            Ok(Peeked::Skipped) => return None,
            Err(error) => {
                self.receive_failed(id, &error);
                return None;
            }
        };
        // The guest may have made its buffer smaller than a message that it has a part of.
        let buf_alloc = self.table.get(id)?.peer_credit.buf_alloc();
        if len > buf_alloc as usize {
            tracing::warn!(
                len,
                buf_alloc,
                ?id,
                "reset a connection: a message exceeds the guest's buffer for it"
            );
            self.reset(id, CloseMode::Reset);
            return None;
        }
        Some(len)
    }

    /// Sends one message, which the guest gets only when it has credit for the whole of it.
    fn deliver_message(&mut self, id: ConnectionId, ring: &mut Ring, space: Space) -> usize {
        let Some(len) = self.next_message(id) else { return 0 };
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        if end.message.is_some() {
            return self.continue_message(id, ring, space);
        }
        let capacity = payload_capacity(self.rx_batch.chain(space.first).writable_bytes());
        let need = CreditNeed::of_message(len, capacity);
        if !self.table.admits(id, need) {
            self.wait_for_credit(id, need);
            // The guest may have space for all of it that it did not consider worth a credit update.
            self.table.request_credit(id);
            return 0;
        }
        let mut bufs = Vec::with_capacity(BATCH);
        let (mut offered, mut next) = (0, space.first);
        while next < self.rx_batch.len() && offered < len && bufs.len() < SEGMENTS_MAX {
            offered += append_payload_bufs(self.rx_batch.chain(next), len - offered, &mut bufs);
            next += 1;
        }
        self.statistics.receives += 1;
        if offered < len {
            drop(bufs);
            return self.start_partial_message(id, ring, space, len);
        }
        let Some(socket) = self.host_ends.get_mut(id).and_then(|end| end.socket.as_ref()) else { return 0 };
        let received = self.sockets.receive(socket, &mut bufs);
        drop(bufs);
        match received {
            Ok(received) => self.send_headers(id, ring, space.first, received.bytes, received.flags()),
            Err(error) => self.receive_failed(id, &error),
        }
    }

    /// Copies a message that does not fit into the buffers that were popped. It is sent in parts.
    fn start_partial_message(
        &mut self,
        id: ConnectionId,
        ring: &mut Ring,
        space: Space,
        len: usize,
    ) -> usize {
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        let Some(socket) = &end.socket else { return 0 };
        let mut message = Vec::new();
        message.reserve_exact(len);
        let memory = message.capacity() as u64;
        if !self.table.memory.reserve_message(memory) {
            self.statistics.memory_waits += 1;
            end.queues.insert(Queues::READ);
            self.waiting_for_memory.push(id, |id| self.table.contains(*id));
            return 0;
        }
        self.message_bytes += memory;
        message.resize(len, 0);
        let received = match self.sockets.receive(socket, &mut [IoBufMut::from(&mut message[..])]) {
            Ok(received) => received,
            Err(error) => {
                self.free_message(&message);
                return self.receive_failed(id, &error);
            }
        };
        message.truncate(received.bytes);
        end.rx_batch_hint = (2 * end.rx_batch_hint).min(BATCH);
        end.statistics.bytes_copied += message.len() as u64;
        self.statistics.totals.bytes_copied += message.len() as u64;
        end.message = Some(PartialMessage { bytes: message, sent: 0, flags: received.flags() });
        self.continue_message(id, ring, space)
    }

    /// Sends the rest of a message, within buffers and credit.
    fn continue_message(&mut self, id: ConnectionId, ring: &mut Ring, space: Space) -> usize {
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        let Some(mut message) = end.message.take() else { return 0 };
        let Some(mut headers) = self.table.data_headers(id) else {
            self.free_message(&message.bytes);
            return 0;
        };
        let (mut next, mut credit) = (space.first, space.credit);
        let (sent_before, mut packets) = (message.sent, 0);
        while next < self.rx_batch.len() && message.sent < message.bytes.len() && credit > 0 {
            let chain = self.rx_batch.chain(next);
            next += 1;
            let left = message.bytes.len() - message.sent;
            let here = left.min(payload_capacity(chain.writable_bytes())).min(credit);
            if here == 0 {
                ring.complete(chain, 0);
                continue;
            }
            chain.write_at(HEADER_BYTES, &message.bytes[message.sent..message.sent + here]);
            message.sent += here;
            credit -= here;
            packets += 1;
            let flags = if here == left { message.flags } else { SeqFlags::empty() };
            let len = u32::try_from(here).expect("at most `PAYLOAD_BYTES_MAX`");
            chain.write_at(0, &headers.next(len, flags).to_bytes());
            ring.complete(chain, HEADER_BYTES as u32 + len);
        }
        self.count_sent(id, message.sent - sent_before, packets);
        let is_partial = message.sent < message.bytes.len();
        match self.host_ends.get_mut(id).filter(|_| is_partial) {
            Some(end) => end.message = Some(message),
            None => self.free_message(&message.bytes),
        }
        if is_partial && credit == 0 {
            self.wait_for_credit(id, CreditNeed { packets: 0, ..CreditNeed::ONE });
        }
        next - space.first
    }
}

/// Returns true if a packet without a payload may be answered: neither a credit update, nor the end of a
/// connection whose socket is closed.
fn may_be_awaited(header: &PacketHeader) -> bool {
    let is_end = header.operation == Operation::Shutdown.number()
        && ShutdownFlags::from_bits_truncate(header.flags).is_all();
    !is_end && header.operation != Operation::CreditUpdate.number()
}

/// Returns the capacity for payload of a chain with this number of writable bytes.
fn payload_capacity(writable: u32) -> usize {
    writable.saturating_sub(HEADER_BYTES as u32).min(PAYLOAD_BYTES_MAX) as usize
}

/// Appends up to `most` bytes of the payload space of a chain to `bufs`, [`SEGMENTS_MAX`] segments in all.
/// Returns its length in bytes.
fn append_payload_bufs<'b>(chain: Chain<'b>, most: usize, bufs: &mut Vec<IoBufMut<'b>>) -> usize {
    let (mut skip, mut left) = (HEADER_BYTES, most.min(payload_capacity(chain.writable_bytes())));
    let mut offered = 0;
    for buf in chain.writable() {
        if bufs.len() == SEGMENTS_MAX || left == 0 {
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
