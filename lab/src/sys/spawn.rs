//! Children that do not outlive the thread that started them, and the descriptors that they inherit.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Makes the kernel kill the child when the thread that starts it ends.
pub(crate) fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: prctl and getppid are async-signal-safe and touch no memory of this process.
        let (outcome, parent_now) =
            unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::getppid()) };
        if outcome != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent may have died before the signal was requested.
        if parent_now.cast_unsigned() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure makes two system calls and allocates nothing, as a child of a threaded process
    // must.
    unsafe { command.pre_exec(ask) }
}

/// Keeps descriptors open in the child, under their numbers here. They must be open when it is started.
pub(crate) fn keep_open(command: &mut Command, descriptors: &[BorrowedFd<'_>]) {
    let numbers: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_raw_fd()).collect();
    // In the child, not here: another thread may be starting a process that must not inherit them.
    let keep = move || {
        for &number in &numbers {
            // SAFETY: fcntl is async-signal-safe; it clears a flag of the child's own table and touches no
            // memory.
            if unsafe { libc::fcntl(number, libc::F_SETFD, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls and allocates nothing, as a child of a threaded process must.
    unsafe { command.pre_exec(keep) };
}
