//! A participant: a thread that runs only while the world gives it its turn, and the futures of its process.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::super::Error;
use super::world::{Slot, World};

/// A participant. A clone is the same one.
#[derive(Clone)]
pub(in crate::store) struct Actor {
    pub(super) world: World,
    pub(super) number: usize,
    /// What runs in the background of its process.
    tasks: Arc<Mutex<Vec<BoxFuture<'static, ()>>>>,
}

impl fmt::Debug for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "actor {}", self.number)
    }
}

impl Actor {
    pub(super) fn new(world: &World, number: usize) -> Self {
        Self { world: world.clone(), number, tasks: Arc::default() }
    }

    /// Whether its process has ended: nothing that it asks for happens any more.
    pub(in crate::store) fn is_dead(&self) -> bool {
        self.world.is_dead(self.number)
    }

    /// `CLOCK_BOOTTIME` of its host.
    pub(in crate::store) fn boot_time(&self) -> Duration {
        self.world.boot_time(self.number)
    }

    /// A timer of its process.
    pub(in crate::store) fn sleep(&self, time: Duration) -> impl Future<Output = ()> + Send + use<> {
        Answer(self.world.timer(self.number, time))
    }

    /// As a runtime's `spawn`.
    pub(in crate::store) fn spawn(&self, work: BoxFuture<'static, ()>) {
        self.lock().push(work);
    }

    /// As a runtime's `block_on`.
    pub(in crate::store) fn wait<T>(&self, mut work: BoxFuture<'static, T>) -> Result<T, Error> {
        loop {
            if self.is_dead() {
                return Err(Error::Cancelled);
            }
            if let Poll::Ready(value) = poll(&mut work) {
                return Ok(value);
            }
            self.poll_tasks();
            // One of them may have had what this waits for.
            if let Poll::Ready(value) = poll(&mut work) {
                return Ok(value);
            }
            self.world.park(self.number);
        }
    }

    /// Lets something happen.
    pub(in crate::store) fn pause(&self) {
        // What ended may be what is waited for.
        if !self.is_dead() && !self.poll_tasks() {
            self.world.park(self.number);
            self.poll_tasks();
        }
    }

    /// Does nothing for this long, but for its process's background.
    pub(super) fn rest(&self, time: Duration) {
        if !time.is_zero() {
            // A process that ended rests for ever.
            let _ = self.wait(Box::pin(self.sleep(time)));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<BoxFuture<'static, ()>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one of them ended.
    fn poll_tasks(&self) -> bool {
        let tasks = std::mem::take(&mut *self.lock());
        let mut is_one_done = false;
        for mut task in tasks {
            match poll(&mut task) {
                Poll::Pending => self.lock().push(task),
                Poll::Ready(()) => is_one_done = true,
            }
        }
        is_one_done
    }

    /// Ends its background.
    pub(super) fn end(&self) {
        let tasks = std::mem::take(&mut *self.lock());
        drop(tasks);
    }
}

fn poll<T>(work: &mut BoxFuture<'static, T>) -> Poll<T> {
    // Everything is polled whenever something happened to its actor.
    work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Ends when something is in the slot.
pub(super) struct Answer<T>(pub(super) Slot<T>);

impl<T> Future for Answer<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<T> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        found.map_or(Poll::Pending, Poll::Ready)
    }
}
