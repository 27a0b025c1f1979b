//! Work on a list by several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Does the work for each item, by threads that take one after the other. A thread ends with its first error.
/// Returns the result of each thread.
pub(crate) fn for_each<I: Copy + Sync, T: Send, E: Send>(
    items: &[I],
    threads: usize,
    work: impl Fn(I) -> Result<T, E> + Sync,
) -> Vec<Result<Vec<T>, E>> {
    let next = AtomicUsize::new(0);
    let take = || items.get(next.fetch_add(1, Ordering::Relaxed)).copied();
    thread::scope(|scope| {
        let worker = || std::iter::from_fn(take).map(&work).collect();
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|worker| worker.join().expect("workers do not panic")).collect()
    })
}
