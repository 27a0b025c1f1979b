//! A guest's end of virtio-vsock: packets, and streams with credit as Linux's driver keeps it.
//!
//! ```text
//!   Guest ── request / send / shutdown ──► tx queue         streams are named by (guest port, host port)
//!         ◄── poll(): Event ───────────── rx queue          buffers go back to the device at once
//! ```
//! Not a socket layer: received data is not kept; an event gives its location while it is handled.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::Duration;

use crate::frontend::Frontend;
use crate::memory::MemoryArena;
use crate::queue::{Queue, QueueBuffer, QueueOptions, wait_any};
use crate::{Error, Result};

/// Bytes before a payload.
pub const HEADER_BYTES: usize = 44;
/// The longest payload that Linux sends in one packet.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// Size of Linux's receive buffers, with the header (`VIRTIO_VSOCK_DEFAULT_RX_BUF_SIZE`).
pub const LINUX_BUFFER_BYTES: usize = 3776;
/// Receive window of Linux's sockets (`VIRTIO_VSOCK_DEFAULT_BUF_SIZE`).
pub const BUF_ALLOC: u32 = 256 << 10;
/// The host.
pub const HOST_CID: u64 = 2;
const STREAM: u16 = 1;
/// Stream sockets only.
pub const FEATURE_STREAM: u64 = 1 << 0;

/// Operations (`VIRTIO_VSOCK_OP_*`).
pub mod op {
    /// Connect.
    pub const REQUEST: u16 = 1;
    /// Accepted.
    pub const RESPONSE: u16 = 2;
    /// Refused, or over at once.
    pub const RST: u16 = 3;
    /// No more of this or that direction.
    pub const SHUTDOWN: u16 = 4;
    /// Data.
    pub const RW: u16 = 5;
    /// Credit update.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Request a credit update.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// In [`op::SHUTDOWN`]: the sender will not receive.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// In [`op::SHUTDOWN`]: the sender will not send.
pub const SHUTDOWN_SEND: u32 = 2;

/// A packet's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketHeader {
    /// From this context.
    pub src_cid: u64,
    /// To this one.
    pub dst_cid: u64,
    /// From this port.
    pub src_port: u32,
    /// To this one.
    pub dst_port: u32,
    /// Bytes of payload.
    pub len: u32,
    /// 1: stream, 2: seqpacket.
    pub kind: u16,
    /// One of [`op`].
    pub op: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// Size of the sender's receive window.
    pub buf_alloc: u32,
    /// Total bytes that its application has consumed.
    pub fwd_cnt: u32,
}

impl PacketHeader {
    /// As it is in a ring.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        for (at, word) in [
            (16, self.src_port),
            (20, self.dst_port),
            (24, self.len),
            (28, u32::from(self.kind) | u32::from(self.op) << 16),
            (32, self.flags),
            (36, self.buf_alloc),
            (40, self.fwd_cnt),
        ] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the header in a ring.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: half(28),
            op: half(30),
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }
}

/// A stream: the guest's port, the host's port.
pub type PortPair = (u32, u32);

/// An event from the host. Payloads are valid in the guest's memory only during [`VsockGuest::poll`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VsockEvent {
    /// The peer wants to connect; [`VsockGuest::accept`] or [`VsockGuest::reset`].
    Request(PortPair),
    /// The peer has accepted.
    Connected(PortPair),
    /// Data.
    Data {
        /// The stream.
        ports: PortPair,
        /// The payload's guest address.
        guest: u64,
        /// The payload's length.
        len: u32,
        /// Seqpacket's marks.
        flags: u32,
    },
    /// The peer ends directions.
    Shutdown(PortPair, u32),
    /// The stream is gone.
    Reset(PortPair),
    /// Credit may be available now.
    Credit(PortPair),
}

/// Hashes ports, several million times a second: as a kernel does, without a key.
#[derive(Debug, Default)]
struct PortHasher(u64);

impl Hasher for PortHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, port: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(port)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// The credit of a stream.
#[derive(Debug, Clone, Copy, Default)]
struct StreamCredit {
    /// The peer's CID, if not the host.
    peer_cid: Option<u64>,
    kind: u16,
    sent: u32,
    peer_alloc: u32,
    peer_forwarded: u32,
    received: u32,
    forwarded: u32,
    /// The value of `forwarded` last sent to the host (`fwd_cnt`).
    advertised: u32,
}

/// Options of a guest.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Context of the guest.
    pub cid: u64,
    /// Entries of each ring.
    pub size: u16,
    /// Bytes of each receive buffer, header included.
    pub receive_bytes: usize,
    /// Negotiated features.
    pub features: u64,
    /// True if received data counts as consumed at once; if not, [`VsockGuest::consumed`] reports it.
    pub takes_at_once: bool,
}

/// A guest with its rings.
#[derive(Debug)]
pub struct VsockGuest {
    options: Options,
    memory: Arc<MemoryArena>,
    rx: Queue,
    tx: Queue,
    rx_buffers: u64,
    tx_slots: u64,
    tx_free: Vec<u16>,
    streams: HashMap<PortPair, StreamCredit, BuildHasherDefault<PortHasher>>,
    /// Buffers that go back at the end of a poll.
    held: Vec<u64>,
    /// Control packets that wait for a free slot.
    waiting: VecDeque<PacketHeader>,
}

const SLOT_BYTES: u64 = (PAYLOAD_BYTES_MAX + 4096) as u64;

impl VsockGuest {
    /// Memory required, in bytes.
    pub fn memory_bytes(options: &Options) -> u64 {
        let size = u64::from(options.size);
        let buffers = size * (options.receive_bytes as u64).next_multiple_of(64) + size * SLOT_BYTES;
        buffers + size * 2 * 1100 + (1 << 20)
    }

    /// Takes memory, makes both rings and starts them. The memory is shared with the backend already.
    ///
    /// # Errors
    /// As the calls of the frontend.
    pub fn start(frontend: &mut Frontend, memory: &Arc<MemoryArena>, options: Options) -> Result<Self> {
        let queue = QueueOptions { size: options.size, features: options.features };
        let (rx, tx) = (Queue::new(memory, 0, queue)?, Queue::new(memory, 1, queue)?);
        let size = u64::from(options.size);
        let stride = (options.receive_bytes as u64).next_multiple_of(64);
        let mut guest = Self {
            options,
            memory: Arc::clone(memory),
            rx,
            tx,
            rx_buffers: memory.alloc(size * stride, 4096),
            tx_slots: memory.alloc(size * SLOT_BYTES, 4096),
            tx_free: (0..options.size).rev().collect(),
            streams: HashMap::default(),
            held: Vec::new(),
            waiting: VecDeque::new(),
        };
        guest.held = (0..size).map(|index| guest.rx_buffers + index * stride).collect();
        guest.recycle();
        guest.tx.disable_callback();
        frontend.start(&guest.rx, 0)?;
        frontend.start(&guest.tx, 0)?;
        // A kick before the ring was there may have been lost.
        guest.rx.force_kick();
        Ok(guest)
    }

    /// The receive ring.
    pub fn rx(&mut self) -> &mut Queue {
        &mut self.rx
    }

    /// The transmit ring.
    pub fn tx(&mut self) -> &mut Queue {
        &mut self.tx
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<MemoryArena> {
        &self.memory
    }

    fn recycle(&mut self) {
        let len = u32::try_from(self.options.receive_bytes).expect("a buffer is short");
        for guest in self.held.drain(..) {
            assert!(self.rx.add(&[], &[QueueBuffer { guest, len }], guest), "a receive buffer too many");
        }
        self.rx.publish();
    }

    /// Handles all received packets and recycles their buffers. Sends a credit update when the host would
    /// stall.
    ///
    /// # Errors
    /// [`Error::Used`]: an invalid used entry.
    pub fn poll(&mut self, mut each: impl FnMut(&mut Self, VsockEvent)) -> Result<usize> {
        self.reclaim()?;
        let mut count = 0;
        while let Some(used) = self.rx.pop_used()? {
            count += 1;
            self.held.push(used.token);
            let mut bytes = [0; HEADER_BYTES];
            self.memory.read(used.token, &mut bytes);
            let header = PacketHeader::decode(&bytes);
            let whole = used.len as usize == HEADER_BYTES + header.len as usize;
            if !whole || header.dst_cid != self.options.cid {
                let what = format!("a packet of {} bytes with the header {header:?}", used.len);
                return Err(Error::Used { ring: 0, what });
            }
            if let Some(event) = self.event(&header, used.token) {
                each(self, event);
            }
        }
        self.recycle();
        self.tx.publish();
        Ok(count)
    }

    fn event(&mut self, header: &PacketHeader, buffer: u64) -> Option<VsockEvent> {
        let ports = (header.dst_port, header.src_port);
        if header.op == op::REQUEST {
            self.streams.insert(ports, StreamCredit { kind: header.kind, ..StreamCredit::default() });
        }
        let Some(stream) = self.streams.get_mut(&ports) else {
            if header.op != op::RST {
                self.control(ports, op::RST, 0);
            }
            return None;
        };
        (stream.peer_alloc, stream.peer_forwarded) = (header.buf_alloc, header.fwd_cnt);
        match header.op {
            op::REQUEST => Some(VsockEvent::Request(ports)),
            op::RESPONSE => Some(VsockEvent::Connected(ports)),
            op::RST => {
                self.streams.remove(&ports);
                Some(VsockEvent::Reset(ports))
            }
            op::SHUTDOWN => Some(VsockEvent::Shutdown(ports, header.flags)),
            op::RW => {
                stream.received = stream.received.wrapping_add(header.len);
                if self.options.takes_at_once {
                    self.consumed(ports, header.len);
                }
                let guest = buffer + HEADER_BYTES as u64;
                Some(VsockEvent::Data { ports, guest, len: header.len, flags: header.flags })
            }
            op::CREDIT_REQUEST => {
                self.control(ports, op::CREDIT_UPDATE, 0);
                Some(VsockEvent::Credit(ports))
            }
            _ => Some(VsockEvent::Credit(ports)),
        }
    }

    /// The application has consumed this number of received bytes. Sends a credit update when the host's
    /// credit falls below one packet, as Linux does.
    pub fn consumed(&mut self, ports: PortPair, len: u32) {
        let Some(stream) = self.streams.get_mut(&ports) else { return };
        stream.forwarded = stream.forwarded.wrapping_add(len);
        let free = BUF_ALLOC.wrapping_sub(stream.received.wrapping_sub(stream.advertised));
        if free < PAYLOAD_BYTES_MAX as u32 && stream.forwarded != stream.advertised {
            self.control(ports, op::CREDIT_UPDATE, 0);
        }
    }

    /// Takes transmit slots back.
    ///
    /// # Errors
    /// [`Error::Used`].
    pub fn reclaim(&mut self) -> Result<()> {
        while let Some(used) = self.tx.pop_used()? {
            self.tx_free.push(u16::try_from(used.token).expect("it is a slot"));
        }
        while let Some(header) = self.waiting.front().copied()
            && self.put(&header, 0)
        {
            self.waiting.pop_front();
        }
        Ok(())
    }

    fn header(&mut self, ports: PortPair, op: u16, flags: u32, len: u32) -> PacketHeader {
        let cid = self.options.cid;
        let stream =
            self.streams.entry(ports).or_insert(StreamCredit { kind: STREAM, ..StreamCredit::default() });
        stream.advertised = stream.forwarded;
        PacketHeader {
            src_cid: cid,
            dst_cid: stream.peer_cid.unwrap_or(HOST_CID),
            src_port: ports.0,
            dst_port: ports.1,
            len,
            kind: stream.kind,
            op,
            flags,
            buf_alloc: BUF_ALLOC,
            fwd_cnt: stream.forwarded,
        }
    }

    fn control(&mut self, ports: PortPair, op: u16, flags: u32) {
        let header = self.header(ports, op, flags, 0);
        if op == op::RST {
            self.streams.remove(&ports);
        }
        // In their order: a stream is accepted before it is used.
        if !self.waiting.is_empty() || !self.put(&header, 0) {
            self.waiting.push_back(header);
        }
    }

    /// Puts a packet into the ring unchanged, even if invalid; its payload is the slot's content. False if
    /// there is no free slot.
    pub fn put(&mut self, header: &PacketHeader, len: usize) -> bool {
        let Some(&slot) = self.tx_free.last() else { return false };
        let guest = self.slot(slot);
        self.memory.write(guest, &header.encode());
        let head = QueueBuffer { guest, len: HEADER_BYTES as u32 };
        let payload = QueueBuffer { guest: guest + 64, len: u32::try_from(len).expect("a payload is short") };
        let parts = [head, payload];
        self.add(slot, if len == 0 { &parts[..1] } else { &parts })
    }

    /// Adds a chain in the next free slot. False if there are not enough descriptors.
    fn add(&mut self, slot: u16, parts: &[QueueBuffer]) -> bool {
        let added = self.tx.add(parts, &[], slot.into());
        if added {
            self.tx_free.pop();
        }
        added
    }

    /// As [`VsockGuest::put`], with header and payload in pieces: the header and the first `each` bytes, then
    /// `each` bytes a piece. With more pieces than a ring has, indirect descriptors must be negotiated.
    pub fn put_in_pieces(&mut self, header: &PacketHeader, payload: &[u8], each: usize) -> bool {
        let Some(&slot) = self.tx_free.last() else { return false };
        let guest = self.slot(slot);
        self.memory.write(guest, &header.encode());
        self.memory.write(guest + HEADER_BYTES as u64, payload);
        let len = |bytes: usize| u32::try_from(bytes).expect("a piece is short");
        let mut parts = vec![QueueBuffer { guest, len: len(HEADER_BYTES + each.min(payload.len())) }];
        let rest = payload.chunks(each).enumerate().skip(1);
        parts.extend(rest.map(|(index, piece)| QueueBuffer {
            guest: guest + (HEADER_BYTES + index * each) as u64,
            len: len(piece.len()),
        }));
        self.add(slot, &parts)
    }

    fn slot(&self, slot: u16) -> u64 {
        self.tx_slots + u64::from(slot) * SLOT_BYTES
    }

    /// Requests a stream from `ports.0` to `ports.1`; an [`VsockEvent::Connected`] or [`VsockEvent::Reset`]
    /// follows.
    pub fn request(&mut self, ports: PortPair) {
        self.request_with(ports, StreamCredit { kind: STREAM, ..StreamCredit::default() });
    }

    /// As [`VsockGuest::request`], of another guest.
    pub fn request_of(&mut self, peer_cid: u64, ports: PortPair) {
        let peer_cid = Some(peer_cid);
        self.request_with(ports, StreamCredit { kind: STREAM, peer_cid, ..StreamCredit::default() });
    }

    /// As [`VsockGuest::request`], for seqpacket.
    pub fn request_seqpacket(&mut self, ports: PortPair) {
        self.request_with(ports, StreamCredit { kind: 2, ..StreamCredit::default() });
    }

    fn request_with(&mut self, ports: PortPair, credit: StreamCredit) {
        self.streams.insert(ports, credit);
        self.control(ports, op::REQUEST, 0);
    }

    /// Accepts an [`VsockEvent::Request`].
    pub fn accept(&mut self, ports: PortPair) {
        self.control(ports, op::RESPONSE, 0);
    }

    /// Ends directions.
    pub fn shutdown(&mut self, ports: PortPair, flags: u32) {
        self.control(ports, op::SHUTDOWN, flags);
    }

    /// Ends all of a stream.
    pub fn reset(&mut self, ports: PortPair) {
        self.control(ports, op::RST, 0);
    }

    /// Number of bytes that the host takes now.
    pub fn credit(&self, ports: PortPair) -> u32 {
        self.streams.get(&ports).map_or(0, |stream| {
            stream.peer_alloc.saturating_sub(stream.sent.wrapping_sub(stream.peer_forwarded))
        })
    }

    /// Sends a packet of `len` bytes of its buffer's present content, if there is credit and room; seen with
    /// [`Queue::publish`] or the next [`VsockGuest::poll`].
    pub fn send_any(&mut self, ports: PortPair, len: u32) -> bool {
        self.send_with(ports, len, 0, |_, _| {})
    }

    /// Sends these bytes, at most [`PAYLOAD_BYTES_MAX`], in one packet, if there is credit and room.
    pub fn send(&mut self, ports: PortPair, bytes: &[u8], flags: u32) -> bool {
        let len = u32::try_from(bytes.len()).expect("a payload is short");
        self.send_with(ports, len, flags, |memory, guest| memory.write(guest, bytes))
    }

    fn send_with(
        &mut self,
        ports: PortPair,
        len: u32,
        flags: u32,
        fill: impl FnOnce(&MemoryArena, u64),
    ) -> bool {
        if self.credit(ports) < len || !self.waiting.is_empty() {
            return false;
        }
        let Some(slot) = self.tx_free.last() else { return false };
        fill(&self.memory, self.slot(*slot) + 64);
        let header = self.header(ports, op::RW, flags, len);
        if !self.put(&header, len as usize) {
            return false;
        }
        if let Some(stream) = self.streams.get_mut(&ports) {
            stream.sent = stream.sent.wrapping_add(len);
        }
        true
    }

    /// Returns true if a packet can be sent: two descriptors and a transmit buffer are free.
    pub fn can_send(&self) -> bool {
        self.tx.free_descriptors() >= 2 && !self.tx_free.is_empty()
    }

    /// Sleeps until the host has sent something, or, if `for_room`, a part of the transmit ring was used.
    /// False if nothing happened in this time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self, for_room: bool, within: Duration) -> Result<bool> {
        self.tx.publish();
        let share = self.tx.in_flight() / 4 * 3;
        let ready = self.rx.enable_callback(1) || (for_room && self.tx.enable_callback(share.max(1)));
        let fds = [self.rx.call_fd(), self.tx.call_fd()];
        let heard = ready || wait_any(if for_room { &fds } else { &fds[..1] }, within)?;
        self.rx.drain_call();
        if for_room {
            self.tx.drain_call();
        }
        self.rx.disable_callback();
        self.tx.disable_callback();
        Ok(heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_what_the_standard_says() {
        let header = PacketHeader {
            src_cid: 3,
            dst_cid: HOST_CID,
            src_port: 0x0102_0304,
            dst_port: 5,
            len: 6,
            kind: STREAM,
            op: op::RW,
            flags: 7,
            buf_alloc: 8,
            fwd_cnt: 9,
        };
        let bytes = header.encode();
        assert_eq!(bytes[..24], [3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0]);
        assert_eq!(bytes[24..], [6, 0, 0, 0, 1, 0, 5, 0, 7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(PacketHeader::decode(&bytes), header);
    }
}
