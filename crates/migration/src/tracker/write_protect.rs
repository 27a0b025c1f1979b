//! Tracks writes by the kernel's write protection: the first write to each protected page lifts its
//! protection.
//!
//! ```text
//!   protected page ── first write: one short fault, no userspace ──────► written ── harvest: PAGEMAP_SCAN ──► protected
//! ```
//!
//! The tracker sees every write through this process's mapping: of its threads, of KVM's guests, of system
//! calls. It does not see writes through other mappings of the same memory or by devices into pinned pages
//! (VFIO, io_uring's registered buffers), nor discarded memory (`MADV_DONTNEED`, a punched hole): these must
//! be reported. A transparent huge page is split by its first write; hugetlb pages are reported whole.
//!
//! Needs Linux 6.7, no privilege. The mapping must not change while it is tracked.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use towline_protocol::{BlockIndex, PageRef};

use super::mappings::{self, RangeKind};
use super::{DirtyTracker, TrackerError};
use crate::lock::lock;
use crate::sys::{PageSelection, Pagemap, STEP_BYTES, Span, Userfault};

/// A dirty tracker that uses the kernel's write protection.
#[derive(Debug)]
pub struct WriteProtect {
    takes_shared: bool,
    pagemap: Pagemap,
    watch: Mutex<Option<Watch>>,
}

/// The tracked memory.
#[derive(Debug)]
struct Watch {
    userfault: Userfault,
    /// Of each block, which pages count.
    which: Vec<PageSelection>,
}

impl WriteProtect {
    /// A tracker for private memory. Checks that the kernel supports it.
    ///
    /// # Errors
    /// [`TrackerError::Unsupported`], [`TrackerError::NotPermitted`].
    pub fn new() -> Result<Self, TrackerError> {
        let takes_shared = false;
        let pagemap = Pagemap::open(Path::new("/proc/self"))
            .map_err(|source| TrackerError::NotPermitted { what: "/proc/self/pagemap", source })?;
        let this = Self { takes_shared, pagemap, watch: Mutex::new(None) };
        this.try_out()?;
        Ok(this)
    }

    /// A tracker for shared memory too (memfd, files, shared hugetlb), all of whose writers use this mapping
    /// or report their writes.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_shared() -> Result<Self, TrackerError> {
        Ok(Self { takes_shared: true, ..Self::new()? })
    }

    /// Tracks a page of our own.
    fn try_out(&self) -> Result<(), TrackerError> {
        let page = crate::sys::RamMapping::anonymous(4096).map_err(refused("mmap"))?;
        let userfault = Userfault::open().map_err(refused("userfaultfd (UFFD_FEATURE_WP_ASYNC)"))?;
        userfault.register(&page.span()).map_err(refused("userfaultfd (UFFDIO_REGISTER)"))?;
        let scanned =
            self.pagemap.find(page.span().address(), 0..4096, PageSelection::WrittenThere, &mut |_, _| {});
        scanned.map_err(refused("PAGEMAP_SCAN"))
    }

    /// The pages of each block to be reported.
    fn which(&self, memory: &[Span<'_>]) -> Result<Vec<PageSelection>, TrackerError> {
        let ranges: Vec<_> =
            memory.iter().map(|span| span.address()..span.address() + span.length()).collect();
        let kinds = mappings::kinds(&ranges)
            .map_err(|source| TrackerError::NotPermitted { what: "/proc/self/maps", source })?;
        if let Some(block) = kinds.iter().position(|&kind| kind == RangeKind::Shared && !self.takes_shared) {
            return Err(TrackerError::Shared { block });
        }
        let which = |kind| {
            if kind == RangeKind::Anonymous { PageSelection::WrittenThere } else { PageSelection::Written }
        };
        Ok(kinds.into_iter().map(which).collect())
    }

    /// Reports runs of one block, by offset and length.
    fn find(
        &self,
        which: PageSelection,
        block: usize,
        span: &Span<'_>,
        report: &mut dyn FnMut(usize, usize),
    ) -> Result<(), TrackerError> {
        let mut reported = 0;
        let mut note = |offset: usize, length: usize| {
            reported = offset + length;
            report(offset, length);
        };
        let found = self.pagemap.find(span.address(), 0..span.length(), which, &mut note);
        found.map_err(|source| TrackerError::Scan { block, offset: reported, source })
    }

    fn protect(&self, watch: &Watch, block: usize, span: &Span<'_>) -> Result<(), TrackerError> {
        let (length, failed) = (span.length(), cannot_watch(block, span));
        watch.userfault.register(span).map_err(&failed)?;
        match watch.which[block] {
            // Absent pages need no mark: they are unprotected when they are created.
            PageSelection::WrittenThere => {
                self.find(PageSelection::WrittenThere, block, span, &mut |_, _| {})
            }
            _ => {
                let protect = |offset| {
                    watch.userfault.protect(span, offset, STEP_BYTES.min(length - offset)).map_err(&failed)
                };
                (0..length).step_by(STEP_BYTES).try_for_each(protect)
            }
        }
    }

    /// Reports the absent pages of a block of private memory that is protected.
    fn gaps(
        &self,
        block: usize,
        span: &Span<'_>,
        untouched: &mut dyn FnMut(PageRef, u64),
    ) -> Result<(), TrackerError> {
        let mut next = 0;
        let mut gap = |next: usize, end: usize| {
            if next < end {
                untouched(page(block, next), (end - next) as u64);
            }
        };
        self.find(PageSelection::There, block, span, &mut |offset, length| {
            gap(next, offset);
            next = offset + length;
        })?;
        gap(next, span.length());
        Ok(())
    }
}

impl DirtyTracker for WriteProtect {
    fn start(
        &self,
        memory: &[Span<'_>],
        untouched: &mut dyn FnMut(PageRef, u64),
    ) -> Result<(), TrackerError> {
        // Otherwise the kernel would lift the old protection only once no forked process has the descriptor.
        self.stop(memory)?;
        let mut slot = lock(&self.watch);
        let which = self.which(memory)?;
        let userfault = Userfault::open().map_err(refused("userfaultfd (UFFD_FEATURE_WP_ASYNC)"))?;
        let watch = Watch { userfault, which };
        for (block, span) in memory.iter().enumerate() {
            self.protect(&watch, block, span)?;
        }
        for (block, span) in memory.iter().enumerate() {
            if watch.which[block] == PageSelection::WrittenThere {
                self.gaps(block, span, untouched)?;
            }
        }
        *slot = Some(watch);
        Ok(())
    }

    fn harvest(&self, memory: &[Span<'_>], report: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError> {
        let slot = lock(&self.watch);
        let watch = slot.as_ref().ok_or(TrackerError::NotStarted)?;
        for (block, span) in memory.iter().enumerate() {
            let mut report = |offset, length: usize| report(page(block, offset), length as u64);
            self.find(watch.which[block], block, span, &mut report)?;
        }
        Ok(())
    }

    fn stop(&self, memory: &[Span<'_>]) -> Result<(), TrackerError> {
        let Some(watch) = lock(&self.watch).take() else { return Ok(()) };
        for (block, span) in memory.iter().enumerate() {
            watch.userfault.unregister(span).map_err(cannot_watch(block, span))?;
        }
        Ok(())
    }
}

fn page(block: usize, offset: usize) -> PageRef {
    let block = BlockIndex(u32::try_from(block).expect("bounded by BLOCKS_MAX"));
    PageRef { block, offset: offset as u64 }
}

fn cannot_watch(block: usize, span: &Span<'_>) -> impl Fn(io::Error) -> TrackerError + use<> {
    let (address, length) = (span.address(), span.length());
    move |source| TrackerError::Register { block, address, length, source }
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> TrackerError {
    move |source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOENT) => TrackerError::NotPermitted { what, source },
        _ => TrackerError::Unsupported { what, source },
    }
}

#[cfg(test)]
#[path = "write_protect_tests.rs"]
mod tests;
