//! From the guest's transmit ring to sockets.

use std::io;

use towline_channel::IoBuf;
use towline_vhost_user::{Next, Ring};

use super::Engine;
use super::batch_pool::{ChainRef, RETAINED_MAX};
use super::host_end::{ChainPayload, Gathered, Payload, Queues, chunk_bytes};
use super::lifecycle::{LifecycleEvent, ReceiveState, SendState};
use crate::connection::{ClosedBy, ConnectionId, Inbound};
use crate::packet::{HEADER_BYTES, PacketHeader, SeqFlags, ShutdownFlags, SocketType};
use crate::sockets::{CloseMode, Sockets};

/// Number of packets that are processed together.
const BATCH: usize = 128;
/// Number of batches before other work has its turn.
const ROUNDS: usize = 8;
/// The share of the ring whose chains may be retained: a quarter.
const RETAINED_DIVISOR: u16 = 4;

impl<S: Sockets> Engine<S> {
    /// Processes packets of the transmit ring. [`Next::Again`]: there are more.
    pub fn process_tx(&mut self, ring: &mut Ring) -> Next {
        for _ in 0..ROUNDS {
            self.complete_chains(ring);
            // Packets that are not processed need no notification either.
            let accepts_packets = self.table.accepts_packets();
            ring.set_notification(accepts_packets);
            if !accepts_packets {
                return Next::Wait;
            }
            let batch = self.pool.idle_slot();
            let count = ring.pop(self.pool.batch_mut(batch), BATCH);
            self.pool.count_segments(batch);
            for chain in 0..count {
                self.process_packet(ChainRef { batch, chain }, ring);
            }
            self.pool.retained_max = usize::from(ring.size() / RETAINED_DIVISOR).min(RETAINED_MAX);
            let mut flush_queue = std::mem::take(&mut self.flush_queue);
            for id in flush_queue.drain(..) {
                if let Some(end) = self.host_ends.get_mut(id) {
                    end.queues.remove(Queues::FLUSH);
                }
                self.flush(id);
                self.retain_or_copy(id);
            }
            self.flush_queue = flush_queue;
            self.complete_chains(ring);
            self.pool.trim();
            if count < BATCH {
                return Next::Wait;
            }
            ring.publish();
        }
        Next::Again
    }

    fn process_packet(&mut self, chain: ChainRef, ring: &mut Ring) {
        let packet = self.pool.batch(chain.batch).chain(chain.chain);
        let mut bytes = [0; HEADER_BYTES];
        if packet.read_at(0, &mut bytes) < HEADER_BYTES {
            self.table.statistics.dropped += 1;
            ring.complete(packet, 0);
            return;
        }
        let header = PacketHeader::parse(&bytes);
        let payload = packet.readable_bytes() - HEADER_BYTES as u32;
        let inbound = self.table.receive_from_guest(&header, payload);
        // Neither a credit update nor the end of a connection has an answer.
        self.traffic.from_guest += u64::from(!matches!(inbound, Inbound::Credit(_) | Inbound::Closed(..)));
        if let Inbound::Payload(id, flags) = inbound {
            self.statistics.totals.packets_from_guest += 1;
            let len = header.len;
            let payload = ChainPayload { chain, offset: 0, len, flags, is_retained: false };
            if self.queue_payload(id, payload) {
                return;
            }
        }
        ring.complete(self.pool.batch(chain.batch).chain(chain.chain), 0);
        match inbound {
            Inbound::Nothing | Inbound::Payload(..) | Inbound::Credit(_) => {}
            Inbound::Connect(id) => self.connect(id),
            Inbound::Accepted(id) => self.accepted(id),
            Inbound::Shutdown(id) => self.schedule_flush(id),
            Inbound::Closed(id, by) => self.closed(id, by),
        }
        if let Inbound::Credit(id) | Inbound::Shutdown(id) | Inbound::Payload(id, _) | Inbound::Accepted(id) =
            inbound
        {
            self.update_credit(id);
        }
    }

    /// Appends a packet's payload to the send queue of its socket. Returns false if its chain can be completed.
    fn queue_payload(&mut self, id: ConnectionId, mut payload: ChainPayload) -> bool {
        let Some(end) = self.host_ends.get_mut(id).filter(|end| end.lifecycle.send != SendState::PeerClosed)
        else {
            // It is discarded. The guest was notified that the peer receives no more, or will be.
            self.table.forwarded(id, payload.len);
            return false;
        };
        end.statistics.packets_from_guest += 1;
        let ends_message = end.kind == SocketType::Seqpacket && payload.flags.contains(SeqFlags::EOM);
        if !ends_message {
            payload.flags = SeqFlags::empty();
        }
        let is_queued = payload.len > 0;
        if is_queued {
            end.send_queue.push_back(Payload::Chain(payload));
            self.pool.add_user(payload.chain.batch);
        } else if !(ends_message && end.end_message(payload.flags)) {
            return false;
        }
        self.schedule_flush(id);
        self.update_credit(id);
        is_queued
    }

    /// Resumes the direction to the guest if it has credit again.
    pub(super) fn update_credit(&mut self, id: ConnectionId) {
        if let Some(end) = self.host_ends.get_mut(id)
            && end.lifecycle.receive == ReceiveState::OutOfCredit
            && self.table.admits(id, end.credit_need)
        {
            self.on_event(id, LifecycleEvent::Credit);
            self.schedule_read(id);
        }
    }

    /// Schedules a flush of the connection after the present batch.
    fn schedule_flush(&mut self, id: ConnectionId) {
        match self.host_ends.get_mut(id) {
            Some(end) if end.queues.contains(Queues::FLUSH) => {}
            Some(end) => {
                end.queues.insert(Queues::FLUSH);
                self.flush_queue.push(id);
            }
            None => self.update(id),
        }
    }

    /// Notifies the client of a connection that the guest has accepted it.
    fn accepted(&mut self, id: ConnectionId) {
        let port = self.table.get(id).map_or(0, |connection| connection.key.peer_port);
        let Some(end) = self.host_ends.get_mut(id) else { return };
        let Some(socket) = &end.socket else { return };
        if let Err(error) = self.sockets.accepted(id, socket, port) {
            // Data that the client sent before is forwarded nevertheless.
            tracing::debug!(%error, port, "client closed before the guest accepted");
            self.send_failed(id, &error);
        }
        self.schedule_read(id);
    }

    /// Closes the socket of a connection that was removed. Data that a guest has sent before its RST is
    /// forwarded if the socket takes it.
    fn closed(&mut self, id: ConnectionId, by: ClosedBy) {
        let has_space = self.host_ends.get_mut(id).is_some_and(|end| end.lifecycle.send != SendState::Full);
        if by == ClosedBy::Guest && has_space {
            self.flush(id);
        }
        self.close_socket(id, CloseMode::Reset);
    }

    /// Sends as much of the send queue as the socket takes.
    pub(super) fn flush(&mut self, id: ConnectionId) {
        loop {
            let Some(end) = self.host_ends.get_mut(id) else { return };
            let can_send = end.lifecycle.send == SendState::Open && !end.send_queue.is_empty();
            let Some(socket) = end.socket.as_ref().filter(|_| can_send) else { break };
            let mut bufs: Vec<IoBuf<'_>> = Vec::with_capacity(end.send_queue.len());
            let Ok(Gathered { bytes, flags }) = end.gather(&self.pool, &mut bufs) else {
                drop(bufs);
                // Once it is copied, a message has a segment for each chunk.
                if self.copy_all(id) == 0 {
                    self.reset(id, CloseMode::Reset);
                    return;
                }
                continue;
            };
            if bytes == 0 {
                drop(bufs);
                self.drop_unfinished_message(id);
                break;
            }
            self.statistics.sends += 1;
            let sent = self.sockets.send(socket, &bufs, flags);
            drop(bufs);
            let sent = match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                sent => sent,
            };
            match sent {
                Ok(sent) => {
                    self.sent(id, sent);
                    if sent < bytes {
                        self.socket_full(id);
                    }
                    self.table.forwarded(id, u32::try_from(sent).expect("at most a window"));
                }
                Err(error) => {
                    self.send_failed(id, &error);
                    return;
                }
            }
        }
        self.update(id);
    }

    /// Discards a message whose end is missing, once its sender has ended its direction: it could never be
    /// sent, and the connection would remain because of it.
    fn drop_unfinished_message(&mut self, id: ConnectionId) {
        let has_ended = self.table.get(id).is_some_and(|it| it.guest_shutdown.contains(ShutdownFlags::SEND));
        if let Some(end) =
            self.host_ends.get_mut(id).filter(|end| has_ended && end.kind == SocketType::Seqpacket)
        {
            end.discard(&mut self.pool);
            self.table.forwarded(id, self.table.unforwarded(id));
        }
    }

    fn sent(&mut self, id: ConnectionId, bytes: usize) {
        let Some(end) = self.host_ends.get_mut(id) else { return };
        end.advance(bytes, &mut self.pool);
        for statistics in [&mut end.statistics, &mut self.statistics.totals] {
            statistics.bytes_to_host += bytes as u64;
        }
    }

    fn socket_full(&mut self, id: ConnectionId) {
        self.statistics.socket_full += 1;
        self.on_event(id, LifecycleEvent::Full);
        self.table.mark_congested(id);
    }

    /// Ends the direction to a socket whose peer receives no more. It may still have data for the guest,
    /// unless it was reset.
    fn send_failed(&mut self, id: ConnectionId, error: &io::Error) {
        tracing::debug!(%error, ?id, "a socket of the host receives no more");
        if error.kind() == io::ErrorKind::BrokenPipe {
            self.on_event(id, LifecycleEvent::SendRefused);
        } else {
            self.reset(id, CloseMode::Reset);
        }
    }

    /// Retains or copies payload of the present batch that was not sent.
    fn retain_or_copy(&mut self, id: ConnectionId) {
        let chunk_bytes = chunk_bytes(self.table.window(id));
        let Some(end) = self.host_ends.get_mut(id) else { return };
        if end.has_unsettled() {
            let copied = end.retain_or_copy(&mut self.pool, chunk_bytes) as u64;
            end.statistics.bytes_copied += copied;
            self.statistics.totals.bytes_copied += copied;
        }
        end.trim();
    }

    /// Copies all payload of a connection that is in the ring. Returns the number of bytes copied.
    pub(super) fn copy_all(&mut self, id: ConnectionId) -> usize {
        let chunk_bytes = chunk_bytes(self.table.window(id));
        let Some(end) = self.host_ends.get_mut(id) else { return 0 };
        let copied = end.copy_all(&mut self.pool, chunk_bytes);
        end.statistics.bytes_copied += copied as u64;
        self.statistics.totals.bytes_copied += copied as u64;
        copied
    }
}
