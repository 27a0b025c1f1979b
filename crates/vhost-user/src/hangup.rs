//! How a worker ends its guest's connection, and only that one.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{Shutdown, shutdown};

/// Shared by a connection and its workers.
#[derive(Debug, Default)]
pub(crate) struct Hangup {
    /// The connection's socket, if it has one.
    socket: Option<OwnedFd>,
    lost: AtomicBool,
}

impl Hangup {
    /// For the connection with this socket.
    pub(crate) fn new(socket: Option<OwnedFd>) -> Self {
        Self { socket, lost: AtomicBool::new(false) }
    }

    /// The guest's memory is gone: the connection ends, which the session's thread sees as its end.
    pub(crate) fn memory_lost(&self) {
        if !self.lost.swap(true, Ordering::AcqRel)
            && let Some(socket) = &self.socket
            && let Err(errno) = shutdown(socket, Shutdown::Both)
        {
            tracing::debug!(%errno, "shutdown of a frontend's connection");
        }
    }

    /// Whether it ended so.
    pub(crate) fn is_memory_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}
