//! The asynchronous runtime in its own thread, blocking waits for it, and the clock of leases: time since boot,
//! including suspended time.

use std::future::Future;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use towline_channel::Cancel;

use super::Error;
#[cfg(test)]
use super::simulation::Actor;

/// Interval at which a waiting thread checks for cancellation.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// As [`CANCEL_CHECK_INTERVAL`], if changes are notified.
const NOTIFIED_INTERVAL: Duration = Duration::from_millis(50);
/// Threads for files, which have no asynchronous interface: used by stores in directories.
pub(super) const FILE_THREADS: usize = 4;

/// Executor of requests.
#[derive(Debug)]
pub(super) enum Runtime {
    /// A separate thread.
    Thread(RuntimeThread),
    /// A simulated participant, which does everything in its single thread.
    #[cfg(test)]
    Simulated(Actor),
}

/// A runtime in its own thread; dropping it cancels its tasks.
#[derive(Debug)]
pub(super) struct RuntimeThread {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        // Threads for files and names stay, and there is one: without any, and where none can be started, a task would panic.
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(FILE_THREADS)
            .thread_keep_alive(Duration::from_secs(u64::from(u32::MAX)))
            .build()?;
        let _ = thread::Builder::new().spawn(|| ())?.join();
        drop(runtime.spawn_blocking(|| ()));
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = move || {
            // Returns when the sender is dropped.
            let _ = runtime.block_on(stopped);
        };
        let thread = thread::Builder::new().name("store".into()).spawn(serve)?;
        Ok(Self::Thread(RuntimeThread { handle, stop: Some(stop), thread: Some(thread) }))
    }

    /// Runs `work` in the background.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Thread(worker) => drop(worker.handle.spawn(work)),
            #[cfg(test)]
            Self::Simulated(actor) => actor.spawn(Box::pin(work)),
        }
    }

    /// Starts `work`, whose result [`Self::finish`] waits for.
    pub(super) fn begin<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Started<T> {
        match self {
            Self::Thread(worker) => {
                let mut task = JoinSet::new();
                task.spawn_on(work, &worker.handle);
                Started::Task(task)
            }
            #[cfg(test)]
            Self::Simulated(_) => Started::Simulated(Box::pin(work)),
        }
    }

    /// Waits for the result of work.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; the work is dropped.
    pub(super) fn finish<T: Send + 'static>(
        &self,
        cancel: Option<&Cancel>,
        started: Started<T>,
    ) -> Result<T, Error> {
        match (self, started) {
            (Self::Thread(worker), Started::Task(mut task)) => worker.handle.block_on(async {
                loop {
                    match tokio::time::timeout(CANCEL_CHECK_INTERVAL, task.join_next()).await {
                        Ok(Some(Ok(value))) => return Ok(value),
                        Err(_) if !cancel.is_some_and(Cancel::is_cancelled) => {}
                        _ => return Err(Error::Cancelled),
                    }
                }
            }),
            #[cfg(test)]
            (Self::Simulated(actor), Started::Simulated(work)) => actor.wait(work),
            #[cfg(test)]
            _ => unreachable!("started by another kind of runtime"),
        }
    }

    /// Waits until `changed` is notified, or for a short time.
    pub(super) fn wait_for_change<'a, T>(
        &self,
        changed: &Condvar,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        match self {
            Self::Thread(_) => {
                let _ = mutex;
                changed.wait_timeout(guard, NOTIFIED_INTERVAL).unwrap_or_else(PoisonError::into_inner).0
            }
            #[cfg(test)]
            Self::Simulated(actor) => {
                drop(guard);
                actor.pause();
                towline_channel::lock::lock(mutex)
            }
        }
    }
}

/// Work that was started. It ends without a result if this is dropped.
pub(super) enum Started<T> {
    /// In the runtime's thread.
    Task(JoinSet<T>),
    /// Not begun: a simulated participant does one thing at a time.
    #[cfg(test)]
    Simulated(std::pin::Pin<Box<dyn Future<Output = T> + Send>>),
}

impl Drop for RuntimeThread {
    fn drop(&mut self) {
        self.stop.take();
        // The last owner may be a task of this runtime, which cannot join the thread.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic has printed its own message.
            let _ = thread.join();
        }
    }
}

/// Source of time.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// `CLOCK_BOOTTIME`, which counts the time for which a host is suspended, unlike `CLOCK_MONOTONIC`.
    System,
    /// Clock of a simulated participant.
    #[cfg(test)]
    Simulated(Actor),
}

impl Clock {
    /// Time since boot.
    pub(super) fn now(&self) -> Duration {
        match self {
            Self::System => {
                let time = clock_gettime(ClockId::Boottime);
                // Never negative on Linux.
                Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
            }
            #[cfg(test)]
            Self::Simulated(actor) => actor.boot_time(),
        }
    }

    /// Waits for `time`, not counting suspended time.
    pub(super) fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        match self {
            Self::System => Box::pin(tokio::time::sleep(time)),
            #[cfg(test)]
            Self::Simulated(actor) => Box::pin(actor.sleep(time)),
        }
    }
}
