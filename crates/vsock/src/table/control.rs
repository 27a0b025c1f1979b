//! Packets for the guest: the queue of control packets, pending resets, and headers of data packets.

use super::{ConnectionTable, PENDING_RESETS_MAX};
use crate::connection::{Connection, ConnectionId, ConnectionKey, ControlPackets, Inbound};
use crate::packet::{Operation, PacketHeader, SeqFlags, SocketType};

/// Makes the headers of data packets of one connection.
#[derive(Debug)]
pub struct DataHeaders<'t> {
    cid: u64,
    connection: &'t mut Connection,
}

impl DataHeaders<'_> {
    /// Returns the header of a packet with `len` bytes, which consume credit. It advertises credit too, so a
    /// credit update that was queued is dropped.
    pub fn next(&mut self, len: u32, flags: SeqFlags) -> PacketHeader {
        debug_assert!(len <= self.connection.peer_credit.available(), "the guest has no credit for it");
        self.connection.peer_credit.consume(len);
        self.connection.control.remove(ControlPackets::CREDIT_UPDATE);
        let mut header = self.connection.header(self.cid, Operation::ReadWrite);
        header.len = len;
        header.flags = flags.bits();
        header
    }
}

impl ConnectionTable {
    /// Returns true if any packet of the guest can be processed: there is room for a reset that answers it.
    pub fn accepts_packets(&self) -> bool {
        self.pending_resets.len() < PENDING_RESETS_MAX
    }

    /// Drops the pending resets of unknown connections, because a guest that posts no buffers waits for its
    /// packets to be processed. Returns their number.
    pub fn drop_pending_resets(&mut self) -> usize {
        std::mem::take(&mut self.pending_resets).len()
    }

    /// Returns the minimum number of packets without payload that wait for buffers of the guest.
    pub fn control_queue_len(&self) -> usize {
        self.control_queue.len() + self.pending_resets.len()
    }

    /// Queues a reset that answers a packet of an unknown connection.
    pub(super) fn refuse_packet(&mut self, header: &PacketHeader) -> Inbound {
        if self.accepts_packets() {
            self.pending_resets.push_back(header.reset());
        }
        Inbound::Nothing
    }

    /// Queues a reset for a connection of another process that the guest may still have.
    pub fn queue_reset(&mut self, key: ConnectionKey, kind: SocketType) {
        if self.by_key.contains_key(&key) {
            return;
        }
        let header = PacketHeader {
            source_cid: self.cid,
            destination_cid: key.peer_cid,
            source_port: key.guest_port,
            destination_port: key.peer_port,
            kind: kind.number(),
            ..PacketHeader::default()
        };
        self.pending_resets.push_back(header.reset());
    }

    /// Queues control packets of a connection.
    pub(super) fn queue_control(&mut self, id: ConnectionId, packets: ControlPackets) {
        let Some(connection) = self.get_mut(id) else { return };
        connection.control |= packets;
        if std::mem::replace(&mut connection.in_control_queue, true) {
            return;
        }
        // A guest that posts no buffers can have connections come and go, whose entries stay in the queue.
        if self.control_queue.len() > 2 * self.by_key.len() {
            let mut queue = std::mem::take(&mut self.control_queue);
            queue.retain(|id| self.contains(*id));
            self.control_queue = queue;
        }
        self.control_queue.push_back(id);
    }

    /// Removes the next packet without payload from the queue. The caller sends it.
    pub fn next_control(&mut self) -> Option<PacketHeader> {
        while let Some(id) = self.control_queue.pop_front() {
            let cid = self.cid;
            let Some(connection) = self.get_mut(id) else { continue };
            connection.in_control_queue = false;
            let Some(packet) = connection.control.iter().next() else { continue };
            connection.control.remove(packet);
            let operation = match packet {
                ControlPackets::REQUEST => Operation::Request,
                ControlPackets::RESPONSE => Operation::Response,
                ControlPackets::CREDIT_UPDATE => Operation::CreditUpdate,
                ControlPackets::CREDIT_REQUEST => Operation::CreditRequest,
                ControlPackets::SHUTDOWN => Operation::Shutdown,
                _ => Operation::Reset,
            };
            let mut header = connection.header(cid, operation);
            if operation == Operation::Shutdown {
                header.flags = connection.host_shutdown.bits();
            }
            connection.is_request_unanswered |= operation == Operation::CreditRequest;
            if !connection.control.is_empty() {
                connection.in_control_queue = true;
                self.control_queue.push_front(id);
            }
            match operation {
                Operation::CreditUpdate => self.statistics.credit_updates_sent += 1,
                Operation::Reset => {
                    self.statistics.resets_sent += 1;
                    self.remove(id);
                }
                _ => {}
            }
            return Some(header);
        }
        let reset = self.pending_resets.pop_front();
        self.statistics.resets_sent += u64::from(reset.is_some());
        reset
    }

    /// Returns the maker of a connection's data headers, if the connection still exists.
    pub fn data_headers(&mut self, id: ConnectionId) -> Option<DataHeaders<'_>> {
        let cid = self.cid;
        Some(DataHeaders { cid, connection: self.get_mut(id)? })
    }
}
