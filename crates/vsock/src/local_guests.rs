//! The guests of one process that may be connected with each other: those with a group in common.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::host::HostSocket;
use crate::packet::Kind;

/// A connection that one guest wants with another.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) port: u32,
    pub(crate) kind: Kind,
    /// Who wants it.
    pub(crate) cid: u64,
    pub(crate) socket: HostSocket,
}

/// Connections that wait for one guest. Those that nobody takes go with the sockets' other ends.
#[derive(Debug)]
pub(crate) struct Mailbox {
    event: OwnedFd,
    most: usize,
    waiting: Mutex<Vec<Incoming>>,
}

impl Mailbox {
    /// A mailbox for about `most` connections.
    pub(crate) fn new(most: usize) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, most, waiting: Mutex::default() })
    }

    /// About how many connections it takes; each guest leaves a [share](LocalGuests::share) of them.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Leaves a connection there. False if the same guest has left `most` already.
    pub(crate) fn put(&self, incoming: Incoming, most: usize) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let left = waiting.iter().filter(|other| other.cid == incoming.cid).count();
        if left >= most {
            return false;
        }
        waiting.push(incoming);
        drop(waiting);
        self.wake();
        true
    }

    /// Has its thread look around.
    pub(crate) fn wake(&self) {
        // It can only be full, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<Incoming> {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A guest: its groups, and where connections are left for it.
type Member = (Vec<String>, Arc<Mailbox>);

/// All guests of a process.
#[derive(Debug, Default)]
pub struct LocalGuests {
    guests: Mutex<HashMap<u64, Member>>,
}

impl LocalGuests {
    /// Adds a guest. False if its context is another's.
    pub(crate) fn add(&self, cid: u64, groups: Vec<String>, mailbox: Arc<Mailbox>) -> bool {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        if guests.contains_key(&cid) {
            return false;
        }
        guests.insert(cid, (groups, mailbox));
        true
    }

    /// The share of each other guest in `most` things of this guest's: half of them is for the host and for the guest itself,
    /// the other half is divided among the guests that have a group in common with it.
    pub(crate) fn share(&self, cid: u64, most: usize) -> usize {
        let guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((groups, _)) = guests.get(&cid) else { return 0 };
        let shares = |(others, _): &&Member| groups.iter().any(|group| others.contains(group));
        // The guest itself is one of them.
        (most / 2 / guests.values().filter(shares).count().max(1)).max(1)
    }

    /// The other guest's mailbox, if the two have a group in common.
    pub(crate) fn find(&self, cid: u64, other: u64) -> Option<Arc<Mailbox>> {
        let guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let (groups, _) = guests.get(&cid)?;
        let (others, mailbox) = guests.get(&other)?;
        groups.iter().any(|group| others.contains(group)).then(|| Arc::clone(mailbox))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostSocket;

    const MOST: usize = 100;

    #[test]
    fn each_guest_has_a_share_of_a_mailbox() {
        let local_guests = LocalGuests::default();
        let mailboxes: Vec<_> = (3..8).map(|_| Arc::new(Mailbox::new(MOST).unwrap())).collect();
        for (cid, mailbox) in (3..).zip(&mailboxes) {
            assert!(local_guests.add(cid, vec!["lab".to_owned()], Arc::clone(mailbox)));
        }
        let share = local_guests.share(3, MOST);
        assert_eq!(share, MOST / 2 / 5);
        let put = |cid| {
            let (_ours, socket) = HostSocket::pair(Kind::Stream).unwrap();
            mailboxes[0].put(Incoming { port: 1, kind: Kind::Stream, cid, socket }, share)
        };
        assert_eq!((0..2 * share).filter(|_| put(4)).count(), share);
        assert!(put(5), "another guest finds room");
        assert_eq!(mailboxes[0].take().len(), share + 1);
        assert!(put(4), "the mailbox is empty again");
    }
}
