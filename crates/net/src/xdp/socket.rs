//! AF_XDP sockets that only transmit: opened here or by a manager, registered with a UMEM, bound, woken up.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XdpMmapOffsets, XdpOptionsFlags,
    XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, send, socket_with, sockopt};

use towline_vhost_user::GuestMemory;

use super::driver;
use super::umem::{BoundSocket, Umem};
use crate::sys::umem_mapping::UmemMapping;
use crate::sys::xsk::{CompletionRing, TxRing};

/// Entries of a TX ring.
pub(super) const TX_ENTRIES: u32 = 2048;
/// Entries of a completion ring, and maximum number of descriptors in flight, so none waits for room in it.
pub(super) const COMPLETION_ENTRIES: u32 = 4096;
/// Entries of the fill ring, which is required although nothing is received.
const FILL_ENTRIES: u32 = 64;
/// Maximum number of bytes of a descriptor with its headroom.
pub(super) const CHUNK_BYTES: u32 = 4096;
/// Size of `struct xsk_tx_metadata`: flags, a union of 16 bytes.
pub(super) const METADATA_BYTES: u32 = 24;
/// Send buffer in copy mode; the default is 208 KiB.
const SEND_BUFFER_BYTES: usize = 4 << 20;
/// Interval between attempts to bind to a busy queue.
const BUSY_INTERVAL: Duration = Duration::from_millis(2);
/// Size of the UMEM that a probe of a queue registers.
const PROBE_BYTES: usize = 4096;

/// A queue of an interface.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueId {
    /// Index of the interface.
    pub(super) interface: u32,
    pub(super) queue: u32,
}

/// Relation of a socket to its UMEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UmemUse {
    /// The UMEM is registered with this socket.
    Registers,
    /// The UMEM is registered with another socket, which is bound (`XDP_SHARED_UMEM`).
    Shares,
}

/// A socket that is not bound. A UMEM and the sizes of the rings can be set once; after a failed attempt to
/// bind they stay.
#[derive(Debug)]
pub(super) struct UnboundSocket {
    fd: OwnedFd,
    umem: Option<Arc<Umem>>,
    has_rings: bool,
}

/// A bound socket.
#[derive(Debug)]
pub(super) struct XdpSocket {
    pub(super) tx: TxRing,
    pub(super) completion: CompletionRing,
    // Dropped after the rings: the kernel releases the queue once they are unmapped and this is closed.
    bound: BoundSocket,
    pub(super) zero_copy: bool,
    /// True if a packet may have several descriptors (`XDP_USE_SG`).
    pub(super) scatter_gather: bool,
}

fn open() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

impl UnboundSocket {
    /// A socket of which nothing is set.
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, umem: None, has_rings: false }
    }

    /// Opens a socket.
    pub(super) fn open() -> io::Result<Self> {
        open().map(Self::new)
    }

    /// The UMEM that is registered with this socket.
    pub(super) fn registered(&self) -> Option<&Arc<Umem>> {
        self.umem.as_ref()
    }

    /// Registers guest memory, unless that is done. `register` registers a mapping, as in [`Umem::new`].
    pub(super) fn register(
        &mut self,
        memory: &Arc<GuestMemory>,
        pairs: usize,
        register: impl FnOnce(&OwnedFd, &UmemMapping, bool) -> io::Result<u32>,
    ) -> io::Result<Arc<Umem>> {
        if let Some(umem) = &self.umem {
            return Ok(Arc::clone(umem));
        }
        let umem = Umem::new(memory, pairs, |mapping, huge_pages| register(&self.fd, mapping, huge_pages))?;
        Ok(Arc::clone(self.umem.insert(Arc::new(umem))))
    }

    /// Binds the socket to a queue, in this mode. Retries while the queue is busy, for `busy_timeout` at most.
    pub(super) fn bind(
        &mut self,
        umem: &Arc<Umem>,
        umem_use: UmemUse,
        mode: SocketAddrXdpFlags,
        queue: QueueId,
        busy_timeout: Duration,
    ) -> io::Result<()> {
        if !self.has_rings {
            // Fails without CAP_NET_ADMIN; the default is used then.
            let _ = sockopt::set_socket_send_buffer_size_force(&self.fd, SEND_BUFFER_BYTES);
            set_ring_sizes(&self.fd, TX_ENTRIES, COMPLETION_ENTRIES)?;
            self.has_rings = true;
        }
        if umem_use == UmemUse::Registers {
            umem.scatter_gather.store(bind_in_mode(&self.fd, mode, queue, busy_timeout)?, Relaxed);
            return Ok(());
        }
        let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, queue.interface, queue.queue);
        let shares = |other: &OwnedFd| {
            let shared_umem_fd = other.as_fd();
            bind(&self.fd, &SocketAddrXdpWithSharedUmem { addr: addr.clone(), shared_umem_fd })
        };
        // EAGAIN if the last one was closed in between: the next attempt registers the UMEM again.
        let shared = retry_while_busy(busy_timeout, || {
            umem.with_bound(shares).unwrap_or(Err(rustix::io::Errno::AGAIN))
        });
        Ok(shared?)
    }
}

/// Registers a mapping as the UMEM of a socket, which pins it. Returns the length of the metadata before each
/// descriptor's data; 0 if `metadata` is false or the kernel does not support it (before 6.8).
pub(super) fn register(fd: &OwnedFd, mapping: &UmemMapping, metadata: bool) -> io::Result<u32> {
    let try_with = |flags: u32, tx_metadata_len: u32| {
        let flags = XdpUmemRegFlags::from_bits_retain(libc::XDP_UMEM_UNALIGNED_CHUNK_FLAG | flags);
        let (addr, len, chunk_size) = (mapping.address(), mapping.len() as u64, CHUNK_BYTES);
        sockopt::set_xdp_umem_reg(
            fd,
            XdpUmemReg { addr, len, chunk_size, headroom: 0, flags, tx_metadata_len },
        )
    };
    if metadata {
        match try_with(libc::XDP_UMEM_TX_METADATA_LEN, METADATA_BYTES) {
            Ok(()) => return Ok(METADATA_BYTES),
            Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(try_with(0, 0).map(|()| 0)?)
}

impl XdpSocket {
    /// Maps the rings of a socket that was bound to a queue with this UMEM.
    pub(super) fn map(socket: UnboundSocket, umem: &Arc<Umem>) -> io::Result<Self> {
        let fd = socket.fd;
        let XdpMmapOffsets { tx, cr, .. } = sockopt::xdp_mmap_offsets(&fd)?;
        let options = sockopt::xdp_options(&fd)?;
        Ok(Self {
            tx: TxRing::map(fd.as_fd(), tx, TX_ENTRIES)?,
            completion: CompletionRing::map(fd.as_fd(), cr, COMPLETION_ENTRIES)?,
            zero_copy: options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY),
            scatter_gather: umem.scatter_gather.load(Relaxed),
            bound: umem.add_bound(fd),
        })
    }

    /// Makes the kernel send the published descriptors.
    pub(super) fn wake_up(&self) -> io::Result<()> {
        Ok(send(&self.bound, &[], SendFlags::DONTWAIT).map(drop)?)
    }

    /// Number of descriptors that the kernel discarded as invalid.
    pub(super) fn invalid_descriptors(&self) -> u64 {
        sockopt::xdp_statistics(&self.bound).map_or(0, |statistics| statistics.tx_invalid_descs)
    }
}

fn set_ring_sizes(fd: &OwnedFd, tx: u32, completion: u32) -> io::Result<()> {
    sockopt::set_xdp_umem_fill_ring_size(fd, FILL_ENTRIES)?;
    sockopt::set_xdp_umem_completion_ring_size(fd, completion)?;
    Ok(sockopt::set_xdp_tx_ring_size(fd, tx)?)
}

/// Returns true if no socket is bound to a queue, by binding one for a moment. Frames of a socket that was
/// closed are then no longer read: the kernel removes a socket from the driver before another one can be
/// bound.
pub(super) fn is_free(queue: QueueId) -> io::Result<bool> {
    let (fd, mapping) = (open()?, UmemMapping::new(PROBE_BYTES, PROBE_BYTES, PROBE_BYTES, PROBE_BYTES)?);
    register(&fd, &mapping, false)?;
    set_ring_sizes(&fd, FILL_ENTRIES, FILL_ENTRIES)?;
    match bind(&fd, &SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, queue.interface, queue.queue)) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::BUSY) => Ok(false),
        // The sockets of an interface are released with it.
        Err(rustix::io::Errno::NODEV) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// Waits until no socket is bound to a queue, for `timeout` at most. If that cannot be determined (without
/// CAP_NET_RAW before Linux 6.15), it is assumed.
///
/// # Errors
/// EBUSY: a socket is still bound to it.
pub(super) fn wait_until_free(queue: QueueId, timeout: Duration) -> io::Result<()> {
    let is_busy = || match is_free(queue) {
        Ok(is_free) => !is_free,
        Err(_) => driver::has_socket(queue.interface, queue.queue).unwrap_or(false),
    };
    let probe = || if is_busy() { Err(rustix::io::Errno::BUSY) } else { Ok(()) };
    Ok(retry_while_busy(timeout, probe)?)
}

/// Binds in this mode. Returns true if the driver supports several descriptors per packet.
fn bind_in_mode(
    fd: &OwnedFd,
    mode: SocketAddrXdpFlags,
    queue: QueueId,
    busy_timeout: Duration,
) -> io::Result<bool> {
    use SocketAddrXdpFlags as F;
    let mut failed = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    // Without several descriptors: some drivers, and kernels before 6.6.
    for scatter_gather in [true, false] {
        let flags = mode | if scatter_gather { F::XDP_USE_SG } else { F::empty() } | F::XDP_USE_NEED_WAKEUP;
        let address = SocketAddrXdp::new(flags, queue.interface, queue.queue);
        match retry_while_busy(busy_timeout, || bind(fd, &address)) {
            Ok(()) => return Ok(scatter_gather),
            // Not supported by the driver, or, with EINVAL, a flag that the kernel does not know.
            Err(errno @ (rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL)) => failed = errno.into(),
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(failed)
}

/// Retries while a queue is busy: it is released some time after its last socket was closed, and no event
/// reports it.
fn retry_while_busy(timeout: Duration, bind: impl Fn() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        match bind() {
            Err(rustix::io::Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(BUSY_INTERVAL),
            outcome => return outcome,
        }
    }
}
