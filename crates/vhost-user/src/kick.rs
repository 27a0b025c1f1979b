//! A ring's kick descriptor, which the frontend chose and shares: it may be anything that can be polled.
//!
//! An eventfd that is drained stays silent until the next kick. Others do not: `/dev/null` is always readable, an eventfd in
//! semaphore mode counts down one by one, a timer fires for ever. So a descriptor that cannot be drained is dropped, and one that
//! wakes the thread again and again while the driver's available index stays where it is is polled at intervals only.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

/// Kicks in a row without a change of the available index, behind which they are taken for useless. A driver's kick may well come
/// after its entry was found without it, but not so often.
const USELESS_KICKS_MAX: u32 = 256;
/// How long such a descriptor is not polled.
const PAUSE: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: OwnedFd,
    /// The driver's available index at the last kick, and how many kicks it did not move at.
    index: u16,
    useless: u32,
    paused_until: Option<Instant>,
}

/// What a drained kick turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drained {
    /// As it should.
    Kick,
    /// From now on it is polled at intervals.
    Paused,
    /// It is readable and gives nothing: no eventfd.
    Unusable,
}

impl Kick {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, index: 0, useless: 0, paused_until: None }
    }

    /// The descriptor.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// What to poll, or how long it is still paused.
    pub(crate) fn polled(&self, now: impl FnOnce() -> Instant) -> Result<&OwnedFd, Duration> {
        match self.paused_until.map(|until| until.saturating_duration_since(now())) {
            Some(left) if !left.is_zero() => Err(left),
            _ => Ok(&self.fd),
        }
    }

    /// Drains it, after `poll` found it readable; `index` is the driver's available index.
    pub(crate) fn drain(&mut self, index: u16) -> Drained {
        let mut count = [0; 8];
        match rustix::io::read(&self.fd, &mut count) {
            Ok(8) if count != [0; 8] => {}
            // Another ring may share it and have been quicker.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => return Drained::Unusable,
        }
        if std::mem::replace(&mut self.index, index) != index {
            (self.useless, self.paused_until) = (0, None);
            return Drained::Kick;
        }
        self.useless = self.useless.saturating_add(1);
        if self.useless < USELESS_KICKS_MAX {
            return Drained::Kick;
        }
        let first = self.useless == USELESS_KICKS_MAX;
        self.paused_until = Some(Instant::now() + PAUSE);
        if first { Drained::Paused } else { Drained::Kick }
    }
}

/// Handles what `poll` found of the kick descriptor of a ring whose available index is `index`; drops it if it is of no use.
pub(crate) fn polled(kick: &mut Option<Kick>, events: PollFlags, index: u16, ring: usize) {
    let Some(polled) = kick else { return };
    let drained = match events {
        events if events.intersects(PollFlags::ERR | PollFlags::NVAL | PollFlags::HUP) => Drained::Unusable,
        events if events.contains(PollFlags::IN) => polled.drain(index),
        _ => return,
    };
    match drained {
        Drained::Kick => {}
        Drained::Paused => tracing::warn!(
            ring,
            "it is kicked again and again and nothing is made available; its kicks are polled at intervals now"
        ),
        Drained::Unusable => {
            tracing::warn!(
                ring,
                "its kick descriptor is no eventfd that can be read; it is not polled any more"
            );
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
    fn what_cannot_be_drained_is_unusable() {
        for path in ["/dev/null", "/dev/zero", "/proc/self/maps"] {
            let mut kick = Kick::new(file(path));
            let drained: Vec<_> = (0..2).map(|_| kick.drain(0)).collect();
            // The file in /proc has more than eight bytes, and any eight of them may be a count; it ends some time.
            assert!(drained.contains(&Drained::Unusable) || path.starts_with("/proc"), "{path}: {drained:?}");
        }
    }

    #[test]
    fn a_kick_that_comes_for_nothing_is_paused_and_one_that_does_not_is_not() {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut kick = Kick::new(eventfd(u32::MAX, flags | EventfdFlags::SEMAPHORE).unwrap());
        let drained: Vec<_> = (1..USELESS_KICKS_MAX).map(|_| kick.drain(0)).collect();
        assert!(drained.iter().all(|drained| *drained == Drained::Kick));
        assert!(kick.polled(Instant::now).is_ok());
        assert_eq!(kick.drain(0), Drained::Paused);
        let until = kick.paused_until.unwrap();
        assert_eq!(kick.polled(|| until - Duration::from_millis(1)).unwrap_err(), Duration::from_millis(1));
        assert!(kick.polled(|| until).is_ok(), "from then on it is polled, and nothing is waited for");
        assert_eq!(kick.drain(0), Drained::Kick, "reported once");
        assert!(kick.paused_until.unwrap() >= until);
        assert_eq!((kick.drain(1), kick.paused_until), (Drained::Kick, None));
        let drained: Vec<_> = (2..2000).map(|index| kick.drain(index)).collect();
        assert!(drained.iter().all(|drained| *drained == Drained::Kick));
    }
}
