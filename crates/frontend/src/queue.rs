//! A split ring as a driver has it.
//!
//! ```text
//!   add(out, in) ─► free descriptors, a chain, an available entry … ─► publish(): the index, and a kick if it is wanted
//!   take()  ◄── used entries        arm(): wake me with the next one; wait() on the call eventfd, as a guest sleeps
//! ```
//! This driver obeys the rules. Tests of a misbehaving one write into [`MemoryArena`] at
//! [`Queue::addresses`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::retry_on_intr;

use crate::memory::MemoryArena;
use crate::wire::feature;
use crate::{Error, Result, system};

/// Descriptors that one indirect table has room for.
const INDIRECT_MAX: usize = 64;
const DESCRIPTOR_BYTES: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Of both rings: flags, index, entries, the other side's event index.
const INDEX: u64 = 2;
const ENTRIES: u64 = 4;
const NO_NOTIFICATION: u16 = 1;
const PAGE: u64 = 4096;

/// Options of a ring.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions {
    /// Entries, a power of two.
    pub size: u16,
    /// The features that were negotiated: event index and indirect tables are used if negotiated.
    pub features: u64,
}

/// Guest addresses of a ring's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub table: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
    /// Indirect tables, [`INDIRECT_MAX`] descriptors for each head; 0 without them.
    tables: u64,
}

/// A buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBuffer {
    /// Guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A used chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The token of [`Queue::add`].
    pub token: u64,
    /// Number of bytes that the device reports as written.
    pub len: u32,
}

/// Counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStatistics {
    /// Chains made available.
    pub added: u64,
    /// Chains used by the device.
    pub used: u64,
    /// Notifications sent to the device.
    pub kicks: u64,
    /// Notifications suppressed by the device.
    pub kicks_suppressed: u64,
    /// Notifications received from the device.
    pub calls: u64,
}

/// A ring.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<MemoryArena>,
    index: u32,
    size: u16,
    features: u64,
    places: RingAddresses,
    /// Descriptors in no chain.
    free: Vec<u16>,
    /// By descriptor: the next of its chain, as in the table.
    links: Vec<Option<u16>>,
    /// By head: its token, while the device has it.
    tokens: Vec<Option<u64>>,
    /// The available index with and without what is not published yet.
    staged: u16,
    published: u16,
    seen: u16,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    statistics: QueueStatistics,
}

impl Queue {
    /// A ring in this memory; the frontend starts it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(memory: &Arc<MemoryArena>, index: u32, options: QueueOptions) -> Result<Self> {
        let QueueOptions { size, features } = options;
        assert!(size.is_power_of_two(), "a ring of {size} entries");
        let entries = u64::from(size);
        let indirect = DESCRIPTOR_BYTES * INDIRECT_MAX as u64 * entries;
        let places = RingAddresses {
            table: memory.alloc(DESCRIPTOR_BYTES * entries, PAGE),
            available: memory.alloc(6 + 2 * entries, PAGE),
            used: memory.alloc(6 + 8 * entries, PAGE),
            tables: if features & feature::INDIRECT != 0 { memory.alloc(indirect, PAGE) } else { 0 },
        };
        let event = || {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            eventfd(0, flags).map_err(system("eventfd"))
        };
        Ok(Self {
            memory: Arc::clone(memory),
            index,
            size,
            features,
            places,
            free: (0..size).rev().collect(),
            links: vec![None; usize::from(size)],
            tokens: vec![None; usize::from(size)],
            staged: 0,
            published: 0,
            seen: 0,
            kick: event()?,
            call: event()?,
            err: event()?,
            statistics: QueueStatistics::default(),
        })
    }

    /// Index of the queue.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where its parts are.
    pub fn addresses(&self) -> RingAddresses {
        self.places
    }

    /// Memory of the queue.
    pub fn memory(&self) -> &Arc<MemoryArena> {
        &self.memory
    }

    /// The counters.
    pub fn statistics(&self) -> QueueStatistics {
        self.statistics
    }

    /// The eventfd by which the device is woken.
    pub fn kick_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// The eventfd by which the device notifies the driver.
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// The eventfd by which the device reports a broken ring.
    pub fn err_fd(&self) -> BorrowedFd<'_> {
        self.err.as_fd()
    }

    /// Where the used ring was read up to: where a backend that comes new has to begin.
    pub fn last_used_idx(&self) -> u16 {
        self.seen
    }

    /// Number of chains that the device has.
    pub fn in_flight(&self) -> u16 {
        self.staged.wrapping_sub(self.seen)
    }

    /// Number of descriptors that are in no chain.
    pub fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    /// Builds a chain: buffers that the device reads, then buffers that it writes. Published by
    /// [`Queue::publish`]. False, without effect, if there are not enough descriptors.
    ///
    /// # Panics
    /// Without a buffer, or with more than 64 in an indirect chain.
    pub fn add(&mut self, out_bufs: &[QueueBuffer], in_bufs: &[QueueBuffer], token: u64) -> bool {
        let count = out_bufs.len() + in_bufs.len();
        assert!(count > 0, "a chain of nothing");
        let indirect = self.places.tables != 0 && count > 1;
        if self.free.len() < if indirect { 1 } else { count } {
            return false;
        }
        let buffers =
            out_bufs.iter().map(|buffer| (buffer, 0)).chain(in_bufs.iter().map(|buffer| (buffer, WRITE)));
        let head = self.free[self.free.len() - 1];
        if indirect {
            assert!(count <= INDIRECT_MAX, "{count} descriptors in an indirect table");
            let table = self.places.tables + u64::from(head) * DESCRIPTOR_BYTES * INDIRECT_MAX as u64;
            for (at, (buffer, flags)) in (0u16..).zip(buffers) {
                let link = (usize::from(at) + 1 < count).then_some(at + 1);
                descriptor(&self.memory, table, at, *buffer, flags, link);
            }
            self.free.pop();
            let len = u32::try_from(count).expect("it is small") * 16;
            let whole = QueueBuffer { guest: table, len };
            descriptor(&self.memory, self.places.table, head, whole, INDIRECT, None);
            self.links[usize::from(head)] = None;
        } else {
            let mut here = self.free.pop();
            for (at, (buffer, flags)) in buffers.enumerate() {
                let Some(index) = here else { break };
                here = if at + 1 < count { self.free.pop() } else { None };
                descriptor(&self.memory, self.places.table, index, *buffer, flags, here);
                self.links[usize::from(index)] = here;
            }
        }
        self.tokens[usize::from(head)] = Some(token);
        self.make_available(head);
        true
    }

    /// Makes a head available, even an invalid one. Seen with [`Queue::publish`].
    pub fn make_available(&mut self, head: u16) {
        let entry = self.places.available + ENTRIES + 2 * u64::from(self.staged & (self.size - 1));
        self.memory.store_le16(entry, head, Ordering::Relaxed);
        self.staged = self.staged.wrapping_add(1);
        self.statistics.added += 1;
    }

    /// Publishes the added chains, and kicks the device unless it suppresses that. True if it was kicked.
    pub fn publish(&mut self) -> bool {
        if self.staged == self.published {
            return false;
        }
        self.memory.store_le16(self.places.available + INDEX, self.staged, Ordering::Release);
        // The driver stores its index, then loads the device's event index; the device does both in the
        // reverse order.
        fence(Ordering::SeqCst);
        let before = std::mem::replace(&mut self.published, self.staged);
        let wanted = if self.has(feature::EVENT_IDX) {
            let event = self.memory.load_le16(self.available_event(), Ordering::Relaxed);
            needs_event(event, self.staged, before)
        } else {
            self.memory.load_le16(self.places.used, Ordering::Relaxed) & NO_NOTIFICATION == 0
        };
        if wanted {
            self.force_kick();
        } else {
            self.statistics.kicks_suppressed += 1;
        }
        wanted
    }

    /// Wakes the device, even if it suppresses kicks.
    pub fn force_kick(&mut self) {
        self.statistics.kicks += 1;
        // It can only be full, and then it is readable.
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Pops a used chain.
    ///
    /// # Errors
    /// [`Error::Used`]: an id that the device does not have, or more bytes than the chain has.
    pub fn pop_used(&mut self) -> Result<Option<Used>> {
        let index = self.memory.load_le16(self.places.used + INDEX, Ordering::Acquire);
        let ready = index.wrapping_sub(self.seen);
        if ready == 0 {
            return Ok(None);
        }
        if ready > self.published.wrapping_sub(self.seen) {
            return Err(self
                .fault(format!("its used index {index} is beyond the available index {}", self.published)));
        }
        let entry = self.places.used + ENTRIES + 8 * u64::from(self.seen & (self.size - 1));
        let mut bytes = [0; 8];
        self.memory.read(entry, &mut bytes);
        let [a, b, c, d, length @ ..] = bytes;
        let (id, len) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(length));
        let head = u16::try_from(id).ok().filter(|head| *head < self.size);
        let token = head.and_then(|head| Some((head, self.tokens[usize::from(head)].take()?)));
        let (head, token) =
            token.ok_or_else(|| self.fault(format!("chain {id} is used but was not available")))?;
        let mut link = Some(head);
        while let Some(index) = link {
            link = self.links[usize::from(index)].take();
            self.free.push(index);
        }
        self.seen = self.seen.wrapping_add(1);
        self.statistics.used += 1;
        Ok(Some(Used { token, len }))
    }

    fn fault(&self, what: String) -> Error {
        Error::Used { ring: self.index, what }
    }

    /// Enables the call after `after` further chains have been used (1: with the next one). True if they have
    /// been already.
    pub fn enable_callback(&mut self, after: u16) -> bool {
        if self.has(feature::EVENT_IDX) {
            let event = self.seen.wrapping_add(after.max(1) - 1);
            self.memory.store_le16(self.used_event(), event, Ordering::Relaxed);
        } else {
            self.memory.store_le16(self.places.available, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let index = self.memory.load_le16(self.places.used + INDEX, Ordering::Acquire);
        index.wrapping_sub(self.seen) >= after.max(1)
    }

    /// Suppresses calls.
    pub fn disable_callback(&mut self) {
        if self.has(feature::EVENT_IDX) {
            self.memory.store_le16(self.used_event(), self.seen.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.memory.store_le16(self.places.available, NO_NOTIFICATION, Ordering::Relaxed);
        }
    }

    /// Drains the call eventfd. True if the device had signalled it.
    pub fn drain_call(&mut self) -> bool {
        let was_signalled = rustix::io::read(&self.call, &mut [0u8; 8]).is_ok();
        self.statistics.calls += u64::from(was_signalled);
        was_signalled
    }

    /// Sleeps until the device has used a chain.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait(&mut self, within: Duration) -> Result<()> {
        while !self.enable_callback(1) {
            if !wait_any(&[self.call_fd()], within)? {
                return Err(Error::Timeout { what: "a used entry", seconds: within.as_secs() });
            }
            self.drain_call();
        }
        self.disable_callback();
        Ok(())
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Address of `avail_event`: the available entry at which the device wants a notification.
    fn available_event(&self) -> u64 {
        self.places.used + ENTRIES + 8 * u64::from(self.size)
    }

    /// Address of `used_event`: the used entry at which the driver wants a notification.
    fn used_event(&self) -> u64 {
        self.places.available + ENTRIES + 2 * u64::from(self.size)
    }
}

fn descriptor(
    memory: &MemoryArena,
    table: u64,
    index: u16,
    buffer: QueueBuffer,
    flags: u16,
    link: Option<u16>,
) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&buffer.guest.to_le_bytes());
    bytes[8..12].copy_from_slice(&buffer.len.to_le_bytes());
    let flags = flags | if link.is_some() { NEXT } else { 0 };
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&link.unwrap_or(0).to_le_bytes());
    memory.write(table + DESCRIPTOR_BYTES * u64::from(index), &bytes);
}

/// Returns true if the step from `old` to `new` passes the entry after `event` (virtio's `vring_need_event`).
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Sleeps until one of these can be read. False if none could in this time.
///
/// # Errors
/// The kernel's.
pub fn wait_any(fds: &[BorrowedFd<'_>], within: Duration) -> Result<bool> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let within = Timespec::try_from(within).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
    let ready = retry_on_intr(|| poll(&mut fds, Some(&within)));
    ready.map(|count| count > 0).map_err(system("poll"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{GUEST_BASE, USER_BASE};

    fn queue(features: u64) -> Queue {
        let memory = Arc::new(MemoryArena::with_regions(1 << 16, 2).unwrap());
        Queue::new(&memory, 0, QueueOptions { size: 4, features }).unwrap()
    }

    /// Gives a chain back as a device would.
    fn recycle(queue: &Queue, at: u16, head: u32, len: u32) {
        let entry = queue.places.used + ENTRIES + 8 * u64::from(at % queue.size);
        queue.memory.write(entry, &[head.to_le_bytes(), len.to_le_bytes()].concat());
        queue.memory.store_le16(queue.places.used + INDEX, at.wrapping_add(1), Ordering::Release);
    }

    #[test]
    fn chains_are_written_as_the_standard_has_them() {
        let mut queue = queue(0);
        let [out, back] = [(0x10, 3), (0x20, 5)].map(|(guest, len)| QueueBuffer { guest, len });
        assert!(queue.add(&[out], &[back], 7));
        assert_eq!((queue.free_descriptors(), queue.publish(), queue.drain_call()), (2, true, false));
        let head = queue.memory.load_le16(queue.places.available + ENTRIES, Ordering::Relaxed);
        let table = queue.memory.bytes(queue.places.table, 64);
        let first = &table[usize::from(head) * 16..][..16];
        let second = &table[usize::from(first[14]) * 16..][..16];
        assert_eq!(first[..14], [0x10, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0]);
        assert_eq!(second, [0x20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0]);
        recycle(&queue, 0, head.into(), 4);
        assert_eq!(queue.pop_used().unwrap(), Some(Used { token: 7, len: 4 }));
        assert_eq!((queue.free_descriptors(), queue.pop_used().unwrap()), (4, None));
    }

    #[test]
    fn a_device_that_gives_back_what_it_has_not_is_found_out() {
        let mut queue = queue(feature::INDIRECT);
        let buffer = QueueBuffer { guest: GUEST_BASE, len: 1 };
        assert!(queue.add(&[buffer, buffer], &[], 1));
        queue.publish();
        assert_eq!(queue.free_descriptors(), 3, "an indirect chain takes one");
        recycle(&queue, 0, 9, 0);
        assert_eq!(
            queue.pop_used().unwrap_err().to_string(),
            "ring 0: chain 9 is used but was not available"
        );
        recycle(&queue, 4, 0, 0);
        let error = queue.pop_used().unwrap_err().to_string();
        assert_eq!(error, "ring 0: its used index 5 is beyond the available index 1");
    }

    #[test]
    fn memory_is_described_as_it_is_used() {
        let memory = MemoryArena::with_regions(1 << 16, 2).unwrap();
        let [first, second] = memory.regions().collect::<Vec<_>>().try_into().unwrap();
        assert_eq!((first.guest_address, first.user_address, first.mmap_offset), (GUEST_BASE, USER_BASE, 0));
        assert_eq!(memory.user_addr(second.guest_address + 5), second.user_address + 5);
        // An allocation that would cross the border is placed after it.
        assert_eq!(memory.alloc(0xfff0, 16), GUEST_BASE);
        assert_eq!(memory.alloc(0x20, 16), second.guest_address);
        memory.write(second.guest_address - 2, b"abcd");
        assert_eq!(memory.bytes(second.guest_address - 2, 4), b"abcd");
    }
}
