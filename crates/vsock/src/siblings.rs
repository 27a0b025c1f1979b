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
    waiting: Mutex<Vec<Incoming>>,
}

/// The most connections that wait for one guest.
const WAITING_MAX: usize = 1024;

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, waiting: Mutex::default() })
    }

    /// Leaves a connection there; beyond the limit it is dropped, which its other end sees.
    pub(crate) fn put(&self, incoming: Incoming) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < WAITING_MAX {
            waiting.push(incoming);
        }
        drop(waiting);
        self.wake();
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
pub struct Siblings {
    guests: Mutex<HashMap<u64, Member>>,
}

impl Siblings {
    /// Adds a guest. False if its context is another's.
    pub(crate) fn add(&self, cid: u64, groups: Vec<String>, mailbox: Arc<Mailbox>) -> bool {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        if guests.contains_key(&cid) {
            return false;
        }
        guests.insert(cid, (groups, mailbox));
        true
    }

    /// The other guest's mailbox, if the two have a group in common.
    pub(crate) fn find(&self, cid: u64, other: u64) -> Option<Arc<Mailbox>> {
        let guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let (groups, _) = guests.get(&cid)?;
        let (others, mailbox) = guests.get(&other)?;
        groups.iter().any(|group| others.contains(group)).then(|| Arc::clone(mailbox))
    }
}
