//! A participant: a thread that only runs when the world schedules it, and the background tasks of its
//! process.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::BoxFuture;
use towline_channel::lock::lock;

use super::super::Error;
use super::world::{Slot, World};

/// A participant. Clones are the same one.
#[derive(Clone)]
pub(in crate::store) struct Actor {
    pub(super) world: World,
    pub(super) number: usize,
    /// Background tasks of its process.
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

    /// Returns true if its process has ended: its requests no longer have an effect.
    pub(in crate::store) fn has_crashed(&self) -> bool {
        self.world.has_crashed(self.number)
    }

    /// `CLOCK_BOOTTIME` of its host.
    pub(in crate::store) fn boot_time(&self) -> Duration {
        self.world.boot_time(self.number)
    }

    /// Starts a timer of its process.
    pub(in crate::store) fn sleep(&self, time: Duration) -> impl Future<Output = ()> + Send + use<> {
        SlotFuture(self.world.timer(self.number, time))
    }

    /// Equivalent of a runtime's `spawn`.
    pub(in crate::store) fn spawn(&self, work: BoxFuture<'static, ()>) {
        lock(&self.tasks).push(work);
    }

    /// Equivalent of a runtime's `block_on`.
    pub(in crate::store) fn wait<T>(&self, mut work: BoxFuture<'static, T>) -> Result<T, Error> {
        loop {
            if self.has_crashed() {
                return Err(Error::Cancelled);
            }
            if let Poll::Ready(value) = poll(&mut work) {
                return Ok(value);
            }
            self.poll_tasks();
            // One of the tasks may have completed it.
            if let Poll::Ready(value) = poll(&mut work) {
                return Ok(value);
            }
            self.world.park(self.number);
        }
    }

    /// Yields until an event concerns the actor.
    pub(in crate::store) fn pause(&self) {
        // A completed task may be the one that the caller waits for.
        if !self.has_crashed() && !self.poll_tasks() {
            self.world.park(self.number);
            self.poll_tasks();
        }
    }

    /// Does nothing for `time`, except for background tasks.
    pub(super) fn idle(&self, time: Duration) {
        if !time.is_zero() {
            // Fails if the process has ended.
            let _ = self.wait(Box::pin(self.sleep(time)));
        }
    }

    /// Polls the tasks. Returns true if one of them has completed.
    fn poll_tasks(&self) -> bool {
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        let mut is_one_done = false;
        for mut task in tasks {
            match poll(&mut task) {
                Poll::Pending => lock(&self.tasks).push(task),
                Poll::Ready(()) => is_one_done = true,
            }
        }
        is_one_done
    }

    /// Drops the background tasks.
    pub(super) fn end(&self) {
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        drop(tasks);
    }
}

fn poll<T>(work: &mut BoxFuture<'static, T>) -> Poll<T> {
    // Without wakers: an actor's tasks are polled after every event that concerns it.
    work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Completes when the slot is filled.
pub(super) struct SlotFuture<T>(pub(super) Slot<T>);

impl<T> Future for SlotFuture<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let found = lock(&self.0).take();
        if found.is_none() {
            // A stream of futures polls only those that were woken.
            context.waker().wake_by_ref();
        }
        found.map_or(Poll::Pending, Poll::Ready)
    }
}
