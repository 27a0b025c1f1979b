//! Private memory for copies: small chunks for headers and short frames, large ones for the rest.
//!
//! ```text
//!   a section   [4 KiB unused][small × 2048][large × 128]
//!   a chunk     [8 unused][24 metadata][data ............]
//! ```
//! The first page is not used, so an address minus a tag of [`super::in_flight`] is still an address.

/// Bytes before the data, with the metadata of the kernel at their end.
const HEADROOM_BYTES: usize = 32;
const SMALL_BYTES: usize = 512;
const LARGE_BYTES: usize = 4096;
const SMALL_CHUNKS: u32 = 2048;
const LARGE_CHUNKS: u32 = 128;
const UNUSED_BYTES: usize = 4096;
/// Size of an arena.
pub(super) const SECTION_BYTES: usize =
    UNUSED_BYTES + SMALL_BYTES * SMALL_CHUNKS as usize + LARGE_BYTES * LARGE_CHUNKS as usize;
/// Maximum length of data in a small chunk.
pub(super) const SMALL_DATA_BYTES: usize = SMALL_BYTES - HEADROOM_BYTES;
/// Maximum length of data in a large chunk.
pub(super) const LARGE_DATA_BYTES: usize = LARGE_BYTES - HEADROOM_BYTES;

/// An allocated chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UmemChunk(u32);

/// Allocator of chunks.
#[derive(Debug)]
pub(super) struct Arena {
    small: Vec<u32>,
    large: Vec<u32>,
}

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            small: (0..SMALL_CHUNKS).rev().collect(),
            large: (SMALL_CHUNKS..SMALL_CHUNKS + LARGE_CHUNKS).rev().collect(),
        }
    }

    /// Allocates a chunk for at most [`LARGE_DATA_BYTES`] bytes. `None` if no chunk of that size is free.
    pub(super) fn alloc(&mut self, bytes: usize) -> Option<UmemChunk> {
        debug_assert!(bytes <= LARGE_DATA_BYTES, "{bytes} bytes in a chunk");
        let free = if bytes <= SMALL_DATA_BYTES { &mut self.small } else { &mut self.large };
        free.pop().map(UmemChunk)
    }

    pub(super) fn free(&mut self, chunk: UmemChunk) {
        let free = if chunk.0 < SMALL_CHUNKS { &mut self.small } else { &mut self.large };
        free.push(chunk.0);
    }
}

impl UmemChunk {
    /// Offset of its data in the section.
    pub(super) fn offset(self) -> usize {
        let start = match self.0.checked_sub(SMALL_CHUNKS) {
            None => self.0 as usize * SMALL_BYTES,
            Some(large) => SMALL_CHUNKS as usize * SMALL_BYTES + large as usize * LARGE_BYTES,
        };
        UNUSED_BYTES + start + HEADROOM_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_adjacent_and_can_be_allocated_again() {
        let mut arena = Arena::new();
        let mut starts = Vec::new();
        for (bytes, size, count) in
            [(1, SMALL_BYTES, SMALL_CHUNKS), (SMALL_DATA_BYTES + 1, LARGE_BYTES, LARGE_CHUNKS)]
        {
            let chunks: Vec<UmemChunk> = std::iter::from_fn(|| arena.alloc(bytes)).collect();
            assert_eq!(chunks.len(), count as usize);
            starts.extend(chunks.iter().map(|chunk| (chunk.offset() - HEADROOM_BYTES, size)));
            chunks.iter().for_each(|chunk| arena.free(*chunk));
            assert_eq!(arena.alloc(bytes), chunks.last().copied());
        }
        starts.sort_unstable();
        let mut end = UNUSED_BYTES;
        for (start, size) in starts {
            assert_eq!((start, start % size), (end, 0));
            end += size;
        }
        assert_eq!(end, SECTION_BYTES);
    }
}
