//! The one system call that no safe library offers soundly.
//!
//! `rustix` has `SO_PEERCRED` too, but its process id cannot be zero, and zero is what the kernel answers for
//! a process outside our pid namespace (QEMU in a container beside ours).

#![allow(unsafe_code)]

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd};

pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut size = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as it is borrowed, and `size` is the size of the value
    // pointed to.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was zeroed, and all zeroes is a value of this struct of three integers.
    Ok(unsafe { credentials.assume_init() })
}
