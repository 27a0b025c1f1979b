//! The UMEM: guest memory, with an arena for each pair, as one range of addresses that the kernel pins.
//!
//! ```text
//!   [arena 0][arena 1] … [region with huge pages] … [region with small ones] …
//! ```
//! Regions are adjacent, in any order, as a UMEM has no holes. A region that cannot be mapped so (an odd
//! offset in its file) is not part of it, and frames in it are copied.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use rustix::fs::fstatfs;
use towline_vhost_user::{GuestMemory, GuestRange};

use super::arena::SECTION_BYTES;
use super::references::UmemRange;
use crate::lock::lock;
use crate::sys::umem_mapping::UmemMapping;

const PAGE_BYTES: u64 = 4096;
/// `HUGETLBFS_MAGIC`.
const HUGE_PAGES: i64 = 0x9584_58f6;

/// Registered memory, pinned while a socket is bound to it.
#[derive(Debug)]
pub(crate) struct Umem {
    pub(super) mapping: Arc<UmemMapping>,
    memory: Arc<GuestMemory>,
    /// Location of each region of guest memory.
    regions: Vec<Option<RegionSlot>>,
    /// Bound sockets. Each keeps a reference to the UMEM in the kernel, so a queue is free once its own
    /// socket is closed. The socket of another pair shares the UMEM of any of them.
    bound: Mutex<Vec<Arc<OwnedFd>>>,
    /// Length of the metadata before each descriptor's data; 0 without metadata.
    pub(super) metadata_bytes: u32,
    /// True if packets may have several descriptors; set when the first socket is bound.
    pub(super) scatter_gather: AtomicBool,
    /// Blocks of each region's file when it was pinned.
    blocks: Vec<u64>,
}

/// A bound socket, closed when this is dropped.
#[derive(Debug)]
pub(super) struct BoundSocket {
    fd: Arc<OwnedFd>,
    umem: Arc<Umem>,
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        lock(&self.umem.bound).retain(|fd| !Arc::ptr_eq(fd, &self.fd));
    }
}

/// Location of a region in the UMEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RegionSlot {
    offset: u64,
    page: u64,
}

/// A region's size, and offset and page size of its file.
#[derive(Debug, Clone, Copy)]
struct RegionFile {
    size: u64,
    offset: u64,
    page: u64,
}

/// Layout of the UMEM.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    slots: Vec<Option<RegionSlot>>,
    align: u64,
    len: u64,
}

impl Umem {
    /// Maps guest memory. `register` registers the mapping with a socket and returns the length of the
    /// metadata; its second argument is true if all guest memory is in huge pages.
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        pairs: usize,
        register: impl FnOnce(&UmemMapping, bool) -> io::Result<u32>,
    ) -> io::Result<Self> {
        let private_bytes = SECTION_BYTES * pairs;
        let files = memory.regions().iter().map(|region| {
            let (file, offset) = region.file();
            Ok(RegionFile { size: region.size(), offset, page: page_bytes(file)? })
        });
        let files = files.collect::<io::Result<Vec<RegionFile>>>()?;
        let layout = Layout::new(private_bytes as u64, &files);
        let bytes =
            |bytes: u64| usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM));
        let mut mapping =
            UmemMapping::new(bytes(layout.len)?, private_bytes, bytes(layout.align)?, SECTION_BYTES)?;
        for (slot, region) in layout.slots.iter().zip(memory.regions()) {
            if let Some(slot) = slot {
                let (file, offset) = region.file();
                mapping.map_file(bytes(slot.offset)?, file, offset, bytes(region.size())?)?;
            }
        }
        let huge_pages = files.iter().all(|file| file.page > PAGE_BYTES);
        let metadata_bytes = register(&mapping, huge_pages)?;
        let blocks = memory.regions().iter().map(|region| blocks(region.file().0)).collect();
        Ok(Self {
            mapping: Arc::new(mapping),
            memory: Arc::clone(memory),
            regions: layout.slots,
            bound: Mutex::default(),
            metadata_bytes,
            scatter_gather: AtomicBool::new(false),
            blocks,
        })
    }

    /// Adds a bound socket, which is closed when the returned value is dropped.
    pub(super) fn add_bound(self: &Arc<Self>, fd: OwnedFd) -> BoundSocket {
        let (fd, umem) = (Arc::new(fd), Arc::clone(self));
        lock(&umem.bound).push(Arc::clone(&fd));
        BoundSocket { fd, umem }
    }

    /// Calls `act` with a bound socket, which is not closed during the call. `None` if no socket is bound.
    pub(super) fn with_bound<T>(&self, act: impl FnOnce(&OwnedFd) -> T) -> Option<T> {
        lock(&self.bound).first().map(|fd| act(fd))
    }

    /// Returns true if it contains this memory.
    pub(super) fn is_of(&self, memory: &Arc<GuestMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Translates a range of guest memory.
    pub(super) fn range(&self, guest: GuestRange) -> UmemRange {
        let slot = self.regions.get(usize::from(guest.region)).copied().flatten();
        let page = slot.map_or(PAGE_BYTES, |slot| slot.page);
        UmemRange { offset: slot.map(|slot| slot.offset + guest.offset), len: guest.len, page }
    }

    /// Returns true if no page was removed from guest memory since it was pinned. Pages that a balloon or
    /// page reporting has discarded stay pinned with their old contents, and those that the guest gets
    /// instead are not part of the UMEM.
    pub(super) fn is_intact(&self) -> bool {
        let now = self.memory.regions().iter().map(|region| blocks(region.file().0));
        now.zip(&self.blocks).all(|(now, pinned)| now >= *pinned)
    }
}

fn blocks(file: &File) -> u64 {
    // If it cannot be determined, nothing is assumed to be removed.
    file.metadata().map_or(u64::MAX, |metadata| metadata.blocks())
}

fn page_bytes(file: &File) -> io::Result<u64> {
    let found = fstatfs(file)?;
    Ok(if found.f_type == HUGE_PAGES { found.f_bsize.cast_unsigned() } else { PAGE_BYTES })
}

impl Layout {
    /// Regions with larger pages come first: as each length is a multiple of the page size, all are aligned
    /// to their pages.
    fn new(private_bytes: u64, files: &[RegionFile]) -> Self {
        let fits = |file: &RegionFile| {
            file.page.is_power_of_two()
                && file.size.is_multiple_of(file.page)
                && file.offset.is_multiple_of(file.page)
        };
        let mut order: Vec<usize> = (0..files.len()).filter(|index| fits(&files[*index])).collect();
        order.sort_by_key(|index| std::cmp::Reverse(files[*index].page));
        let align = order.first().map_or(PAGE_BYTES, |index| files[*index].page);
        let (mut slots, mut offset) = (vec![None; files.len()], private_bytes);
        for index in order {
            slots[index] = Some(RegionSlot { offset, page: files[index].page });
            offset = offset.saturating_add(files[index].size);
        }
        Self { slots, align, len: offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_adjacent_and_aligned() {
        let (small, huge) = (PAGE_BYTES, 2 << 20);
        let files = [
            RegionFile { size: 0xa0000, offset: 0, page: small },
            RegionFile { size: 8 << 20, offset: 2 << 20, page: huge },
            RegionFile { size: 0x1800, offset: 0, page: small },
            RegionFile { size: 0x2000, offset: 0x800, page: small },
            RegionFile { size: 0x3000, offset: 0x1000, page: small },
        ];
        let private_bytes = 0x81000;
        let second = private_bytes + (8 << 20);
        let slot = |offset, page| Some(RegionSlot { offset, page });
        let slots =
            vec![slot(second, small), slot(private_bytes, huge), None, None, slot(second + 0xa0000, small)];
        let expected = Layout { slots, align: huge, len: second + 0xa3000 };
        assert_eq!(Layout::new(private_bytes, &files), expected);
        let empty = Layout { slots: vec![], align: small, len: private_bytes };
        assert_eq!(Layout::new(private_bytes, &[]), empty);
    }
}
