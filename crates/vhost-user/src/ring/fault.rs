//! Faults of a ring.

use super::{CHAIN_BYTES_MAX, CHAIN_SEGMENTS_MAX};

/// A violation by the driver that ends its ring, or by the frontend, which sets the ring's addresses. Other
/// rings continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingFault {
    /// An invalid ring size.
    #[error("its size is {found}, expected a power of two up to 32768")]
    Size {
        /// The size.
        found: u32,
    },
    /// A part of the ring that is outside guest memory, or not aligned.
    #[error(
        "its {part} at user address {user:#x} ({len} bytes, aligned to {align}) is not in the guest's memory"
    )]
    Unmapped {
        /// The part.
        part: &'static str,
        /// Address in the frontend's process.
        user: u64,
        /// Length in bytes.
        len: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// A used ring over the available ring: each completion would make another chain available, without the
    /// driver.
    #[error("its used ring (user address {used:#x}) overlaps its available ring ({available:#x})")]
    Overlap {
        /// Address of the available ring in the frontend's process.
        available: u64,
        /// Address of the used ring.
        used: u64,
    },
    /// More available entries than free descriptors.
    #[error(
        "its available index is {found}, at most {most} was possible (last_avail_idx is {last_avail_idx})"
    )]
    AvailableIndex {
        /// The driver's index.
        found: u16,
        /// Highest possible index.
        most: u16,
        /// The device's index.
        last_avail_idx: u16,
    },
    /// A head outside the descriptor table.
    #[error("descriptor {found} was made available, but there are only {size}")]
    Head {
        /// The head.
        found: u16,
        /// Size of the table.
        size: u16,
    },
    /// A head that is in flight.
    #[error("descriptor {head} was made available a second time before it was used")]
    HeadInFlight {
        /// The head.
        head: u16,
    },
    /// A `next` field outside the table.
    #[error("in the chain of descriptor {head}, {found} comes next, but its table has only {size}")]
    Next {
        /// The head of the chain.
        head: u16,
        /// The `next` field.
        found: u16,
        /// Size of the table.
        size: usize,
    },
    /// A chain with too many descriptors, or with a loop.
    #[error("the chain of descriptor {head} has more than {most} descriptors, or a loop")]
    TooManyDescriptors {
        /// The head of the chain.
        head: u16,
        /// Maximum number of descriptors.
        most: usize,
    },
    /// A descriptor of length 0.
    #[error("a descriptor in the chain of {head} has length 0")]
    EmptyDescriptor {
        /// The head of the chain.
        head: u16,
    },
    /// A chain with too many bytes.
    #[error("the chain of descriptor {head} has more than {CHAIN_BYTES_MAX} bytes")]
    TooManyBytes {
        /// The head of the chain.
        head: u16,
    },
    /// A chain with more segments than one system call accepts.
    #[error("the chain of descriptor {head} has more than {CHAIN_SEGMENTS_MAX} segments of memory")]
    TooManySegments {
        /// The head of the chain.
        head: u16,
    },
    /// A buffer outside guest memory.
    #[error(
        "a buffer of {len} bytes at guest address {guest:#x}, in the chain of {head}, is not in the guest's memory"
    )]
    Buffer {
        /// The head of the chain.
        head: u16,
        /// Address of the buffer.
        guest: u64,
        /// Length in bytes.
        len: u32,
    },
    /// A readable descriptor after a writable one.
    #[error("in the chain of descriptor {head}, a readable buffer comes after a writable one")]
    DescriptorOrder {
        /// The head of the chain.
        head: u16,
    },
    /// An invalid indirect table: within another, without the feature, with a `next` field, or of a partial
    /// descriptor.
    #[error("the chain of descriptor {head} has an indirect table {why}")]
    Indirect {
        /// The head of the chain.
        head: u16,
        /// The violation.
        why: &'static str,
    },
    /// Memory of the ring or of the dirty log is no longer accessible.
    #[error(
        "the guest's memory or the dirty log can no longer be accessed (SIGBUS): its file was truncated, or the kernel has no page for it"
    )]
    MemoryLost,
    /// A write that the dirty log has no bit for: the migration under way would lose it.
    #[error("page {page} was written and the dirty log has no bit for it")]
    OutsideLog {
        /// Number of the page.
        page: u64,
    },
}
