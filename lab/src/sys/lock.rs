//! Locks of open files (`F_OFD_SETLKW`), which QEMU has of the files of its drives.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// Bytes that QEMU locks: `RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE` (QEMU's block/file-posix.c).
const FIRST: i64 = 100;
const LENGTH: i64 = 200;

/// Waits until no QEMU has locks of the file, and locks it exclusively until it is closed.
pub(crate) fn lock_drive(file: &File) -> io::Result<()> {
    // SAFETY: a structure of numbers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK.try_into().expect("a small number");
    lock.l_whence = libc::SEEK_SET.try_into().expect("a small number");
    (lock.l_start, lock.l_len) = (FIRST, LENGTH);
    // SAFETY: the kernel reads one `flock`, which lives across the call.
    let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &raw const lock) };
    if locked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
