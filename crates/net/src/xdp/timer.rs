//! Timer for the next poll of the completion ring, which has no event: soon while completions arrive, later
//! and later while they do not; or at a given time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(10);

/// Completions since the timer was armed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompletionProgress {
    Some,
    None,
}

/// A timer whose interval adapts to the completions.
#[derive(Debug)]
pub(super) struct CompletionTimer {
    fd: OwnedFd,
    interval: Duration,
    armed: bool,
}

impl CompletionTimer {
    pub(super) fn new() -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd, interval: SHORTEST, armed: false })
    }

    /// Lets the timer fire once.
    pub(super) fn arm(&mut self, progress: CompletionProgress) {
        self.interval = match progress {
            CompletionProgress::Some => SHORTEST,
            CompletionProgress::None => (self.interval * 2).min(LONGEST),
        };
        self.set(self.interval);
    }

    /// Lets the timer fire once at this time, or soon if that has passed.
    pub(super) fn arm_at(&mut self, time: Instant) {
        self.set(time.saturating_duration_since(Instant::now()).max(SHORTEST));
    }

    fn set(&mut self, delay: Duration) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec {
            tv_sec: i64::try_from(delay.as_secs()).expect("a delay is far below 2^63 seconds"),
            tv_nsec: delay.subsec_nanos().into(),
        };
        let set = timerfd_settime(
            &self.fd,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval: zero, it_value },
        );
        set.expect("the delay is a valid time");
        self.armed = true;
    }

    /// Drains the timer and marks it as not armed.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.armed) {
            // EAGAIN if it has not fired yet.
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }
}

impl AsFd for CompletionTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
