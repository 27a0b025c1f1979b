//! AF_XDP sockets that only transmit: opened here or by a manager, registered, bound, called.

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

use super::umem::{Bound, Umem};
use crate::sys::span::Span;
use crate::sys::xsk::{Completion, Transmit};

/// Descriptors of a transmit ring.
pub(super) const TRANSMIT_DESCRIPTORS: u32 = 2048;
/// Descriptors that may be under way: what the completion ring holds, so that none has to wait for room in it.
pub(super) const COMPLETIONS: u32 = 4096;
/// Nothing is received, but there has to be one.
const FILLS: u32 = 64;
/// The most bytes of a descriptor with what stands before it.
pub(super) const CHUNK_BYTES: u32 = 4096;
/// `struct xsk_tx_metadata`: flags, a union of 16 bytes.
pub(super) const METADATA_BYTES: u32 = 24;
/// What may wait in the device in copy mode; the default is 208 KiB.
const SEND_BUFFER_BYTES: usize = 4 << 20;
/// Between two looks whether a queue is free.
pub(super) const FREE_INTERVAL: Duration = Duration::from_millis(2);
/// What is registered to find out whether a queue is free.
const PROBE_BYTES: usize = 4096;

/// How frames get to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By the tap.
    Tap,
    /// By AF_XDP, and the kernel copies: the driver cannot do otherwise.
    Copy,
    /// By AF_XDP, and the device reads the guest's memory.
    ZeroCopy,
}

impl Mode {
    /// Of its number.
    pub(crate) fn of(number: u8) -> Self {
        [Self::Tap, Self::Copy, Self::ZeroCopy]
            .into_iter()
            .find(|mode| *mode as u8 == number)
            .unwrap_or(Self::Tap)
    }

    /// As statistics call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Copy => "af-xdp-copy",
            Self::ZeroCopy => "af-xdp-zero-copy",
        }
    }
}

/// A socket that is bound.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) transmit: Transmit,
    pub(super) completion: Completion,
    // Behind the rings: the kernel lets the queue go when they are unmapped and this is closed.
    bound: Bound,
    pub(super) zero_copy: bool,
    /// Whether a packet may be of several descriptors.
    pub(super) gathers: bool,
}

/// A socket that nothing is done with yet.
pub(super) fn open() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Has the socket pin all of a span. Bytes of metadata before each descriptor's data, if it is wanted and the kernel has that
/// (6.8).
pub(super) fn register(fd: &OwnedFd, span: &Span, metadata: bool) -> io::Result<u32> {
    let try_with = |flags: u32, tx_metadata_len: u32| {
        let flags = XdpUmemRegFlags::from_bits_retain(libc::XDP_UMEM_UNALIGNED_CHUNK_FLAG | flags);
        let (addr, len, chunk_size) = (span.address(), span.len() as u64, CHUNK_BYTES);
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

impl Socket {
    /// Binds a socket to a queue of an interface. `umem` is registered with this one, or with another that is bound.
    pub(super) fn bind(
        fd: OwnedFd,
        umem: &Arc<Umem>,
        shares: bool,
        (interface, queue): (u32, u32),
        patience: Duration,
    ) -> io::Result<Self> {
        // Where it may not be more, it stays what it is.
        let _ = sockopt::set_socket_send_buffer_size_force(&fd, SEND_BUFFER_BYTES);
        sockopt::set_xdp_umem_fill_ring_size(&fd, FILLS)?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, COMPLETIONS)?;
        sockopt::set_xdp_tx_ring_size(&fd, TRANSMIT_DESCRIPTORS)?;
        let address = |flags| SocketAddrXdp::new(flags, interface, queue);
        if shares {
            let addr = address(SocketAddrXdpFlags::XDP_SHARED_UMEM);
            let shares = |other: &OwnedFd| {
                let shared_umem_fd = other.as_fd();
                bind(&fd, &SocketAddrXdpWithSharedUmem { addr: addr.clone(), shared_umem_fd })
            };
            // If the last one was closed just now, the next attempt registers it again.
            patiently(patience, || umem.with_bound(shares).unwrap_or(Err(rustix::io::Errno::AGAIN)))?;
        } else {
            umem.gathers.store(bind_best(&fd, address, patience)?, Relaxed);
        }
        let XdpMmapOffsets { tx, cr, .. } = sockopt::xdp_mmap_offsets(&fd)?;
        let options = sockopt::xdp_options(&fd)?;
        Ok(Self {
            transmit: Transmit::map(fd.as_fd(), tx, TRANSMIT_DESCRIPTORS)?,
            completion: Completion::map(fd.as_fd(), cr, COMPLETIONS)?,
            zero_copy: options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY),
            gathers: umem.gathers.load(Relaxed),
            bound: umem.enter(fd),
        })
    }

    /// Has the kernel send what was published.
    pub(super) fn call(&self) -> io::Result<()> {
        Ok(send(&self.bound, &[], SendFlags::DONTWAIT).map(drop)?)
    }

    /// Descriptors that the kernel found to be none, and threw away.
    pub(super) fn invalid(&self) -> u64 {
        sockopt::xdp_statistics(&self.bound).map_or(0, |statistics| statistics.tx_invalid_descs)
    }
}

/// Whether a queue of an interface is nobody's, found out by being its owner for a moment. What was sent by a socket that is closed is
/// no longer read then: the kernel takes a queue from the driver before somebody else can have it.
pub(super) fn is_free(interface: u32, queue: u32) -> io::Result<bool> {
    let (fd, span) = (open()?, Span::new(PROBE_BYTES, PROBE_BYTES, PROBE_BYTES, PROBE_BYTES)?);
    register(&fd, &span, false)?;
    sockopt::set_xdp_umem_fill_ring_size(&fd, FILLS)?;
    sockopt::set_xdp_umem_completion_ring_size(&fd, FILLS)?;
    sockopt::set_xdp_tx_ring_size(&fd, FILLS)?;
    match bind(&fd, &SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, interface, queue)) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::BUSY) => Ok(false),
        // An interface that goes takes its sockets with it.
        Err(rustix::io::Errno::NODEV) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// The best that the driver does; whether it takes packets of several descriptors.
fn bind_best(
    fd: &OwnedFd,
    address: impl Fn(SocketAddrXdpFlags) -> SocketAddrXdp,
    patience: Duration,
) -> io::Result<bool> {
    use SocketAddrXdpFlags as F;
    let tries = [
        (F::XDP_ZEROCOPY, true),
        (F::XDP_ZEROCOPY, false),
        (F::XDP_COPY, true),
        // From before 6.6.
        (F::XDP_COPY, false),
    ];
    let mut failed = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    for (mode, gathers) in tries {
        let several = if gathers { F::XDP_USE_SG } else { F::empty() };
        match patiently(patience, || bind(fd, &address(mode | several | F::XDP_USE_NEED_WAKEUP))) {
            Ok(()) => return Ok(gathers),
            // Not this way; EINVAL is a kernel that does not know a flag.
            Err(errno @ (rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL)) => failed = errno.into(),
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(failed)
}

/// A queue is free some time after its last socket was closed, and there is no event that tells when.
fn patiently(patience: Duration, bind: impl Fn() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    let until = Instant::now() + patience;
    loop {
        match bind() {
            Err(rustix::io::Errno::BUSY) if Instant::now() < until => std::thread::sleep(FREE_INTERVAL),
            outcome => return outcome,
        }
    }
}
