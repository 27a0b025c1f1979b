//! A guest's memory, allocated here or mapped from a file of its owner: source or destination of a migration.
//!
//! ```text
//!   vCPUs, writers ──► write() + mark_dirty() ──► Memory ──► Outgoing      extents · zero pages · dirty runs
//!                                                 Memory ◄── Incoming      straight into place, populated ahead
//! ```
//!
//! Each block is anonymous memory or a shared mapping of a file or memfd, which other processes write through
//! their own mappings. For anonymous memory untouched pages are known, so these are neither read nor sent,
//! and not touched where zero pages arrive. Writes during a migration must be marked ([`Memory::mark_dirty`];
//! [`Memory::write`] does it), since the memory itself is not tracked.
//!
//! This memory runs no guest, and its device state is opaque bytes. Limits: pages of 4 KiB; a block's file
//! must not be truncated while it is mapped.

mod error;
mod guest;
mod populate;
mod sink;

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{PageRef, RamBlock, limits};

pub use error::MemoryError;
pub use populate::Populated;

use crate::dirty::DirtyMap;
use crate::guest::RAM_SECTION_ID;
use crate::lock::lock;
use crate::sys::{RamMapping, Span};

/// A block to be mapped.
#[derive(Debug, Clone, Copy)]
pub struct MemoryBlock<'a> {
    /// QEMU's idstr, e.g. `pc.ram`.
    pub name: &'a str,
    /// Bytes, a multiple of 4096.
    pub length: u64,
    /// Where its memory is.
    pub backing: BlockBacking<'a>,
}

/// Where a block's memory is.
#[derive(Debug, Clone, Copy)]
pub enum BlockBacking<'a> {
    /// Private memory of this process, zero at first.
    Anonymous,
    /// In a file or memfd, shared. The descriptor may be closed afterwards.
    Shared {
        /// The file, open for reading and writing.
        file: BorrowedFd<'a>,
        /// Where the block begins in it, in bytes, a multiple of 4096.
        offset: u64,
    },
}

/// A guest's memory with its dirty map: source or destination of a migration.
pub struct Memory {
    configuration: OnceLock<Configuration>,
    ram: OnceLock<KnownBlocks>,
    /// If built to adopt: maximum number of bytes to allocate.
    limit: Option<u64>,
    /// The file to adopt into, if any, of exactly the guest's size.
    file: Option<OwnedFd>,
    section_id: AtomicU32,
    given_state: Mutex<Option<Vec<u8>>>,
    received_state: Mutex<Option<DeviceState>>,
    is_committed: AtomicBool,
    on_stop: Option<Hook>,
    on_start: Option<Hook>,
}

/// Work of the embedder's.
type Hook = Box<dyn Fn() -> crate::Result<()> + Send + Sync>;

/// The blocks, once they are known.
struct KnownBlocks {
    blocks: Vec<RamBlock>,
    mapped: Vec<MappedBlock>,
    dirty: DirtyMap,
    /// Pages that may hold something; in shared blocks all may, even those without a bit in the map.
    touched: DirtyMap,
}

struct MappedBlock {
    region: RamMapping,
    /// No other mapping writes here, so `touched` is exact.
    is_ours: bool,
}

impl Memory {
    /// A guest with these blocks, in this order. As a sink it takes only a guest with the same machine type
    /// and blocks.
    ///
    /// # Errors
    /// A block has an invalid length, name or file; or the kernel refuses memory.
    pub fn new(configuration: Configuration, blocks: &[MemoryBlock<'_>]) -> Result<Self, MemoryError> {
        let (configuration, ram) = (configuration.into(), KnownBlocks::map(blocks)?.into());
        Ok(Self { configuration, ram, ..Self::empty(None) })
    }

    /// A sink that takes any guest of at most `limit` bytes and allocates anonymous memory for it when it
    /// arrives.
    pub fn adopting(limit: u64) -> Self {
        Self::empty(Some(limit))
    }

    /// A sink that takes any guest of exactly `length` bytes and puts its blocks into a file or memfd, one
    /// after the other.
    pub fn adopting_into(file: OwnedFd, length: u64) -> Self {
        Self { file: Some(file), ..Self::empty(Some(length)) }
    }

    /// Sets the callbacks that stop the guest for its last pass, and start it again if the migration fails
    /// after that. After `stop` has returned, nothing writes to the memory.
    #[must_use]
    pub fn with_hooks(
        mut self,
        stop: impl Fn() -> crate::Result<()> + Send + Sync + 'static,
        start: impl Fn() -> crate::Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.on_stop = Some(Box::new(stop));
        self.on_start = Some(Box::new(start));
        self
    }

    /// Sets the device state that goes with the memory ([`DeviceState::bytes`]); at the latest when `stop`
    /// returns.
    pub fn set_device_state(&self, bytes: Vec<u8>) {
        *lock(&self.given_state) = Some(bytes);
    }

    /// The device state received; `None` before that, and once it was taken.
    pub fn take_device_state(&self) -> Option<DeviceState> {
        lock(&self.received_state).take()
    }

    /// Returns true if a guest arrived completely. Whether its source knows is the result of
    /// [`crate::Incoming::run`].
    pub fn is_committed(&self) -> bool {
        self.is_committed.load(Ordering::Acquire)
    }

    /// The blocks; none before a guest was adopted.
    pub fn blocks(&self) -> &[RamBlock] {
        self.ram.get().map_or(&[], |ram| &ram.blocks)
    }

    /// Copies memory of one block in and marks it dirty.
    ///
    /// # Panics
    /// If it is not within the block.
    pub fn write(&self, at: PageRef, bytes: &[u8]) {
        let ram = self.ram();
        ram.touched.mark(at, bytes.len() as u64);
        ram.span(at).write(offset_in_block(at), bytes);
        ram.dirty.mark(at, bytes.len() as u64);
    }

    /// Copies memory of one block out. The copy may have a concurrent write in part.
    ///
    /// # Panics
    /// If it is not within the block.
    pub fn read(&self, at: PageRef, bytes: &mut [u8]) {
        self.ram().span(at).read(offset_in_block(at), bytes);
    }

    /// Marks `length` bytes from `at` on as written by other means than [`Self::write`]: they are sent
    /// (again). Call it after the write.
    ///
    /// # Panics
    /// If it is not within the block.
    pub fn mark_dirty(&self, at: PageRef, length: u64) {
        let ram = self.ram();
        ram.touched.mark(at, length);
        ram.dirty.mark(at, length);
    }

    fn empty(limit: Option<u64>) -> Self {
        Self {
            configuration: OnceLock::new(),
            ram: OnceLock::new(),
            limit,
            file: None,
            section_id: AtomicU32::new(RAM_SECTION_ID),
            given_state: Mutex::default(),
            received_state: Mutex::default(),
            is_committed: AtomicBool::new(false),
            on_stop: None,
            on_start: None,
        }
    }

    /// # Panics
    /// If no guest was adopted: no method that names pages makes sense before.
    fn ram(&self) -> &KnownBlocks {
        self.ram.get().expect("pages are named only when there are blocks")
    }
}

impl KnownBlocks {
    fn map(blocks: &[MemoryBlock<'_>]) -> Result<Self, MemoryError> {
        let (mut names, mut checked, mut mapped) = (BTreeSet::new(), Vec::new(), Vec::new());
        for block in blocks {
            checked.push(checked_block(block.name, block.length, &mut names)?);
            mapped.push(block.map()?);
        }
        let (dirty, touched) = (DirtyMap::new(&checked), DirtyMap::new(&checked));
        Ok(Self { blocks: checked, mapped, dirty, touched })
    }

    fn span(&self, page: PageRef) -> Span<'_> {
        self.mapped[page.block.index()].region.span()
    }

    /// Returns true if a page is known to be zero without reading it.
    fn is_known_zero(&self, page: PageRef) -> bool {
        self.mapped[page.block.index()].is_ours && !self.touched.is_marked(page)
    }
}

/// Returns the block of this name and length, unless it is not possible beside those of `names`.
pub(crate) fn checked_block<'a>(
    name: &'a str,
    length: u64,
    names: &mut BTreeSet<&'a str>,
) -> Result<RamBlock, MemoryError> {
    let block = name.to_owned();
    if !names.insert(name) || names.len() > limits::BLOCKS_MAX || name.len() > limits::NAME_BYTES_MAX {
        return Err(MemoryError::Name { block });
    }
    if length == 0 || !length.is_multiple_of(PAGE_SIZE) || length > limits::RAM_BYTES_MAX {
        return Err(MemoryError::Length { block, found: length });
    }
    Ok(RamBlock { name: block, length, mapped: None })
}

impl MemoryBlock<'_> {
    fn map(&self) -> Result<MappedBlock, MemoryError> {
        let (block, found) = (self.name.to_owned(), self.length);
        let Ok(length) = usize::try_from(found) else { return Err(MemoryError::Length { block, found }) };
        let (region, is_ours) = match self.backing {
            BlockBacking::Anonymous => (RamMapping::anonymous(length), true),
            BlockBacking::Shared { file, offset } => {
                self.check_file(file, offset)?;
                (RamMapping::shared(file, offset, length), false)
            }
        };
        let region = region.map_err(|source| MemoryError::Map { block, length: found, source })?;
        Ok(MappedBlock { region, is_ours })
    }

    fn check_file(&self, file: BorrowedFd<'_>, offset: u64) -> Result<(), MemoryError> {
        let block = self.name.to_owned();
        let failed = |source| MemoryError::Map { block: block.clone(), length: self.length, source };
        let file = file.as_fd().try_clone_to_owned().map_err(&failed)?;
        let found = std::fs::File::from(file).metadata().map_err(&failed)?.len();
        let expected = offset.saturating_add(self.length);
        if found < expected {
            return Err(MemoryError::FileTooShort { block, found, expected });
        }
        Ok(())
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("blocks", &self.blocks())
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Offset of a page in its block. It was checked against the block, whose length fits.
pub(crate) fn offset_in_block(page: PageRef) -> usize {
    usize::try_from(page.offset).expect("within a block that is mapped here")
}
