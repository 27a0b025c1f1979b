//! Transmission by AF_XDP, from guest memory: a driver with zero-copy lets the network card read it there.
//!
//! ```text
//!   chain ─► offload work (segment) ─► ranges of the UMEM ─► descriptors ─► TX ring of the interface's queue
//!              │ headers, short frames: arena, private memory      ▲           │
//!              └ frames that cannot be sent so: the tap            │ in_flight: tag
//!   used ring ◄──────────── chain whose last descriptor is complete, in any order ◄── completion ring
//! ```
//! The whole guest memory is pinned for this (`umem`), once for all pairs, and again when it changes. On any failure frames
//! go to the tap, as without AF_XDP, and AF_XDP is tried again later.
//!
//! Out of scope: receiving, XDP programs. Other programs of this host do not see the frames.

mod arena;
mod driver;
mod error_budget;
mod frame_builder;
mod in_flight;
mod references;
mod socket;
mod timer;
mod transmitter;
mod tx_queue;
mod umem;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::Duration;

use rustix::net::{AddressFamily, sockopt};
use towline_vhost_user::Memory;

use crate::lock::lock;
use crate::sys::interface;
use crate::sys::umem_mapping::UmemMapping;
use driver::DriverFeatures;
use socket::{QueueId, UmemUse, XdpSocket};
use tx_queue::TxQueue;
use umem::Umem;

pub use socket::TransmitMode;
pub(crate) use transmitter::XdpTransmitter;

/// Bytes of a frame beyond the MTU: Ethernet header and two VLAN tags.
const LINK_HEADER_BYTES: usize = 14 + 8;

/// Reason why an interface cannot be used for AF_XDP.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XdpError {
    /// The interface does not exist.
    #[error("there is no interface {name} in this network to transmit by")]
    NoInterface {
        /// Name of the interface.
        name: String,
    },
    /// A request about the interface failed.
    #[error("interface {name}: {source}")]
    Interface {
        /// Name of the interface.
        name: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// No socket can be opened.
    #[error("cannot open an AF_XDP socket: {0}; run with CAP_NET_RAW, or pass open sockets with --xsk-fds")]
    Open(io::Error),
    /// A descriptor is not an AF_XDP socket.
    #[error("descriptor {number} is not an AF_XDP socket")]
    NotXdpSocket {
        /// Position of the descriptor in the list, from 1.
        number: usize,
    },
}

/// An interface to transmit by.
#[derive(Debug)]
pub struct Xdp {
    name: String,
    index: u32,
    first_queue: u32,
    /// Sockets that a manager opened, the first one last. Each can be bound once.
    sockets: Option<Mutex<Vec<OwnedFd>>>,
    software_checksums: bool,
    /// The registered memory, while a pair uses it.
    umem: Mutex<Weak<Umem>>,
}

impl Xdp {
    /// Transmits by this interface: pair 0 by queue `first_queue`, each further pair by the next one. `sockets` are passed
    /// neither bound nor with a UMEM; without them, sockets are opened here.
    ///
    /// # Errors
    /// The interface does not exist, or there are no sockets of the right kind.
    pub fn new(name: &str, first_queue: u32, sockets: Option<Vec<OwnedFd>>) -> Result<Self, XdpError> {
        let failed = |source| XdpError::Interface { name: name.to_owned(), source };
        let index = interface::index(name).map_err(failed)?;
        let index = index.ok_or_else(|| XdpError::NoInterface { name: name.to_owned() })?;
        match &sockets {
            None => drop(socket::open().map_err(XdpError::Open)?),
            Some(sockets) => {
                let is_xdp = |fd: &OwnedFd| sockopt::socket_domain(fd) == Ok(AddressFamily::XDP);
                if let Some(at) = sockets.iter().position(|fd| !is_xdp(fd)) {
                    return Err(XdpError::NotXdpSocket { number: at + 1 });
                }
            }
        }
        let sockets = sockets.map(|sockets| Mutex::new(sockets.into_iter().rev().collect()));
        let (name, index) = (name.to_owned(), index.cast_unsigned());
        Ok(Self { name, index, first_queue, sockets, software_checksums: false, umem: Mutex::default() })
    }

    /// Computes all checksums in software, for a driver whose checksum offload is broken.
    #[must_use]
    pub fn with_software_checksums(self) -> Self {
        Self { software_checksums: true, ..self }
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface's queue of a pair.
    fn queue(&self, pair: usize) -> QueueId {
        let queue = self.first_queue + u32::try_from(pair).expect("there are at most 128 pairs");
        QueueId { interface: self.index, queue }
    }

    /// Returns true if no socket is bound to this pair's queue.
    ///
    /// # Errors
    /// This cannot be determined, for instance because no socket can be opened.
    pub(crate) fn is_free(&self, pair: usize) -> io::Result<bool> {
        socket::is_free(self.queue(pair))
    }

    /// An unbound socket: the next one of those that were passed, or a new one.
    fn socket(&self) -> io::Result<OwnedFd> {
        let Some(sockets) = &self.sockets else { return socket::open() };
        let exhausted =
            || io::Error::new(io::ErrorKind::NotFound, "all sockets that were passed have been used");
        lock(sockets).pop().ok_or_else(exhausted)
    }

    /// Binds a socket for this pair of `pairs`, and registers guest memory unless another pair has. Returns `None` while
    /// another pair is doing so. Retries while the queue is busy, for `busy_timeout` at most.
    fn bind(
        &self,
        pair: usize,
        pairs: usize,
        memory: &Arc<Memory>,
        busy_timeout: Duration,
    ) -> io::Result<Option<TxQueue>> {
        let mut registered = match self.umem.try_lock() {
            Ok(registered) => registered,
            Err(TryLockError::Poisoned(registered)) => registered.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let mtu = interface::mtu(&self.name)? as usize;
        let driver = DriverFeatures::query(self.index).unwrap_or_default();
        let queue = self.queue(pair);
        let fd = self.socket()?;
        let known = registered.upgrade().filter(|umem| umem.is_of(memory));
        let (umem, socket) = if let Some(umem) = known {
            let socket = XdpSocket::bind(fd, &umem, UmemUse::Shares, queue, busy_timeout)?;
            (umem, socket)
        } else {
            let register = |mapping: &UmemMapping, huge_pages: bool| {
                // Metadata has to be in the page of its descriptor, for which small pages of guests have no room.
                let metadata = !driver.zero_copy || (driver.checksum && huge_pages);
                socket::register(&fd, mapping, metadata && !self.software_checksums)
            };
            let umem = Arc::new(Umem::new(memory, pairs, register)?);
            let socket = XdpSocket::bind(fd, &umem, UmemUse::Registers, queue, busy_timeout)?;
            *registered = Arc::downgrade(&umem);
            (umem, socket)
        };
        TxQueue::new(umem, socket, pair, driver.descriptors, mtu + LINK_HEADER_BYTES).map(Some)
    }
}
