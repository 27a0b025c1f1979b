//! Requests about a network interface by its name (`linux/sockios.h`), in the network namespace of this
//! process.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{done, request};

const IFF_UP: libc::c_short = libc::IFF_UP as libc::c_short;

/// Index of the interface; `None` if there is none of this name.
pub(crate) fn index(name: &str) -> io::Result<Option<i32>> {
    let mut request = request(name)?;
    match call(libc::SIOCGIFINDEX, &mut request) {
        // SAFETY: SIOCGIFINDEX fills this field of the union; any bits are a valid number.
        Ok(()) => Ok(Some(unsafe { request.ifr_ifru.ifru_ifindex })),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// MTU of the interface.
pub(crate) fn mtu(name: &str) -> io::Result<u32> {
    let mut request = request(name)?;
    call(libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: SIOCGIFMTU fills this field of the union; any bits are a valid number.
    Ok(unsafe { request.ifr_ifru.ifru_mtu }.cast_unsigned())
}

/// Sets the MTU of the interface.
pub(crate) fn set_mtu(name: &str, mtu: u32) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = mtu.cast_signed();
    call(libc::SIOCSIFMTU, &mut request)
}

/// Brings the interface up.
pub(crate) fn set_up(name: &str) -> io::Result<()> {
    let mut request = request(name)?;
    call(libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS fills this field of the union; any bits are a valid number.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | IFF_UP;
    call(libc::SIOCSIFFLAGS, &mut request)
}

/// Makes a request, which may change its argument. Any socket accepts it; this one has no other use, so a
/// sandbox may permit it.
fn call(number: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: for these requests the kernel reads and writes one `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(socket.as_raw_fd(), number, &raw mut *request) })
}
