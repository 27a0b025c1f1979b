//! Taps and packet sockets, for which the standard library and rustix have no functions.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context, Result};

/// `TUNSETIFF`, `TUNSETOFFLOAD`, `TUNSETVNETHDRSZ` (`linux/if_tun.h`).
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
/// Checksums and TCP super-frames over both.
const OFFLOADS: libc::c_ulong = 1 | 2 | 4;
/// `struct virtio_net_hdr_mrg_rxbuf`.
const HEADER_BYTES: libc::c_int = 12;
/// `PACKET_VNET_HDR` and `PACKET_QDISC_BYPASS` (`linux/if_packet.h`).
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_QDISC_BYPASS: libc::c_int = 20;

/// Segmentation and checksums that the kernel leaves to the reader of a tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offloads {
    On,
    Off,
}

/// Opens a queue of a tap with this many in this thread's namespace; creates the tap if needed. Frames have a header of 12 bytes.
pub(super) fn tap(name: &str, queues: usize, offloads: Offloads) -> Result<File> {
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
            libc::ioctl(fd, TUNSETIFF, &raw const request),
            libc::ioctl(fd, TUNSETVNETHDRSZ, &raw const size),
            libc::ioctl(fd, TUNSETOFFLOAD, if offloads == Offloads::On { OFFLOADS } else { 0 }),
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
pub(super) struct Injector {
    fd: OwnedFd,
}

impl Injector {
    /// Opens an interface of this thread's namespace.
    pub(super) fn new(interface: &str) -> Result<Self> {
        let protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: the call has no pointers.
        let number = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if number < 0 {
            return Err(io::Error::last_os_error()).context("packet socket (needs root)");
        }
        // SAFETY: the descriptor is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        for option in [PACKET_VNET_HDR, PACKET_QDISC_BYPASS] {
            let on: libc::c_int = 1;
            let len = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the option's value is an int.
            let set =
                unsafe { libc::setsockopt(number, libc::SOL_PACKET, option, (&raw const on).cast(), len) };
            if set < 0 {
                return Err(io::Error::last_os_error()).context("option of a packet socket");
            }
        }
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol as u16;
        // SAFETY: the name is NUL-terminated.
        address.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) }.cast_signed();
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address has this type and length.
        if unsafe { libc::bind(number, (&raw const address).cast(), len) } < 0 {
            return Err(io::Error::last_os_error()).with_context(|| format!("packet socket on {interface}"));
        }
        Ok(Self { fd })
    }

    /// Sends the frame up to `count` times. Returns how many were accepted; an error if the interface is full.
    pub(super) fn send(&self, frame: &[u8], count: usize) -> io::Result<usize> {
        let slices = [IoSlice::new(frame)];
        // SAFETY: all zero is a valid message.
        let mut message: libc::mmsghdr = unsafe { zeroed() };
        // An `IoSlice` has the layout of an `iovec`.
        message.msg_hdr.msg_iov = slices.as_ptr().cast_mut().cast();
        message.msg_hdr.msg_iovlen = 1;
        let mut messages = vec![message; count];
        let count = u32::try_from(count).expect("a batch is small");
        // SAFETY: the messages and their buffers live until the call returns, and are only read.
        let sent = unsafe { libc::sendmmsg(self.fd.as_raw_fd(), messages.as_mut_ptr(), count, 0) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(usize::try_from(sent).unwrap_or(0))
    }
}
