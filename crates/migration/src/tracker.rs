//! Trackers of a running guest's writes.
//!
//! ```text
//!   start ─► guest writes … ─► harvest ─► guest writes … ─► harvest ─► guest stopped ─► harvest ─► stop
//! ```
//!
//! - [`WriteProtect`]: the kernel does, for memory that this process writes (vCPU threads, KVM, system
//!   calls).
//! - [`DirtyLogTracker`]: by an existing bitmap, a bit for each page: KVM's dirty log ([`KvmDirtyLog`]
//!   combines its slots), a device's.
//!
//! Neither sees writes by devices into pinned pages (VFIO) and by other processes through their own mappings:
//! these must be reported by [`crate::SourceMemory::mark_dirty`].

mod bitmap;
mod error;
mod kvm;
mod mappings;
mod write_protect;

use towline_protocol::PageRef;

pub use bitmap::{DirtyLogReader, DirtyLogTracker};
pub use error::TrackerError;
pub use kvm::{KvmDirtyLog, MemorySlot};
pub use write_protect::WriteProtect;

use crate::sys::Span;

/// Tracks which pages of a guest's memory were written. Every call names the same memory, a span for each
/// block.
pub trait DirtyTracker: Send + Sync {
    /// Starts, or starts again: every write after it returns is in a later harvest. Reports to `untouched`
    /// the known runs of pages that were never touched: they are zero until they are reported.
    ///
    /// # Errors
    /// This memory cannot be tracked; nothing is tracked.
    fn start(&self, memory: &[Span<'_>], untouched: &mut dyn FnMut(PageRef, u64))
    -> Result<(), TrackerError>;

    /// Takes the pages written since the last call (since the start) and reports each run of them, its first
    /// page and its length in bytes. A page may be reported that was not written.
    ///
    /// # Errors
    /// Writes may be lost from now on.
    fn harvest(&self, memory: &[Span<'_>], report: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError>;

    /// Ends the tracking and its cost for the guest. Also called when nothing was started.
    ///
    /// # Errors
    /// The guest may still be slowed down.
    fn stop(&self, memory: &[Span<'_>]) -> Result<(), TrackerError>;
}

impl<T: DirtyTracker + ?Sized> DirtyTracker for &T {
    fn start(
        &self,
        memory: &[Span<'_>],
        untouched: &mut dyn FnMut(PageRef, u64),
    ) -> Result<(), TrackerError> {
        T::start(self, memory, untouched)
    }

    fn harvest(&self, memory: &[Span<'_>], report: &mut dyn FnMut(PageRef, u64)) -> Result<(), TrackerError> {
        T::harvest(self, memory, report)
    }

    fn stop(&self, memory: &[Span<'_>]) -> Result<(), TrackerError> {
        T::stop(self, memory)
    }
}
