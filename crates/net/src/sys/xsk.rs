//! `linux/if_xdp.h`: the rings that an AF_XDP socket shares with the kernel.
//!
//! ```text
//!   transmit     ours ─► the kernel   descriptors: where, how long, what follows
//!   completion   ours ◄─ the kernel   places that it is done with, in any order
//! ```
//! Each is an array of a power of two of entries with two counters, of which either side moves one.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};

/// Which ring is mapped.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Transmit,
    Completion,
}

/// A ring that is mapped.
#[derive(Debug)]
struct Shared {
    base: NonNull<u8>,
    len: usize,
    offsets: XdpRingOffset,
    size: u32,
}

// SAFETY: the addresses of a mapping that lives as long as this and has one user, who may be any thread.
unsafe impl Send for Shared {}

/// Where descriptors go.
#[derive(Debug)]
pub(crate) struct Transmit {
    shared: Shared,
    produced: u32,
    consumed: u32,
}

/// Where addresses come from.
#[derive(Debug)]
pub(crate) struct Completion {
    shared: Shared,
    at: u32,
}

impl Shared {
    fn map(fd: BorrowedFd<'_>, kind: Kind, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        let (page, entry) = match kind {
            Kind::Transmit => (libc::XDP_PGOFF_TX_RING as u64, size_of::<XdpDesc>()),
            Kind::Completion => (libc::XDP_UMEM_PGOFF_COMPLETION_RING, size_of::<u64>()),
        };
        let entries = usize::try_from(offsets.desc).map_err(|_| io::ErrorKind::InvalidData)?;
        let len = entries + entry * size as usize;
        let words = [Some(offsets.producer), Some(offsets.consumer), offsets.flags];
        let fits = |word: &u64| word.is_multiple_of(4) && *word + 4 <= offsets.desc;
        if !words.iter().flatten().all(fits) || !entries.is_multiple_of(8) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping at a place of the kernel's choice replaces nothing.
        let base = unsafe { mmap(null_mut(), len, prot, flags, fd, page) }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at 0");
        Ok(Self { base, len, offsets, size })
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        let at = usize::try_from(at).expect("it was compared with the mapping");
        // SAFETY: `map` has seen that four aligned bytes are there; both sides use them as atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    fn producer(&self) -> &AtomicU32 {
        self.word(self.offsets.producer)
    }

    fn consumer(&self) -> &AtomicU32 {
        self.word(self.offsets.consumer)
    }

    /// Where entry `at`, counted without end, lies.
    fn entry<T>(&self, at: u32) -> *mut T {
        let index = (at & (self.size - 1)) as usize;
        let at = usize::try_from(self.offsets.desc).expect("as in `map`") + index * size_of::<T>();
        assert!(at + size_of::<T>() <= self.len, "an entry of another ring");
        // SAFETY: it was compared just now.
        unsafe { self.base.as_ptr().add(at).cast() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and goes with this.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        unmapped.expect("a mapping can be unmapped");
    }
}

impl Transmit {
    pub(crate) fn map(fd: BorrowedFd<'_>, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        Ok(Self { shared: Shared::map(fd, Kind::Transmit, offsets, size)?, produced: 0, consumed: 0 })
    }

    /// How many descriptors there is room for.
    pub(crate) fn room(&mut self) -> u32 {
        self.waiting();
        self.shared.size - self.produced.wrapping_sub(self.consumed)
    }

    /// How many the kernel has not taken yet, of those written.
    pub(crate) fn waiting(&mut self) -> u32 {
        let consumed = self.shared.consumer().load(Ordering::Acquire);
        // The kernel moves it forward only; whatever it were, we stay within the ring.
        if self.produced.wrapping_sub(consumed) <= self.shared.size {
            self.consumed = consumed;
        }
        self.produced.wrapping_sub(self.consumed)
    }

    /// Writes a descriptor, for which there is room. Seen after [`Self::publish`].
    pub(crate) fn push(&mut self, addr: u64, len: u32, options: u32) {
        assert!(self.produced.wrapping_sub(self.consumed) < self.shared.size, "there is no room");
        let descriptor = XdpDesc { addr, len, options: XdpDescOptions::from_bits_retain(options) };
        let entry: *mut XdpDesc = self.shared.entry(self.produced);
        // SAFETY: the entry is in the mapping and aligned, and ours until the counter is moved.
        unsafe { entry.write_volatile(descriptor) };
        self.produced = self.produced.wrapping_add(1);
    }

    pub(crate) fn publish(&mut self) {
        self.shared.producer().store(self.produced, Ordering::Release);
    }

    /// Whether the kernel wants to be called; always, if it cannot say so.
    pub(crate) fn wants_a_call(&self) -> bool {
        let flags = self.shared.offsets.flags;
        flags.is_none_or(|at| self.shared.word(at).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0)
    }
}

impl Completion {
    pub(crate) fn map(fd: BorrowedFd<'_>, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        Ok(Self { shared: Shared::map(fd, Kind::Completion, offsets, size)?, at: 0 })
    }

    /// What the kernel is done with since the last time. How many.
    pub(crate) fn take(&mut self, mut each: impl FnMut(u64)) -> u32 {
        let there = self.shared.producer().load(Ordering::Acquire).wrapping_sub(self.at);
        let there = there.min(self.shared.size);
        for _ in 0..there {
            let entry: *mut u64 = self.shared.entry(self.at);
            // SAFETY: the entry is in the mapping and aligned, and the kernel has written it.
            each(unsafe { entry.read_volatile() });
            self.at = self.at.wrapping_add(1);
        }
        self.shared.consumer().store(self.at, Ordering::Release);
        there
    }
}
