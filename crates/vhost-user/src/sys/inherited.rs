//! A descriptor that a service manager has left open, by systemd's protocol (`sd_listen_fds(3)`).

use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

/// `SD_LISTEN_FDS_START`.
const FIRST: i32 = 3;
/// It can be taken once.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// How many descriptors were left for this very process; 0 without a service manager, and once they are taken.
pub(crate) fn count() -> usize {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.load(Ordering::Relaxed) {
        return 0;
    }
    number("LISTEN_FDS").map_or(0, |count| count as usize)
}

/// Takes the first of them over; `EBADF` if it is not open, or taken.
pub(crate) fn take() -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes numbers.
    let open = unsafe { libc::fcntl(FIRST, libc::F_GETFD) } >= 0;
    if !open || count() == 0 || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Errno::BADF);
    }
    // SAFETY: the variables name this process, so whoever started it has left the descriptor open for it; nobody else here
    // takes it over, as it is taken once.
    let fd = unsafe { OwnedFd::from_raw_fd(FIRST) };
    // It shall not go on to children.
    let flags = rustix::io::FdFlags::CLOEXEC;
    rustix::io::fcntl_setfd(&fd, flags).map(|()| fd)
}
