//! Computes a block's checksums while its pages arrive.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towline_channel::lock::lock;
use towline_migration::parallel;
use towline_protocol::ram::PAGE_SIZE;

use super::open_chunk::{Node, OpenChunk};
use super::subtree::{Subtree, subtrees};
use super::{CHUNK_BYTES, ChunkHash, hash_chunk};

/// Default memory for open chunks in an [`OpenBudget`]: some 27,000 chunks with a run of pages missing (53
/// GiB of guest memory), or 1,700 chunks of which every second page has arrived.
pub const OPEN_BYTES_MAX: usize = 16 << 20;

/// Limits the memory of open chunks, of one block or of several together. Clones share the budget.
#[derive(Debug, Clone)]
pub struct OpenBudget {
    bytes_left: Arc<AtomicUsize>,
}

impl OpenBudget {
    /// A budget of `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        Self { bytes_left: Arc::new(AtomicUsize::new(bytes)) }
    }

    /// Remaining bytes.
    #[cfg(test)]
    pub(super) fn bytes_left(&self) -> usize {
        self.bytes_left.load(Ordering::Relaxed)
    }

    fn reserve(&self, bytes: usize) -> bool {
        let reserved = self
            .bytes_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        reserved.is_ok()
    }

    fn release(&self, bytes: usize) {
        self.bytes_left.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Hashes a block's chunks while its pages arrive, in any order and from any number of threads.
///
/// A page that arrives again replaces its earlier content. That is free if the old value has not been merged
/// yet, and always if the page was zero; otherwise the chunk becomes *stale* and is read again in
/// [`finish`](Self::finish). Hashing is done outside any lock; there is one lock per chunk.
///
/// Callers must order writes of the *same* page, as they must order the writes to the block itself: otherwise
/// the hashed content is undefined.
///
/// # Memory
/// 48 B per chunk (24 KiB per GiB), and for each open chunk 38 B per value: at most 9 values (608 B with
/// spare capacity) if its pages arrive in order, at most 256 (9.5 KiB) in the worst order. The open chunks
/// together stay within their [`OpenBudget`]: beyond it they become stale. No page is buffered.
#[derive(Debug)]
pub struct BlockHasher {
    length: u64,
    chunks: Vec<Mutex<ChunkState>>,
    budget: OpenBudget,
}

#[derive(Debug)]
enum ChunkState {
    /// No page arrived: zero.
    Missing,
    Done(ChunkHash),
    Open(OpenChunk),
    Stale,
}

impl BlockHasher {
    /// A hasher for a block of `length` bytes, with a budget that several blocks can share.
    ///
    /// # Panics
    /// If `length` is not a multiple of [`PAGE_SIZE`]; the protocol refuses such blocks.
    pub fn new(length: u64, budget: OpenBudget) -> Self {
        assert!(length.is_multiple_of(PAGE_SIZE), "a block of {length} bytes is not made of whole pages");
        let chunks = (0..length.div_ceil(CHUNK_BYTES)).map(|_| Mutex::new(ChunkState::Missing)).collect();
        Self { length, chunks, budget }
    }

    /// Adds whole pages with content `bytes` at byte `offset`.
    ///
    /// Aligned runs are hashed fastest: from 16 KiB on at BLAKE3's full speed on one core, single pages at
    /// about half of it. Zeros are detected.
    ///
    /// # Panics
    /// If these are not whole pages of the block.
    pub fn data(&self, offset: u64, bytes: &[u8]) {
        for run in self.runs(offset, bytes.len() as u64) {
            if !self.is_needed(&run) {
                continue;
            }
            let bytes = &bytes[run.skipped..];
            let nodes: Vec<Node> =
                run.subtrees().map(|subtree| Node::hash(subtree, run.first, bytes, run.pages)).collect();
            self.put(&run, &nodes);
        }
    }

    /// Adds `length` bytes of zero pages at byte `offset`.
    ///
    /// # Panics
    /// If these are not whole pages of the block.
    pub fn zero(&self, offset: u64, length: u64) {
        for run in self.runs(offset, length) {
            let nodes: Vec<Node> = run.subtrees().map(Node::zero).collect();
            self.put(&run, &nodes);
        }
    }

    /// Sets the hash of a chunk, none of whose pages arrive.
    ///
    /// # Panics
    /// If the block does not have the chunk.
    pub fn set_known(&self, chunk: usize, hash: ChunkHash) {
        *self.chunk(chunk) = ChunkState::Done(hash);
    }

    /// Number of chunks that [`finish`](Self::finish) would read again.
    #[cfg(test)]
    pub(super) fn stale_chunks(&self) -> usize {
        (0..self.chunks.len()).filter(|&index| matches!(*self.chunk(index), ChunkState::Stale)).count()
    }

    /// Hashes of all chunks; a page that never arrived is zero.
    ///
    /// Stale chunks are read by `reread(offset, buffer)`, which must fill the buffer with the block's bytes
    /// at `offset`, in up to `threads` threads. A buffer has a chunk's length (the last one may be shorter)
    /// and is page-aligned, as direct I/O requires.
    ///
    /// # Errors
    /// The first error of `reread`, after which reading stops.
    pub fn finish<E: Send>(
        &self,
        threads: usize,
        reread: impl Fn(u64, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Vec<ChunkHash>, E> {
        let mut stale = Vec::new();
        let mut hashes = Vec::with_capacity(self.chunks.len());
        for index in 0..self.chunks.len() {
            hashes.push(match mem::replace(&mut *self.chunk(index), ChunkState::Missing) {
                ChunkState::Missing => ChunkHash::Zero,
                ChunkState::Done(hash) => hash,
                ChunkState::Open(open) => {
                    self.budget.release(open.bytes());
                    open.close()
                }
                ChunkState::Stale => {
                    stale.push(index);
                    ChunkHash::Zero
                }
            });
        }
        let rehashed = parallel::for_each(&stale, threads, || {
            let mut buffer = Buffer::new();
            let reread = &reread;
            move |&index| {
                let offset = index as u64 * CHUNK_BYTES;
                let bytes = buffer.first((self.length - offset).min(CHUNK_BYTES) as usize);
                reread(offset, bytes)?;
                Ok((index, hash_chunk(bytes)))
            }
        });
        for (index, hash) in rehashed? {
            hashes[index] = hash;
        }
        Ok(hashes)
    }

    fn runs(&self, offset: u64, length: u64) -> impl Iterator<Item = ChunkPages> {
        let end = offset.checked_add(length).filter(|&end| end <= self.length);
        let end = end.expect("pages lie within their block");
        assert!(offset.is_multiple_of(PAGE_SIZE) && length.is_multiple_of(PAGE_SIZE), "pages are whole");
        let (mut next, total) = (offset, self.length);
        std::iter::from_fn(move || {
            let start = next - next % CHUNK_BYTES;
            let run = (next < end).then(|| ChunkPages {
                chunk: (start / CHUNK_BYTES) as usize,
                first: pages(next - start),
                end: pages(end.min(start + CHUNK_BYTES) - start),
                pages: pages(total.min(start + CHUNK_BYTES) - start),
                skipped: (next - offset) as usize,
            });
            next = start + CHUNK_BYTES;
            run
        })
    }

    /// Returns false if the run has no effect because its chunk will be read again.
    fn is_needed(&self, run: &ChunkPages) -> bool {
        let mut chunk = self.chunk(run.chunk);
        if !run.is_whole() && matches!(*chunk, ChunkState::Done(ChunkHash::Data(_))) {
            *chunk = ChunkState::Stale;
        }
        run.is_whole() || !matches!(*chunk, ChunkState::Stale)
    }

    fn put(&self, run: &ChunkPages, nodes: &[Node]) {
        let mut chunk = self.chunk(run.chunk);
        // Stale unless another state is found below.
        let before = mem::replace(&mut *chunk, ChunkState::Stale);
        let mut open = match before {
            ChunkState::Open(mut open) => {
                self.budget.release(open.bytes());
                if run.is_whole() {
                    open.clear();
                }
                open
            }
            ChunkState::Done(ChunkHash::Zero) if nodes.iter().all(Node::is_zero) => {
                *chunk = before;
                return;
            }
            ChunkState::Done(ChunkHash::Data(_)) | ChunkState::Stale if !run.is_whole() => return,
            _ => OpenChunk::new(run.pages),
        };
        if nodes.iter().try_for_each(|node| open.insert(*node)).is_err() {
            return;
        }
        if let Some(hash) = open.root() {
            *chunk = ChunkState::Done(hash);
        } else if self.budget.reserve(open.bytes()) {
            *chunk = ChunkState::Open(open);
        } else if open.is_zero() {
            *chunk = ChunkState::Missing;
        }
    }

    fn chunk(&self, index: usize) -> MutexGuard<'_, ChunkState> {
        lock(&self.chunks[index])
    }
}

impl Drop for BlockHasher {
    fn drop(&mut self) {
        for chunk in &mut self.chunks {
            if let ChunkState::Open(open) = chunk.get_mut().unwrap_or_else(PoisonError::into_inner) {
                self.budget.release(open.bytes());
            }
        }
    }
}

/// The pages of one call that are in one chunk.
struct ChunkPages {
    chunk: usize,
    /// First page and the one after the last, within the chunk.
    first: u16,
    end: u16,
    /// Pages of the chunk.
    pages: u16,
    /// Bytes of the call that belong to earlier chunks.
    skipped: usize,
}

impl ChunkPages {
    fn is_whole(&self) -> bool {
        self.first == 0 && self.end == self.pages
    }

    fn subtrees(&self) -> impl Iterator<Item = Subtree> {
        subtrees(self.first, self.end, self.pages)
    }
}

/// For a test that compares the documentation with reality.
#[cfg(test)]
pub(super) fn memory_per_chunk() -> usize {
    size_of::<Mutex<ChunkState>>()
}

fn pages(bytes: u64) -> u16 {
    u16::try_from(bytes / PAGE_SIZE).expect("a chunk has 512 pages at most")
}

/// A page-aligned buffer for a chunk.
struct Buffer {
    bytes: Vec<u8>,
    from: usize,
}

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; (CHUNK_BYTES + PAGE_SIZE) as usize];
        let from = (bytes.as_ptr().addr() as u64).next_multiple_of(PAGE_SIZE) - bytes.as_ptr().addr() as u64;
        Self { bytes, from: from as usize }
    }

    fn first(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + length]
    }
}
