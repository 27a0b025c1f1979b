//! Pseudoterminals.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};

/// Opens a pseudoterminal: the user's end, and the programs' end.
pub(crate) fn open_terminal() -> io::Result<[OwnedFd; 2]> {
    let (mut watcher, mut program) = (-1, -1);
    let null = std::ptr::null_mut();
    // SAFETY: the two descriptors are written to places that are ours; null asks for no name, settings and
    // size.
    match unsafe { libc::openpty(&raw mut watcher, &raw mut program, null, null.cast(), null.cast()) } {
        // SAFETY: the call has opened both, and nothing else owns them.
        0 => Ok([watcher, program].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })),
        _ => Err(io::Error::last_os_error()),
    }
}
