//! A guest's memory: one file, mapped here whole, described to the backend in one or more regions.
//!
//! ```text
//!   offset in the file   0 ......... region 0 ......... region 1 .........
//!   guest address        GUEST_BASE + offset                                  regions lie beside each other
//!   user address         USER_BASE + offset + index * USER_STRIDE             and are apart here, so none can
//!                                                                             take the one for the other
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapOptions;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::sys::Shared;
use crate::wire::RegionInfo;
use crate::{Result, system};

/// The guest address of the first byte.
pub const GUEST_BASE: u64 = 0x4000_0000;
/// The user address of the first byte.
pub const USER_BASE: u64 = 0x7e00_0000_0000;
const USER_STRIDE: u64 = 0x10_0000_0000;
const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;

/// Shared memory from which ranges are allocated, and never freed.
#[derive(Debug)]
pub struct MemoryArena {
    fd: OwnedFd,
    shared: Shared,
    region: u64,
    regions: u64,
    next: AtomicU64,
}

impl MemoryArena {
    /// Memory of this size, in one region, with all pages touched.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(bytes: u64) -> Result<Self> {
        Self::with_regions(bytes, 1)
    }

    /// Memory of `region_count` regions, each of `region_bytes`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn with_regions(region_bytes: u64, region_count: u64) -> Result<Self> {
        Self::in_file(MemfdFlags::CLOEXEC, region_bytes.next_multiple_of(PAGE), region_count)
    }

    /// Memory of one region in pages of 2 MiB, which the system must have free.
    ///
    /// # Errors
    /// The kernel's.
    pub fn in_huge_pages(bytes: u64) -> Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        Self::in_file(flags, bytes.next_multiple_of(HUGE_PAGE), 1)
    }

    fn in_file(flags: MemfdFlags, region: u64, region_count: u64) -> Result<Self> {
        let fd = memfd_create("guest", flags).map_err(system("memfd_create"))?;
        ftruncate(&fd, region * region_count).map_err(system("ftruncate"))?;
        let map = MmapOptions::new().populate().map_raw(&fd).map_err(system("mmap"))?;
        Ok(Self { fd, shared: Shared::new(map), region, regions: region_count, next: AtomicU64::new(0) })
    }

    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The regions, as described to a backend.
    pub fn regions(&self) -> impl Iterator<Item = RegionInfo> + '_ {
        (0..self.regions).map(|index| RegionInfo {
            guest_address: GUEST_BASE + index * self.region,
            size: self.region,
            user_address: USER_BASE + index * (self.region + USER_STRIDE),
            mmap_offset: index * self.region,
        })
    }

    /// The user address of a guest address.
    pub fn user_addr(&self, guest: u64) -> u64 {
        let offset = guest - GUEST_BASE;
        USER_BASE + offset + offset / self.region * USER_STRIDE
    }

    /// A part of it, at a multiple of `align` and within one region; its guest address.
    ///
    /// # Panics
    /// If there is not so much left.
    pub fn alloc(&self, bytes: u64, align: u64) -> u64 {
        let place = |from: u64| {
            let start = from.next_multiple_of(align);
            let crosses = start / self.region != (start + bytes - 1) / self.region;
            if crosses { (start / self.region + 1) * self.region } else { start }
        };
        let taken = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
            let start = place(next);
            (start + bytes <= self.region * self.regions).then_some(start + bytes)
        });
        let before = taken
            .unwrap_or_else(|next| panic!("cannot allocate {bytes} bytes of the guest's memory at {next}"));
        GUEST_BASE + place(before)
    }

    /// Copies to a guest address.
    pub fn write(&self, guest: u64, bytes: &[u8]) {
        self.shared.write(offset(guest), bytes);
    }

    /// Copies from a guest address.
    pub fn read(&self, guest: u64, bytes: &mut [u8]) {
        self.shared.read(offset(guest), bytes);
    }

    /// `len` bytes at a guest address.
    pub fn bytes(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(guest, &mut bytes);
        bytes
    }

    /// A 16-bit word.
    pub fn load_le16(&self, guest: u64, order: Ordering) -> u16 {
        self.shared.load_le16(offset(guest), order)
    }

    /// A 16-bit word.
    pub fn store_le16(&self, guest: u64, value: u16, order: Ordering) {
        self.shared.store_le16(offset(guest), value, order);
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// As a dirty log: the numbers of the pages that are marked, which are marked no more. Bit 0 is guest
    /// page 0.
    pub fn take_dirty_pages(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for word in 0..self.shared.len() / 8 {
            let mut bits = self.shared.take_64(word * 8);
            while bits != 0 {
                pages.push(word as u64 * 64 + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
        pages
    }
}

pub(crate) fn offset(guest: u64) -> usize {
    usize::try_from(guest.wrapping_sub(GUEST_BASE)).expect("an address has 64 bits")
}
