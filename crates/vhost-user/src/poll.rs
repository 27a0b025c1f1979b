//! Descriptors that a worker waits for besides its queues, in types of this crate.

use std::fmt;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags as Flags};

bitflags::bitflags! {
    /// Events of a descriptor, as in `poll(2)`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct PollFlags: u16 {
        /// Readable (`POLLIN`).
        const IN = Flags::IN.bits();
        /// Writable (`POLLOUT`).
        const OUT = Flags::OUT.bits();
        /// The peer of a stream socket closed its writing end (`POLLRDHUP`).
        const RDHUP = Flags::RDHUP.bits();
        /// Error (`POLLERR`); reported without being requested.
        const ERR = Flags::ERR.bits();
        /// Hangup (`POLLHUP`); reported without being requested.
        const HUP = Flags::HUP.bits();
        /// Not an open descriptor (`POLLNVAL`); reported without being requested.
        const NVAL = Flags::NVAL.bits();
    }
}

/// Descriptors for one call of `poll(2)`, in the order in which they were added.
#[derive(Default)]
pub struct PollSet<'fd> {
    fds: Vec<PollFd<'fd>>,
}

impl fmt::Debug for PollSet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").field("len", &self.fds.len()).finish()
    }
}

impl<'fd> PollSet<'fd> {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a descriptor and the events to wait for.
    pub fn add(&mut self, fd: &'fd impl AsFd, events: PollFlags) {
        self.fds.push(PollFd::new(fd, Flags::from_bits_retain(events.bits())));
    }

    /// Number of descriptors in the set.
    pub fn len(&self) -> usize {
        self.fds.len()
    }

    /// Returns true if the set has no descriptor.
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [PollFd<'fd>] {
        &mut self.fds
    }

    /// Events that the last `poll` reported, by descriptor.
    pub(crate) fn events(&self) -> impl Iterator<Item = PollFlags> {
        self.fds.iter().map(|fd| PollFlags::from_bits_retain(fd.revents().bits()))
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{Timespec, poll};

    use super::*;

    #[test]
    fn events_are_reported_by_descriptor() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (idle, kept) = rustix::pipe::pipe().unwrap();
        let mut set = PollSet::new();
        set.add(&idle, PollFlags::IN);
        set.add(&writer, PollFlags::OUT);
        set.add(&reader, PollFlags::IN);
        assert_eq!((set.len(), set.is_empty()), (3, false));
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(set.as_mut_slice(), Some(&now)).unwrap(), 1);
        let events: Vec<_> = set.events().collect();
        assert_eq!(events, [PollFlags::empty(), PollFlags::OUT, PollFlags::empty()]);
        drop(kept);
    }
}
