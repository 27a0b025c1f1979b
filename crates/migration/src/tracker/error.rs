//! Errors of dirty tracking.

use std::io;

/// Error of a tracker: it cannot start, or can no longer continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The kernel is too old or built without it.
    #[error(
        "this kernel cannot track writes by {what} ({source}): it needs Linux 6.7 or later with CONFIG_USERFAULTFD and PTE markers; use a KVM dirty log instead (DirtyLogTracker)"
    )]
    Unsupported {
        /// The call that is missing.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// This process may not use it.
    #[error(
        "{what} is not permitted ({source}): a seccomp filter, a security module or a /proc that is not there forbids it; allow it, or use a KVM dirty log instead (DirtyLogTracker)"
    )]
    NotPermitted {
        /// The call that was refused.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Write protection sees only one mapping of memory that may have several.
    #[error(
        "block {block} is mapped shared: writes through other mappings of it (another process, a second mmap) would not be seen; if all its writers use this mapping or report their writes (mark_dirty), use WriteProtect::of_shared, else a dirty log (DirtyLogTracker)"
    )]
    Shared {
        /// Number of the block.
        block: usize,
    },
    /// The memory is not as promised, or is already tracked.
    #[error(
        "block {block}, {length} bytes at {address:#x}, cannot be watched: {source} (EBUSY: another userfaultfd has it; EINVAL: it is not all mapped, or does not begin and end with its huge pages)"
    )]
    Register {
        /// Number of the block.
        block: usize,
        /// Where it begins in this process.
        address: usize,
        /// Length of the block in bytes.
        length: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The written pages cannot be read.
    #[error("cannot read the written pages of block {block} from {offset:#x} on: {source}")]
    Scan {
        /// Number of the block.
        block: usize,
        /// From where on, in bytes.
        offset: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The embedder's dirty log failed.
    #[error("the dirty log of block {block} cannot be read: {source}")]
    Log {
        /// Number of the block.
        block: usize,
        /// The embedder's reason.
        source: io::Error,
    },
    /// The embedder's dirty log cannot be started or stopped.
    #[error("dirty logging cannot be switched {}: {source}", if *on { "on" } else { "off" })]
    LogSwitch {
        /// The requested state.
        on: bool,
        /// The embedder's reason.
        source: io::Error,
    },
    /// The embedder's dirty log has a bit for a page that does not exist.
    #[error("the dirty log of block {block} has page {page}, expected less than {pages}")]
    LogBit {
        /// Number of the block.
        block: usize,
        /// The page of the first such bit.
        page: u64,
        /// Number of pages that the block has.
        pages: u64,
    },
    /// Harvested before it was started.
    #[error("the tracker is not started")]
    NotStarted,
}

impl From<TrackerError> for crate::Error {
    fn from(error: TrackerError) -> Self {
        Self::guest(error)
    }
}
