//! A split ring, seen from the device: chains are taken in batches, and given back in batches.
//!
//! ```text
//!   pop(batch, most) ─► chains ─► complete(chain, written) … ─► publish()
//!     one load of the           staged here, dirty pages          used entries, one store of the used index,
//!     available index           gathered                          log flushed, at most one notification
//! ```
//! What it is not: it waits for nothing and knows no threads; see [`Worker`](crate::Worker). Packed rings are left out.
//!
//! A driver is not trusted. Whatever it does ends with a [`RingFault`] that names it, after bounded work: a chain has at
//! most [`CHAIN_DESCRIPTORS_MAX`] descriptors in [`CHAIN_PIECES_MAX`] pieces and [`CHAIN_BYTES_MAX`] bytes. A ring with a
//! fault gives no chains any more. Those that it gave before may be completed.

mod batch;
mod fault;
mod notify;
mod recovery;
#[cfg(test)]
mod recovery_tests;
mod walk;
mod words;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use batch::{Batch, Chain, Head};
pub use fault::RingFault;

use crate::features;
use crate::log::{DirtyCache, DirtyLog, LogSwitch};
use crate::memory::Memory;
use crate::message::VringAddress;
use crate::sys::Area;
use notify::NO_NOTIFICATION;
use recovery::Recovery;
use walk::Walk;
use words::Words;

/// The most entries of a ring.
pub const RING_SIZE_MAX: u16 = 32768;
/// The most descriptors in one chain: what QEMU's own devices take (`VIRTQUEUE_MAX_SIZE`).
pub const CHAIN_DESCRIPTORS_MAX: usize = 1024;
/// The most pieces of memory in one chain: what one system call takes.
pub const CHAIN_PIECES_MAX: usize = towline_channel::IOV_MAX;
/// Pieces of memory behind which a batch takes no further chain, so that what a ring makes the device remember is bounded.
pub const BATCH_PIECES_MAX: usize = 16 << 10;
/// The most bytes in one chain.
pub const CHAIN_BYTES_MAX: u32 = 1 << 30;

const DESCRIPTOR_BYTES: usize = 16;
const USED_BYTES: usize = 8;
/// Of available and used ring alike: flags, then the index, then the entries, then the other side's event index.
const INDEX: usize = 2;
const ENTRIES: usize = 4;
/// In [`VringAddress::flags`]: writes to the used ring are logged.
const LOG_USED: u32 = 1;

/// All that a ring is made of.
#[derive(Debug)]
pub struct RingSetup {
    /// Entries; a power of two.
    pub size: u32,
    /// Where its parts are.
    pub address: VringAddress,
    /// Which available entry comes first.
    pub base: u16,
    /// What was negotiated.
    pub features: u64,
    /// By what the driver is woken; none if it polls.
    pub call: Option<OwnedFd>,
    /// Whether writes are logged.
    pub switch: LogSwitch,
    /// Where to.
    pub log: Option<Arc<DirtyLog>>,
}

/// What a ring did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingStatistics {
    /// Chains completed.
    pub chains: u64,
    /// Times that the used index was moved.
    pub batches: u64,
    /// Times that the driver was woken.
    pub notifications: u64,
    /// Times that it did not want to be.
    pub notifications_suppressed: u64,
}

/// A ring that is in use.
#[derive(Debug)]
pub struct Ring {
    memory: Arc<Memory>,
    parts: Parts,
    address: VringAddress,
    size: u16,
    event_index: bool,
    indirect: bool,
    call: Option<OwnedFd>,
    dirty: DirtyCache,
    /// The next available entry to take.
    next: u16,
    /// The driver's available index when it was last looked at.
    seen: u16,
    /// The driver's available index when the worker last had it: by a look, or by [`Ring::arm`], which reports each value once.
    reported: u16,
    used: u16,
    /// The used index when the driver was last woken or did not want to be.
    told: u16,
    /// By head: the device has it, by the number at which it was taken; 0 if it has not.
    taken: Vec<u64>,
    order: u64,
    recovery: Recovery,
    in_flight: u16,
    /// Completed and not yet published: head, bytes written.
    staged: VecDeque<(u16, u32)>,
    /// Whether the driver shall wake the device.
    listening: bool,
    epoch: u64,
    fault: Option<RingFault>,
    statistics: RingStatistics,
}

#[derive(Debug)]
struct Parts {
    table: Area,
    available: Area,
    used: Area,
}

impl Ring {
    /// A ring in this memory. `epoch` tells its [`Head`]s from those of a ring that stood here before.
    ///
    /// # Errors
    /// [`RingFault::Size`], [`RingFault::Place`].
    pub fn new(setup: RingSetup, memory: Arc<Memory>, epoch: u64) -> Result<Self, RingFault> {
        let RingSetup { size: found, address, base, features, call, switch, log } = setup;
        let size = u16::try_from(found).ok().filter(|size| size.is_power_of_two() && *size <= RING_SIZE_MAX);
        let size = size.ok_or(RingFault::Size { found })?;
        let event_index = features & features::EVENT_IDX != 0;
        let parts = Parts::find(&memory, &address, size, event_index)?;
        let used = parts.used.load_16(INDEX, Ordering::Acquire);
        Ok(Self {
            memory,
            parts,
            address,
            size,
            event_index,
            indirect: features & features::INDIRECT_DESC != 0,
            call,
            dirty: DirtyCache::new(switch, log),
            next: base,
            seen: base,
            reported: base,
            used,
            told: used,
            taken: vec![0; usize::from(size)],
            order: 0,
            recovery: Recovery::default(),
            in_flight: 0,
            staged: VecDeque::new(),
            listening: true,
            epoch,
            fault: None,
            statistics: RingStatistics::default(),
        })
    }

    /// Takes at most `most` chains into the batch, whose former content goes. Returns how many; none if the driver has
    /// no more or the ring is broken.
    pub fn pop(&mut self, batch: &mut Batch, most: usize) -> usize {
        batch.begin(&self.memory, self.epoch);
        if self.fault.is_none()
            && let Err(fault) = self.take(batch, most)
        {
            self.fault = Some(fault);
        }
        batch.len()
    }

    fn take(&mut self, batch: &mut Batch, most: usize) -> Result<(), RingFault> {
        self.take_again(batch, most)?;
        let most = most - batch.len();
        if usize::from(self.seen.wrapping_sub(self.next)) < most {
            self.look()?;
        }
        let pending = usize::from(self.seen.wrapping_sub(self.next));
        for _ in 0..pending.min(most) {
            if batch.is_full() {
                // The worker may take a short batch for an empty ring: `arm` reports what is left.
                self.reported = self.next;
                break;
            }
            let entry = ENTRIES + 2 * usize::from(self.next & (self.size - 1));
            let head = self.parts.available.load_16(entry, Ordering::Relaxed);
            if head >= self.size {
                return Err(RingFault::Head { found: head, size: self.size });
            }
            if self.taken[usize::from(head)] != 0 {
                return Err(RingFault::Twice { head });
            }
            self.walk(head, batch)?;
            self.order += 1;
            self.taken[usize::from(head)] = self.order;
            self.recovery.took(head, self.order);
            self.in_flight += 1;
            self.next = self.next.wrapping_add(1);
        }
        Ok(())
    }

    fn walk(&self, head: u16, batch: &mut Batch) -> Result<(), RingFault> {
        let (memory, table) = (&self.memory, &self.parts.table);
        Walk { memory, table, size: self.size, indirect: self.indirect }.chain(head, batch)
    }

    /// Looks at the driver's index.
    fn look(&mut self) -> Result<(), RingFault> {
        let found = self.parts.available.load_16(INDEX, Ordering::Acquire);
        let room = self.size - self.in_flight;
        if found.wrapping_sub(self.next) > room {
            let most = self.next.wrapping_add(room);
            return Err(RingFault::Index { found, most, at: self.next });
        }
        (self.seen, self.reported) = (found, found);
        Ok(())
    }

    /// Puts back the chains of the batch from `first` on, which were taken last and are not completed: the next
    /// [`Ring::pop`] gives them again.
    ///
    /// # Panics
    /// If one of them is no longer the device's, or the batch is of another ring.
    pub fn give_back(&mut self, batch: &mut Batch, first: usize) {
        assert_eq!(batch.epoch, self.epoch, "a batch of another ring");
        for shape in batch.chains.drain(first..).rev() {
            let taken = &mut self.taken[usize::from(shape.head)];
            assert!(*taken != 0, "chain {} was completed and given back", shape.head);
            if self.recovery.gives_back(shape.head, *taken) {
                continue;
            }
            *taken = 0;
            self.in_flight -= 1;
            self.order -= 1;
            self.next = self.next.wrapping_sub(1);
        }
    }

    /// The device is done with a chain and wrote the first `written` bytes of its writable part. The driver sees it
    /// after [`Ring::publish`].
    pub fn complete(&mut self, chain: Chain<'_>, written: u32) {
        let mut left = written.min(chain.writable_bytes());
        for piece in chain.writable_pieces() {
            let here = left.min(piece.len);
            self.dirty.mark(chain.batch.memory.guest_address(piece), here.into());
            left -= here;
        }
        self.finish(chain.head(), written.min(chain.writable_bytes()));
    }

    /// As [`Ring::complete`], later and in any order, for a chain to which nothing was written.
    pub fn complete_head(&mut self, head: Head) {
        self.finish(head, 0);
    }

    fn finish(&mut self, head: Head, written: u32) {
        // A ring that was stopped meanwhile has told the frontend that it gives nothing back.
        let order = if head.epoch == self.epoch { self.taken[usize::from(head.index)] } else { 0 };
        if order == 0 || !self.recovery.is_due((head.index, written), order) {
            return;
        }
        let mut next = Some((head.index, written));
        while let Some((head, written)) = next {
            self.taken[usize::from(head)] = 0;
            self.in_flight -= 1;
            self.staged.push_back((head, written));
            next = self.recovery.next_due();
        }
    }

    /// Shows the driver what was completed, and wakes it once if it wants that. True if it was woken.
    pub fn publish(&mut self) -> bool {
        if self.staged.is_empty() {
            return false;
        }
        let (mut at, count) = (self.used, self.staged.len());
        self.recovery.gives(count);
        for (head, written) in &self.staged {
            let slot = usize::from(at & (self.size - 1));
            self.parts.used.store_pair(ENTRIES + USED_BYTES * slot, [(*head).into(), *written]);
            at = at.wrapping_add(1);
        }
        let first = std::mem::replace(&mut self.used, at);
        self.parts.used.store_16(INDEX, at, Ordering::Release);
        self.recovery.gave(self.staged.drain(..));
        self.mark_used(first, count);
        self.flush_log();
        self.statistics.chains += count as u64;
        self.statistics.batches += 1;
        self.notify()
    }

    fn mark_used(&mut self, first: u16, count: usize) {
        let slot = usize::from(first & (self.size - 1));
        let straight = count.min(usize::from(self.size) - slot);
        self.mark_ring(0, ENTRIES);
        self.mark_ring(ENTRIES + USED_BYTES * slot, USED_BYTES * straight);
        self.mark_ring(ENTRIES, USED_BYTES * (count - straight));
    }

    /// Bytes of the used ring were written.
    fn mark_ring(&mut self, offset: usize, len: usize) {
        if self.address.flags.get() & LOG_USED != 0 {
            self.dirty.mark(self.address.log.get().saturating_add(offset as u64), len as u64);
        }
    }

    fn flush_log(&mut self) {
        if let Some(page) = self.dirty.flush() {
            self.fault.get_or_insert(RingFault::Log { page });
        }
    }

    fn notify(&mut self) -> bool {
        let signalled = std::mem::replace(&mut self.told, self.used);
        let wanted = notify::wants_call(&self.words(), signalled, self.used);
        if wanted {
            self.statistics.notifications += 1;
            self.call();
        } else {
            self.statistics.notifications_suppressed += 1;
        }
        wanted
    }

    /// Wakes the driver, whatever it wants.
    pub(crate) fn call(&self) {
        if let Some(call) = &self.call {
            // It can only be full, and then it is readable, which is all that was wanted; or of no use to anybody.
            if let Err(errno) = rustix::io::write(call, &1u64.to_ne_bytes()) {
                tracing::debug!(%errno, "the driver's eventfd");
            }
        }
    }

    /// Whether the driver shall wake the device when it has more; yes at first. A device that waits for something else
    /// (a packet to receive, while there is room) says no.
    pub fn listen(&mut self, wanted: bool) {
        if std::mem::replace(&mut self.listening, wanted) && !wanted && !self.event_index {
            self.store_flags(NO_NOTIFICATION);
        }
    }

    /// Before the device waits: enables the driver's notifications, if the device listens. True if the driver has moved its
    /// available index since the device last looked, so that waiting would be wrong.
    ///
    /// Each value of the index is reported once. A worker that leaves available chains alone is not called again for them; it is
    /// called when the driver adds more, or by what it waits for itself ([`Worker::poll`](crate::Worker::poll)).
    pub fn arm(&mut self) -> bool {
        if !self.listening || self.fault.is_some() {
            return false;
        }
        let mut reported = self.reported;
        let armed = notify::arm(&self.words(), &mut reported);
        self.reported = reported;
        if armed.stored {
            let offset = if self.event_index { Words::event_offset(self.size) } else { 0 };
            self.mark_ring(offset, 2);
        }
        self.flush_log();
        armed.moved
    }

    /// While the device works, kicks are of no use.
    pub(crate) fn disarm(&mut self) {
        if !self.event_index && self.parts.used.load_16(0, Ordering::Relaxed) & NO_NOTIFICATION == 0 {
            self.store_flags(NO_NOTIFICATION);
        }
    }

    /// The driver's available index as it is now, whatever it is.
    pub(crate) fn available_index(&self) -> u16 {
        self.parts.available.load_16(INDEX, Ordering::Relaxed)
    }

    fn store_flags(&mut self, flags: u16) {
        self.parts.used.store_16(0, flags, Ordering::Relaxed);
        self.mark_ring(0, 2);
    }

    fn words(&self) -> Words<'_> {
        let Self { parts, size, event_index, .. } = self;
        Words { available: &parts.available, used: &parts.used, size: *size, event_index: *event_index }
    }

    /// The same ring in other memory, or at other places.
    pub(crate) fn settle(&mut self, memory: Arc<Memory>, address: VringAddress) -> Result<(), RingFault> {
        self.parts = Parts::find(&memory, &address, self.size, self.event_index)?;
        (self.memory, self.address) = (memory, address);
        self.recovery.moved(&address);
        Ok(())
    }

    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        // Whatever was told to the old one may not have been heard.
        self.call();
    }

    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.dirty.set_log(log);
    }

    /// Its places are no longer the guest's to give, so it is not even stopped. Where it stood.
    pub(crate) fn lose(self) -> u16 {
        self.recovery.end();
        self.next
    }

    /// The memory that it and its buffers are in.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Whether a part of the memory or of the log was replaced by zeros after a fault.
    pub(crate) fn has_lost_memory(&self) -> bool {
        self.memory.is_lost() || self.dirty.is_lost()
    }

    pub(crate) fn address(&self) -> VringAddress {
        self.address
    }

    /// Ends the ring: chains that the device still has go back empty. Where the next one begins, how many chains that were,
    /// and by what the driver was woken.
    pub(crate) fn stop(mut self) -> (u16, usize, Option<OwnedFd>) {
        let left = self.left();
        for index in &left {
            self.finish(Head { index: *index, epoch: self.epoch }, 0);
        }
        self.publish();
        self.recovery.end();
        if !self.event_index && self.parts.used.load_16(0, Ordering::Relaxed) != 0 {
            self.store_flags(0);
        }
        self.flush_log();
        (self.next, left.len(), self.call)
    }

    /// How many entries it has.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Whether it was empty when it began: its driver had just been started.
    pub(crate) fn is_new(&self) -> bool {
        self.next == 0 && self.used == 0
    }

    /// What ended it, if something did.
    pub fn fault(&self) -> Option<&RingFault> {
        self.fault.as_ref()
    }

    /// How many chains the device has.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// What it did so far.
    pub fn statistics(&self) -> RingStatistics {
        self.statistics
    }
}

impl Parts {
    fn find(
        memory: &Memory,
        address: &VringAddress,
        size: u16,
        event_index: bool,
    ) -> Result<Self, RingFault> {
        let event = if event_index { 2 } else { 0 };
        let size = usize::from(size);
        let find = |part, user: u64, len, align| {
            let fault = RingFault::Place { part, user, len, align };
            memory.user_area(user, len, align).ok_or(fault)
        };
        Ok(Self {
            table: find("descriptor table", address.descriptors.get(), DESCRIPTOR_BYTES * size, 16)?,
            available: find("available ring", address.available.get(), ENTRIES + 2 * size + event, 2)?,
            used: find("used ring", address.used.get(), ENTRIES + USED_BYTES * size + event, 4)?,
        })
    }
}
