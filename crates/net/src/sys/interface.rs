//! `linux/sockios.h`: what is asked of a network interface by its name, in the network that this process lives in.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{done, request};

/// The interface's number, or `None` if there is none of this name.
pub(crate) fn index(name: &str) -> io::Result<Option<i32>> {
    let mut request = request(name)?;
    let socket = socket()?;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives across the call.
    match done(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX, &raw mut request) }) {
        // SAFETY: of this union SIOCGIFINDEX fills the number; any bits are one.
        Ok(()) => Ok(Some(unsafe { request.ifr_ifru.ifru_ifindex })),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The most bytes of a frame without its Ethernet header.
pub(crate) fn mtu(name: &str) -> io::Result<u32> {
    let mut request = request(name)?;
    let socket = socket()?;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) })?;
    // SAFETY: of this union SIOCGIFMTU fills the MTU; any bits are a number.
    Ok(unsafe { request.ifr_ifru.ifru_mtu }.cast_unsigned())
}

/// Sets [`mtu`].
pub(crate) fn set_mtu(name: &str, mtu: u32) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = mtu.cast_signed();
    let socket = socket()?;
    // SAFETY: the kernel reads one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU, &raw mut request) })
}

/// Has it take part.
pub(crate) fn set_up(name: &str) -> io::Result<()> {
    let mut request = request(name)?;
    let socket = socket()?;
    // SAFETY: the kernel reads and writes one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) })?;
    // SAFETY: of this union SIOCGIFFLAGS fills the flags; any bits are a number.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | 1;
    // SAFETY: the kernel reads one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) })
}

/// Interfaces are asked through any socket of the network.
/// Any socket will do; this one cannot be used for anything else, so that a sandbox may leave it to the process.
fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}
