//! Descriptors by number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Takes over an open descriptor that another process (a parent, a `getfd`) passed under its number, without
/// duplicating it, and makes it close-on-exec.
///
/// Exclusive ownership cannot be checked; the user asserts it by `fd:N`.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn take_over(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: these calls read a number and change a flag of it; any number is allowed.
    let set = unsafe {
        let flags = libc::fcntl(number, libc::F_GETFD);
        if flags < 0 { flags } else { libc::fcntl(number, libc::F_SETFD, flags | libc::FD_CLOEXEC) }
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open (checked above), and the user gave it to us by its number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes `fd` refer to the open file of `replacement` (`dup3`); its former file is closed as soon as no call
/// in another thread uses it. Ownership of the number is unchanged.
pub(crate) fn replace(fd: BorrowedFd<'_>, replacement: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        // SAFETY: both are open, because they are borrowed. The number stays open all along, so no borrow
        // dangles.
        if unsafe { libc::dup3(replacement.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // EBUSY: another thread is between getting a number and filling it.
        if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) {
            return Err(error);
        }
    }
}
