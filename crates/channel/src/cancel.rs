//! Cooperative cancellation token.

use crate::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A cancellation token: any holder may cancel it, once and for all.
///
/// [`connect`](fn@crate::connect) and [`Listener::accept`](crate::Listener::accept) watch it. A thread that
/// waits inside a channel is woken by that channel's `shutdown`, not by this. Its descriptor becomes readable
/// and stays so, for other poll loops.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    cancelled: AtomicBool,
    event: Arc<OwnedFd>,
}

impl Cancel {
    /// Creates a token that is not cancelled.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has no descriptor left.
    pub fn new() -> Result<Self> {
        Ok(Self(Arc::new(Shared { cancelled: AtomicBool::new(false), event: Arc::new(event()?) })))
    }

    /// Wakes every waiter, now and later. Async-signal-safe: it is one atomic store and one `write(2)`.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        raise(self.0.event.as_fd());
    }

    /// Returns true if it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// The descriptor, for a loop that holds it for longer than a borrow.
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0.event)
    }

    /// Returns true if another clone of the token exists.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// [`Error::Cancelled`] if it was cancelled, for loops that do not poll.
    ///
    /// # Errors
    /// Only [`Error::Cancelled`].
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl AsFd for Cancel {
    /// Readable once it was cancelled; never read from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

/// A descriptor that becomes readable with [`raise`] and stays so.
pub(crate) fn event() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| Error::io("eventfd", "this process", errno))
}

/// Makes an [`event`] readable.
pub(crate) fn raise(event: BorrowedFd<'_>) {
    // The only failure is EAGAIN, when it was raised 2^64 - 2 times: it is readable then too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
