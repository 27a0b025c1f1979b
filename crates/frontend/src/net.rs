//! A guest's end of virtio-net: pairs of a receive and a transmit queue.
//!
//! ```text
//!   Pair ── transmit, transmit_from ──► tx queue      a header of 12 bytes and a frame, in one buffer or in pages
//!        ◄── receive: Frame ─────────── rx queue      one buffer, or as many as the header says (MRG_RXBUF)
//! ```
//! Without TCP, control queue and checksums; the caller builds the frames.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use crate::frontend::Frontend;
use crate::memory::{MemoryArena, offset};
use crate::queue::{Queue, QueueBuffer, QueueOptions};
use crate::{Error, Result};

/// `struct virtio_net_hdr_v1`.
pub const HEADER_BYTES: usize = 12;
/// The longest frame that segmentation offload makes, with its Ethernet header.
pub const FRAME_BYTES_MAX: usize = 65536 + 18;
/// Size of Linux's receive buffers with merged buffers and an MTU of 1500.
pub const LINUX_BUFFER_BYTES: usize = 1536;
const PAGE: usize = 4096;
const BUFFERS_MAX: u16 = 1024;
/// Of the longest frame with its header.
const PAGES_MAX: usize = (HEADER_BYTES + FRAME_BYTES_MAX).div_ceil(PAGE);

/// Feature bits of the device.
pub mod feature {
    /// The device takes partial checksums.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes partial checksums.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The MTU is reported.
    pub const MTU: u64 = 1 << 3;
    /// The address is reported.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TCP super-frames over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes TCP super-frames over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The device takes TCP super-frames over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device takes TCP super-frames over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// Frames may come in several buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// Several pairs of queues.
    pub const MQ: u64 = 1 << 22;
    /// All that makes super-frames of TCP and leaves checksums to others.
    pub const OFFLOADS: u64 = CSUM | GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | HOST_TSO4 | HOST_TSO6;
}

/// Options of a pair.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Entries of each ring.
    pub size: u16,
    /// Bytes of each receive buffer, header included. More than a page goes in pages, a descriptor for each.
    pub receive_bytes: usize,
    /// Bytes of each transmit buffer, header included.
    pub transmit_bytes: usize,
    /// Negotiated features.
    pub features: u64,
}

/// A received frame: its header and the rest of it.
#[derive(Debug)]
pub struct Frame<'a> {
    memory: &'a MemoryArena,
    /// Offsets and lengths; the header is at the beginning.
    parts: &'a [(usize, usize)],
}

impl Frame<'_> {
    /// Bytes without the header.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|(_, len)| len).sum::<usize>() - HEADER_BYTES
    }

    /// Returns true if there is nothing after the header.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of buffers that it lies in.
    pub fn buffers(&self) -> usize {
        self.parts.len()
    }

    /// A copy of header and frame.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len() + HEADER_BYTES];
        let mut done = 0;
        for &(offset, len) in self.parts {
            self.memory.shared().read(offset, &mut bytes[done..done + len]);
            done += len;
        }
        bytes
    }

    /// Header and frame, for a system call that writes them.
    pub fn write<T>(&self, call: impl FnOnce(&[IoSlice<'_>]) -> T) -> T {
        self.memory.shared().send(self.parts, call)
    }
}

/// A receive and a transmit queue.
#[derive(Debug)]
pub struct DriverPair {
    options: Options,
    memory: Arc<MemoryArena>,
    rx: Queue,
    tx: Queue,
    slots: u64,
    free: Vec<u16>,
    /// Buffers that the driver has and has to recycle.
    held: Vec<u64>,
}

impl DriverPair {
    /// Memory required, in bytes.
    pub fn memory_bytes(options: &Options) -> u64 {
        let (rx, tx) = (stride(options.receive_bytes), stride(options.transmit_bytes));
        u64::from(options.size) * (rx + tx + 2 * 1100) + (1 << 17)
    }

    /// Takes memory, makes the queues `2 * index` and `2 * index + 1`, and starts them.
    ///
    /// # Errors
    /// As the calls of the frontend.
    pub fn start(
        frontend: &mut Frontend,
        memory: &Arc<MemoryArena>,
        index: u32,
        options: Options,
    ) -> Result<Self> {
        let queue = QueueOptions { size: options.size, features: options.features };
        let (rx, tx) = (Queue::new(memory, 2 * index, queue)?, Queue::new(memory, 2 * index + 1, queue)?);
        let size = u64::from(options.size);
        let buffers = memory.alloc(size * stride(options.receive_bytes), PAGE as u64);
        let slots = memory.alloc(size * stride(options.transmit_bytes), PAGE as u64);
        let held = (0..size).map(|at| buffers + at * stride(options.receive_bytes)).collect();
        let free = (0..options.size).rev().collect();
        let mut pair = Self { options, memory: Arc::clone(memory), rx, tx, slots, free, held };
        pair.recycle();
        pair.rx.disable_callback();
        pair.tx.disable_callback();
        frontend.start(&pair.rx, 0)?;
        frontend.start(&pair.tx, 0)?;
        pair.rx.force_kick();
        Ok(pair)
    }

    /// The receive ring.
    pub fn rx(&mut self) -> &mut Queue {
        &mut self.rx
    }

    /// The transmit ring.
    pub fn tx(&mut self) -> &mut Queue {
        &mut self.tx
    }

    /// Both, to wait for both.
    pub fn rings(&mut self) -> (&mut Queue, &mut Queue) {
        (&mut self.rx, &mut self.tx)
    }

    fn recycle(&mut self) {
        while let Some(guest) = self.held.pop() {
            let pages = PageDescriptors::new(guest, self.options.receive_bytes);
            if !self.rx.add(&[], pages.all(), guest) {
                // The ring has fewer descriptors than buffers; this one waits.
                self.held.push(guest);
                break;
            }
        }
        self.rx.publish();
    }

    /// Delivers received frames to `each`, and makes their buffers available again.
    ///
    /// # Errors
    /// [`Error::Used`]: an invalid used entry; [`Error::Timeout`]: a part of a frame is missing.
    pub fn receive(&mut self, mut each: impl FnMut(&Frame<'_>)) -> Result<usize> {
        let (mut count, mut parts) = (0, Vec::new());
        while let Some(used) = self.rx.pop_used()? {
            parts.clear();
            self.part(used.token, used.len, &mut parts)?;
            let buffers = match self.options.features & feature::MRG_RXBUF {
                0 => 1,
                _ => self.memory.load_le16(used.token + 10, std::sync::atomic::Ordering::Relaxed),
            };
            if buffers == 0 || buffers > BUFFERS_MAX || (used.len as usize) < HEADER_BYTES {
                let what = format!("a frame of {} bytes in {buffers} buffers", used.len);
                return Err(Error::Used { ring: self.rx.index(), what });
            }
            for _ in 1..buffers {
                // All of a frame comes back at once.
                let next = self.rx.pop_used()?;
                let next = next.ok_or(Error::Timeout { what: "the rest of a frame", seconds: 0 })?;
                self.part(next.token, next.len, &mut parts)?;
            }
            each(&Frame { memory: &self.memory, parts: &parts });
            count += 1;
        }
        if !self.held.is_empty() {
            self.recycle();
        }
        Ok(count)
    }

    fn part(&mut self, token: u64, len: u32, parts: &mut Vec<(usize, usize)>) -> Result<()> {
        if len as usize > self.options.receive_bytes {
            let what = format!("{len} bytes in a buffer of {}", self.options.receive_bytes);
            return Err(Error::Used { ring: self.rx.index(), what });
        }
        self.held.push(token);
        parts.push((offset(token), len as usize));
        Ok(())
    }

    /// Writes `bytes` (header and frame) into every transmit buffer, for [`DriverPair::transmit_any`].
    pub fn fill_transmit_buffers(&mut self, bytes: &[u8]) {
        (0..self.options.size).for_each(|slot| self.memory.write(self.slot(slot), bytes));
    }

    /// Transmits header and frame, `len` bytes in all, with the current content of the buffer. False if there
    /// is no free buffer. Published by [`DriverPair::flush`].
    pub fn transmit_any(&mut self, len: usize) -> bool {
        let Some(&slot) = self.free.last() else { return false };
        let guest = self.slot(slot);
        // Without checksum offload Linux has no frames of several parts.
        let added = if self.options.features & feature::CSUM == 0 {
            let len = u32::try_from(len).expect("a frame's length");
            self.tx.add(&[QueueBuffer { guest, len }], &[], slot.into())
        } else {
            self.tx.add(PageDescriptors::new(guest, len).all(), &[], slot.into())
        };
        if added {
            self.free.pop();
        }
        added
    }

    /// Transmits this header and frame. False if there is no free buffer.
    pub fn transmit(&mut self, bytes: &[u8]) -> bool {
        let Some(slot) = self.free.last() else { return false };
        self.memory.write(self.slot(*slot), bytes);
        self.transmit_any(bytes.len())
    }

    /// Transmits the header and frame that `read` writes into a transmit buffer, without another copy. `None`
    /// if there is no free buffer.
    ///
    /// # Errors
    /// As `read`.
    pub fn transmit_from(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        let Some(slot) = self.free.last() else { return Ok(None) };
        if self.tx.free_descriptors() < self.options.transmit_bytes.div_ceil(PAGE) + 1 {
            return Ok(None);
        }
        let at = offset(self.slot(*slot));
        let len = self.memory.shared().receive(at, self.options.transmit_bytes, read)?;
        Ok(self.transmit_any(len).then_some(len))
    }

    /// Makes the queued frames available to the device.
    pub fn flush(&mut self) -> bool {
        self.tx.publish()
    }

    /// Takes transmit buffers back; how many.
    ///
    /// # Errors
    /// [`Error::Used`].
    pub fn reclaim(&mut self) -> Result<usize> {
        let before = self.free.len();
        while let Some(used) = self.tx.pop_used()? {
            self.free.push(u16::try_from(used.token).expect("it is a slot"));
        }
        Ok(self.free.len() - before)
    }

    /// Sleeps until most of the transmitted buffers have been used.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait_room(&mut self, within: Duration) -> Result<()> {
        let share = (self.tx.in_flight() / 4 * 3).max(1);
        if !self.tx.enable_callback(share) && !crate::wait_any(&[self.tx.call_fd()], within)? {
            return Err(Error::Timeout { what: "a transmitted frame", seconds: within.as_secs() });
        }
        self.tx.drain_call();
        self.tx.disable_callback();
        Ok(())
    }

    fn slot(&self, slot: u16) -> u64 {
        self.slots + u64::from(slot) * stride(self.options.transmit_bytes)
    }
}

/// Buffers lie on cache lines, long ones on pages.
fn stride(bytes: usize) -> u64 {
    (if bytes > PAGE { bytes.next_multiple_of(PAGE) } else { bytes.next_multiple_of(64) }) as u64
}

/// A descriptor for each page; the first `count` are meant.
struct PageDescriptors {
    buffers: [QueueBuffer; PAGES_MAX],
    count: usize,
}

impl PageDescriptors {
    fn new(guest: u64, len: usize) -> Self {
        let mut pages =
            Self { buffers: [QueueBuffer { guest, len: 0 }; PAGES_MAX], count: len.div_ceil(PAGE) };
        for (at, buffer) in pages.buffers[..pages.count].iter_mut().enumerate() {
            let start = at * PAGE;
            buffer.guest = guest + start as u64;
            buffer.len = u32::try_from(PAGE.min(len - start)).expect("a page at most");
        }
        pages
    }

    fn all(&self) -> &[QueueBuffer] {
        &self.buffers[..self.count]
    }
}
