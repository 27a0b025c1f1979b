//! Error of a memory table.

/// Maximum number of regions of a guest's memory.
pub const REGIONS_MAX: usize = 256;
/// Maximum size of a guest's memory in bytes, 16 TiB. During a change of the table the former memory is
/// mapped too, and a standby has separate memory: so one guest occupies at most half of an address space of
/// 128 TiB, and others of the process get their devices.
pub const GUEST_BYTES_MAX: u64 = 1 << 44;

/// Error of mapping guest memory or a dirty log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryTableError {
    /// A region that does not fit in any address space.
    #[error("a region of {size} bytes at offset {offset} of its file is larger than any address space")]
    TooLarge {
        /// Offset of the region in its file.
        offset: u64,
        /// Length of the region in bytes.
        size: u64,
    },
    /// A region of length 0.
    #[error("the region at guest address {guest:#x} has length 0")]
    Empty {
        /// Guest address of the region.
        guest: u64,
    },
    /// Addresses that wrap around.
    #[error(
        "the region of {size:#x} bytes at guest address {guest:#x}, user address {user:#x} ends beyond 2^64"
    )]
    Wraps {
        /// Guest address of the region.
        guest: u64,
        /// User address of the region.
        user: u64,
        /// Length of the region in bytes.
        size: u64,
    },
    /// Overlapping regions.
    #[error("the regions at guest addresses {one:#x} and {other:#x} overlap")]
    Overlap {
        /// Guest address of the first.
        one: u64,
        /// Guest address of the second.
        other: u64,
    },
    /// More than [`REGIONS_MAX`].
    #[error("the guest's memory has {found} regions, at most {REGIONS_MAX} are supported")]
    TooMany {
        /// Number of regions.
        found: usize,
    },
    /// More than [`GUEST_BYTES_MAX`].
    #[error("the guest's memory has {found:#x} bytes, at most {GUEST_BYTES_MAX:#x} are supported")]
    TooMuch {
        /// Number of bytes.
        found: u64,
    },
    /// A region to be removed that does not exist.
    #[error("no region of {size:#x} bytes at guest address {guest:#x} to remove")]
    Absent {
        /// Guest address of the region.
        guest: u64,
        /// Length of the region in bytes.
        size: u64,
    },
    /// A file that is too short.
    #[error("a region ends at {end:#x} in its file, which has {has:#x} bytes")]
    File {
        /// End of the region.
        end: u64,
        /// Size of the file.
        has: u64,
    },
    /// The mapping failed.
    #[error("shared memory cannot be mapped: {0}; was it created with share=on?")]
    Map(std::io::Error),
}
