//! Which chunks are here, which are on their way, and which may go.
//!
//! ```text
//!   absent ─► fetching ─► fetched (compressed) ─► filling ─► resident ─► absent
//!                 └─► failed                      a thread that wants it      oldest first, unless somebody uses it
//! ```
//! A thread *uses* what it asked for last, until it asks for something else; nobody's use ends when it is given back. What this is
//! not: it fetches and decompresses nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use bytes::Bytes;

use super::spool::Number;
use super::{Error, Result, Runtime};

/// The state of every chunk that is not absent.
#[derive(Debug, Default)]
pub(super) struct Cache {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    chunks: HashMap<Number, Chunk>,
    /// Resident ones, oldest first.
    resident: VecDeque<Number>,
    /// What threads use.
    used: HashMap<ThreadId, Vec<Number>>,
    /// Chunks that are fetching or fetched.
    ahead: usize,
    /// Those that are fetching.
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
    /// For whoever asks for it next, who tries anew after that.
    Failed(Error),
}

/// What a thread that wants a chunk has to do.
#[derive(Debug)]
pub(super) enum Turn {
    /// Nothing: it is here, and is used by the thread from now on.
    Here,
    /// Decompress it, and say so ([`Cache::filled`]).
    Fill(Bytes),
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread uses nothing any more. Gives what may go, oldest first, until at most `limit` are resident; these are absent
    /// then.
    pub(super) fn release(&self, thread: ThreadId, limit: usize, mut forget: impl FnMut(Number)) {
        let mut state = self.lock();
        for number in state.used.remove(&thread).unwrap_or_default() {
            if let Some(Chunk::Resident { users }) = state.chunks.get_mut(&number) {
                *users -= 1;
            }
        }
        let mut looks = state.resident.len();
        while state.resident.len() > limit && looks > 0 {
            looks -= 1;
            let Some(number) = state.resident.pop_front() else { break };
            match state.chunks.get(&number) {
                Some(Chunk::Resident { users: 0 }) => {
                    state.chunks.remove(&number);
                    // Under the lock: nobody fills it meanwhile.
                    forget(number);
                }
                Some(_) => state.resident.push_back(number),
                None => {}
            }
        }
    }

    /// Gives back what nobody in particular uses. What is not used any more may go, and is absent then.
    pub(super) fn give_back(&self, numbers: impl Iterator<Item = Number>, mut forget: impl FnMut(Number)) {
        let mut state = self.lock();
        for number in numbers {
            if let Some(Chunk::Resident { users }) = state.chunks.get_mut(&number) {
                *users = users.saturating_sub(1);
                if *users == 0 {
                    state.chunks.remove(&number);
                    forget(number);
                }
            }
        }
    }

    /// Says that somebody fetches this chunk now, if it is absent and fewer than `limit` are ahead, and fewer than `requests` of
    /// these fetching.
    pub(super) fn claim(&self, number: Number, limit: usize, requests: usize) -> bool {
        let mut state = self.lock();
        let is_too_many = state.ahead >= limit || state.fetching >= requests;
        if is_too_many || state.chunks.contains_key(&number) {
            return false;
        }
        state.ahead += 1;
        state.fetching += 1;
        state.chunks.insert(number, Chunk::Fetching);
        true
    }

    /// A fetch came to its end.
    pub(super) fn fetched(&self, number: Number, result: Result<Bytes>) {
        let mut state = self.lock();
        state.fetching -= 1;
        let chunk = match result {
            Ok(bytes) => Chunk::Fetched(bytes),
            Err(error) => {
                state.ahead -= 1;
                Chunk::Failed(error)
            }
        };
        state.chunks.insert(number, chunk);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until a chunk that was claimed is here, or is to be filled by the caller. It is used by that thread from then on, or by
    /// nobody in particular. `look` is called meanwhile.
    pub(super) fn take(
        &self,
        thread: Option<ThreadId>,
        number: Number,
        runtime: &Runtime,
        look: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Turn>> {
        let mut state = self.lock();
        loop {
            match state.chunks.get_mut(&number) {
                // Somebody took it away again, or its failure was told.
                None => return Ok(None),
                Some(Chunk::Resident { users }) => {
                    *users += 1;
                    if let Some(thread) = thread {
                        state.used.entry(thread).or_default().push(number);
                    }
                    return Ok(Some(Turn::Here));
                }
                Some(chunk @ Chunk::Fetched(_)) => {
                    let Chunk::Fetched(bytes) = std::mem::replace(chunk, Chunk::Filling) else {
                        unreachable!("just matched");
                    };
                    state.ahead -= 1;
                    return Ok(Some(Turn::Fill(bytes)));
                }
                Some(Chunk::Failed(_)) => {
                    let Some(Chunk::Failed(error)) = state.chunks.remove(&number) else {
                        unreachable!("just matched");
                    };
                    return Err(error);
                }
                Some(Chunk::Fetching | Chunk::Filling) => {
                    state = runtime.pause(&self.changed, &self.state, state);
                    look()?;
                }
            }
        }
    }

    /// The chunk that [`Turn::Fill`] was said of is here now, and used by the thread; or cannot be had.
    pub(super) fn filled(&self, thread: Option<ThreadId>, number: Number, is_here: bool) {
        let mut state = self.lock();
        match is_here {
            true => {
                state.chunks.insert(number, Chunk::Resident { users: 1 });
                if let Some(thread) = thread {
                    state.used.entry(thread).or_default().push(number);
                    state.resident.push_back(number);
                }
            }
            false => drop(state.chunks.remove(&number)),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether its bytes are here.
    pub(super) fn is_resident(&self, number: Number) -> bool {
        matches!(self.lock().chunks.get(&number), Some(Chunk::Resident { .. }))
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

    fn bring(cache: &Cache, number: Number) {
        assert!(cache.claim(number, 9, 9));
        cache.fetched(number, Ok(Bytes::from_static(b"x")));
        let turn = cache.take(Some(thread()), number, &runtime(), &|| Ok(())).unwrap();
        assert!(matches!(turn, Some(Turn::Fill(_))), "{turn:?}");
        cache.filled(Some(thread()), number, true);
    }

    #[test]
    fn what_a_thread_uses_stays_and_the_oldest_goes_first() {
        let cache = Cache::default();
        (0..3).for_each(|number| bring(&cache, number));
        let other = std::thread::spawn(thread).join().unwrap();
        assert!(matches!(cache.take(Some(other), 0, &runtime(), &|| Ok(())), Ok(Some(Turn::Here))));
        let mut gone = Vec::new();
        cache.release(thread(), 1, |number| gone.push(number));
        assert_eq!(gone, [1, 2]);
        assert!(cache.is_resident(0) && !cache.is_resident(1));
        cache.release(other, 0, |number| gone.push(number));
        assert_eq!(gone, [1, 2, 0]);
    }

    #[test]
    fn what_nobody_in_particular_uses_goes_when_it_is_given_back() {
        let cache = Cache::default();
        assert!(cache.claim(4, 9, 9));
        cache.fetched(4, Ok(Bytes::from_static(b"x")));
        assert!(matches!(cache.take(None, 4, &runtime(), &|| Ok(())), Ok(Some(Turn::Fill(_)))));
        cache.filled(None, 4, true);
        assert!(matches!(cache.take(None, 4, &runtime(), &|| Ok(())), Ok(Some(Turn::Here))));
        let mut gone = Vec::new();
        cache.release(thread(), 0, |number| gone.push(number));
        cache.give_back([4, 5].into_iter(), |number| gone.push(number));
        assert!(gone.is_empty() && cache.is_resident(4));
        cache.give_back([4].into_iter(), |number| gone.push(number));
        assert_eq!(gone, [4]);
        assert!(!cache.is_resident(4));
    }

    #[test]
    fn only_so_many_are_ahead_and_a_failure_is_told_once() {
        let cache = Cache::default();
        assert!(
            cache.claim(1, 1, 9) && !cache.claim(1, 9, 9) && !cache.claim(2, 1, 9) && !cache.claim(2, 9, 1)
        );
        cache.fetched(1, Err(Error::Cancelled));
        assert!(cache.claim(2, 1, 1));
        assert!(matches!(cache.take(Some(thread()), 1, &runtime(), &|| Ok(())), Err(Error::Cancelled)));
        assert!(cache.take(Some(thread()), 1, &runtime(), &|| Ok(())).unwrap().is_none());
        assert!(cache.claim(1, 2, 2));
    }

    #[test]
    fn who_waits_may_be_told_to_end() {
        let cache = Cache::default();
        assert!(cache.claim(1, 1, 1));
        let error = cache.take(Some(thread()), 1, &runtime(), &|| Err(Error::Cancelled)).unwrap_err();
        assert!(matches!(error, Error::Cancelled));
    }
}
