//! An eventfd of this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::mailbox::Wake;

/// A non-blocking eventfd.
#[derive(Debug)]
pub(crate) struct Eventfd(OwnedFd);

impl Eventfd {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wake for Eventfd {
    fn signal(&self) {
        // The only failure is a full counter, which is readable too.
        let _ = signal(self.as_fd());
    }

    fn drain(&self) {
        // A failure means that it was drained already.
        let _ = rustix::io::read(self.as_fd(), &mut [0u8; 8]);
    }
}

/// Adds one to the counter of an eventfd, which may be the frontend's.
pub(crate) fn signal(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::write(fd, &1u64.to_ne_bytes())?;
    Ok(())
}
