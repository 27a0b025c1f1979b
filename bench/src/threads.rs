//! Work of several threads at the same time.

use anyhow::Result;

/// Runs each of these in its own thread. Returns the first error.
pub(crate) fn at_once<W: FnOnce() -> Result<()> + Send>(works: impl IntoIterator<Item = W>) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = works.into_iter().map(|work| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })
}
