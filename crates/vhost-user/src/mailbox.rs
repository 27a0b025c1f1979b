//! Queue of commands to a worker's thread, which sleeps in `poll` on more than its mailbox.
//!
//! The sender puts the command into the queue and then signals the eventfd; the receiver drains the eventfd
//! and then empties the queue. A command that arrives between these two steps leaves the eventfd signalled,
//! so the next iteration finds it. The functions are generic over queue and eventfd, and this file uses
//! nothing else of the crate, so `tests/model` checks this very code under loom.

use std::sync::mpsc::{Receiver, Sender, TryRecvError};

/// The session's end of a queue.
pub(crate) trait Push<T> {
    /// Returns false if the receiver is gone.
    fn push(&self, command: T) -> bool;
}

/// The thread's end of a queue.
pub(crate) trait Pop<T> {
    fn pop(&self) -> Popped<T>;
}

/// Result of [`Pop::pop`].
pub(crate) enum Popped<T> {
    Command(T),
    Empty,
    /// Empty, and the sender is gone.
    Closed,
}

/// Event that ends the receiver's `poll`.
pub(crate) trait Wake {
    fn signal(&self);
    fn drain(&self);
}

/// State of the sender after [`process`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mailbox {
    Open,
    Closed,
}

/// Sends a command. Returns false if the receiver is gone.
pub(crate) fn send<T>(queue: &impl Push<T>, wake: &impl Wake, command: T) -> bool {
    let sent = queue.push(command);
    wake.signal();
    sent
}

/// Executes every command in the queue. `signalled` is the eventfd if `poll` found it readable.
pub(crate) fn process<T>(
    queue: &impl Pop<T>,
    signalled: Option<&impl Wake>,
    mut execute: impl FnMut(T),
) -> Mailbox {
    if let Some(wake) = signalled {
        wake.drain();
    }
    loop {
        match queue.pop() {
            Popped::Command(command) => execute(command),
            Popped::Empty => return Mailbox::Open,
            Popped::Closed => return Mailbox::Closed,
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
