//! Ends the connection of a guest whose memory is lost, from the thread of a worker.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{Shutdown, shutdown};

/// Shared by a connection and its workers.
#[derive(Debug, Default)]
pub(crate) struct Hangup {
    /// The connection's socket, if it has one.
    socket: Option<OwnedFd>,
    memory_lost: AtomicBool,
}

impl Hangup {
    /// Hangup of the connection with this socket.
    pub(crate) fn new(socket: Option<OwnedFd>) -> Self {
        Self { socket, memory_lost: AtomicBool::new(false) }
    }

    /// Shuts the connection down because the guest's memory is lost. The session's thread reads the end of
    /// the stream.
    pub(crate) fn memory_lost(&self) {
        if !self.memory_lost.swap(true, Ordering::AcqRel)
            && let Some(socket) = &self.socket
            && let Err(errno) = shutdown(socket, Shutdown::Both)
        {
            tracing::debug!(%errno, "cannot shut down the frontend's connection");
        }
    }

    /// Returns true after [`Hangup::memory_lost`].
    pub(crate) fn is_memory_lost(&self) -> bool {
        self.memory_lost.load(Ordering::Acquire)
    }
}
