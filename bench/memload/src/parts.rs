//! Work of several threads on parts of a guest's memory.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Pages that a thread takes at a time: 8 MiB.
const PART_PAGES: usize = 2048;

/// Calls `find` with all parts of this number of pages, in these threads, until it finds something.
pub(crate) fn find_in_parts<T: Send + Sync>(
    pages: usize,
    threads: NonZeroUsize,
    find: impl Fn(Range<usize>) -> Option<T> + Sync,
) -> Option<T> {
    let (next, found) = (AtomicUsize::new(0), OnceLock::new());
    thread::scope(|scope| {
        for _ in 0..threads.get() {
            scope.spawn(|| {
                while found.get().is_none() {
                    let first = next.fetch_add(PART_PAGES, Ordering::Relaxed);
                    if first >= pages {
                        break;
                    }
                    if let Some(it) = find(first..pages.min(first + PART_PAGES)) {
                        // Another thread may have found something at the same time.
                        let _ = found.set(it);
                    }
                }
            });
        }
    });
    found.into_inner()
}
