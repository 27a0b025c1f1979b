//! A guest without a machine: memory with a checked pattern, and threads that write to it at a given rate.
//! For measurements and tests without a QEMU; the ends `mem:` of the command line.
//!
//! ```text
//!   Synthetic   memory · pattern · load (threads) ──► SourceMemory ──► Outgoing ═══► Incoming ──► Checked ──► Memory
//!                 └─ generation of each page ──► Ledger = its device state ═════════════════════► compares every page
//! ```
//!
//! A page's content follows from the guest's seed, its number and its generation, which each write of the
//! load increments; a share of them is zero. When the guest is stopped its generations are sent as device
//! state, so the other end knows the expected content of each page, and detects a stale, torn or misplaced
//! one.
//!
//! It has no machine, so only [`Checked`] can use it. Limits: 4 KiB pages, one RAM block.

mod checked;
mod ledger;
mod load;
mod options;
mod parts;
mod pattern;
mod shape;

use std::convert::Infallible;
use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_migration::tracker::{DirtyLogTracker, DirtyTracker, WriteProtect};
use towline_migration::{LiveBlock, Memory, MemoryError, RamMapping, Result, SourceMemory, memory};
use towline_protocol::configuration::Configuration;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, limits};

pub use checked::{BlockHash, CheckOutcome, Checked, ReceivedMemory};
pub use ledger::{Ledger, LedgerError};
pub use options::{MemOptions, ParseBytes, Room};
pub use pattern::{WrongContent, WrongPage};
pub use shape::{Backing, Shape};

use load::{LoadThreads, Mode, Over};
use parts::find_in_parts;
use pattern::PAGE_BYTES;

/// The RAM block's name.
pub const BLOCK_NAME: &str = "mem.ram";
/// The machine type in the stream, so no QEMU accepts the guest.
pub const MACHINE_TYPE: &str = "towline-mem";

/// A synthetic guest: memory with a checked pattern, and threads that write to it.
pub struct Synthetic {
    shape: Shape,
    region: RamMapping,
    generations: Vec<AtomicU32>,
}

impl Synthetic {
    /// Maps the memory and fills it, with as many threads as there are CPUs.
    ///
    /// # Errors
    /// The length is invalid, or there is too little memory.
    pub fn new(shape: Shape) -> Result<Self, MemoryError> {
        let region = map(&shape)?;
        // Small pages do as well.
        let _ = region.span().advise_huge();
        let generations = (0..shape.pages()).map(|_| AtomicU32::new(0)).collect();
        let this = Self { shape, region, generations };
        this.fill();
        Ok(this)
    }

    /// Runs the guest's load while `work` sends the guest. The engine stops it for the last pass; after
    /// `work` has returned, nothing writes to the memory.
    ///
    /// # Errors
    /// Writes cannot be tracked on this machine.
    pub fn run<T>(&self, work: impl FnOnce(&SourceMemory<'_>) -> T) -> Result<T> {
        let tracker = self.tracker()?;
        let load = LoadThreads::new(self.shape.threads.get());
        thread::scope(|scope| {
            let _over = Over(&load);
            if self.shape.dirty_rate > 0 {
                for thread in 0..self.shape.threads.get() {
                    let load = &load;
                    let rewrite = |page, content: &mut _| self.rewrite(page, content);
                    scope.spawn(move || load.run(&self.shape, thread, rewrite));
                }
            }
            let block = LiveBlock { name: BLOCK_NAME, span: self.region.span() };
            let stop = || {
                load.set(Mode::Stopped);
                Ok(())
            };
            let start = || {
                load.set(Mode::Runs);
                Ok(())
            };
            let guest = SourceMemory::new(configuration(), &[block], &*tracker)?
                .with_hooks(stop, start)
                .with_device_state(|| Ok(self.ledger().encode()));
            Ok(work(&guest))
        })
    }

    /// The expected content of each page, of a stopped guest.
    pub fn ledger(&self) -> Ledger {
        let generations = self.generations.iter().map(|generation| generation.load(Ordering::Relaxed));
        Ledger { pattern: self.shape.pattern(), generations: generations.collect() }
    }

    /// Writes the next generation of a page; only one thread at a time does that for the same page.
    fn rewrite(&self, page: usize, content: &mut [u8; PAGE_BYTES]) {
        let generation = self.generations[page].load(Ordering::Relaxed).wrapping_add(1);
        self.shape.pattern().fill(page as u64, generation, content);
        self.region.span().write(page * PAGE_BYTES, content);
        self.generations[page].store(generation, Ordering::Relaxed);
    }

    fn tracker(&self) -> Result<Box<dyn DirtyTracker>> {
        Ok(match (self.shape.dirty_rate, self.shape.backing) {
            (0, _) => Box::new(DirtyLogTracker::new(nothing_written)),
            (_, Backing::Private) => Box::new(WriteProtect::new()?),
            // No other process has the memfd.
            (_, Backing::Memfd | Backing::HugeTlb) => Box::new(WriteProtect::of_shared()?),
        })
    }

    fn fill(&self) {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        find_in_parts(self.shape.pages(), threads, |pages| -> Option<Infallible> {
            let mut content = [0; PAGE_BYTES];
            for page in pages {
                self.shape.pattern().fill(page as u64, 0, &mut content);
                // Zero pages too: like those of a real guest they are allocated.
                self.region.span().write(page * PAGE_BYTES, &content);
            }
            None
        });
    }
}

/// The configuration section of a synthetic guest's stream.
pub fn configuration() -> Configuration {
    Configuration { machine_type: MACHINE_TYPE.into(), ..Configuration::default() }
}

fn nothing_written(_: BlockIndex, _: &mut [u64]) -> std::io::Result<()> {
    Ok(())
}

fn map(shape: &Shape) -> Result<RamMapping, MemoryError> {
    let (block, found) = (BLOCK_NAME.to_owned(), shape.length);
    if found == 0 || !found.is_multiple_of(PAGE_SIZE) || found > limits::RAM_BYTES_MAX {
        return Err(MemoryError::Length { block, found });
    }
    let Ok(length) = usize::try_from(found) else { return Err(MemoryError::Length { block, found }) };
    let mapped = match shape.backing {
        Backing::Private => RamMapping::anonymous(length),
        backing => memfd(found, backing).and_then(|file| RamMapping::shared(file.as_fd(), 0, length)),
    };
    mapped.map_err(|source| MemoryError::Map { block, length: found, source })
}

/// A memfd of `length` bytes, for a backing that is not private.
///
/// # Errors
/// The kernel has no memory; or the length is not a multiple of the huge pages' size.
pub fn memfd(length: u64, backing: Backing) -> std::io::Result<OwnedFd> {
    let huge = match backing {
        Backing::HugeTlb => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Backing::Memfd | Backing::Private => MemfdFlags::empty(),
    };
    let file = memfd_create("towline-mem", MemfdFlags::CLOEXEC | huge)?;
    ftruncate(&file, length)?;
    Ok(file)
}

/// Maps a memfd as the memory of a guest and populates all its pages now, with huge pages where available; they stay for later
/// mappings.
///
/// # Errors
/// The length is less than that, or the kernel has too little memory.
pub fn populated(file: &OwnedFd, length: u64, threads: NonZeroUsize) -> Result<Memory, MemoryError> {
    let backing = memory::BlockBacking::Shared { file: file.as_fd(), offset: 0 };
    let block = memory::MemoryBlock { name: BLOCK_NAME, length, backing };
    let memory = Memory::new(configuration(), &[block])?;
    memory.populate(threads)?;
    Ok(memory)
}

impl fmt::Debug for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Synthetic").field("shape", &self.shape).finish_non_exhaustive()
    }
}
