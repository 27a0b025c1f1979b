//! When to look for completions again: nothing tells of them. Soon while they come, and ever later while they do not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug)]
pub(super) struct Timer {
    fd: OwnedFd,
    wait: Duration,
    armed: bool,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd, wait: SHORTEST, armed: false })
    }

    /// It fires once, after a while that depends on whether something came since the last time.
    pub(super) fn arm(&mut self, came: bool) {
        self.wait = if came { SHORTEST } else { (self.wait * 2).min(LONGEST) };
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec { tv_nsec: self.wait.subsec_nanos().into(), ..zero };
        let set = timerfd_settime(
            &self.fd,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: zero, it_value },
        );
        set.expect("the time is one");
        self.armed = true;
    }

    /// Whether it had been armed and was waited for; not any more.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.armed) {
            // Not yet is as good.
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
