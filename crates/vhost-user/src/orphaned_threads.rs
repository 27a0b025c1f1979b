//! Threads of connections that have ended. Each waits in the kernel: for pages that the frontend does not
//! provide, or in a call on a descriptor that the frontend has made blocking again.
//!
//! Nothing can end such a thread but its frontend. So the next connection begins when there are none: a
//! frontend that connects again and again leaks the threads of one connection, not of each. A thread that
//! closes descriptors holds nothing else, so the next connection waits only while there are many.

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use towline_channel::lock::lock;

/// Time limit of [`OrphanedThreads::drop_apart`].
const DROP_WITHIN: Duration = Duration::from_secs(1);
/// Number of descriptor-closing threads that are ignored.
const CLOSING_MAX: usize = 8;

/// Orphaned threads of one device.
#[derive(Debug, Default)]
pub(crate) struct OrphanedThreads {
    workers: Mutex<Vec<JoinHandle<()>>>,
    closing: Mutex<Vec<JoinHandle<()>>>,
}

impl OrphanedThreads {
    /// Adds a thread that does not end.
    pub(crate) fn add(&self, thread: JoinHandle<()>) {
        lock(&self.workers).push(thread);
    }

    /// Waits until a thread ends, which disconnects `ended`. One that does not end in this time is leaked.
    pub(crate) fn join<T>(&self, thread: JoinHandle<()>, ended: &Receiver<T>, within: Duration) {
        let name = thread.thread().name().unwrap_or_default().to_owned();
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(within) {
            tracing::error!(name, "a thread does not end; it is leaked, with its memory");
            self.add(thread);
        } else if thread.join().is_err() {
            tracing::error!(name, "a thread panicked");
        }
    }

    /// Drops a value with descriptors of the frontend on another thread, and waits a while for it: the last
    /// close of one may wait.
    pub(crate) fn drop_apart(&self, value: impl Send + 'static) {
        let (alive, ended) = channel::<Infallible>();
        let close = move || {
            drop(value);
            drop(alive);
        };
        // Without a thread the value is dropped here.
        let Ok(thread) = Builder::new().name("close".into()).spawn(close) else { return };
        if ended.recv_timeout(DROP_WITHIN) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("a descriptor of the frontend is not closed at once; leaving that to a thread");
            lock(&self.closing).push(thread);
        }
    }

    /// Number of running threads, apart from a few that close descriptors.
    pub(crate) fn count(&self) -> usize {
        unfinished(&self.workers) + unfinished(&self.closing).saturating_sub(CLOSING_MAX - 1)
    }
}

fn unfinished(threads: &Mutex<Vec<JoinHandle<()>>>) -> usize {
    let mut threads = lock(threads);
    threads.retain(|thread| !thread.is_finished());
    threads.len()
}
