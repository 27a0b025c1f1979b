//! Why memory cannot be tracked.

use std::io;

/// Who watches a guest's memory cannot, or can no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The kernel is too old or built without it.
    #[error(
        "this kernel cannot track writes by {what} ({source}): it needs Linux 6.7 or later with CONFIG_USERFAULTFD and PTE markers; use a KVM dirty log instead (Bitmap)"
    )]
    Unsupported {
        /// The call that is missing.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Something forbids it to this process.
    #[error(
        "{what} is not permitted ({source}): a seccomp filter, a security module or a /proc that is not there forbids it; allow it, or use a KVM dirty log instead (Bitmap)"
    )]
    NotPermitted {
        /// The call that was refused.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Write protection sees only one mapping of memory that may have several.
    #[error(
        "block {block} is mapped shared: writes through other mappings of it (another process, a second mmap) would not be seen; if all its writers use this mapping or say what they write (mark_dirty), use WriteProtect::of_shared, else a dirty log (Bitmap)"
    )]
    Shared {
        /// Its number.
        block: usize,
    },
    /// The memory is not what was promised, or somebody else watches it.
    #[error(
        "block {block}, {length} bytes at {address:#x}, cannot be watched: {source} (EBUSY: another userfaultfd has it; EINVAL: it is not all mapped, or does not begin and end with its huge pages)"
    )]
    Register {
        /// Its number.
        block: usize,
        /// Where it begins in this process.
        address: usize,
        /// Its length in bytes.
        length: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// What was written cannot be found out.
    #[error("what was written to block {block} cannot be found out from {offset:#x} on: {source}")]
    Scan {
        /// Its number.
        block: usize,
        /// From where on, in bytes.
        offset: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The embedder's dirty log failed.
    #[error("the dirty log of block {block} cannot be had: {source}")]
    Log {
        /// Its number.
        block: usize,
        /// The embedder's reason.
        source: io::Error,
    },
    /// The embedder's dirty log cannot begin or end.
    #[error("dirty logging cannot be switched {}: {source}", if *on { "on" } else { "off" })]
    LogSwitch {
        /// What it was to be.
        on: bool,
        /// The embedder's reason.
        source: io::Error,
    },
    /// The embedder's dirty log has a bit for a page that does not exist.
    #[error("the dirty log of block {block} has page {page}, expected less than {pages}")]
    LogBit {
        /// Its number.
        block: usize,
        /// The page of the first such bit.
        page: u64,
        /// How many pages the block has.
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
