//! Pages of a process by their state: the ioctl `PAGEMAP_SCAN`.
//!
//! ```text
//!   start ├──────────┤ step ├──────────┤ …  end        one ioctl finds and protects, up to REGIONS_MAX runs at once
//! ```
//!
//! Pages of this process are found that were written since they were protected, pages of any process that are
//! no longer those of the file that they were mapped from.
//!
//! The kernel finds a written page and protects it again in one step, under the lock of its page table, and
//! no CPU has a stale writable translation when the call returns: a write is either before it and reported,
//! or after it and found by the next call. Formats: `include/uapi/linux/fs.h`, Linux 6.7;
//! `Documentation/admin-guide/mm/pagemap.rst`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

use linux_raw_sys::general::{
    PAGE_IS_FILE, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC,
    PM_SCAN_WP_MATCHING, page_region, pm_scan_arg,
};
use rustix::ioctl::opcode;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u32 = opcode::read_write::<pm_scan_arg>(b'f', 16);
/// Runs that one call may report: 96 KiB.
const REGIONS_MAX: usize = 4096;
/// Bytes of one call: the kernel holds the address space's lock for it, which blocks other threads (1 GiB
/// takes about a millisecond), and no huge page crosses its bounds.
pub(crate) const STEP_BYTES: usize = 1 << 30;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))]
const _: () = assert!(PAGEMAP_SCAN == 0xc060_6610);
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<pm_scan_arg>() == 96 && size_of::<page_region>() == 24);
    assert!(offset_of!(pm_scan_arg, start) == 16 && offset_of!(pm_scan_arg, walk_end) == 32);
    assert!(offset_of!(pm_scan_arg, vec) == 40 && offset_of!(pm_scan_arg, vec_len) == 48);
    assert!(offset_of!(pm_scan_arg, category_mask) == 72 && offset_of!(pm_scan_arg, return_mask) == 88);
    assert!(offset_of!(page_region, end) == 8 && offset_of!(page_region, categories) == 16);
    assert!(PAGE_IS_WRITTEN == 1 << 1 && PM_SCAN_WP_MATCHING == 1 && PM_SCAN_CHECK_WPASYNC == 2);
};

/// Selection of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSelection {
    /// Pages without protection that exist, in memory or swapped; they are protected. For private memory,
    /// whose pages the kernel never drops.
    WrittenThere,
    /// All pages without protection; they are protected. For memory that the kernel may unmap at any time,
    /// because a file or memfd has it too.
    Written,
    /// Pages that exist; nothing is changed.
    There,
    /// Pages of a private mapping of a file that exist and are not the file's: the process has written them.
    /// Nothing is changed.
    Private,
}

/// The pagemap of a process.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens that of the process with this directory in `/proc`.
    pub(crate) fn open(process: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(process.join("pagemap"))? })
    }

    /// Finds the selected pages in a range of the memory from `base` on, and reports each run of them, its
    /// offset from `base` and its length, in ascending order.
    ///
    /// # Errors
    /// `ENOTTY`: the kernel lacks the call; `EPERM`: the memory is not registered for asynchronous write
    /// protection; no memory. Some runs may be lost then.
    pub(crate) fn find(
        &self,
        base: usize,
        range: Range<usize>,
        which: PageSelection,
        report: &mut dyn FnMut(usize, usize),
    ) -> io::Result<()> {
        let (mut start, end) = (base + range.start, base + range.end);
        let nothing = page_region { start: 0, end: 0, categories: 0 };
        let mut regions = vec![nothing; REGIONS_MAX];
        while start < end {
            // Up to the next multiple of a step: a huge page is protected as a whole or not at all.
            let step_end = end.min((start / STEP_BYTES + 1) * STEP_BYTES);
            let (found, walked) = self.scan(start, step_end, which, &mut regions)?;
            for region in &regions[..found] {
                let (first, last) = (region.start as usize, region.end as usize);
                report(first - base, last - first);
            }
            if walked <= start {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            start = walked;
        }
        Ok(())
    }

    /// One call: the number of runs found, and the end of the scanned range.
    fn scan(
        &self,
        start: usize,
        end: usize,
        which: PageSelection,
        regions: &mut [page_region],
    ) -> io::Result<(usize, usize)> {
        let there = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let (mask, inverted, any_of) = match which {
            PageSelection::WrittenThere => (PAGE_IS_WRITTEN, 0, there),
            PageSelection::Written => (PAGE_IS_WRITTEN, 0, 0),
            PageSelection::There => (0, 0, there),
            PageSelection::Private => (PAGE_IS_FILE, PAGE_IS_FILE, there),
        };
        let is_protected = matches!(which, PageSelection::WrittenThere | PageSelection::Written);
        let protect = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;
        let mut argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: if is_protected { protect.into() } else { 0 },
            start: start as u64,
            end: end as u64,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: inverted.into(),
            category_mask: mask.into(),
            category_anyof_mask: any_of.into(),
            // Runs consist of selected pages; other flags would only split them.
            return_mask: if is_protected { mask.into() } else { 0 },
        };
        // SAFETY: PAGEMAP_SCAN reads and writes one `pm_scan_arg` and at most `vec_len` regions at `vec`,
        // both of which live until it returns; asynchronous write protection changes nothing that a program
        // can see.
        let found = unsafe {
            libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN.into(), std::ptr::from_mut(&mut argument))
        };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        Ok((found.min(regions.len()), usize::try_from(argument.walk_end).unwrap_or(end).min(end)))
    }
}
