//! Memory as an image's readers see it: the file's content where the page bitmap has a bit, zeros elsewhere,
//! regardless of the file's content there. Stock QEMU leaves the old content of a page that became zero, and
//! damage may leave anything.

use std::ops::Range;

use crate::checksum::{ChunkHash, hash_chunk, is_zero};

/// Bytes hashed at once where content and zeros alternate: BLAKE3's full width, and small enough for a cache.
const BUFFER_BYTES: usize = 64 << 10;

static ZEROS: [u8; BUFFER_BYTES] = [0; BUFFER_BYTES];

/// A run of pages that all have content or are all zero, as a byte range. Runs are contiguous; the first
/// begins at 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ByteRun {
    pub(crate) range: Range<usize>,
    pub(crate) has_content: bool,
}

/// A copy of the bytes as delivered.
#[cfg(any(feature = "store", test))]
pub(crate) fn copy(bytes: &[u8], runs: &[ByteRun]) -> Vec<u8> {
    let mut delivered = vec![0; bytes.len()];
    gather(bytes, runs, 0..bytes.len(), &mut delivered);
    delivered
}

/// Hash of a chunk as delivered. Pages without a bit are not read.
pub(crate) fn hash(bytes: &[u8], runs: &[ByteRun]) -> ChunkHash {
    match runs {
        [ByteRun { has_content: true, .. }] => return hash_chunk(bytes),
        [] | [ByteRun { has_content: false, .. }] => return ChunkHash::Zero,
        _ => {}
    }
    if runs.iter().all(|run| !run.has_content || is_zero(&bytes[run.range.clone()])) {
        return ChunkHash::Zero;
    }
    let mut hasher = blake3::Hasher::new();
    let (mut at, mut first, mut buffer) = (0, 0, vec![0; BUFFER_BYTES]);
    while at < bytes.len() {
        while runs[first].range.end <= at {
            first += 1;
        }
        let run = &runs[first];
        let end = (at + BUFFER_BYTES).min(bytes.len());
        if run.range.end < end {
            let buffer = &mut buffer[..end - at];
            gather(bytes, &runs[first..], at..end, buffer);
            hasher.update(buffer);
            at = end;
            continue;
        }
        // Hash as many whole buffers of one run as there are.
        let whole = if run.range.end == bytes.len() {
            bytes.len()
        } else {
            at + (run.range.end - at) / BUFFER_BYTES * BUFFER_BYTES
        };
        if run.has_content {
            hasher.update(&bytes[at..whole]);
        } else {
            (at..whole).step_by(BUFFER_BYTES).for_each(|at| {
                hasher.update(&ZEROS[..BUFFER_BYTES.min(whole - at)]);
            });
        }
        at = whole;
    }
    ChunkHash::Data(*hasher.finalize().as_bytes())
}

/// Copies a range of the bytes as delivered.
fn gather(bytes: &[u8], runs: &[ByteRun], range: Range<usize>, into: &mut [u8]) {
    for run in runs.iter().take_while(|run| run.range.start < range.end) {
        let part = run.range.start.max(range.start)..run.range.end.min(range.end);
        let target = &mut into[part.start - range.start..part.end - range.start];
        if run.has_content { target.copy_from_slice(&bytes[part]) } else { target.fill(0) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 4096;

    fn runs(pages: &[bool]) -> Vec<ByteRun> {
        let mut at = 0;
        let run = |alike: &[bool]| {
            let start = at;
            at += alike.len() * PAGE;
            ByteRun { range: start..at, has_content: alike[0] }
        };
        pages.chunk_by(|first, second| first == second).map(run).collect()
    }

    proptest! {
        /// Runs of all lengths, and chunks of any length.
        #[test]
        fn the_hash_is_that_of_the_delivered_bytes(
            lengths in prop::collection::vec((any::<bool>(), 1..80_usize), 1..30),
            fill in prop_oneof![Just(0_u8), any::<u8>()],
        ) {
            let pages: Vec<bool> = lengths.iter().flat_map(|&(has, count)| std::iter::repeat_n(has, count)).take(512).collect();
            let mut file = vec![fill; pages.len() * PAGE];
            for (page, bytes) in file.chunks_mut(PAGE).enumerate().filter(|_| fill != 0) {
                bytes[page % PAGE] = bytes[page % PAGE].wrapping_add(page as u8);
            }
            let mut expected = file.clone();
            for (page, _) in pages.iter().enumerate().filter(|(_, has)| !**has) {
                expected[page * PAGE..][..PAGE].fill(0);
            }
            let runs = runs(&pages);
            prop_assert_eq!(hash(&file, &runs), hash_chunk(&expected));
            prop_assert_eq!(copy(&file, &runs), expected);
        }
    }
}
