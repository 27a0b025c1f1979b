//! How commands reach a worker's thread, which sleeps in `poll` on more than its mailbox.
//!
//! The sender puts the command into the queue and then raises the eventfd; the receiver drains the eventfd and then empties the
//! queue. A command that comes between the two leaves the eventfd raised, so it is found on the next round. Generic over queue and
//! eventfd, and this file uses nothing of the crate, so that `tests/model` can check the order under loom.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

/// The session's end of a queue.
pub(crate) trait Push<T> {
    /// False if the other end is gone.
    fn push(&self, command: T) -> bool;
}

/// The thread's end of a queue.
pub(crate) trait Pop<T> {
    fn pop(&self) -> Popped<T>;
}

/// What a queue had.
pub(crate) enum Popped<T> {
    Command(T),
    Empty,
    /// Empty, and the sender is gone.
    Closed,
}

/// What wakes the receiver's `poll`.
pub(crate) trait Wake {
    fn raise(&self);
    fn drain(&self);
}

/// Sends a command. False if the receiver is gone.
pub(crate) fn send<T>(queue: &impl Push<T>, wake: &impl Wake, command: T) -> bool {
    let sent = queue.push(command);
    wake.raise();
    sent
}

/// Executes everything in the queue; `raised` is the eventfd if `poll` found it readable. False once the sender is gone.
pub(crate) fn process<T>(
    queue: &impl Pop<T>,
    raised: Option<&impl Wake>,
    mut execute: impl FnMut(T),
) -> bool {
    if let Some(wake) = raised {
        wake.drain();
    }
    loop {
        match queue.pop() {
            Popped::Command(command) => execute(command),
            Popped::Empty => return true,
            Popped::Closed => return false,
        }
    }
}

impl<T> Push<T> for Sender<T> {
    fn push(&self, command: T) -> bool {
        self.send(command).is_ok()
    }
}

impl<T> Pop<T> for Receiver<T> {
    fn pop(&self) -> Popped<T> {
        match self.try_recv() {
            Ok(command) => Popped::Command(command),
            Err(TryRecvError::Empty) => Popped::Empty,
            Err(TryRecvError::Disconnected) => Popped::Closed,
        }
    }
}

impl Wake for OwnedFd {
    fn raise(&self) {
        // The only failure is a full counter, which is readable too.
        let _ = rustix::io::write(self.as_fd(), &1u64.to_ne_bytes());
    }

    fn drain(&self) {
        // Non-blocking: a failure means that it was drained already.
        let _ = rustix::io::read(self.as_fd(), &mut [0u8; 8]);
    }
}
