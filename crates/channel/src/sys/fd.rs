//! Descriptors by number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Takes over an open descriptor that somebody (a parent process, a `getfd`) left for us under its number, without
/// duplicating it, and makes it close-on-exec.
///
/// That nobody else in this process owns it cannot be checked; it is what a user says who writes `fd:N`.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn take_over(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: these calls look at a number and change a flag of it; any number is allowed.
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

/// Makes the number of `fd` stand for what `replacement` stands for; what it stood for before is closed as soon as no
/// call in another thread uses it. The number stays owned by whom it was.
pub(crate) fn replace(fd: BorrowedFd<'_>, replacement: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        // SAFETY: both are open, as they are borrowed. The number stays open all along, so nobody's borrow dangles.
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
