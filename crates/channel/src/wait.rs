//! The one place where this crate waits for a descriptor: `poll(2)` with a deadline and a stop descriptor.

use crate::{Cancel, Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Reason why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Woken {
    /// The descriptor is ready, or has an error that the next call on it returns.
    Ready,
    /// The descriptor that stops us is readable.
    Stopped,
    /// The deadline passed.
    TimedOut,
}

/// Waits until `fd` is ready for `events` or `stop` is readable. Without a deadline, it waits forever.
pub(crate) fn wait(
    fd: BorrowedFd<'_>,
    events: PollFlags,
    stop: Option<BorrowedFd<'_>>,
    deadline: Option<Instant>,
) -> Result<Woken, Errno> {
    loop {
        let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        // Without a second descriptor the first is its placeholder, with no events requested.
        let second = stop.map_or(PollFd::from_borrowed_fd(fd, PollFlags::empty()), |stop| {
            PollFd::from_borrowed_fd(stop, PollFlags::IN)
        });
        let mut fds = [PollFd::from_borrowed_fd(fd, events), second];
        match poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(0) => return Ok(Woken::TimedOut),
            Ok(_) if stop.is_some() && !fds[1].revents().is_empty() => return Ok(Woken::Stopped),
            Ok(_) => return Ok(Woken::Ready),
        }
    }
}

/// Deadline and cancellation of one operation on a peer, and the errors when it takes longer.
#[derive(Debug)]
pub(crate) struct Deadline<'a> {
    op: &'static str,
    peer: String,
    started: Instant,
    deadline: Instant,
    cancel: &'a Cancel,
}

impl<'a> Deadline<'a> {
    pub(crate) fn new(op: &'static str, peer: String, deadline: Instant, cancel: &'a Cancel) -> Self {
        Self { op, peer, started: Instant::now(), deadline, cancel }
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The same, with this fraction (1 of `parts`) of the time that is left.
    pub(crate) fn share(&self, parts: usize) -> Self {
        let parts = u32::try_from(parts).unwrap_or(u32::MAX).max(1);
        let deadline = Instant::now() + self.remaining() / parts;
        Self { peer: self.peer.clone(), deadline, ..*self }
    }

    /// Waits for a descriptor.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags) -> Result<()> {
        match wait(fd, events, Some(self.cancel.as_fd()), Some(self.deadline)) {
            Ok(Woken::Ready) => Ok(()),
            Ok(Woken::Stopped) => Err(Error::Cancelled),
            Ok(Woken::TimedOut) => Err(self.timeout()),
            Err(errno) => Err(self.io(errno)),
        }
    }

    /// Does nothing for a while, at most until the deadline.
    pub(crate) fn pause(&self, duration: Duration) -> Result<()> {
        let end = self.deadline.min(Instant::now() + duration);
        match wait(self.cancel.as_fd(), PollFlags::IN, None, Some(end)) {
            Ok(Woken::TimedOut) => Ok(()),
            Ok(_) => Err(Error::Cancelled),
            Err(errno) => Err(self.io(errno)),
        }
    }

    pub(crate) fn timeout(&self) -> Error {
        Error::timeout(self.op, &self.peer, self.started.elapsed())
    }

    pub(crate) fn io(&self, source: impl Into<std::io::Error>) -> Error {
        Error::io(self.op, &self.peer, source)
    }
}

/// Rounded up, because a wait that ends early would only be repeated.
fn timespec(duration: Duration) -> Timespec {
    let most = Timespec { tv_sec: i64::MAX, tv_nsec: 0 };
    Timespec::try_from(duration).unwrap_or(most)
}
