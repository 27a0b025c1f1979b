//! Temporary storage of pages until their chunk is sent: an unnamed file, and the state of each chunk.
//!
//! A running guest sends some pages again, so a chunk may be sent before its content is final. Its *version*
//! is incremented after each page is written: if the version at which a chunk was read is still the same
//! later, its content is final.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, RamBlock};

use super::{CHUNK_BYTES, Error, Result};
use crate::ChunkHash;
use crate::bitmap::Bitmap;
use crate::lock::lock;

/// Pages per chunk.
const CHUNK_PAGES: u64 = CHUNK_BYTES / PAGE_SIZE;

/// Default without TMPDIR; /tmp is a tmpfs on many hosts.
const DIRECTORY: &str = "/var/tmp";

/// Index of a chunk among those of all blocks.
pub(super) type ChunkNumber = usize;

/// Memory of a guest that is being stored.
#[derive(Debug)]
pub(super) struct Spool {
    file: File,
    directory: PathBuf,
    blocks: Vec<SpoolBlock>,
    chunks: Vec<Chunk>,
}

#[derive(Debug)]
struct SpoolBlock {
    length: u64,
    /// Offset in the file.
    start: u64,
    /// Index of its first chunk.
    first: ChunkNumber,
    /// A bit for each page whose bytes in the file are not zero.
    bitmap: Bitmap,
}

#[derive(Debug, Default)]
struct Chunk {
    /// Number of pages received.
    received: AtomicU32,
    version: AtomicU32,
    /// True if a page with content was received.
    has_data: AtomicBool,
    /// Version at which the chunk was stored, and its name.
    stored: Mutex<Option<(u32, ChunkHash)>>,
}

impl Spool {
    /// Creates a sparse file for these blocks.
    pub(super) fn new(blocks: &[RamBlock]) -> Result<Self> {
        let directory = std::env::var_os("TMPDIR").map_or_else(|| DIRECTORY.into(), PathBuf::from);
        let failed = |why| Error::Spool { path: directory.display().to_string(), why };
        let file = tempfile::tempfile_in(&directory).map_err(failed)?;
        let (mut start, mut first) = (0, 0);
        let mut spooled = Vec::with_capacity(blocks.len());
        for block in blocks {
            spooled.push(SpoolBlock {
                length: block.length,
                start,
                first,
                bitmap: Bitmap::new(block.pages()),
            });
            let chunks = block.length.div_ceil(CHUNK_BYTES);
            start += chunks * CHUNK_BYTES;
            first += chunks as usize;
        }
        file.set_len(start).map_err(failed)?;
        let chunks = (0..first).map(|_| Chunk::default()).collect();
        Ok(Self { file, directory, blocks: spooled, chunks })
    }

    /// Writes consecutive pages; calls `complete` for each chunk that has all of its pages for the first
    /// time.
    pub(super) fn write(
        &self,
        block: BlockIndex,
        offset: u64,
        bytes: &[u8],
        complete: &mut dyn FnMut(ChunkNumber),
    ) -> Result<()> {
        let spooled = &self.blocks[block.index()];
        self.file.write_all_at(bytes, spooled.start + offset).map_err(self.failed())?;
        for page in 0..bytes.len() as u64 / PAGE_SIZE {
            spooled.bitmap.set(offset / PAGE_SIZE + page);
        }
        self.count_pages(spooled, offset, bytes.len() as u64 / PAGE_SIZE, true, complete);
        Ok(())
    }

    /// Writes a page of zeros; as [`Self::write`].
    pub(super) fn zero(
        &self,
        block: BlockIndex,
        offset: u64,
        complete: &mut dyn FnMut(ChunkNumber),
    ) -> Result<()> {
        let spooled = &self.blocks[block.index()];
        if spooled.bitmap.clear(offset / PAGE_SIZE) {
            let zeros = [0; PAGE_SIZE as usize];
            self.file.write_all_at(&zeros, spooled.start + offset).map_err(self.failed())?;
        }
        self.count_pages(spooled, offset, 1, false, complete);
        Ok(())
    }

    /// Reads the current content of pages.
    pub(super) fn current(&self, block: BlockIndex, offset: u64, content: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(content, self.blocks[block.index()].start + offset).map_err(self.failed())
    }

    /// Passes a chunk's current content (`None`: zeros) to `store`, and records the resulting name with the
    /// chunk's version.
    pub(super) fn store_chunk(
        &self,
        number: ChunkNumber,
        buffer: &mut Vec<u8>,
        store: impl FnOnce(Option<&[u8]>) -> Result<ChunkHash>,
    ) -> Result<()> {
        let chunk = &self.chunks[number];
        // Before the bytes are read: a page that arrives meanwhile makes the result stale.
        let version = chunk.version.load(Ordering::Acquire);
        let hash = if chunk.has_data.load(Ordering::Acquire) {
            let (block, offset) = self.block_of(number);
            buffer.resize(CHUNK_BYTES.min(block.length - offset) as usize, 0);
            self.file.read_exact_at(buffer, block.start + offset).map_err(self.failed())?;
            store(Some(buffer))?
        } else {
            store(None)?
        };
        *lock(&chunk.stored) = Some((version, hash));
        Ok(())
    }

    /// Chunks that were not stored yet, or have changed since.
    pub(super) fn stale(&self) -> Vec<ChunkNumber> {
        let is_stale = |chunk: &Chunk| {
            let stored = lock(&chunk.stored);
            stored.is_none_or(|(version, _)| version != chunk.version.load(Ordering::Acquire))
        };
        (0..self.chunks.len()).filter(|&number| is_stale(&self.chunks[number])).collect()
    }

    /// Names of the stored chunks, by block.
    pub(super) fn names(&self) -> Vec<Vec<ChunkHash>> {
        let name = |chunk: &Chunk| {
            let stored = lock(&chunk.stored);
            stored.map_or(ChunkHash::Zero, |(_, hash)| hash)
        };
        let of_block = |block: &SpoolBlock| {
            let count = block.length.div_ceil(CHUNK_BYTES) as usize;
            self.chunks[block.first..block.first + count].iter().map(name).collect()
        };
        self.blocks.iter().map(of_block).collect()
    }

    fn block_of(&self, number: ChunkNumber) -> (&SpoolBlock, u64) {
        let index = self.blocks.partition_point(|block| block.first <= number) - 1;
        // Blocks without pages have no chunks, and the same first chunk as the next block.
        let block = &self.blocks[index];
        (block, (number - block.first) as u64 * CHUNK_BYTES)
    }

    /// Counts pages that were written.
    fn count_pages(
        &self,
        block: &SpoolBlock,
        offset: u64,
        pages: u64,
        has_data: bool,
        complete: &mut dyn FnMut(ChunkNumber),
    ) {
        let (mut page, end) = (offset / PAGE_SIZE, offset / PAGE_SIZE + pages);
        while page < end {
            let index = page / CHUNK_PAGES;
            let until = end.min((index + 1) * CHUNK_PAGES);
            let number = block.first + index as usize;
            let chunk = &self.chunks[number];
            if has_data {
                chunk.has_data.store(true, Ordering::Release);
            }
            chunk.version.fetch_add(1, Ordering::AcqRel);
            let (arrived, all) = ((until - page) as u32, self.pages_of(block, index));
            let before = chunk.received.fetch_add(arrived, Ordering::AcqRel);
            if before < all && before + arrived >= all {
                complete(number);
            }
            page = until;
        }
    }

    fn pages_of(&self, block: &SpoolBlock, index: u64) -> u32 {
        (block.length / PAGE_SIZE - index * CHUNK_PAGES).min(CHUNK_PAGES) as u32
    }

    fn failed(&self) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = self.directory.display().to_string();
        move |why| Error::Spool { path, why }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    fn spool() -> Spool {
        let block = |name: &str, length| RamBlock { name: name.into(), length, mapped: None };
        Spool::new(&[block("none", 0), block("a", CHUNK_BYTES + PAGE_SIZE), block("b", CHUNK_BYTES)]).unwrap()
    }

    fn stored(spool: &Spool, number: ChunkNumber) -> ChunkHash {
        let mut hash = None;
        let store = |bytes: Option<&[u8]>| {
            hash = Some(bytes.map_or(ChunkHash::Zero, crate::checksum::hash_chunk));
            Ok(hash.unwrap())
        };
        spool.store_chunk(number, &mut Vec::new(), store).unwrap();
        hash.unwrap()
    }

    #[test]
    fn a_chunk_is_complete_once_and_stale_when_a_page_arrives_again() {
        let spool = spool();
        let mut complete = Vec::new();
        let a = BlockIndex(1);
        // The last page of the first chunk and the only one of the second.
        spool.write(a, CHUNK_BYTES - PAGE_SIZE, &[1; 2 * PAGE], &mut |number| complete.push(number)).unwrap();
        assert_eq!(complete, [1]);
        for page in 0..CHUNK_PAGES - 1 {
            spool.zero(a, page * PAGE_SIZE, &mut |number| complete.push(number)).unwrap();
        }
        assert_eq!(complete, [1, 0]);
        assert_eq!(spool.stale(), [0, 1, 2]);
        let mut expected = vec![0; CHUNK_BYTES as usize];
        expected[CHUNK_BYTES as usize - PAGE..].fill(1);
        assert_eq!(stored(&spool, 0), crate::checksum::hash_chunk(&expected));
        assert_eq!(stored(&spool, 1), crate::checksum::hash_chunk(&[1; PAGE]));
        assert_eq!(stored(&spool, 2), ChunkHash::Zero);
        assert!(spool.stale().is_empty());
        // The page becomes zero again.
        spool.zero(a, CHUNK_BYTES, &mut |_| panic!("complete already")).unwrap();
        assert_eq!(spool.stale(), [1]);
        assert_eq!(stored(&spool, 1), ChunkHash::Zero);
        assert_eq!(spool.names()[1][1], ChunkHash::Zero);
        assert_eq!(spool.names().iter().map(Vec::len).collect::<Vec<_>>(), [0, 2, 1]);
    }

    #[test]
    fn a_page_that_arrives_while_its_chunk_is_read_makes_it_stale() {
        let spool = spool();
        let b = BlockIndex(2);
        spool.write(b, 0, &[3; CHUNK_BYTES as usize], &mut |_| {}).unwrap();
        let store = |_: Option<&[u8]>| {
            spool.write(b, 0, &[4; PAGE], &mut |_| {}).unwrap();
            Ok(ChunkHash::Data([3; 32]))
        };
        spool.store_chunk(2, &mut Vec::new(), store).unwrap();
        assert!(spool.stale().contains(&2));
    }
}
