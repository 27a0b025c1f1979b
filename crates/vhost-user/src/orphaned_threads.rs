//! Threads of connections that have ended. Each waits in the kernel: for pages that the frontend does not provide, or in a call on
//! a descriptor that the frontend has made blocking again.
//!
//! Nothing can end such a thread but its frontend. So the next connection begins when there are none: a frontend that connects
//! again and again leaves behind the threads of one connection, not of each.

use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Orphaned threads of one device.
#[derive(Debug, Default)]
pub(crate) struct OrphanedThreads(Mutex<Vec<JoinHandle<()>>>);

impl OrphanedThreads {
    /// Adds a thread that does not end.
    pub(crate) fn add(&self, thread: JoinHandle<()>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    /// Number of threads that have not ended.
    pub(crate) fn count(&self) -> usize {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.len()
    }
}
