//! Queues of connections that may have ended meanwhile.

use std::collections::VecDeque;

/// Entries that a queue may have before it is looked through.
const ENTRIES_MIN: usize = 64;

/// A queue whose entries can outlive the connections that they are for. It looks through its entries when it has twice as
/// many as were live the last time, so that connections that come and go leave nothing and an entry costs constant time.
#[derive(Debug)]
pub(super) struct LiveQueue<T> {
    entries: VecDeque<T>,
    most: usize,
}

impl<T> Default for LiveQueue<T> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), most: ENTRIES_MIN }
    }
}

impl<T> LiveQueue<T> {
    /// Appends an entry; drops those that are not live, if there are many.
    pub(super) fn push(&mut self, entry: T, is_live: impl Fn(&T) -> bool) {
        if self.entries.len() >= self.most {
            self.entries.retain(is_live);
            self.most = (2 * self.entries.len()).max(ENTRIES_MIN);
            self.entries.shrink_to(self.most);
        }
        self.entries.push_back(entry);
    }

    /// Takes the first entry, live or not.
    pub(super) fn pop(&mut self) -> Option<T> {
        self.entries.pop_front()
    }

    /// The first entry, live or not.
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
    fn entries_that_are_not_live_do_not_pile_up() {
        let mut queue = LiveQueue::default();
        for entry in 0..1_000_000 {
            // The last hundred are live.
            queue.push(entry, |other| *other + 100 > entry);
            assert!(queue.len() <= 201, "{} entries", queue.len());
        }
        let mut last = None;
        while let Some(entry) = queue.pop() {
            assert!(last.is_none_or(|last| entry == last + 1), "{entry} behind {last:?}");
            last = Some(entry);
        }
        assert_eq!((last, queue.is_empty()), (Some(999_999), true));
    }
}
