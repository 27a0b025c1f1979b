//! The asynchronous part of the process: one thread, and a way to wait for it.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use towline_channel::Cancel;

use super::Error;

/// How often who waits looks whether somebody wants to stop.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Threads for files, which have no asynchronous form: a store in a directory uses them.
const FILE_THREADS: usize = 4;

/// A runtime in a thread of its own; what is under way ends with it.
#[derive(Debug)]
pub(crate) struct Runtime {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the thread.
    pub(crate) fn start() -> io::Result<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().max_blocking_threads(FILE_THREADS).build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = move || {
            // Ends when the sender goes.
            let _ = runtime.block_on(stopped);
        };
        let thread = thread::Builder::new().name("store".into()).spawn(serve)?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Has something done there, and does not wait.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        drop(self.handle.spawn(work));
    }

    /// Has something done there and waits for it.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; the work is dropped.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        cancel: Option<&Cancel>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Error> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.handle.spawn(async move {
            // Nobody waits any more for who was cancelled.
            let _ = sender.send(work.await);
        });
        loop {
            match receiver.recv_timeout(LOOK_INTERVAL) {
                Ok(value) => return Ok(value),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::Cancelled),
                Err(mpsc::RecvTimeoutError::Timeout) if cancel.is_some_and(Cancel::is_cancelled) => {
                    task.abort();
                    return Err(Error::Cancelled);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.stop.take();
        // Who drops it last may be a task of its own, which cannot wait for its end.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic there has been told by its own message.
            let _ = thread.join();
        }
    }
}
