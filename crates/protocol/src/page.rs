//! The unit in which memory is transferred.

/// The target page size of x86 and of most other machines.
pub const PAGE_SIZE: u64 = 4096;
