//! Populates memory ahead of use: on many machines the first touch of a page costs more than the network.

use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{KnownBlocks, Memory, MemoryError};
use crate::parallel;
use crate::sys::{HUGE_PAGE_BYTES, Span};

/// Bytes that one thread populates per call: large enough to amortize the call, small enough to share the
/// work well.
const CHUNK_BYTES: usize = 16 * HUGE_PAGE_BYTES;

/// Result of populating, and its duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Populated {
    /// Bytes of memory, all of it.
    pub bytes: u64,
    /// The time it took.
    pub elapsed: Duration,
    /// Huge pages were requested and not refused for every block. The kernel decides about their use.
    pub is_huge_advised: bool,
    /// The kernel does not know the call (before Linux 5.14, or for this kind of file): pages were touched
    /// one by one.
    pub is_touched: bool,
}

/// A piece of a block.
struct PopulateRange<'a> {
    block: &'a str,
    span: Span<'a>,
    offset: usize,
    length: usize,
}

impl Memory {
    /// Populates all pages now, with `threads` threads, and with huge pages where available. For a
    /// destination, before the migration; never before postcopy, which discards them. Content is not changed.
    ///
    /// # Errors
    /// There are no blocks, or too little memory.
    pub fn populate(&self, threads: NonZeroUsize) -> Result<Populated, MemoryError> {
        let ram = self.ram.get().ok_or(MemoryError::NoBlocks)?;
        let begun = Instant::now();
        let is_huge_advised = ram
            .mapped
            .iter()
            .map(|mapped| mapped.region.span().advise_huge())
            .fold(true, |all, one| all & one.is_ok());
        let is_touched = AtomicBool::new(false);
        let populate = |chunk: &PopulateRange<'_>| chunk.populate(&is_touched);
        parallel::for_each(&chunks(ram), threads.get(), || populate)?;
        let bytes = ram.blocks.iter().map(|block| block.length).sum();
        let is_touched = is_touched.into_inner();
        Ok(Populated { bytes, elapsed: begun.elapsed(), is_huge_advised, is_touched })
    }
}

fn chunks(ram: &KnownBlocks) -> Vec<PopulateRange<'_>> {
    let mut chunks = Vec::new();
    for (block, mapped) in ram.blocks.iter().zip(&ram.mapped) {
        let span = mapped.region.span();
        for offset in (0..span.length()).step_by(CHUNK_BYTES) {
            let length = CHUNK_BYTES.min(span.length() - offset);
            chunks.push(PopulateRange { block: &block.name, span, offset, length });
        }
    }
    chunks
}

impl PopulateRange<'_> {
    fn populate(&self, is_touched: &AtomicBool) -> Result<(), MemoryError> {
        if !is_touched.load(Ordering::Relaxed) {
            match self.span.populate(self.offset, self.length) {
                Ok(()) => return Ok(()),
                // Not known, or not allowed (a sandbox): not a lack of memory, which touching would only find
                // the hard way.
                Err(error) if is_refused(&error) => is_touched.store(true, Ordering::Relaxed),
                Err(source) => {
                    let (block, offset) = (self.block.to_owned(), self.offset as u64);
                    return Err(MemoryError::Populate { block, offset, source });
                }
            }
        }
        self.span.touch(self.offset, self.length);
        Ok(())
    }
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM | libc::ENOSYS))
}
