//! Refused system calls: reported on standard error, and failed with `EPERM`.
//!
//! The kernel raises SIGSYS in place of the call. The handler reports it and writes the error into the
//! register of the result. It neither allocates nor locks nor waits for a reader, since it runs in the middle
//! of the code that made the call.

use std::io::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use syscalls::Sysno;

mod sealed;

pub(super) use sealed::{SealedPath, seal};

/// Maximum length of a report.
const LINE_BYTES_MAX: usize = 320;
/// `asm-generic/siginfo.h`: the signal was raised by seccomp.
const SYS_SECCOMP: i32 = 1;

/// Bitmap of the reported numbers, so a loop reports its call once. A signal handler has no other state.
static REPORTED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Returns true if a call was refused.
pub(super) fn has_refused() -> bool {
    REPORTED.iter().any(|word| word.load(Relaxed) != 0)
}

/// Installs the handler of SIGSYS.
pub(super) fn install_handler() -> io::Result<()> {
    // SAFETY: all zero is a valid `sigaction`: no handler, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = refused;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the type that SA_SIGINFO requires and is async-signal-safe.
    done(unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) }.into())
}

/// Result of a call of the C library that returns 0 if it has succeeded.
fn done(result: libc::c_long) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn refused(_signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        return;
    }
    // SAFETY: with SA_SIGINFO the third argument is the interrupted thread's `ucontext_t`, unshared until the
    // handler returns.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let (number, arguments) = registers::call(context);
    report(number, arguments);
    registers::set_result(context, -libc::EPERM);
}

fn report(number: usize, arguments: [u64; 3]) {
    let bit = 1 << (number % 64);
    if let Some(word) = REPORTED.get(number / 64)
        && word.fetch_or(bit, Relaxed) & bit != 0
    {
        return;
    }
    let mut line = [0_u8; LINE_BYTES_MAX];
    let mut rest = &mut line[..];
    let name = Sysno::new(number).map_or("unknown", |call| call.name());
    let [first, second, third] = arguments;
    // A line that is too long is truncated.
    let _ = writeln!(
        rest,
        "towline: the sandbox refused the system call {name} ({number}; {first:#x}, {second:#x}, {third:#x}): it fails with \
         EPERM. In ordinary use this is a bug: please report it; --sandbox none runs without the sandbox"
    );
    let length = LINE_BYTES_MAX - rest.len();
    // The caller must not block on a reader: a report that a pipe or terminal has no room for is lost.
    let stderr = std::io::stderr();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if !matches!(poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&now)), Ok(1..)) {
        return;
    }
    // SAFETY: the bytes are initialised up to the length. A closed standard error is ignored.
    unsafe { libc::write(2, line.as_ptr().cast(), length) };
}

#[cfg(target_arch = "x86_64")]
mod registers {
    /// Returns the call's number and first arguments.
    pub(super) fn call(context: &libc::ucontext_t) -> (usize, [u64; 3]) {
        let register = |index: libc::c_int| context.uc_mcontext.gregs[index as usize].cast_unsigned();
        let arguments = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX].map(register);
        (register(libc::REG_RAX) as usize, arguments)
    }

    /// Sets the call's result.
    pub(super) fn set_result(context: &mut libc::ucontext_t, result: i32) {
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = result.into();
    }
}

#[cfg(target_arch = "aarch64")]
mod registers {
    /// Returns the call's number and first arguments.
    pub(super) fn call(context: &libc::ucontext_t) -> (usize, [u64; 3]) {
        let registers = &context.uc_mcontext.regs;
        (registers[8] as usize, [registers[0], registers[1], registers[2]])
    }

    /// Sets the call's result.
    pub(super) fn set_result(context: &mut libc::ucontext_t, result: i32) {
        context.uc_mcontext.regs[0] = i64::from(result).cast_unsigned();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes a call that the program never makes.
    pub(crate) fn trace_me() -> io::Result<()> {
        // SAFETY: the call has no pointers, and is refused before it does anything.
        done(unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) })
    }

    /// Makes a call with integer arguments; 0 is a null pointer.
    pub(crate) fn call(number: libc::c_long, arguments: [i32; 4]) -> io::Result<()> {
        let [first, second, third, fourth] = arguments.map(libc::c_long::from);
        // SAFETY: the calls of the tests take no pointers, or check them first and fail on null.
        match unsafe { libc::syscall(number, first, second, third, fourth) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Returns true if this process cannot gain privileges by executing a program.
    pub(crate) fn has_no_new_privileges() -> bool {
        // SAFETY: the call has no pointers.
        unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 }
    }
}
