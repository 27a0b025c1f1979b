//! The guests of one process that may connect to each other: those with a group in common.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};

use crate::host::socket::HostSocket;
use crate::lock::lock;

/// A connection to a port of the guest that waits to be opened.
#[derive(Debug)]
pub(crate) struct IncomingConnection {
    /// Port of the guest.
    pub(crate) port: u32,
    /// CID of the peer.
    pub(crate) cid: u64,
    pub(crate) socket: HostSocket,
}

/// Connections of other guests that wait to be accepted by one guest. If none accepts them, they are closed
/// with the queue.
#[derive(Debug)]
pub(crate) struct AcceptQueue {
    event: OwnedFd,
    capacity: usize,
    waiting: Mutex<Vec<IncomingConnection>>,
}

impl AcceptQueue {
    /// Creates a queue for about `capacity` connections.
    pub(crate) fn new(capacity: usize) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, capacity, waiting: Mutex::default() })
    }

    /// Returns the approximate maximum length; each guest has a [share](LocalGuests::share) of it.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Appends a connection. Returns false if the same guest has `share` connections in the queue.
    pub(crate) fn push(&self, incoming: IncomingConnection, share: usize) -> bool {
        let mut waiting = lock(&self.waiting);
        let queued = waiting.iter().filter(|other| other.cid == incoming.cid).count();
        if queued >= share {
            return false;
        }
        waiting.push(incoming);
        drop(waiting);
        self.wake();
        true
    }

    /// Wakes the guest's worker.
    pub(crate) fn wake(&self) {
        // It fails only if the counter is at its maximum, and then the descriptor is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Removes all connections.
    pub(crate) fn take_all(&self) -> Vec<IncomingConnection> {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        std::mem::take(&mut *lock(&self.waiting))
    }
}

impl AsFd for AcceptQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A guest of the process.
#[derive(Debug)]
struct Member {
    groups: Vec<String>,
    queue: Arc<AcceptQueue>,
}

impl Member {
    fn shares_group(&self, other: &Self) -> bool {
        self.groups.iter().any(|group| other.groups.contains(group))
    }
}

/// All guests of a process.
#[derive(Debug, Default)]
pub struct LocalGuests {
    guests: Mutex<HashMap<u64, Member>>,
}

impl LocalGuests {
    /// Registers a guest. Returns false if its CID is taken.
    pub(crate) fn register(&self, cid: u64, groups: Vec<String>, queue: Arc<AcceptQueue>) -> bool {
        let mut guests = lock(&self.guests);
        if guests.contains_key(&cid) {
            return false;
        }
        guests.insert(cid, Member { groups, queue });
        true
    }

    /// Returns the share of each other guest in `total` resources of this guest: half of them is reserved for
    /// the host and the guest itself, the other half is divided equally among the guests that have a group in
    /// common with it.
    pub(crate) fn share(&self, cid: u64, total: usize) -> usize {
        let guests = lock(&self.guests);
        let Some(guest) = guests.get(&cid) else { return 0 };
        // The guest itself is one of them.
        let members = guests.values().filter(|other| guest.shares_group(other)).count();
        (total / 2 / members.max(1)).max(1)
    }

    /// Returns the accept queue of the guest `other`, if the two have a group in common.
    pub(crate) fn accept_queue(&self, cid: u64, other: u64) -> Option<Arc<AcceptQueue>> {
        let guests = lock(&self.guests);
        let (guest, other) = (guests.get(&cid)?, guests.get(&other)?);
        guest.shares_group(other).then(|| Arc::clone(&other.queue))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::socket::HostSocket;
    use crate::packet::SocketType;

    const CAPACITY: usize = 100;

    #[test]
    fn each_guest_has_a_share_of_an_accept_queue() {
        let guests = LocalGuests::default();
        let queues: Vec<_> = (3..8).map(|_| Arc::new(AcceptQueue::new(CAPACITY).unwrap())).collect();
        for (cid, queue) in (3..).zip(&queues) {
            assert!(guests.register(cid, vec!["lab".to_owned()], Arc::clone(queue)));
        }
        let share = guests.share(3, CAPACITY);
        assert_eq!(share, CAPACITY / 2 / 5);
        let push = |cid| {
            let (_ours, socket) = HostSocket::pair(SocketType::Stream).unwrap();
            queues[0].push(IncomingConnection { port: 1, cid, socket }, share)
        };
        assert_eq!((0..2 * share).filter(|_| push(4)).count(), share);
        assert!(push(5), "another guest's share is full too");
        assert_eq!(queues[0].take_all().len(), share + 1);
        assert!(push(4), "the queue is empty again");
    }
}
