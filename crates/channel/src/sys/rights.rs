//! The socket option `SO_PASSRIGHTS`.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The value on most architectures; the libc crate lacks it.
const SO_PASSRIGHTS: c_int = 83;

/// Makes the kernel refuse descriptors that a peer of this Unix socket passes (`EPERM` for the peer). Sockets
/// that are accepted from a listener inherit it. Otherwise the process that receives closes them, also with
/// the socket whose queue has them, and the last close of a descriptor may wait: that of a TCP connection
/// with `SO_LINGER` for its peer.
///
/// # Errors
/// `ENOPROTOOPT`: the kernel is older than Linux 6.16.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) -> io::Result<()> {
    let off: c_int = 0;
    let length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the pointer is to an integer of this length, which the kernel only reads.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const off).cast(), length)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
