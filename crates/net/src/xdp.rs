//! Transmission by AF_XDP, from guest memory: a driver with zero-copy lets the network card read it there.
//!
//! ```text
//!   chain ─► offload work (segment) ─► ranges of the UMEM ─► descriptors ─► TX ring of the interface's queue
//!              │ headers, short frames: arena, private memory      ▲           │
//!              └ frames that cannot be sent so: the tap            │ in_flight: tag
//!   used ring ◄──────────── chain whose last descriptor is complete, in any order ◄── completion ring
//! ```
//! The whole guest memory is pinned for this (`umem`), once for all pairs, and again when it changes. On any
//! failure frames go to the tap, as without AF_XDP, and AF_XDP is tried again later.
//!
//! Out of scope: receiving, XDP programs. Other programs of this host do not see the frames.

mod arena;
mod driver;
mod error_budget;
mod frame_builder;
mod in_flight;
mod orphans;
mod references;
mod socket;
mod timer;
mod transmitter;
mod tx_queue;
mod umem;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::Duration;

use rustix::net::xdp::SocketAddrXdpFlags;
use rustix::net::{AddressFamily, sockopt};
use towline_channel::ZeroCopySend;
use towline_vhost_user::GuestMemory;

use crate::PAIRS_MAX;
use crate::features;
use crate::lock::lock;
use crate::statistics::CopyReason;
use crate::sys::interface;
use crate::sys::umem_mapping::UmemMapping;
use driver::DriverFeatures;
use frame_builder::GuestReferences;
use references::PageCrossing;
use socket::{QueueId, UmemUse, UnboundSocket, XdpSocket};
use tx_queue::{QueueOptions, TxQueue};
use umem::Umem;

pub(crate) use transmitter::XdpTransmitter;

/// Bytes of a frame beyond the MTU: Ethernet header and two VLAN tags.
const LINK_HEADER_BYTES: usize = 14 + 8;
/// Time limit for a queue to become free again after a probing socket.
const PROBE_RELEASE_TIMEOUT: Duration = Duration::from_millis(200);

/// Reason for which an interface cannot be used for AF_XDP.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XdpError {
    /// The interface does not exist.
    #[error("there is no interface {name} in this network to transmit by")]
    NoInterface { name: String },
    /// A request about the interface failed.
    #[error("interface {name}: {source}")]
    Interface { name: String, source: io::Error },
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
    /// True if a manager opens the sockets, so there are no others.
    sockets_passed: bool,
    /// Unbound sockets, the next one last: those that were passed, and those whose queue was busy. Each can
    /// be bound once.
    sockets: Mutex<Vec<UnboundSocket>>,
    software_checksums: bool,
    copy_mode: CopyMode,
    zero_copy_send: ZeroCopySend,
    /// True once the driver has refused descriptors across pages of 4 KiB, even within a huge page.
    pages_scattered: AtomicBool,
    /// The registered memory, while a pair uses it.
    umem: Mutex<Weak<Umem>>,
    /// True for each pair that no connection of this process has used yet: a process that was killed may have
    /// left frames.
    unused: [AtomicBool; PAIRS_MAX],
    /// True for each pair whose last connection ended with frames in flight, until its queue is known to be
    /// free.
    orphaned: [AtomicBool; PAIRS_MAX],
}

/// Use of AF_XDP's copy mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyMode {
    /// Without zero-copy frames go by the tap, which is faster.
    Refused,
    /// A copy is used even if the driver has zero-copy.
    Required,
}

impl Xdp {
    /// Transmits by this interface: pair 0 by queue `first_queue`, each further pair by the next one.
    /// `sockets` are passed neither bound nor with a UMEM; without them, sockets are opened here. If the
    /// driver has no zero-copy, frames go by the tap ([`Xdp::with_copy_mode`]).
    ///
    /// # Errors
    /// The interface does not exist, or the sockets are of the wrong kind.
    pub fn new(name: &str, first_queue: u32, sockets: Option<Vec<OwnedFd>>) -> Result<Self, XdpError> {
        let failed = |source| XdpError::Interface { name: name.to_owned(), source };
        let index = interface::index(name).map_err(failed)?;
        let index = index.ok_or_else(|| XdpError::NoInterface { name: name.to_owned() })?;
        match &sockets {
            None => drop(UnboundSocket::open().map_err(XdpError::Open)?),
            Some(sockets) => {
                let is_xdp = |fd: &OwnedFd| sockopt::socket_domain(fd) == Ok(AddressFamily::XDP);
                if let Some(at) = sockets.iter().position(|fd| !is_xdp(fd)) {
                    return Err(XdpError::NotXdpSocket { number: at + 1 });
                }
            }
        }
        let sockets_passed = sockets.is_some();
        let sockets = sockets.unwrap_or_default().into_iter().rev().map(UnboundSocket::new).collect();
        Ok(Self {
            name: name.to_owned(),
            index: index.cast_unsigned(),
            first_queue,
            sockets_passed,
            sockets: Mutex::new(sockets),
            software_checksums: false,
            copy_mode: CopyMode::Refused,
            zero_copy_send: ZeroCopySend::Auto,
            pages_scattered: AtomicBool::new(false),
            umem: Mutex::default(),
            unused: [const { AtomicBool::new(true) }; PAIRS_MAX],
            orphaned: [const { AtomicBool::new(false) }; PAIRS_MAX],
        })
    }

    /// Computes all checksums in software, for a driver whose checksum offload is broken.
    #[must_use]
    pub fn with_software_checksums(self) -> Self {
        Self { software_checksums: true, ..self }
    }

    /// Uses the copy mode of AF_XDP, in which the kernel copies each packet, even if the driver has
    /// zero-copy.
    #[must_use]
    pub fn with_copy_mode(self) -> Self {
        Self { copy_mode: CopyMode::Required, ..self }
    }

    /// Sets which frames refer to guest memory in zero-copy mode. `Auto` sends by the tap for a driver with
    /// offloads, which a tap accepts unchanged; `On` sends for any driver; `Off` copies all frames.
    #[must_use]
    pub fn with_zero_copy_send(self, zero_copy_send: ZeroCopySend) -> Self {
        Self { zero_copy_send, ..self }
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
    /// The state of the queue cannot be determined, for instance because no socket can be opened.
    fn is_free(&self, pair: usize) -> io::Result<bool> {
        socket::is_free(self.queue(pair))
    }

    /// An unbound socket to register `memory` with, or to share a registration.
    fn take_socket(&self, memory: &Arc<GuestMemory>, umem_use: UmemUse) -> io::Result<UnboundSocket> {
        let mut sockets = lock(&self.sockets);
        // A registration cannot be changed, even if pages were since removed from that memory.
        let is_current = |umem: &Arc<Umem>| umem.is_of(memory) && umem.is_intact();
        sockets.retain(|socket| socket.registered().is_none_or(is_current));
        // A socket with a UMEM cannot share another one.
        let suits =
            |socket: &UnboundSocket| socket.registered().is_some() == (umem_use == UmemUse::Registers);
        if let Some(index) = sockets.iter().rposition(suits) {
            return Ok(sockets.remove(index));
        }
        if let Some(socket) = sockets.pop() {
            return Ok(socket);
        }
        if self.sockets_passed {
            let used_up = "all sockets that were passed have been used";
            return Err(io::Error::new(io::ErrorKind::NotFound, used_up));
        }
        UnboundSocket::open()
    }

    /// Keeps a socket that could not be bound for the next attempt: a passed one cannot be replaced, and
    /// memory that is registered with it need not be pinned again.
    fn put_back(&self, socket: UnboundSocket, error: &io::Error) {
        if is_temporary(error) || (self.sockets_passed && socket.registered().is_none()) {
            lock(&self.sockets).push(socket);
        }
    }

    /// Closes the unbound sockets that keep guest memory pinned, because that memory is about to change.
    pub(crate) fn release_memory(&self) {
        lock(&self.sockets).retain(|socket| socket.registered().is_none());
    }

    /// Binds a socket for this pair of `pairs`, and registers guest memory unless another pair has. Returns
    /// `None` while another pair is doing so. Retries while the queue is busy, for `busy_timeout` at most.
    fn bind(
        &self,
        pair: usize,
        pairs: usize,
        memory: &Arc<GuestMemory>,
        busy_timeout: Duration,
    ) -> io::Result<Option<TxQueue>> {
        let mut registered = match self.umem.try_lock() {
            Ok(registered) => registered,
            Err(TryLockError::Poisoned(registered)) => registered.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let mtu = interface::mtu(&self.name)? as usize;
        let driver = DriverFeatures::query(self.index);
        if self.copy_mode == CopyMode::Refused && driver.as_ref().is_ok_and(|driver| !driver.zero_copy) {
            return Err(self.no_zero_copy());
        }
        let driver = driver.unwrap_or_default();
        let zero_copy = driver.zero_copy && self.copy_mode == CopyMode::Refused;
        let known = registered.upgrade().filter(|umem| umem.is_of(memory));
        let umem_use = if known.is_some() { UmemUse::Shares } else { UmemUse::Registers };
        let mut socket = self.take_socket(memory, umem_use)?;
        let mut busy_timeout = busy_timeout;
        if self.sockets_passed && known.is_none() && socket.registered().is_none() {
            // Registered with a socket that is not bound in the end, this memory would cost it when memory
            // changes.
            if let Err(error) = socket::wait_until_free(self.queue(pair), busy_timeout) {
                self.put_back(socket, &error);
                return Err(error);
            }
            busy_timeout = busy_timeout.max(PROBE_RELEASE_TIMEOUT);
        }
        let register = |socket: &mut UnboundSocket| match known {
            Some(umem) if socket.registered().is_none() => Ok((umem, UmemUse::Shares)),
            _ => {
                let register = |fd: &OwnedFd, mapping: &UmemMapping, huge_pages: bool| {
                    // Metadata must be in the page of its descriptor, for which small pages of guests have no
                    // room.
                    let metadata = !zero_copy || (driver.checksum && huge_pages);
                    socket::register(fd, mapping, metadata && !self.software_checksums)
                };
                Ok((socket.register(memory, pairs, register)?, UmemUse::Registers))
            }
        };
        let mode = match self.copy_mode {
            CopyMode::Refused => SocketAddrXdpFlags::XDP_ZEROCOPY,
            CopyMode::Required => SocketAddrXdpFlags::XDP_COPY,
        };
        let bound = register(&mut socket).and_then(|(umem, umem_use)| {
            socket.bind(&umem, umem_use, mode, self.queue(pair), busy_timeout)?;
            Ok((umem, umem_use))
        });
        let (umem, umem_use) = match bound {
            Ok(bound) => bound,
            Err(error) => {
                self.put_back(socket, &error);
                let unsupported = error.raw_os_error() == Some(libc::EOPNOTSUPP);
                let refused = unsupported && self.copy_mode == CopyMode::Refused;
                return Err(if refused { self.no_zero_copy() } else { error });
            }
        };
        if umem_use == UmemUse::Registers {
            *registered = Arc::downgrade(&umem);
        }
        let socket = XdpSocket::map(socket, &umem)?;
        let scattered = self.pages_scattered.load(Relaxed);
        let options = QueueOptions {
            zero_copy_descriptors: driver.descriptors,
            zero_copy_crossing: if scattered { PageCrossing::None } else { PageCrossing::WithinHugePages },
            zero_copy_references: match self.zero_copy_send {
                ZeroCopySend::Off => GuestReferences::Forbidden(CopyReason::Setting),
                _ => GuestReferences::Allowed,
            },
            frame_bytes_max: mtu + LINK_HEADER_BYTES,
        };
        TxQueue::new(umem, socket, pair, &options).map(Some)
    }

    fn no_zero_copy(&self) -> io::Error {
        let name = &self.name;
        io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "{name} has no zero-copy, and a copy by AF_XDP is slower than the tap; --af-xdp-copy uses it nevertheless"
            ),
        )
    }
}

/// Returns true if a queue may be available later: it is busy, or its interface is down or missing.
fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EBUSY | libc::ENETDOWN | libc::ENXIO | libc::ENODEV | libc::EAGAIN)
    )
}

/// Returns true if the frames of a driver with these features should be sent by AF_XDP, because that is not slower
/// than the tap.
fn suits(copy_mode: CopyMode, zero_copy_send: ZeroCopySend, features: u64) -> bool {
    let is_chosen = copy_mode == CopyMode::Required || zero_copy_send != ZeroCopySend::Auto;
    is_chosen || features & features::CSUM == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_the_tap_sends_for_a_driver_with_offloads() {
        let offloads = features::CSUM;
        for (zero_copy_send, chosen) in
            [(ZeroCopySend::Auto, false), (ZeroCopySend::On, true), (ZeroCopySend::Off, true)]
        {
            assert!(suits(CopyMode::Refused, zero_copy_send, 0));
            assert_eq!(suits(CopyMode::Refused, zero_copy_send, offloads), chosen, "{zero_copy_send:?}");
            assert!(suits(CopyMode::Required, zero_copy_send, offloads));
        }
    }
}
