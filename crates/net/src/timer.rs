//! A timer for a worker, among the descriptors that it waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// A timer that fires once.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Lets it fire after this time, which replaces the former one.
    pub(crate) fn set(&self, delay: Duration) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // 0 would disarm it.
        let delay = delay.max(Duration::from_nanos(1));
        let it_value = Timespec::try_from(delay).expect("a delay is far below 2^63 seconds");
        let value = Itimerspec { it_interval: zero, it_value };
        let set = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value);
        set.expect("the delay is a valid time");
    }

    /// Makes it unreadable, if it has fired.
    pub(crate) fn clear(&self) {
        // EAGAIN if it has not fired yet.
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
