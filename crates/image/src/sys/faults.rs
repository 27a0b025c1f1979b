//! Handles loads from a mapped file that find no page because the file was truncated or its disk failed. The
//! kernel raises SIGBUS, which would end the process; here it sets a flag of the mapping.
//!
//! ```text
//!   load ──► no page ──► SIGBUS ──► address in a guarded range?  yes: map a page of zeros, set the flag; the load continues
//!                                                                   no:  the previous handler, or the default action
//! ```
//!
//! The handler takes no lock and allocates nothing: the ranges are in a list that only grows, whose entries
//! are reused. Loads by the kernel (a vectored send, direct I/O) raise no signal; those calls fail with
//! `EFAULT`.
//!
//! Limits: one handler for the process, installed with the first mapping. A program that replaces it later
//! without calling it loses the guard.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Guards a mapped range while it exists.
#[derive(Debug)]
pub(super) struct FaultGuard(&'static Range);

/// Entry of the list.
#[derive(Debug)]
struct Range {
    /// 0 if the entry is free.
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
    claimed: AtomicBool,
    /// Set before the entry is published, and never changed.
    next: *const Range,
}

// SAFETY: `next` is not written after the entry was published, and points to an entry that is never freed.
unsafe impl Sync for Range {}

/// First entry of the list.
static RANGES: AtomicPtr<Range> = AtomicPtr::new(ptr::null_mut());

/// Page size of the host, for the handler; set before the handler is installed.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);

/// The previous action for SIGBUS; written once, before the handler is installed.
static PREVIOUS: PreviousAction = PreviousAction(UnsafeCell::new(MaybeUninit::uninit()));

struct PreviousAction(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once under `OnceLock`, before the handler that reads it is installed.
unsafe impl Sync for PreviousAction {}

impl FaultGuard {
    /// Guards the memory of `bytes`, which must stay mapped while the guard exists.
    pub(super) fn new(bytes: &[u8]) -> io::Result<Self> {
        install()?;
        let start = bytes.as_ptr().addr();
        let range = claim();
        range.lost.store(false, Ordering::Relaxed);
        range.end.store(
            start + bytes.len().next_multiple_of(PAGE_BYTES.load(Ordering::Relaxed)),
            Ordering::Relaxed,
        );
        // Last: from here on the handler uses the range.
        range.start.store(start, Ordering::Release);
        Ok(Self(range))
    }

    /// Returns true if a load in the range found no page.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.claimed.store(false, Ordering::Release);
    }
}

fn ranges() -> impl Iterator<Item = &'static Range> {
    let mut at = RANGES.load(Ordering::Acquire).cast_const();
    std::iter::from_fn(move || {
        // SAFETY: entries are leaked boxes, so each pointer is null or always valid.
        let range = unsafe { at.as_ref() }?;
        at = range.next;
        Some(range)
    })
}

/// Claims a free entry or adds one.
fn claim() -> &'static Range {
    let is_ours = |range: &&Range| {
        range.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    if let Some(range) = ranges().find(is_ours) {
        return range;
    }
    let mut first = RANGES.load(Ordering::Acquire);
    loop {
        let range = Box::into_raw(Box::new(Range {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            claimed: AtomicBool::new(true),
            next: first,
        }));
        match RANGES.compare_exchange(first, range, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the entry was just leaked and is never freed.
            Ok(_) => return unsafe { &*range },
            Err(now) => {
                first = now;
                // SAFETY: the entry was not published, so this is the only pointer to it.
                drop(unsafe { Box::from_raw(range) });
            }
        }
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let failed = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        // SAFETY: only reads a constant of the system.
        if let Ok(bytes @ 1..) = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) {
            PAGE_BYTES.store(bytes, Ordering::Relaxed);
        }
        // SAFETY: only this closure, which runs once, writes it, and the handler that reads it is not
        // installed yet.
        let previous = unsafe { (*PREVIOUS.0.get()).as_mut_ptr() };
        // SAFETY: only reads the current action, into a valid `sigaction`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous) } != 0 {
            return Err(failed());
        }
        // SAFETY: all zero is a valid `sigaction`: no handler, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        // SAFETY: the handler has the type that SA_SIGINFO requires and is async-signal-safe.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(failed()),
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, whose address is set for SIGBUS of a fault.
    let address = unsafe { (*info).si_addr() }.addr();
    let is_hit = |range: &&Range| {
        let start = range.start.load(Ordering::Acquire);
        start != 0 && start <= address && address < range.end.load(Ordering::Relaxed)
    };
    if let Some(range) = ranges().find(is_hit)
        && map_zeros(address)
    {
        range.lost.store(true, Ordering::Release);
        return;
    }
    forward(signal, info, context);
}

/// Maps a page of zeros at `address`.
fn map_zeros(address: usize) -> bool {
    let bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = address - address % bytes;
    // SAFETY: the thread's own `errno`, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the page is in a range of a `FaultGuard`, so it belongs to a mapping of this crate, is
    // read-only for all threads and is not unmapped while the interrupted load runs. The replaced page has
    // lost its content.
    let mapped = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(page),
            bytes,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    mapped != libc::MAP_FAILED
}

/// Calls the previous handler, or does the default action.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: written before this handler was installed, and never again.
    let previous = unsafe { (*PREVIOUS.0.get()).assume_init_ref() };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zero is the default action; the load is repeated and ends the process, as without a
            // guard.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &raw const default, ptr::null_mut());
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: an action with SA_SIGINFO holds a function of this type; the arguments are the kernel's
            // own.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: an action without SA_SIGINFO holds a function of this type.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
