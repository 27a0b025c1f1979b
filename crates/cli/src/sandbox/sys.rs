//! A call that the filter refuses: named on standard error, and answered with `EPERM`.
//!
//! The kernel raises SIGSYS instead of doing the call, with the registers as they were; the handler tells and puts an
//! error where the call's answer would be. It allocates nothing, takes no lock and waits for no reader, for it runs wherever the
//! call was.

use std::fmt::{self, Write as _};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use syscalls::Sysno;

mod names;

pub(super) use names::{SealedName, seal};

/// Longest line.
const LINE_BYTES_MAX: usize = 320;
/// `SYS_SECCOMP` of `asm-generic/siginfo.h`: why the signal came.
const OF_SECCOMP: i32 = 1;

/// Which numbers were told of: what a loop does again and again is said once. A handler has no other place to remember in.
static TOLD: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Whether a call was refused.
pub(super) fn has_refused() -> bool {
    TOLD.iter().any(|word| word.load(Relaxed) != 0)
}

/// Installs the handler.
pub(super) fn answer_refused_calls() -> io::Result<()> {
    // SAFETY: all zero is a valid `sigaction`: no handler, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = refused;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the type that SA_SIGINFO asks for and does only what a handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn refused(_signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`.
    if unsafe { (*info).si_code } != OF_SECCOMP {
        return;
    }
    // SAFETY: with SA_SIGINFO the third argument is the interrupted thread's `ucontext_t`, ours until we return.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let (number, arguments) = registers::call(context);
    tell(number, arguments);
    registers::set_answer(context, -libc::EPERM);
}

fn tell(number: usize, arguments: [u64; 3]) {
    let bit = 1 << (number % 64);
    if let Some(word) = TOLD.get(number / 64)
        && word.fetch_or(bit, Relaxed) & bit != 0
    {
        return;
    }
    let mut line = Line { bytes: [0; LINE_BYTES_MAX], length: 0 };
    let name = Sysno::new(number).map_or("unknown", |call| call.name());
    let [first, second, third] = arguments;
    // What does not fit is cut off.
    let _ = writeln!(
        line,
        "towline: the sandbox refused the system call {name} ({number}; {first:#x}, {second:#x}, {third:#x}): it fails with \
         EPERM. If towline needs it here, that is a bug to be reported; --sandbox none goes on without"
    );
    // Whoever made the call must not wait for a reader. What a pipe or a terminal has no room for is lost.
    let stderr = std::io::stderr();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if !matches!(poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&now)), Ok(1..)) {
        return;
    }
    // SAFETY: the bytes are initialised up to the length. That standard error may be closed is no reason to fail.
    unsafe { libc::write(2, line.bytes.as_ptr().cast(), line.length) };
}

struct Line {
    bytes: [u8; LINE_BYTES_MAX],
    length: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for (to, from) in self.bytes[self.length..].iter_mut().zip(text.bytes()) {
            *to = from;
            self.length += 1;
        }
        Ok(())
    }
}

#[cfg(target_arch = "x86_64")]
mod registers {
    /// The number and the first arguments.
    pub(super) fn call(context: &libc::ucontext_t) -> (usize, [u64; 3]) {
        let register = |index: libc::c_int| context.uc_mcontext.gregs[index as usize].cast_unsigned();
        let arguments = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX].map(register);
        (register(libc::REG_RAX) as usize, arguments)
    }

    /// What the call seems to have answered.
    pub(super) fn set_answer(context: &mut libc::ucontext_t, answer: i32) {
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = answer.into();
    }
}

#[cfg(target_arch = "aarch64")]
mod registers {
    /// The number and the first arguments.
    pub(super) fn call(context: &libc::ucontext_t) -> (usize, [u64; 3]) {
        let registers = &context.uc_mcontext.regs;
        (registers[8] as usize, [registers[0], registers[1], registers[2]])
    }

    /// What the call seems to have answered.
    pub(super) fn set_answer(context: &mut libc::ucontext_t, answer: i32) {
        context.uc_mcontext.regs[0] = i64::from(answer).cast_unsigned();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A call that nobody here makes.
    pub(crate) fn trace_me() -> io::Result<()> {
        // SAFETY: the call has no pointers, and is refused before it does anything.
        match unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes a call with numbers for arguments; a pointer is null.
    pub(crate) fn call(number: libc::c_long, arguments: [i32; 4]) -> io::Result<()> {
        let [first, second, third, fourth] = arguments.map(libc::c_long::from);
        // SAFETY: the tests' calls take no pointers, or look at them first and fail on null.
        match unsafe { libc::syscall(number, first, second, third, fourth) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Whether this process can gain no rights by executing a program.
    pub(crate) fn no_new_privileges() -> bool {
        // SAFETY: the call has no pointers.
        unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 }
    }
}
