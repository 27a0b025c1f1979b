//! Chunks that have been compared with their checksum: each is hashed once, for any number of concurrent
//! copies.

use std::sync::Mutex;

use towline_channel::lock::lock;
use towline_protocol::{BlockIndex, RamBlock};

use crate::bitmap::Bitmap;
use crate::checksum::CHUNK_BYTES;

/// Maximum number of chunks compared at the same time; chunks that share a lock wait for each other.
const LOCKS: usize = 64;

/// A bit for each chunk.
#[derive(Debug)]
pub(crate) struct Verified {
    locks: Vec<Mutex<()>>,
    done: Vec<Bitmap>,
}

impl Verified {
    pub(crate) fn new(blocks: &[RamBlock]) -> Self {
        Self {
            locks: (0..LOCKS).map(|_| Mutex::default()).collect(),
            done: blocks.iter().map(|block| Bitmap::new(block.length.div_ceil(CHUNK_BYTES))).collect(),
        }
    }

    /// Runs `verify` unless it has succeeded for this chunk. Concurrent callers wait for the first.
    pub(crate) fn verify_once<E>(
        &self,
        block: BlockIndex,
        chunk: usize,
        verify: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let (done, bit) = (&self.done[block.index()], chunk as u64);
        if done.is_set(bit) {
            return Ok(());
        }
        let _lock = lock(&self.locks[chunk % LOCKS]);
        if !done.is_set(bit) {
            verify()?;
            done.set(bit);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn each_chunk_is_verified_once_and_again_after_a_failure() {
        let blocks = [("a", 5 << 20), ("b", 300 << 20)];
        let block = |(name, length): (&str, u64)| RamBlock { name: name.into(), length, mapped: None };
        let verified = Verified::new(&blocks.map(block));
        let (runs, last) = (AtomicUsize::new(0), BlockIndex(1));
        assert_eq!(verified.verify_once(last, 149, || Err("damaged")), Err("damaged"));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for chunk in 0..150 {
                        let run = || {
                            runs.fetch_add(1, Ordering::Relaxed);
                            Ok::<(), &str>(())
                        };
                        verified.verify_once(last, chunk, run).unwrap();
                    }
                });
            }
        });
        assert_eq!(runs.into_inner(), 150);
        assert_eq!(verified.verify_once(BlockIndex(0), 2, || Err("not this one's")), Err("not this one's"));
    }
}
