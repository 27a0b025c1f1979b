//! Work on a list by several threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use towline_channel::lock::lock;

/// Does the work for each item, by threads that take one after the other; `worker` returns the work of one thread. Returns the results in any
/// order.
///
/// # Errors
/// The first one, after which no thread takes another item.
pub(crate) fn for_each<I: Copy + Sync, T: Send, E: Send, W: FnMut(I) -> Result<T, E>>(
    items: &[I],
    threads: usize,
    worker: impl Fn() -> W + Sync,
) -> Result<Vec<T>, E> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        let (mut work, mut done) = (worker(), Vec::new());
        while lock(&failed).is_none() {
            let Some(&item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            match work(item) {
                Ok(value) => done.push(value),
                Err(error) => {
                    lock(&failed).get_or_insert(error);
                }
            }
        }
        done
    };
    let done = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1).min(items.len())).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("workers do not panic")).collect()
    });
    lock(&failed).take().map_or(Ok(done), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_item_is_taken_after_an_error() {
        let (items, taken): (Vec<usize>, _) = ((0..10_000).collect(), AtomicUsize::new(0));
        let failed = for_each(&items, 4, || {
            |item| {
                taken.fetch_add(1, Ordering::Relaxed);
                // The others go on until it has failed.
                thread::sleep(std::time::Duration::from_millis(1));
                if item == 5 { Err(item) } else { Ok(item) }
            }
        });
        assert_eq!(failed, Err(5));
        assert!(taken.into_inner() < items.len());
        assert_eq!(for_each(&items, 4, || Ok::<usize, usize>).unwrap().len(), items.len());
    }
}
