//! A child that inherits only the given descriptors, has its own session, and can be bound to the life of its
//! parent.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::confinement::Given;
use crate::runtime::Lifetime;

/// Byte by which a parent has its child become its program; any other has it end.
pub(crate) const ADMITTED: u8 = 1;

/// Sets up the child of `command`. `descriptors` are its only ones beside the standard ones, under the numbers that they have here; they
/// must be open when it is started. `confinement` is beyond that of its parent. `gate` is its end of a socket pair: it writes its process id
/// to it, and becomes its program once it reads [`ADMITTED`]. Until then it is killed with its parent, whatever the end of its life.
///
/// The kernel kills the child when the *thread* that starts it ends, so that thread must live on: with [`Lifetime::WithOwner`] always,
/// else until the child is admitted.
pub(crate) fn isolate(
    command: &mut Command,
    descriptors: &[OwnedFd],
    lifetime: Lifetime,
    confinement: Option<Given>,
    gate: BorrowedFd<'_>,
) {
    let numbers: Vec<RawFd> = descriptors.iter().map(|descriptor| descriptor.as_raw_fd()).collect();
    let gate = gate.as_raw_fd();
    let parent = std::process::id();
    let prepare = move || {
        unblock_signals()?;
        // SAFETY: setsid is async-signal-safe and touches no memory.
        check(unsafe { libc::setsid() })?;
        // SAFETY: prctl with this argument is a system call that touches no memory.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        // SAFETY: getppid has no conditions.
        let now = unsafe { libc::getppid() };
        // The parent may have ended before the signal was requested.
        if now.cast_unsigned() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let range_flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
        // SAFETY: close_range with this flag only marks descriptors of the child's own table.
        check(unsafe { libc::close_range(3, libc::c_uint::MAX, range_flags) })?;
        for &number in &numbers {
            // SAFETY: fcntl is async-signal-safe; it clears a flag of the child's own table and touches no
            // memory.
            check(unsafe { libc::fcntl(number, libc::F_SETFD, 0) })?;
        }
        if let Some(confinement) = &confinement {
            confinement.apply();
        }
        wait_for_admission(gate)?;
        if lifetime == Lifetime::Detached {
            // SAFETY: prctl with this argument is a system call that touches no memory.
            check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) })?;
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls and allocates nothing, as a child of a threaded process must.
    unsafe { command.pre_exec(prepare) };
}

/// Unblocks all signals: a parent may hold them back, and what it starts would inherit that.
fn unblock_signals() -> io::Result<()> {
    // SAFETY: all zero is a valid `sigset_t`, and an empty one.
    let none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: it is async-signal-safe, and reads the set.
    match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) } {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Reports this process, and waits until its parent has recorded it.
fn wait_for_admission(gate: RawFd) -> io::Result<()> {
    // SAFETY: getpid has no conditions.
    let pid = unsafe { libc::getpid() }.to_ne_bytes();
    // SAFETY: the kernel reads the array, which is as long as stated.
    let written = unsafe { libc::write(gate, pid.as_ptr().cast(), pid.len()) };
    let mut answer = [0_u8];
    // SAFETY: the kernel writes at most the one byte of the array.
    let mut read = || unsafe { libc::read(gate, answer.as_mut_ptr().cast(), 1) };
    let mut received = read();
    while received < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
        received = read();
    }
    if written == pid.len().cast_signed() && received == 1 && answer == [ADMITTED] {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ECANCELED))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Work on an input and an output that makes system calls, and neither allocates nor panics.
pub(crate) type ChildWork = fn(BorrowedFd<'_>, BorrowedFd<'_>);

/// Does the work in a child process that has these descriptors, and no others. Returns its id.
pub(crate) fn fork(input: BorrowedFd<'_>, output: BorrowedFd<'_>, work: ChildWork) -> io::Result<i32> {
    // SAFETY: fork has no conditions; the child makes only system calls until it ends, as one of a threaded
    // process must.
    let pid = unsafe { libc::fork() };
    if pid != 0 {
        check(pid)?;
        return Ok(pid);
    }
    let (input, output) = (input.as_raw_fd(), output.as_raw_fd());
    // SAFETY: system calls on descriptors of the child's own table; none touches memory. Both numbers are
    // above those that are replaced.
    let is_ready = unsafe {
        libc::setsid();
        libc::dup2(input, 0) == 0
            && libc::dup2(output, 1) == 1
            && libc::close_range(2, libc::c_uint::MAX, 0) == 0
    };
    if is_ready {
        // SAFETY: both were opened above, and are closed with the process.
        let [input, output] = [0, 1].map(|number| unsafe { BorrowedFd::borrow_raw(number) });
        work(input, output);
    }
    // SAFETY: _exit ends the child without running anything of the parent's.
    unsafe { libc::_exit(0) }
}
