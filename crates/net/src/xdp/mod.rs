//! Transmission by AF_XDP, from the guest's memory: where the driver can, the device reads it there.
//!
//! ```text
//!   chain ─► segment: what there is to do ─► plan: where it lies ─► descriptors ─► the interface's queue
//!              │ headers, short packets: arena (ours)   ▲                              │
//!              └ what cannot be done so: the tap        │ ledger: tag                  ▼
//!   used ring ◄──────────── the chain whose last descriptor is back, in any order ◄── completions
//! ```
//! The whole of the guest's memory is pinned for that (`umem`), once for all pairs, and anew when it changes. Whatever goes
//! wrong, the frames go by the tap, as without all this; it is tried again after a while.
//!
//! What it is not: it receives nothing, loads no program, and frames that leave by it are seen by nobody on this host.

mod arena;
mod budget;
mod features;
mod ledger;
mod link;
mod plan;
mod prepare;
mod sender;
mod socket;
mod timer;
mod umem;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::Duration;

use rustix::net::{AddressFamily, sockopt};
use towline_vhost_user::Memory;

use crate::sys::interface;
use crate::sys::span::Span;
use features::Features;
use link::Link;
use socket::Socket;
use umem::Umem;

pub(crate) use sender::Sender;
pub use socket::Mode;

/// Bytes of a frame beside its MTU: Ethernet and two VLAN tags.
const LINK_BYTES: usize = 14 + 8;

/// Why nothing can be transmitted so.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// There is no such interface.
    #[error("there is no interface {name} in this network to transmit by")]
    NoInterface {
        /// Its name.
        name: String,
    },
    /// It cannot be asked.
    #[error("interface {name}: {source}")]
    Interface {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// No socket can be opened.
    #[error("no AF_XDP socket can be opened: {0}; it wants CAP_NET_RAW, or give open ones with --xsk-fds")]
    Open(io::Error),
    /// A descriptor that is no AF_XDP socket.
    #[error("descriptor {number} is no AF_XDP socket")]
    NoSocket {
        /// Its place among those given, from 1.
        number: usize,
    },
}

/// An interface to transmit by.
#[derive(Debug)]
pub struct Xdp {
    name: String,
    index: u32,
    first_queue: u32,
    /// Opened by a manager. Each is good for one memory of the guest's.
    given: Option<Mutex<Vec<OwnedFd>>>,
    software_checksums: bool,
    /// What is pinned now, as long as somebody uses it.
    umem: Mutex<Weak<Umem>>,
}

impl Xdp {
    /// Transmits by this interface, pair 0 by its queue `first_queue` and each other by the next one. Sockets are `given`, not
    /// bound and with nothing registered, or opened here.
    ///
    /// # Errors
    /// That it cannot be.
    pub fn new(name: &str, first_queue: u32, given: Option<Vec<OwnedFd>>) -> Result<Self, XdpError> {
        let failed = |source| XdpError::Interface { name: name.to_owned(), source };
        let index = interface::index(name).map_err(failed)?;
        let index = index.ok_or_else(|| XdpError::NoInterface { name: name.to_owned() })?;
        match &given {
            None => drop(socket::open().map_err(XdpError::Open)?),
            Some(given) => {
                let is_one = |fd: &OwnedFd| sockopt::socket_domain(fd) == Ok(AddressFamily::XDP);
                if let Some(at) = given.iter().position(|fd| !is_one(fd)) {
                    return Err(XdpError::NoSocket { number: at + 1 });
                }
            }
        }
        // The last one given first.
        let given = given.map(|given| Mutex::new(given.into_iter().rev().collect()));
        let (name, index) = (name.to_owned(), index.cast_unsigned());
        Ok(Self { name, index, first_queue, given, software_checksums: false, umem: Mutex::default() })
    }

    /// Makes all checksums here, also where the kernel or the device would: for a driver that does it wrong.
    #[must_use]
    pub fn with_software_checksums(self) -> Self {
        Self { software_checksums: true, ..self }
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The queue that this pair sends by.
    fn queue(&self, pair: usize) -> u32 {
        self.first_queue + u32::try_from(pair).expect("there are few pairs")
    }

    /// Whether this pair's queue is nobody's. An error where that cannot be found out: no socket can be opened here, for one.
    pub(crate) fn is_free(&self, pair: usize) -> io::Result<bool> {
        socket::is_free(self.index, self.queue(pair))
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        let Some(given) = &self.given else { return socket::open() };
        given.lock().unwrap_or_else(PoisonError::into_inner).pop().ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "all sockets that were given have been used")
        })
    }

    /// Pins this memory, unless another pair has, and binds a socket for this pair. `None` if another one is just about it.
    /// A queue that somebody else has, or just had, is waited for with `patience`.
    fn link(
        &self,
        (pair, pairs): (usize, usize),
        memory: &Arc<Memory>,
        patience: Duration,
    ) -> io::Result<Option<Link>> {
        let mut shared = match self.umem.try_lock() {
            Ok(shared) => shared,
            Err(TryLockError::Poisoned(shared)) => shared.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let mtu = interface::mtu(&self.name)? as usize;
        let features = Features::of(self.index).unwrap_or_default();
        let queue = self.queue(pair);
        let fd = self.socket()?;
        let known = shared.upgrade().filter(|umem| umem.is_of(memory));
        let (umem, socket) = match known {
            Some(umem) => {
                let socket = Socket::bind(fd, &umem, true, (self.index, queue), patience)?;
                (umem, socket)
            }
            None => {
                let register = |span: &Span, huge: bool| {
                    // Before each descriptor there must be room in its own page, which small pages do not have.
                    let takes = !features.zero_copy || (features.checksum && huge);
                    socket::register(&fd, span, takes && !self.software_checksums)
                };
                let umem = Arc::new(Umem::new(memory, pairs, register)?);
                let socket = Socket::bind(fd, &umem, false, (self.index, queue), patience)?;
                *shared = Arc::downgrade(&umem);
                (umem, socket)
            }
        };
        Link::new(umem, socket, (pair, features.descriptors), mtu + LINK_BYTES).map(Some)
    }
}
