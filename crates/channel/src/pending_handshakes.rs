//! Handshakes of accepted connections, each in its own thread, so a slow or silent peer does not block
//! others.
//!
//! ```text
//!   listening socket ─┐                      ┌─ thread: handshake ─┐
//!                     ├─ epoll ─▶ accept ────┼─ thread: handshake ─┼─▶ through ─▶ accept gives it
//!   bell ─────────────┘                      └─ …                  ┘      └ rings the bell
//! ```
//!
//! Limits: [`PENDING_HANDSHAKES_MAX`] at once, of which the oldest is dropped, and [`HANDSHAKE_TIMEOUT`]
//! each.

use crate::cancel::{event, raise};
use crate::lock::lock;
use crate::{Cancel, Channel, Error, Result};
use rustix::event::epoll;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Maximum number of connections that are in their handshakes at once.
const PENDING_HANDSHAKES_MAX: usize = 64;
/// The time that a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The handshake that turns a connection into a channel.
pub(crate) type HandshakeFunction =
    dyn Fn(Box<dyn Channel>, Instant, &Cancel) -> Result<Box<dyn Channel>> + Send + Sync;

/// The handshakes of one listener. Dropping it ends them.
pub(crate) struct PendingHandshakes {
    epoll: OwnedFd,
    handshake: Arc<HandshakeFunction>,
    running: Mutex<VecDeque<Cancel>>,
    done: Arc<FinishedHandshake>,
}

struct FinishedHandshake {
    results: Mutex<VecDeque<Result<Box<dyn Channel>>>>,
    /// Eventfd; readable while there are results.
    ready: OwnedFd,
}

impl PendingHandshakes {
    pub(crate) fn new(listener: BorrowedFd<'_>, handshake: Arc<HandshakeFunction>) -> Result<Self> {
        let failed = |errno| Error::io("epoll", "this process", errno);
        let done = FinishedHandshake { results: Mutex::default(), ready: event()? };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in [listener, done.ready.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        Ok(Self { epoll, handshake, running: Mutex::default(), done: Arc::new(done) })
    }

    /// Readable when a connection arrives or a handshake completes.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Begins with a connection.
    pub(crate) fn start(&self, connection: Box<dyn Channel>) -> Result<()> {
        let cancel = Cancel::new()?;
        let mut running = lock(&self.running);
        // Handshakes that have ended hold no second reference.
        running.retain(Cancel::is_shared);
        if running.len() == PENDING_HANDSHAKES_MAX
            && let Some(oldest) = running.pop_front()
        {
            oldest.cancel();
        }
        running.push_back(cancel.clone());
        let (handshake, done) = (Arc::clone(&self.handshake), Arc::clone(&self.done));
        let work = move || {
            let opened = handshake(connection, Instant::now() + HANDSHAKE_TIMEOUT, &cancel);
            // Drop the result of a cancelled handshake.
            if !cancel.is_cancelled() {
                done.push(opened);
            }
        };
        let thread = std::thread::Builder::new().name("handshake".to_owned());
        thread.spawn(work).map(drop).map_err(Error::NoThread)
    }

    /// Takes the result of a completed handshake, successful or not.
    pub(crate) fn pop_ready(&self) -> Option<Result<Box<dyn Channel>>> {
        let mut results = lock(&self.done.results);
        let first = results.pop_front();
        if results.is_empty() {
            // The eventfd may not be readable yet: there is nothing to drain then.
            let _ = rustix::io::read(&self.done.ready, &mut [0; 8]);
        }
        first
    }
}

impl Drop for PendingHandshakes {
    fn drop(&mut self) {
        let running = lock(&self.running);
        running.iter().for_each(Cancel::cancel);
    }
}

impl std::fmt::Debug for PendingHandshakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingHandshakes").finish_non_exhaustive()
    }
}

impl FinishedHandshake {
    fn push(&self, opened: Result<Box<dyn Channel>>) {
        let mut results = lock(&self.results);
        results.push_back(opened);
        raise(self.ready.as_fd());
    }
}
