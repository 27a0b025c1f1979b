//! What a driver can do to a ring that ends it.

use super::{CHAIN_BYTES_MAX, CHAIN_PIECES_MAX};

/// Why a ring was stopped. Always the driver's fault (or the frontend's, who said where the ring is); other rings go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// A size that no ring has.
    #[error("its size is {found}, expected a power of two up to 32768")]
    Size {
        /// The size.
        found: u32,
    },
    /// A part of it that is nowhere, or not aligned.
    #[error(
        "its {part} at user address {user:#x} ({len} bytes, aligned to {align}) is not in the guest's memory"
    )]
    Place {
        /// Which part.
        part: &'static str,
        /// Where it should be, in the frontend's addresses.
        user: u64,
        /// Its length in bytes.
        len: usize,
        /// Its alignment in bytes.
        align: usize,
    },
    /// More entries than there is room for.
    #[error("its available index is {found}, at most {most} was possible (the device stands at {at})")]
    Index {
        /// What the driver wrote.
        found: u16,
        /// The largest it can be.
        most: u16,
        /// Where the device is.
        at: u16,
    },
    /// The head of a chain outside the table.
    #[error("descriptor {found} was made available, but there are only {size}")]
    Head {
        /// The head.
        found: u16,
        /// The table's size.
        size: u16,
    },
    /// A chain that the device still has.
    #[error("descriptor {head} was made available a second time before it was used")]
    Twice {
        /// The head.
        head: u16,
    },
    /// A link that leads outside the table.
    #[error("in the chain of descriptor {head}, {found} comes next, but its table has only {size}")]
    Next {
        /// The chain's head.
        head: u16,
        /// The link.
        found: u16,
        /// The table's size.
        size: usize,
    },
    /// A chain that does not end.
    #[error("the chain of descriptor {head} has more than {most} descriptors, or goes round")]
    Long {
        /// The chain's head.
        head: u16,
        /// How many there may be.
        most: usize,
    },
    /// Nothing to read or write.
    #[error("a descriptor in the chain of {head} has no byte")]
    Nothing {
        /// The chain's head.
        head: u16,
    },
    /// More bytes than one chain may have.
    #[error("the chain of descriptor {head} has more than {CHAIN_BYTES_MAX} bytes")]
    Bytes {
        /// The chain's head.
        head: u16,
    },
    /// More pieces than one system call takes.
    #[error("the chain of descriptor {head} lies in more than {CHAIN_PIECES_MAX} pieces")]
    Pieces {
        /// The chain's head.
        head: u16,
    },
    /// A buffer that is not in memory.
    #[error(
        "a buffer of {len} bytes at guest address {guest:#x}, in the chain of {head}, is not in the guest's memory"
    )]
    Buffer {
        /// The chain's head.
        head: u16,
        /// Where it should be.
        guest: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// What the device reads must come before what it writes.
    #[error("in the chain of descriptor {head}, a buffer to read comes after one to write")]
    Order {
        /// The chain's head.
        head: u16,
    },
    /// A table within a table, or without the feature, or with a link behind it, or of no whole descriptors.
    #[error("the chain of descriptor {head} has an indirect table {why}")]
    Indirect {
        /// The chain's head.
        head: u16,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Memory of it, or of the dirty log, cannot be accessed any more.
    #[error(
        "the guest's memory or the dirty log cannot be accessed any more (SIGBUS): its file was truncated, or has no page to give"
    )]
    MemoryLost,
    /// A write that the dirty log has no bit for: the guest would lose it in the migration that is under way.
    #[error("page {page} was written and the dirty log has no bit for it")]
    Log {
        /// The page's number.
        page: u64,
    },
}
