//! State of the chunks: absent, in flight, or in memory.
//!
//! ```text
//!   absent ─► fetching ─► fetched (compressed) ─► filling ─► resident ─► absent
//!                 └─► failed                      by a waiting thread      oldest first, unless in use
//! ```
//! A thread *uses* the chunks that it acquired last, until it acquires others; chunks acquired without a
//! thread are used until they are released. This module neither fetches nor decompresses.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex};
use std::thread::ThreadId;

use bytes::Bytes;
use towline_channel::lock::lock;

use super::{Error, Result, Runtime};

/// Index of a chunk among those of all blocks.
pub(super) type ChunkNumber = usize;

/// State of all chunks that are not absent.
#[derive(Debug, Default)]
pub(super) struct Cache {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    chunks: HashMap<ChunkNumber, Chunk>,
    /// Resident chunks, oldest first.
    resident: VecDeque<ChunkNumber>,
    /// Chunks used by each thread.
    used: HashMap<ThreadId, Vec<ChunkNumber>>,
    /// Number of chunks that are fetching or fetched.
    outstanding: usize,
    /// Number of chunks that are fetching.
    fetching: usize,
}

#[derive(Debug)]
enum Chunk {
    Fetching,
    Fetched(Bytes),
    Filling,
    Resident {
        users: usize,
    },
    /// For the next thread that acquires the chunk, after which it is absent.
    Failed(Error),
}

/// Limits within which a chunk is fetched.
#[derive(Debug, Clone, Copy)]
pub(super) struct FetchLimits {
    /// Maximum number of chunks that are fetching or fetched.
    pub(super) chunks: usize,
    /// Maximum number of chunks that are fetching.
    pub(super) requests: usize,
}

/// Result of acquiring a chunk.
#[derive(Debug)]
pub(super) enum Acquired {
    /// The chunk is resident and used by the thread from now on.
    Resident,
    /// The caller must decompress it and call [`Cache::filled`] or [`Cache::fill_failed`].
    MustFill(Bytes),
}

impl Cache {
    /// Ends the thread's uses. Evicts unused chunks, oldest first, until at most `limit` are resident.
    pub(super) fn release_thread(&self, thread: ThreadId, limit: usize, mut evict: impl FnMut(ChunkNumber)) {
        let mut state = lock(&self.state);
        for number in state.used.remove(&thread).unwrap_or_default() {
            if let Some(Chunk::Resident { users }) = state.chunks.get_mut(&number) {
                *users -= 1;
            }
        }
        let mut checks = state.resident.len();
        while state.resident.len() > limit && checks > 0 {
            checks -= 1;
            let Some(number) = state.resident.pop_front() else { break };
            match state.chunks.get(&number) {
                Some(Chunk::Resident { users: 0 }) => {
                    state.chunks.remove(&number);
                    // Under the lock, so no other thread fills it.
                    evict(number);
                }
                Some(_) => state.resident.push_back(number),
                None => {}
            }
        }
    }

    /// Releases chunks that were acquired without a thread. Unused chunks are evicted.
    pub(super) fn release(
        &self,
        numbers: impl Iterator<Item = ChunkNumber>,
        mut evict: impl FnMut(ChunkNumber),
    ) {
        let mut state = lock(&self.state);
        for number in numbers {
            if let Some(Chunk::Resident { users }) = state.chunks.get_mut(&number) {
                *users = users.saturating_sub(1);
                if *users == 0 {
                    state.chunks.remove(&number);
                    evict(number);
                }
            }
        }
    }

    /// Marks an absent chunk as being fetched if the limits permit. Returns true if the caller must fetch it.
    pub(super) fn claim(&self, number: ChunkNumber, limits: FetchLimits) -> bool {
        let mut state = lock(&self.state);
        let is_limited = state.outstanding >= limits.chunks || state.fetching >= limits.requests;
        if is_limited || state.chunks.contains_key(&number) {
            return false;
        }
        state.outstanding += 1;
        state.fetching += 1;
        state.chunks.insert(number, Chunk::Fetching);
        true
    }

    /// Records the result of a fetch.
    pub(super) fn fetched(&self, number: ChunkNumber, result: Result<Bytes>) {
        let mut state = lock(&self.state);
        state.fetching -= 1;
        let chunk = match result {
            Ok(bytes) => Chunk::Fetched(bytes),
            Err(error) => {
                state.outstanding -= 1;
                Chunk::Failed(error)
            }
        };
        state.chunks.insert(number, chunk);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until a claimed chunk is resident or must be filled by the caller, and marks it as used by
    /// `thread`, if there is one. `check_cancelled` is called during the wait.
    pub(super) fn acquire(
        &self,
        thread: Option<ThreadId>,
        number: ChunkNumber,
        runtime: &Runtime,
        check_cancelled: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Acquired>> {
        let mut state = lock(&self.state);
        loop {
            // Evicted, or its failure was returned to another thread.
            let Some(chunk) = state.chunks.get_mut(&number) else { return Ok(None) };
            match std::mem::replace(chunk, Chunk::Filling) {
                Chunk::Resident { users } => {
                    *chunk = Chunk::Resident { users: users + 1 };
                    if let Some(thread) = thread {
                        state.used.entry(thread).or_default().push(number);
                    }
                    return Ok(Some(Acquired::Resident));
                }
                Chunk::Fetched(bytes) => {
                    state.outstanding -= 1;
                    return Ok(Some(Acquired::MustFill(bytes)));
                }
                Chunk::Failed(error) => {
                    state.chunks.remove(&number);
                    return Err(error);
                }
                pending @ (Chunk::Fetching | Chunk::Filling) => {
                    *chunk = pending;
                    state = runtime.wait_for_change(&self.changed, &self.state, state);
                    check_cancelled()?;
                }
            }
        }
    }

    /// Marks the chunk of [`Acquired::MustFill`] as resident and used by the thread.
    pub(super) fn filled(&self, thread: Option<ThreadId>, number: ChunkNumber) {
        let mut state = lock(&self.state);
        state.chunks.insert(number, Chunk::Resident { users: 1 });
        if let Some(thread) = thread {
            state.used.entry(thread).or_default().push(number);
            state.resident.push_back(number);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Marks the chunk of [`Acquired::MustFill`] as absent, since it could not be filled.
    pub(super) fn fill_failed(&self, number: ChunkNumber) {
        lock(&self.state).chunks.remove(&number);
        self.changed.notify_all();
    }

    /// Returns true if the chunk is resident.
    pub(super) fn is_resident(&self, number: ChunkNumber) -> bool {
        matches!(lock(&self.state).chunks.get(&number), Some(Chunk::Resident { .. }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn thread() -> ThreadId {
        std::thread::current().id()
    }

    fn runtime() -> Runtime {
        Runtime::start().unwrap()
    }

    fn limits(chunks: usize, requests: usize) -> FetchLimits {
        FetchLimits { chunks, requests }
    }

    fn load(cache: &Cache, number: ChunkNumber) {
        assert!(cache.claim(number, limits(9, 9)));
        cache.fetched(number, Ok(Bytes::from_static(b"x")));
        let acquired = cache.acquire(Some(thread()), number, &runtime(), &|| Ok(())).unwrap();
        assert!(matches!(acquired, Some(Acquired::MustFill(_))), "{acquired:?}");
        cache.filled(Some(thread()), number);
    }

    #[test]
    fn chunks_in_use_stay_and_the_oldest_is_evicted_first() {
        let cache = Cache::default();
        (0..3).for_each(|number| load(&cache, number));
        let other = std::thread::spawn(thread).join().unwrap();
        assert!(matches!(
            cache.acquire(Some(other), 0, &runtime(), &|| Ok(())),
            Ok(Some(Acquired::Resident))
        ));
        let mut evicted = Vec::new();
        cache.release_thread(thread(), 1, |number| evicted.push(number));
        assert_eq!(evicted, [1, 2]);
        assert!(cache.is_resident(0) && !cache.is_resident(1));
        cache.release_thread(other, 0, |number| evicted.push(number));
        assert_eq!(evicted, [1, 2, 0]);
    }

    #[test]
    fn a_chunk_acquired_without_a_thread_stays_until_it_is_released() {
        let cache = Cache::default();
        assert!(cache.claim(4, limits(9, 9)));
        cache.fetched(4, Ok(Bytes::from_static(b"x")));
        assert!(matches!(cache.acquire(None, 4, &runtime(), &|| Ok(())), Ok(Some(Acquired::MustFill(_)))));
        cache.filled(None, 4);
        assert!(matches!(cache.acquire(None, 4, &runtime(), &|| Ok(())), Ok(Some(Acquired::Resident))));
        let mut evicted = Vec::new();
        cache.release_thread(thread(), 0, |number| evicted.push(number));
        cache.release([4, 5].into_iter(), |number| evicted.push(number));
        assert!(evicted.is_empty() && cache.is_resident(4));
        cache.release([4].into_iter(), |number| evicted.push(number));
        assert_eq!(evicted, [4]);
        assert!(!cache.is_resident(4));
    }

    #[test]
    fn fetches_are_limited_and_a_failure_is_returned_once() {
        let cache = Cache::default();
        assert!(
            cache.claim(1, limits(1, 9))
                && !cache.claim(1, limits(9, 9))
                && !cache.claim(2, limits(1, 9))
                && !cache.claim(2, limits(9, 1))
        );
        cache.fetched(1, Err(Error::Cancelled));
        assert!(cache.claim(2, limits(1, 1)));
        assert!(matches!(cache.acquire(Some(thread()), 1, &runtime(), &|| Ok(())), Err(Error::Cancelled)));
        assert!(cache.acquire(Some(thread()), 1, &runtime(), &|| Ok(())).unwrap().is_none());
        assert!(cache.claim(1, limits(2, 2)));
    }

    #[test]
    fn a_wait_can_be_cancelled() {
        let cache = Cache::default();
        assert!(cache.claim(1, limits(1, 1)));
        let error = cache.acquire(Some(thread()), 1, &runtime(), &|| Err(Error::Cancelled)).unwrap_err();
        assert!(matches!(error, Error::Cancelled));
    }
}
