//! The worker while no frontend is connected: clients of the host wait in it, and are refused in time.
//!
//! ```text
//!   Vsock::serve_unconnected: runs the worker, without queues ◄── taken with its clients, returned empty ──► a session
//! ```

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use towline_channel::Cancel;

use crate::lock::lock;

/// Interval of attempts to create a worker, for which the process may have no descriptor left.
const RETRY_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

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
    /// descriptor. If it fails, it is called again after a while, and `failed` gets the first error.
    pub(super) fn serve(
        &self,
        cancel: &Cancel,
        create: impl Fn() -> io::Result<(W, OwnedFd)>,
        run: impl Fn(&mut W),
        failed: impl FnOnce(io::Error),
    ) -> io::Result<()> {
        let mut events: Option<OwnedFd> = None;
        let mut failed = Some(failed);
        while !cancel.is_cancelled() {
            let mut retry = None;
            match &mut *lock(&self.place) {
                Place::Taken => events = None,
                Place::Worker(worker) => run(worker),
                place @ Place::Vacant => {
                    // It may be the descriptor that is missing.
                    events = None;
                    match create() {
                        Ok((mut worker, fd)) => {
                            run(&mut worker);
                            (*place, events) = (Place::Worker(worker), Some(fd));
                        }
                        Err(error) => {
                            retry = Some(&RETRY_INTERVAL);
                            if let Some(failed) = failed.take() {
                                failed(error);
                            }
                        }
                    }
                }
            }
            let fds =
                [cancel.as_fd(), self.changed.as_fd()].into_iter().chain(events.as_ref().map(AsFd::as_fd));
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut fds, retry) {
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_worker_that_cannot_be_created_is_created_later() {
        let (cancel, place) = (Cancel::new().unwrap(), Unconnected::new().unwrap());
        let (attempts, errors) = (Cell::new(0), Cell::new(0));
        let create = || {
            attempts.set(attempts.get() + 1);
            if attempts.get() == 1 {
                return Err(Errno::MFILE.into());
            }
            Ok(((), cancel.as_fd().try_clone_to_owned()?))
        };
        let failed = |error: io::Error| {
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
            errors.set(errors.get() + 1);
        };
        place.serve(&cancel, create, |_: &mut ()| cancel.cancel(), failed).unwrap();
        assert_eq!((attempts.get(), errors.get()), (2, 1));
    }
}
