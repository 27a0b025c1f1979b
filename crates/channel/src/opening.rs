//! Connections that have something to settle before they are channels (a handshake), each in a thread of its own, so that
//! one that is slow, or says nothing, holds up no other.
//!
//! ```text
//!   listening socket ─┐                      ┌─ thread: handshake ─┐
//!                     ├─ epoll ─▶ accept ────┼─ thread: handshake ─┼─▶ through ─▶ accept gives it
//!   bell ─────────────┘                      └─ …                  ┘      └ rings the bell
//! ```
//!
//! Limits: [`OPENINGS_MAX`] at once, of which the oldest gives way, and [`OPENING_TIMEOUT`] each.

use crate::cancel::{event, raise};
use crate::{Cancel, Channel, Error, Result};
use rustix::event::epoll;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most connections that are in their handshakes at once.
const OPENINGS_MAX: usize = 64;
/// How long a handshake may take.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);

/// What makes a channel of a connection.
pub(crate) type Open = dyn Fn(Box<dyn Channel>, Instant, &Cancel) -> Result<Box<dyn Channel>> + Send + Sync;

/// The handshakes of one listener. Dropping it ends them.
pub(crate) struct Openings {
    epoll: OwnedFd,
    open: Arc<Open>,
    under_way: Mutex<VecDeque<Cancel>>,
    done: Arc<Done>,
}

struct Done {
    through: Mutex<VecDeque<Result<Box<dyn Channel>>>>,
    /// Readable while somebody is through.
    bell: OwnedFd,
}

impl Openings {
    pub(crate) fn new(listener: BorrowedFd<'_>, open: Arc<Open>) -> Result<Self> {
        let failed = |errno| Error::io("epoll", "this process", errno);
        let done = Done { through: Mutex::default(), bell: event()? };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in [listener, done.bell.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        Ok(Self { epoll, open, under_way: Mutex::default(), done: Arc::new(done) })
    }

    /// Readable when somebody connects, and when somebody is through.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Begins with a connection.
    pub(crate) fn begin(&self, connection: Box<dyn Channel>) -> Result<()> {
        let cancel = Cancel::new()?;
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have ended hold no second reference.
        under_way.retain(Cancel::is_shared);
        if under_way.len() == OPENINGS_MAX
            && let Some(oldest) = under_way.pop_front()
        {
            oldest.cancel();
        }
        under_way.push_back(cancel.clone());
        let (open, done, peer) =
            (Arc::clone(&self.open), Arc::clone(&self.done), connection.peer().to_owned());
        let work = move || {
            let opened = open(connection, Instant::now() + OPENING_TIMEOUT, &cancel);
            // Whoever was cancelled is missed by nobody.
            if !cancel.is_cancelled() {
                done.push(opened);
            }
        };
        let thread = std::thread::Builder::new().name("handshake".to_owned());
        thread.spawn(work).map(drop).map_err(|source| Error::io("start a handshake with", &peer, source))
    }

    /// Who is through, or has failed.
    pub(crate) fn take(&self) -> Option<Result<Box<dyn Channel>>> {
        self.done.take()
    }
}

impl Drop for Openings {
    fn drop(&mut self) {
        let under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.iter().for_each(Cancel::cancel);
    }
}

impl std::fmt::Debug for Openings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Openings").finish_non_exhaustive()
    }
}

impl Done {
    fn push(&self, opened: Result<Box<dyn Channel>>) {
        let mut through = self.lock();
        through.push_back(opened);
        raise(self.bell.as_fd());
    }

    fn take(&self) -> Option<Result<Box<dyn Channel>>> {
        let mut through = self.lock();
        let first = through.pop_front();
        if through.is_empty() {
            // It is not raised the first time: there is nothing to read then.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        first
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Result<Box<dyn Channel>>>> {
        self.through.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
