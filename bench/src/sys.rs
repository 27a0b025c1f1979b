//! Taps, packet sockets and listeners of AF_VSOCK, for which the standard library and rustix have no functions.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd as _, OwnedFd};

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;
use rustix::net::{
    AddressFamily, MMsgHdr, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, listen, sendmmsg,
    socket_with,
};

/// Checksums and TCP super-frames over both.
const OFFLOADS: libc::c_ulong = 1 | 2 | 4;
/// `struct virtio_net_hdr_mrg_rxbuf`.
const HEADER_BYTES: libc::c_int = 12;
/// Length of the backlog of a listener.
const BACKLOG: i32 = 128;

/// Segmentation and checksums that the kernel leaves to the reader of a tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offloads {
    On,
    Off,
}

/// Opens a queue of a tap with this many in this thread's namespace; creates the tap if needed. Frames have a header of 12 bytes.
pub(crate) fn tap(name: &str, queues: usize, offloads: Offloads) -> Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
    // SAFETY: all zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = flags | if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    request.ifr_ifru.ifru_flags = i16::from_ne_bytes((flags as u16).to_ne_bytes());
    let size = HEADER_BYTES;
    // SAFETY: each request has its type of argument: an `ifreq`, a pointer to an int, a number.
    let outcome = unsafe {
        let fd = file.as_raw_fd();
        let calls = [
            libc::ioctl(fd, libc::TUNSETIFF, &raw const request),
            libc::ioctl(fd, libc::TUNSETVNETHDRSZ, &raw const size),
            libc::ioctl(fd, libc::TUNSETOFFLOAD, if offloads == Offloads::On { OFFLOADS } else { 0 }),
        ];
        calls.into_iter().min()
    };
    if outcome < Some(0) {
        return Err(io::Error::last_os_error()).with_context(|| format!("tap {name}"));
    }
    rustix::io::ioctl_fionbio(&file, true)?;
    Ok(file)
}

/// Sends many frames with a virtio-net header of 10 bytes in one call.
pub(crate) struct Injector {
    fd: OwnedFd,
}

impl Injector {
    /// Opens an interface of this thread's namespace.
    pub(crate) fn new(interface: &str) -> Result<Self> {
        let fd = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .context("packet socket (needs root)")?;
        for option in [libc::PACKET_VNET_HDR, libc::PACKET_QDISC_BYPASS] {
            let on: libc::c_int = 1;
            let len = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the option's value is an int.
            let set = unsafe {
                libc::setsockopt(fd.as_raw_fd(), libc::SOL_PACKET, option, (&raw const on).cast(), len)
            };
            if set < 0 {
                return Err(io::Error::last_os_error()).context("option of a packet socket");
            }
        }
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = name_to_index(&fd, interface)?.cast_signed();
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address has this type and length.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
            return Err(io::Error::last_os_error()).with_context(|| format!("packet socket on {interface}"));
        }
        Ok(Self { fd })
    }

    /// Sends the frame up to `count` times. Returns how many were accepted; an error if the interface is full.
    pub(crate) fn send(&self, frame: &[u8], count: usize) -> io::Result<usize> {
        let slices = [IoSlice::new(frame)];
        let mut ancillary: Vec<_> = (0..count).map(|_| SendAncillaryBuffer::default()).collect();
        let mut messages: Vec<_> =
            ancillary.iter_mut().map(|ancillary| MMsgHdr::new(&slices, ancillary)).collect();
        Ok(sendmmsg(&self.fd, &mut messages, SendFlags::empty())?)
    }
}

/// Listens at a port of this machine. The listener does not block.
pub(crate) fn listen_vsock(port: u32) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None).context("AF_VSOCK socket")?;
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_vm = unsafe { zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_ANY;
    address.svm_port = port;
    let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address has this type and length, and is only read.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("AF_VSOCK port {port}"));
    }
    listen(&fd, BACKLOG)?;
    Ok(fd)
}
