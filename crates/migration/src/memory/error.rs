//! Errors of a [`super::Memory`].

use std::io;

use towline_protocol::limits;

/// Memory that cannot be allocated, or a guest that does not fit into it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The caller's block has no size that a guest's block can have.
    #[error(
        "block {block:?} has {found} bytes, expected a multiple of 4096 that is not 0 and fits into this process"
    )]
    Length {
        /// Name of the block.
        block: String,
        /// Length of the block in bytes.
        found: u64,
    },
    /// The caller's block is not made of whole pages.
    #[error("block {block:?} begins at {found:#x}, expected a multiple of 4096")]
    Alignment {
        /// Name of the block.
        block: String,
        /// Where it begins in this process.
        found: usize,
    },
    /// The caller has more blocks than a stream may name, or one with a name that is too long or used twice.
    #[error(
        "block {block:?} is one too many, has a name of more than {} bytes or one that is there twice",
        limits::NAME_BYTES_MAX
    )]
    Name {
        /// Name of the block.
        block: String,
    },
    /// The file of a block ends before the block does.
    #[error(
        "the file of block {block:?} has {found} bytes, expected at least {expected}: enlarge it or correct the offset"
    )]
    FileTooShort {
        /// Name of the block.
        block: String,
        /// The file's length.
        found: u64,
        /// Where the block ends in it.
        expected: u64,
    },
    /// The kernel refuses memory.
    #[error("{length} bytes for block {block:?} cannot be allocated: {source}")]
    Map {
        /// Name of the block.
        block: String,
        /// Length of the block in bytes.
        length: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel could not populate the pages: there is too little memory.
    #[error("block {block:?} cannot be populated at {offset:#x}: {source}")]
    Populate {
        /// Name of the block.
        block: String,
        /// From where on, in bytes.
        offset: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The incoming guest is larger than what may be allocated for it.
    #[error(
        "the guest has {found} bytes of memory with block {block:?}, at most {expected} are allowed here"
    )]
    TooLarge {
        /// The block that exceeds it.
        block: String,
        /// Bytes up to its end.
        found: u64,
        /// The limit.
        expected: u64,
    },
    /// The incoming guest is smaller than the memory made for it.
    #[error(
        "the guest has {found} bytes of memory, {expected} were made ready for it: give both sides the same size"
    )]
    TooSmall {
        /// Bytes of all its blocks.
        found: u64,
        /// Bytes here.
        expected: u64,
    },
    /// A block of the incoming guest has another size here.
    #[error(
        "block {block:?} has {found} bytes at the source, expected {expected}: give both sides the same memory"
    )]
    BlockLength {
        /// Name of the block.
        block: String,
        /// Length of the block in bytes at the source.
        found: u64,
        /// Length of the block in bytes here.
        expected: u64,
    },
    /// The incoming guest has another block at this place.
    #[error("the source's block number {number} is {block:?} of {found} bytes, expected {expected}")]
    Block {
        /// Position of the block in the list.
        number: usize,
        /// Name of the block.
        block: String,
        /// Length of the block in bytes.
        found: u64,
        /// The expected value.
        expected: String,
    },
    /// The incoming guest has too few blocks.
    #[error("the source has {found} blocks, expected also {block:?} of {expected} bytes")]
    BlockMissing {
        /// The first that is missing.
        block: String,
        /// Number of blocks that the source has.
        found: usize,
        /// Length of the block in bytes here.
        expected: u64,
    },
    /// The guest has another machine type.
    #[error("the source's machine type is {found:?}, expected {expected:?}: start both sides with the same")]
    MachineType {
        /// The source's.
        found: String,
        /// The machine type of this memory.
        expected: String,
    },
    /// Pages arrived before the block list, or the guest was requested before it arrived.
    #[error("there is no memory yet: the block list has not arrived")]
    NoBlocks,
    /// The guest has no device state.
    #[error(
        "the guest's device state is not there: set it before the migration or when the guest is stopped"
    )]
    NoDeviceState,
}

impl From<MemoryError> for crate::Error {
    fn from(error: MemoryError) -> Self {
        Self::guest(error)
    }
}
