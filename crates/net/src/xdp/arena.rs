//! Room of our own for what is copied: headers and short packets in small chunks, others in large ones.
//!
//! ```text
//!   a section   [4 KiB nobody uses][small × 2048][large × 128]
//!   a chunk     [8 unused][24 metadata][what is sent .....]
//! ```
//! Nothing is sent from the first page, so that an address less a tag of [`super::ledger`] is one as well.

/// Bytes before what is sent, metadata of the kernel's at their end.
pub(super) const LEAD_BYTES: usize = 32;
const SMALL_BYTES: usize = 512;
const LARGE_BYTES: usize = 4096;
const SMALL_CHUNKS: u32 = 2048;
const LARGE_CHUNKS: u32 = 128;
const FIRST_BYTES: usize = 4096;
/// Bytes of an arena.
pub(super) const SECTION_BYTES: usize =
    FIRST_BYTES + SMALL_BYTES * SMALL_CHUNKS as usize + LARGE_BYTES * LARGE_CHUNKS as usize;
/// What fits into a small chunk.
pub(super) const SMALL_ROOM: usize = SMALL_BYTES - LEAD_BYTES;
/// What fits into a large one.
pub(super) const LARGE_ROOM: usize = LARGE_BYTES - LEAD_BYTES;

/// A chunk that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk(u32);

/// Which chunks are free.
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

    /// One with room for so many bytes, at most [`LARGE_ROOM`].
    pub(super) fn take(&mut self, bytes: usize) -> Option<Chunk> {
        debug_assert!(bytes <= LARGE_ROOM, "{bytes} bytes in a chunk");
        let list = if bytes <= SMALL_ROOM { &mut self.small } else { &mut self.large };
        list.pop().map(Chunk)
    }

    pub(super) fn free(&mut self, chunk: Chunk) {
        let list = if chunk.0 < SMALL_CHUNKS { &mut self.small } else { &mut self.large };
        list.push(chunk.0);
    }
}

impl Chunk {
    /// Where in the section what is sent begins.
    pub(super) fn place(self) -> usize {
        let start = match self.0.checked_sub(SMALL_CHUNKS) {
            None => self.0 as usize * SMALL_BYTES,
            Some(large) => SMALL_CHUNKS as usize * SMALL_BYTES + large as usize * LARGE_BYTES,
        };
        FIRST_BYTES + start + LEAD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_lie_beside_each_other_and_come_back() {
        let mut arena = Arena::new();
        let mut places = Vec::new();
        for (bytes, size, count) in
            [(1, SMALL_BYTES, SMALL_CHUNKS), (SMALL_ROOM + 1, LARGE_BYTES, LARGE_CHUNKS)]
        {
            let chunks: Vec<Chunk> = std::iter::from_fn(|| arena.take(bytes)).collect();
            assert_eq!(chunks.len(), count as usize);
            places.extend(chunks.iter().map(|chunk| (chunk.place() - LEAD_BYTES, size)));
            chunks.iter().for_each(|chunk| arena.free(*chunk));
            assert_eq!(arena.take(bytes), chunks.last().copied());
        }
        places.sort_unstable();
        let mut end = FIRST_BYTES;
        for (place, size) in places {
            assert_eq!((place, place % size), (end, 0));
            end += size;
        }
        assert_eq!(end, SECTION_BYTES);
    }
}
