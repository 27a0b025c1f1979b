//! Requests to the descriptor of a tap or macvtap (`linux/if_tun.h`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{done, name_of, request};

/// A tap that has the virtio header, and nothing else, before each frame.
pub(crate) const TAP: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
pub(crate) const MULTI_QUEUE: i32 = libc::IFF_MULTI_QUEUE;
pub(crate) const IS_TAP: i32 = libc::IFF_TAP;
pub(crate) const VNET_HDR: i32 = libc::IFF_VNET_HDR;

/// Makes a newly opened `/dev/net/tun` or `/dev/tapN` a queue of this interface. A tap that does not exist is
/// created.
pub(crate) fn attach(fd: BorrowedFd<'_>, name: &str, flags: i32) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags = short(flags);
    // SAFETY: the kernel reads and writes one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
}

/// Interface of a queue, and its flags.
pub(crate) fn interface(fd: BorrowedFd<'_>) -> io::Result<(String, i32)> {
    let mut request = request("?")?;
    // SAFETY: the kernel writes one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    // SAFETY: TUNGETIFF fills this field of the union; any bits are a valid number.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok((name_of(&request), i32::from(flags.cast_unsigned())))
}

/// Sets the length of the virtio header before each frame.
pub(crate) fn set_header_bytes(fd: BorrowedFd<'_>, bytes: i32) -> io::Result<()> {
    // SAFETY: the kernel reads one `int`, which lives across the call.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })
}

/// Sets the offloads that the receiver of the tap's frames supports (`TUN_F_*`).
pub(crate) fn set_offloads(fd: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) })
}

/// Bytes of a queue that may be in the network stack at once. `INT_MAX` is unlimited.
pub(crate) fn send_buffer(fd: BorrowedFd<'_>) -> io::Result<i32> {
    let mut bytes = 0;
    // SAFETY: the kernel writes one `int`, which lives across the call.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETSNDBUF, &raw mut bytes) })?;
    Ok(bytes)
}

/// Attaches or detaches the queue; no flows are steered to a detached queue.
pub(crate) fn set_queue(fd: BorrowedFd<'_>, attached: bool) -> io::Result<()> {
    let flag = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    let mut request = request("?")?;
    request.ifr_ifru.ifru_flags = short(flag);
    // SAFETY: the kernel reads one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE, &raw mut request) })
}

fn short(flags: i32) -> libc::c_short {
    u16::try_from(flags).expect("flags of interfaces have 16 bits").cast_signed()
}
