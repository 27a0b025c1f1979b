//! The rings that an AF_XDP socket shares with the kernel (`linux/if_xdp.h`).
//!
//! ```text
//!   TX           we produce, the kernel consumes   descriptors: address, length, options
//!   completion   the kernel produces, we consume   addresses of descriptors that were sent, in any order
//! ```
//! Each has a power of two of entries, a producer and a consumer index.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};

/// A mapped ring.
#[derive(Debug)]
struct RingMapping {
    base: NonNull<u8>,
    len: usize,
    offsets: XdpRingOffset,
    size: u32,
}

// SAFETY: addresses of a mapping that lives as long as this and has one owner, on any thread.
unsafe impl Send for RingMapping {}

/// The TX ring.
#[derive(Debug)]
pub(crate) struct TxRing {
    ring: RingMapping,
    produced: u32,
    consumed: u32,
}

/// The completion ring.
#[derive(Debug)]
pub(crate) struct CompletionRing {
    ring: RingMapping,
    consumed: u32,
}

impl RingMapping {
    /// Maps the ring at this offset of the socket, which has `size` entries of type `T`.
    fn map<T>(fd: BorrowedFd<'_>, page: u64, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        let entries = usize::try_from(offsets.desc).map_err(|_| io::ErrorKind::InvalidData)?;
        let len = entries + size_of::<T>() * size as usize;
        let words = [Some(offsets.producer), Some(offsets.consumer), offsets.flags];
        let fits = |word: &u64| word.is_multiple_of(4) && *word + 4 <= offsets.desc;
        if !words.iter().flatten().all(fits) || !entries.is_multiple_of(8) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping at an address chosen by the kernel replaces nothing.
        let base = unsafe { mmap(null_mut(), len, prot, flags, fd, page) }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at 0");
        Ok(Self { base, len, offsets, size })
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        let at = usize::try_from(at).expect("`map` has checked the offset");
        // SAFETY: `map` has checked that four aligned bytes are mapped there; both sides access them
        // atomically.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    fn producer(&self) -> &AtomicU32 {
        self.word(self.offsets.producer)
    }

    fn consumer(&self) -> &AtomicU32 {
        self.word(self.offsets.consumer)
    }

    /// Pointer to entry `at`, a free-running index.
    fn entry<T>(&self, at: u32) -> *mut T {
        let index = (at & (self.size - 1)) as usize;
        let at = usize::try_from(self.offsets.desc).expect("`map` has checked the offset")
            + index * size_of::<T>();
        assert!(at + size_of::<T>() <= self.len, "the entries are those of another ring");
        // SAFETY: asserted above.
        unsafe { self.base.as_ptr().add(at).cast() }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: no other value uses the mapping.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        unmapped.expect("a mapping can be unmapped");
    }
}

impl TxRing {
    pub(crate) fn map(fd: BorrowedFd<'_>, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        let ring = RingMapping::map::<XdpDesc>(fd, libc::XDP_PGOFF_TX_RING as u64, offsets, size)?;
        Ok(Self { ring, produced: 0, consumed: 0 })
    }

    /// Number of free entries.
    pub(crate) fn free(&mut self) -> u32 {
        self.unconsumed();
        self.ring.size - self.produced.wrapping_sub(self.consumed)
    }

    /// Number of descriptors that the kernel has not consumed yet.
    pub(crate) fn unconsumed(&mut self) -> u32 {
        let consumed = self.ring.consumer().load(Ordering::Acquire);
        // The kernel only increases it. Any other value is ignored, to stay within the ring.
        if self.produced.wrapping_sub(consumed) <= self.ring.size {
            self.consumed = consumed;
        }
        self.produced.wrapping_sub(self.consumed)
    }

    /// Writes a descriptor to a free entry. The kernel sees it after [`Self::publish`].
    pub(crate) fn push(&mut self, addr: u64, len: u32, options: u32) {
        assert!(self.produced.wrapping_sub(self.consumed) < self.ring.size, "the TX ring is full");
        let descriptor = XdpDesc { addr, len, options: XdpDescOptions::from_bits_retain(options) };
        let entry: *mut XdpDesc = self.ring.entry(self.produced);
        // SAFETY: the entry is in the mapping and aligned, and the kernel does not read it before the
        // producer index is stored.
        unsafe { entry.write_volatile(descriptor) };
        self.produced = self.produced.wrapping_add(1);
    }

    pub(crate) fn publish(&mut self) {
        self.ring.producer().store(self.produced, Ordering::Release);
    }

    /// Returns true if the kernel needs a wakeup (`XDP_RING_NEED_WAKEUP`), or does not report it.
    pub(crate) fn needs_wakeup(&self) -> bool {
        let flags = self.ring.offsets.flags;
        flags.is_none_or(|at| self.ring.word(at).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0)
    }
}

impl CompletionRing {
    pub(crate) fn map(fd: BorrowedFd<'_>, offsets: XdpRingOffset, size: u32) -> io::Result<Self> {
        let page = libc::XDP_UMEM_PGOFF_COMPLETION_RING;
        Ok(Self { ring: RingMapping::map::<u64>(fd, page, offsets, size)?, consumed: 0 })
    }

    /// Consumes all completions. Returns their number.
    pub(crate) fn consume(&mut self, mut each: impl FnMut(u64)) -> u32 {
        let count = self.ring.producer().load(Ordering::Acquire).wrapping_sub(self.consumed);
        let count = count.min(self.ring.size);
        for _ in 0..count {
            let entry: *mut u64 = self.ring.entry(self.consumed);
            // SAFETY: the entry is in the mapping and aligned, and the kernel has written it.
            each(unsafe { entry.read_volatile() });
            self.consumed = self.consumed.wrapping_add(1);
        }
        self.ring.consumer().store(self.consumed, Ordering::Release);
        count
    }
}
