//! Work on a list by several threads.

use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

use crate::lock::lock;

/// Does the work for each item, by at most `threads` threads that take one after the other, of which the caller's is one; `worker` returns the
/// work of one thread. Returns the results in the order of the items.
///
/// # Errors
/// The first one, after which no thread takes another item.
pub fn for_each<'a, I: Sync, T: Send, E: Send, W: FnMut(&'a I) -> Result<T, E>>(
    items: &'a [I],
    threads: usize,
    worker: impl Fn() -> W + Sync,
) -> Result<Vec<T>, E> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        let (mut work, mut done) = (worker(), Vec::new());
        while lock(&failed).is_none() {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { break };
            match work(item) {
                Ok(value) => done.push((at, value)),
                Err(error) => {
                    lock(&failed).get_or_insert(error);
                }
            }
        }
        done
    };
    let mut done = thread::scope(|scope| {
        // A host that has no room for another thread does the work with fewer.
        let others =
            (1..threads.min(items.len())).map_while(|_| Builder::new().spawn_scoped(scope, work).ok());
        let others: Vec<_> = others.collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    lock(&failed).take().map_or_else(|| Ok(done.into_iter().map(|(_, value)| value).collect()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_item_is_taken_after_an_error() {
        let (items, taken): (Vec<usize>, _) = ((0..10_000).collect(), AtomicUsize::new(0));
        let failed = for_each(&items, 4, || {
            |&item| {
                taken.fetch_add(1, Ordering::Relaxed);
                // The others go on until it has failed.
                thread::sleep(std::time::Duration::from_millis(1));
                if item == 5 { Err(item) } else { Ok(item) }
            }
        });
        assert_eq!(failed, Err(5));
        assert!(taken.into_inner() < items.len());
        assert_eq!(for_each(&items, 4, || |&item| Ok::<usize, usize>(item)), Ok(items));
    }
}
