//! A ring's kick descriptor. The frontend chose it and shares it, so it may be anything that can be polled.
//!
//! A drained eventfd is not readable until the next kick. Other descriptors are: `/dev/null` always, an
//! eventfd in semaphore mode until it has counted down, a timer forever. So a descriptor that cannot be
//! drained is dropped, and one that keeps waking the thread while the driver's available index does not move
//! is polled only at intervals.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::poll::PollFlags;

/// Consecutive kicks without a new available index after which they count as spurious. A driver's kick may
/// well arrive after its entry was found without it, but not that often.
const SPURIOUS_KICKS_MAX: u32 = 256;
/// Maximum kicks counted per read of the eventfd.
const KICKS_MAX: u64 = 1 << 16;
/// Interval at which a descriptor with spurious kicks is polled.
const PAUSE: Duration = Duration::from_millis(20);

/// A kick descriptor.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: OwnedFd,
    /// The driver's available index at the last kick.
    avail_idx: u16,
    /// Consecutive kicks without a new available index.
    spurious: u32,
    /// Kicks since [`Kick::take_count`].
    count: u64,
    paused_until: Option<Instant>,
}

/// Result of [`Kick::drain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KickState {
    /// A kick.
    Kick,
    /// From now on the descriptor is polled at intervals.
    Paused,
    /// The descriptor is readable but is not an eventfd.
    Unusable,
}

impl Kick {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, avail_idx: 0, spurious: 0, count: 0, paused_until: None }
    }

    /// Descriptor to poll, or the remaining time for which it is paused.
    pub(crate) fn poll_fd(&self, now: impl FnOnce() -> Instant) -> Result<&OwnedFd, Duration> {
        match self.paused_until.map(|until| until.saturating_duration_since(now())) {
            Some(left) if !left.is_zero() => Err(left),
            _ => Ok(&self.fd),
        }
    }

    /// Returns the number of kicks since the last call.
    pub(crate) fn take_count(&mut self) -> u64 {
        std::mem::take(&mut self.count)
    }

    /// Drains the descriptor after `poll` found it readable. `avail_idx` is the driver's available index.
    pub(crate) fn drain(&mut self, avail_idx: u16) -> KickState {
        let mut count = [0; 8];
        match rustix::io::read(&self.fd, &mut count) {
            // Each kick adds 1 to an eventfd. Any process with the descriptor may add more.
            Ok(8) if count != [0; 8] => {
                self.count = self.count.saturating_add(u64::from_ne_bytes(count).min(KICKS_MAX));
            }
            // Another ring may share the descriptor and have drained it first.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => return KickState::Unusable,
        }
        if std::mem::replace(&mut self.avail_idx, avail_idx) != avail_idx {
            self.spurious = 0;
            self.paused_until = None;
            return KickState::Kick;
        }
        self.spurious = self.spurious.saturating_add(1);
        if self.spurious < SPURIOUS_KICKS_MAX {
            return KickState::Kick;
        }
        self.paused_until = Some(Instant::now() + PAUSE);
        if self.spurious == SPURIOUS_KICKS_MAX { KickState::Paused } else { KickState::Kick }
    }
}

/// Handles events of a ring's kick descriptor, and drops an unusable one. `avail_idx` is the driver's
/// available index.
pub(crate) fn handle_events(kick: &mut Option<Kick>, events: PollFlags, avail_idx: u16, ring: usize) {
    let Some(polled) = kick else { return };
    let drained = if events.intersects(PollFlags::ERR | PollFlags::NVAL | PollFlags::HUP) {
        KickState::Unusable
    } else if events.contains(PollFlags::IN) {
        polled.drain(avail_idx)
    } else {
        return;
    };
    match drained {
        KickState::Kick => {}
        KickState::Paused => {
            tracing::warn!(ring, "spurious kicks without available descriptors; polling at intervals");
        }
        KickState::Unusable => {
            tracing::warn!(ring, "the kick descriptor is not a readable eventfd; no longer polling it");
            *kick = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn file(path: &str) -> OwnedFd {
        std::fs::File::open(path).unwrap().into()
    }

    #[test]
    fn a_descriptor_that_cannot_be_drained_is_unusable() {
        for path in ["/dev/null", "/dev/zero", "/proc/self/maps"] {
            let mut kick = Kick::new(file(path));
            let drained: Vec<_> = (0..2).map(|_| kick.drain(0)).collect();
            // The file in /proc has more than eight bytes, and any eight of them may be a count.
            assert!(
                drained.contains(&KickState::Unusable) || path.starts_with("/proc"),
                "{path}: {drained:?}"
            );
        }
    }

    #[test]
    fn kicks_between_two_looks_are_counted() {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).unwrap();
        let driver = fd.try_clone().unwrap();
        let mut kick = Kick::new(fd);
        for kicks in [1u64, 5, u64::MAX - 1] {
            rustix::io::write(&driver, &kicks.to_ne_bytes()).unwrap();
            assert_eq!(kick.drain(kicks as u16), KickState::Kick);
            assert_eq!(kick.take_count(), kicks.min(KICKS_MAX));
        }
        // Drained by another ring that shares it.
        assert_eq!((kick.drain(0), kick.take_count()), (KickState::Kick, 0));
    }

    #[test]
    fn only_spurious_kicks_are_paused() {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut kick = Kick::new(eventfd(u32::MAX, flags | EventfdFlags::SEMAPHORE).unwrap());
        let drained: Vec<_> = (1..SPURIOUS_KICKS_MAX).map(|_| kick.drain(0)).collect();
        assert!(drained.iter().all(|drained| *drained == KickState::Kick));
        assert!(kick.poll_fd(Instant::now).is_ok());
        assert_eq!(kick.drain(0), KickState::Paused);
        let until = kick.paused_until.unwrap();
        assert_eq!(kick.poll_fd(|| until - Duration::from_millis(1)).unwrap_err(), Duration::from_millis(1));
        assert!(kick.poll_fd(|| until).is_ok(), "it is polled again at this instant");
        assert_eq!(kick.drain(0), KickState::Kick, "the pause is reported once");
        assert!(kick.paused_until.unwrap() >= until);
        assert_eq!((kick.drain(1), kick.paused_until), (KickState::Kick, None));
        let drained: Vec<_> = (2..2000).map(|index| kick.drain(index)).collect();
        assert!(drained.iter().all(|drained| *drained == KickState::Kick));
    }
}
