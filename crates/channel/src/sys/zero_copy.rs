//! The socket option that makes zero-copy sends possible.

use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_ZEROCOPY` of `asm-generic/socket.h`, which the C library's bindings lack.
const SO_ZEROCOPY: libc::c_int = 60;

/// The kernel version that has zero-copy sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Enabled {
    /// Since this call.
    Now,
    /// Already set.
    Before,
    /// The kernel cannot.
    Never,
}

/// Sets `SO_ZEROCOPY`.
pub(crate) fn enable(fd: BorrowedFd<'_>) -> io::Result<Enabled> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` live across the call, and `len` is the size of `value`.
    let was = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, SO_ZEROCOPY, (&raw mut value).cast(), &raw mut len)
    };
    if was == 0 && value != 0 {
        return Ok(Enabled::Before);
    }
    let one: libc::c_int = 1;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `one` lives across the call and is `len` bytes long.
    if unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, SO_ZEROCOPY, (&raw const one).cast(), len)
    } == 0
    {
        return Ok(Enabled::Now);
    }
    let error = io::Error::last_os_error();
    match Errno::from_io_error(&error) {
        Some(Errno::NOPROTOOPT | Errno::OPNOTSUPP) => Ok(Enabled::Never),
        _ => Err(error),
    }
}
