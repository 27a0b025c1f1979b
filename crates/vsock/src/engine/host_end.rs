//! The host's end of a connection: its socket, and payload in transit to it.

use std::collections::VecDeque;

use towline_channel::{IOV_MAX, IoBuf};

use super::batch_pool::{BatchPool, ChainRef};
use super::chunk::PayloadChunk;
use super::lifecycle::Lifecycle;
use crate::connection::ConnectionId;
use crate::credit::CreditNeed;
use crate::packet::{HEADER_BYTES, SeqFlags, SocketType};
use crate::statistics::ConnectionStatistics;

/// Minimum length of a packet that is retained in the ring while the socket is full. Shorter ones are copied:
/// a chain of the ring is worth more.
const RETAIN_BYTES_MIN: u32 = 4096;
/// Maximum number of chains that one connection retains: a window of the largest packets, so these are never
/// copied.
const RETAINED_MAX: usize = 16;
/// Limits of the size of a chunk of copied payload, in bytes; within them it is an eighth of the window.
const CHUNK_BYTES_MIN: u32 = 1 << 10;
const CHUNK_BYTES_MAX: u32 = 64 << 10;
/// Capacity of a send queue that is not freed when the queue is empty.
const IDLE_ENTRIES_MAX: usize = 16;

bitflags::bitflags! {
    /// Queues of the engine that have an entry of the connection.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(super) struct Queues: u8 {
        /// Connections whose send queue will be flushed after the present batch.
        const FLUSH = 1;
        /// Connections that will be read, or that wait for memory before they can be.
        const READ = 2;
        /// Timers after which credit is requested.
        const CREDIT_TIMER = 4;
    }
}

/// See the module.
pub(super) struct HostEnd<S> {
    pub(super) id: ConnectionId,
    pub(super) kind: SocketType,
    /// `None` while it is being connected.
    pub(super) socket: Option<S>,
    pub(super) lifecycle: Lifecycle,
    pub(super) queues: Queues,
    /// Payload that was not sent yet.
    pub(super) send_queue: VecDeque<Payload>,
    /// Number of entries of `send_queue`, from the front, that belong to earlier batches: retained or copied.
    settled: usize,
    /// Chains that are retained in the ring.
    retained: usize,
    /// Bytes in copied chunks.
    pub(super) buffered_bytes: usize,
    /// Estimate of the guest's buffers that the next read fills.
    pub(super) rx_batch_hint: usize,
    /// Urgent data has arrived: a short read may have stopped at its mark, and does not mean that the socket
    /// is empty.
    pub(super) has_urgent: bool,
    /// Credit that the connection waits for, and the number of times that its timer has expired.
    pub(super) credit_need: CreditNeed,
    pub(super) credit_polls: u32,
    /// A message that is partly sent to the guest.
    pub(super) message: Option<PartialMessage>,
    pub(super) statistics: ConnectionStatistics,
}

/// A message to the guest that did not fit into its buffers at once.
pub(super) struct PartialMessage {
    pub(super) bytes: Vec<u8>,
    /// Number of bytes that were sent.
    pub(super) sent: usize,
    /// Flags of its last packet.
    pub(super) flags: SeqFlags,
}

/// Payload in the send queue.
pub(super) enum Payload {
    /// In guest memory.
    Chain(ChainPayload),
    /// Copied.
    Copied(Box<PayloadChunk>),
}

/// Payload in guest memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChainPayload {
    pub(super) chain: ChainRef,
    /// Bytes that were sent, and those that were not.
    pub(super) offset: u32,
    pub(super) len: u32,
    /// Flags of the packet: whether a message ends with it.
    pub(super) flags: SeqFlags,
    /// It belongs to an earlier batch, and counts as retained.
    pub(super) is_retained: bool,
}

/// Buffers that were gathered for a send: their length, and the flags of a message that ends with them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gathered {
    pub(super) bytes: usize,
    pub(super) flags: SeqFlags,
}

/// Error of a message that has more segments than a call takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct TooManySegments;

/// Returns the size of a chunk of copied payload for this window. Of the chunks of a connection, the first
/// may be sent in part and the last filled in part.
pub(super) fn chunk_bytes(window: u32) -> usize {
    (window / 8).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX) as usize
}

impl<S> HostEnd<S> {
    pub(super) fn new(id: ConnectionId, kind: SocketType, socket: Option<S>) -> Self {
        Self {
            id,
            kind,
            socket,
            lifecycle: Lifecycle::default(),
            queues: Queues::empty(),
            send_queue: VecDeque::new(),
            settled: 0,
            retained: 0,
            buffered_bytes: 0,
            rx_batch_hint: 2,
            has_urgent: false,
            credit_need: CreditNeed::ONE,
            credit_polls: 0,
            message: None,
            statistics: ConnectionStatistics::default(),
        }
    }

    /// Ends the message that has begun, without further bytes. Returns false if none has begun: an empty
    /// message could not be distinguished from the end of the stream.
    pub(super) fn end_message(&mut self, flags: SeqFlags) -> bool {
        match self.send_queue.back_mut() {
            Some(Payload::Chain(last)) if last.flags.is_empty() => {
                last.flags = flags;
                true
            }
            Some(Payload::Copied(chunk)) => chunk.end_message(flags),
            _ => false,
        }
    }

    /// Appends the buffers of the next call to `bufs`: of a stream as much of the send queue as a call takes;
    /// of messages the first one, or nothing while it is incomplete.
    pub(super) fn gather<'s>(
        &'s self,
        pool: &'s BatchPool,
        bufs: &mut Vec<IoBuf<'s>>,
    ) -> Result<Gathered, TooManySegments> {
        let full = |bytes| match self.kind {
            SocketType::Stream => Ok(Gathered { bytes, flags: SeqFlags::empty() }),
            SocketType::Seqpacket => Err(TooManySegments),
        };
        let mut bytes = 0;
        for payload in &self.send_queue {
            let flags = match payload {
                Payload::Chain(ChainPayload { chain, offset, len, flags, .. }) => {
                    let (mut skip, mut left) = (HEADER_BYTES + *offset as usize, *len as usize);
                    for buf in pool.batch(chain.batch).chain(chain.chain).readable() {
                        let here = skip.min(buf.len());
                        skip -= here;
                        let buf = buf.skip(here).prefix(left);
                        if buf.is_empty() {
                            continue;
                        }
                        if bufs.len() == IOV_MAX {
                            return full(bytes);
                        }
                        left -= buf.len();
                        bytes += buf.len();
                        bufs.push(buf);
                    }
                    *flags
                }
                Payload::Copied(_) if bufs.len() == IOV_MAX => return full(bytes),
                Payload::Copied(chunk) => {
                    let (part, flags) = chunk.front(self.kind);
                    bytes += part.len();
                    bufs.push(IoBuf::from(part));
                    flags
                }
            };
            if self.kind == SocketType::Seqpacket && !flags.is_empty() {
                return Ok(Gathered { bytes, flags });
            }
        }
        let bytes = match self.kind {
            SocketType::Stream => bytes,
            SocketType::Seqpacket => 0,
        };
        Ok(Gathered { bytes, flags: SeqFlags::empty() })
    }

    /// Removes sent bytes from the send queue.
    pub(super) fn advance(&mut self, bytes: usize, pool: &mut BatchPool) {
        let mut left = bytes;
        while let Some(front) = self.send_queue.front_mut() {
            let is_sent = match front {
                Payload::Chain(payload) => {
                    let here = left.min(payload.len as usize);
                    let step = u32::try_from(here).expect("at most `len`");
                    payload.offset += step;
                    payload.len -= step;
                    left -= here;
                    payload.len == 0
                }
                Payload::Copied(chunk) => {
                    let here = chunk.advance(left);
                    left -= here;
                    self.buffered_bytes -= here;
                    chunk.is_sent()
                }
            };
            if !is_sent {
                return;
            }
            self.pop_sent(pool);
            if left == 0 {
                return;
            }
        }
    }

    fn pop_sent(&mut self, pool: &mut BatchPool) {
        self.settled = self.settled.saturating_sub(1);
        if let Some(Payload::Chain(payload)) = self.send_queue.pop_front() {
            self.complete(&payload, pool);
        }
    }

    fn complete(&mut self, payload: &ChainPayload, pool: &mut BatchPool) {
        self.retained -= usize::from(payload.is_retained);
        pool.retained -= usize::from(payload.is_retained);
        pool.complete(payload.chain);
    }

    /// Returns true if payload of the present batch was not sent.
    pub(super) fn has_unsettled(&self) -> bool {
        self.settled < self.send_queue.len()
    }

    /// Retains payload of the present batch that was not sent in the ring, or copies it into chunks of
    /// `chunk_bytes` where it is not worth a chain of the ring. Returns the number of bytes copied.
    pub(super) fn retain_or_copy(&mut self, pool: &mut BatchPool, chunk_bytes: usize) -> usize {
        let mut copied = 0;
        for payload in self.send_queue.split_off(self.settled) {
            let Payload::Chain(mut chain) = payload else {
                self.send_queue.push_back(payload);
                continue;
            };
            let fits = self.retained < RETAINED_MAX && pool.retained < pool.retained_max;
            if chain.len >= RETAIN_BYTES_MIN && fits && pool.may_retain(chain.chain.batch) {
                self.retained += 1;
                pool.retained += 1;
                chain.is_retained = true;
                self.send_queue.push_back(Payload::Chain(chain));
                continue;
            }
            copied += self.copy(&chain, pool, chunk_bytes);
            self.complete(&chain, pool);
        }
        self.settled = self.send_queue.len();
        copied
    }

    /// Copies all payload in the ring into chunks of `chunk_bytes`, because the ring stops, or because a
    /// message has more segments than a call takes. Returns the number of bytes copied.
    pub(super) fn copy_all(&mut self, pool: &mut BatchPool, chunk_bytes: usize) -> usize {
        let mut copied = 0;
        for payload in std::mem::take(&mut self.send_queue) {
            if let Payload::Chain(chain) = payload {
                copied += self.copy(&chain, pool, chunk_bytes);
                self.complete(&chain, pool);
            } else {
                self.send_queue.push_back(payload);
            }
        }
        self.settled = self.send_queue.len();
        copied
    }

    fn copy(&mut self, payload: &ChainPayload, pool: &BatchPool, chunk_bytes: usize) -> usize {
        let chain = pool.batch(payload.chain.batch).chain(payload.chain.chain);
        let (mut offset, mut left) = (HEADER_BYTES + payload.offset as usize, payload.len as usize);
        while left > 0 {
            if !matches!(self.send_queue.back(), Some(Payload::Copied(chunk)) if chunk.room() > 0) {
                self.send_queue.push_back(Payload::Copied(Box::new(PayloadChunk::new(chunk_bytes))));
            }
            let Some(Payload::Copied(chunk)) = self.send_queue.back_mut() else { break };
            let here = left.min(chunk.room());
            chunk.append(here, |room| {
                chain.read_at(offset, room);
            });
            offset += here;
            left -= here;
        }
        if let Some(Payload::Copied(chunk)) = self.send_queue.back_mut()
            && !payload.flags.is_empty()
        {
            chunk.end_message(payload.flags);
        }
        self.buffered_bytes += payload.len as usize;
        payload.len as usize
    }

    /// Frees memory of the send queue that a batch needed.
    pub(super) fn trim(&mut self) {
        if self.send_queue.capacity() > IDLE_ENTRIES_MAX {
            self.send_queue.shrink_to(IDLE_ENTRIES_MAX);
        }
    }

    /// Returns its memory in bytes, without its socket and a message in transit to the guest.
    pub(super) fn footprint(&self) -> usize {
        let chunks = self.send_queue.iter().map(|payload| match payload {
            Payload::Copied(chunk) => chunk.footprint(),
            Payload::Chain(_) => 0,
        });
        size_of::<Self>() + self.send_queue.capacity() * size_of::<Payload>() + chunks.sum::<usize>()
    }

    /// Drops the send queue.
    pub(super) fn discard(&mut self, pool: &mut BatchPool) {
        for payload in std::mem::take(&mut self.send_queue) {
            if let Payload::Chain(chain) = payload {
                self.complete(&chain, pool);
            }
        }
        self.settled = 0;
        self.buffered_bytes = 0;
    }
}

/// Host ends by the slot of their connection.
pub(super) struct HostEnds<S>(Vec<Option<HostEnd<S>>>);

impl<S> Default for HostEnds<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S> HostEnds<S> {
    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut HostEnd<S>> {
        self.0.get_mut(id.index as usize)?.as_mut().filter(|end| end.id == id)
    }

    pub(super) fn insert(&mut self, end: HostEnd<S>) {
        let index = end.id.index as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        debug_assert!(self.0[index].is_none(), "the slot has the end of a closed connection");
        self.0[index] = Some(end);
    }

    pub(super) fn remove(&mut self, id: ConnectionId) -> Option<HostEnd<S>> {
        self.0.get_mut(id.index as usize)?.take_if(|end| end.id == id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &HostEnd<S>> {
        self.0.iter().flatten()
    }

    pub(super) fn ids(&self) -> Vec<ConnectionId> {
        self.iter().map(|end| end.id).collect()
    }
}
