//! The worker while no frontend is connected: clients of the host wait in it, and are refused in time.
//!
//! ```text
//!   Vsock::serve_unconnected: runs the worker, without queues ◄── taken with its clients, returned empty ──► a session
//! ```

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use towline_channel::Cancel;

use crate::lock::lock;

/// Place of a worker that no session has.
pub(super) struct Unconnected<W> {
    place: Mutex<Place<W>>,
    /// A session has taken the worker, or has ended.
    changed: OwnedFd,
}

enum Place<W> {
    /// Not yet created: a thread creates it when it serves it.
    Vacant,
    Worker(W),
    /// A session has it.
    Taken,
}

impl<W> fmt::Debug for Unconnected<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unconnected").finish_non_exhaustive()
    }
}

impl<W> Unconnected<W> {
    pub(super) fn new() -> io::Result<Self> {
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { place: Mutex::new(Place::Vacant), changed })
    }

    /// Takes the worker for a session, if there is one.
    pub(super) fn take(&self) -> Option<W> {
        match self.replace(Place::Taken) {
            Place::Worker(worker) => Some(worker),
            _ => None,
        }
    }

    /// The session has ended: the next worker is created here.
    pub(super) fn vacate(&self) {
        drop(self.replace(Place::Vacant));
    }

    fn replace(&self, place: Place<W>) -> Place<W> {
        let former = std::mem::replace(&mut *lock(&self.place), place);
        // It fails only if the counter is at its maximum, and then the descriptor is readable.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
        former
    }

    /// Runs the worker whenever no session has it, until cancelled. `create` returns a worker and its
    /// descriptor.
    pub(super) fn serve(
        &self,
        cancel: &Cancel,
        create: impl Fn() -> io::Result<(W, OwnedFd)>,
        run: impl Fn(&mut W),
    ) -> io::Result<()> {
        let mut events: Option<OwnedFd> = None;
        while !cancel.is_cancelled() {
            match &mut *lock(&self.place) {
                Place::Taken => events = None,
                Place::Worker(worker) => run(worker),
                place @ Place::Vacant => {
                    let (mut worker, fd) = create()?;
                    run(&mut worker);
                    (*place, events) = (Place::Worker(worker), Some(fd));
                }
            }
            let fds =
                [cancel.as_fd(), self.changed.as_fd()].into_iter().chain(events.as_ref().map(AsFd::as_fd));
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let _ = rustix::io::read(&self.changed, &mut [0u8; 8]);
        }
        // The process ends, or another one continues.
        if let place @ Place::Worker(_) = &mut *lock(&self.place) {
            *place = Place::Vacant;
        }
        Ok(())
    }
}
