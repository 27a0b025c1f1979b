//! Queue of connections, some of which may be closed when their turn comes.

use std::collections::VecDeque;

/// Length below which a queue is never pruned.
const ENTRIES_MIN: usize = 64;

/// A queue whose entries can outlive their connections. It is pruned when it is twice as long as after the
/// last time, so connections that come and go leave nothing in it, and an entry costs constant time.
#[derive(Debug)]
pub(super) struct PrunedQueue<T> {
    entries: VecDeque<T>,
    prune_at: usize,
}

impl<T> Default for PrunedQueue<T> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), prune_at: ENTRIES_MIN }
    }
}

impl<T> PrunedQueue<T> {
    /// Appends an entry. If there are many, it drops those that are not live.
    pub(super) fn push(&mut self, entry: T, is_live: impl Fn(&T) -> bool) {
        if self.entries.len() >= self.prune_at {
            self.entries.retain(is_live);
            self.prune_at = (2 * self.entries.len()).max(ENTRIES_MIN);
            self.entries.shrink_to(self.prune_at);
        }
        self.entries.push_back(entry);
    }

    /// Removes the first entry, live or not.
    pub(super) fn pop(&mut self) -> Option<T> {
        self.entries.pop_front()
    }

    /// Returns the first entry, live or not.
    pub(super) fn front(&self) -> Option<&T> {
        self.entries.front()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_closed_connections_do_not_accumulate() {
        let mut queue = PrunedQueue::default();
        for entry in 0..1_000_000 {
            // The last hundred are live.
            queue.push(entry, |other| *other + 100 > entry);
            assert!(queue.len() <= 201, "{} entries", queue.len());
        }
        let mut last = None;
        while let Some(entry) = queue.pop() {
            assert!(last.is_none_or(|last| entry == last + 1), "{entry} after {last:?}");
            last = Some(entry);
        }
        assert_eq!((last, queue.is_empty()), (Some(999_999), true));
    }
}
