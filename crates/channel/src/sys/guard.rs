//! Handles SIGBUS in mapped files: an access past the end of a truncated file, to a page that a disk cannot
//! read, or to a huge page that the kernel does not have.
//!
//! ```text
//!   access ─► SIGBUS ─► handler: a guarded mapping? ─ yes ──► zeros in its place, marked as lost; the access is repeated
//!                                                    └ no ──► the former action, as a rule the end of the process
//! ```
//! The thread continues with zeros, and its program asks later whether memory is lost ([`faults`],
//! [`MappingGuard::is_lost`]). The handler makes one system call (`mmap`), takes no lock and allocates
//! nothing. A system call that accesses such memory fails with `EFAULT` and raises no signal.
//!
//! Limits: one handler for the process, installed with the first guard. A program that replaces it later
//! without calling it loses the guards.
//!
//! A signal handler has no argument of its owner, so the list of mappings is a static. Its entries are reused
//! and never freed; each is protected by a sequence counter, so the handler, which may run at any time, never
//! uses an inconsistent one.

use std::io;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::lock::lock;

/// All entries, newest first.
static ENTRIES: AtomicPtr<GuardedMapping> = AtomicPtr::new(null_mut());
/// Entries that are not in use.
static FREE: Mutex<Vec<&'static GuardedMapping>> = Mutex::new(Vec::new());
/// Former action of SIGBUS; set before the handler is installed.
static FORMER_ACTION: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
static INSTALLED: OnceLock<bool> = OnceLock::new();
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// A mapping on the handler's list.
#[derive(Debug)]
struct GuardedMapping {
    /// Odd while the entry changes.
    sequence: AtomicUsize,
    start: AtomicUsize,
    /// 0: not in use.
    len: AtomicUsize,
    /// Bytes of a page for [`Zeros::Page`], 0 for [`Zeros::Mapping`].
    page_bytes: AtomicUsize,
    lost: AtomicBool,
    next: *const GuardedMapping,
}

// SAFETY: atomics, and a constant pointer to another entry, which is never freed.
unsafe impl Send for GuardedMapping {}
// SAFETY: as above.
unsafe impl Sync for GuardedMapping {}

/// Guards a mapping while it exists.
#[derive(Debug)]
pub struct MappingGuard(&'static GuardedMapping);

/// Zeros in place of a guarded mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros {
    /// A page that cannot be written, at the address of the fault.
    Page,
    /// All pages of the mapping, at the first fault.
    Mapping,
}

/// Number of faults of guarded memory in this process.
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Acquire)
}

impl MappingGuard {
    /// Guards a mapping, until this is dropped.
    ///
    /// # Safety
    /// `start..start + len` is a mapping of the caller that outlives this value. What `zeros` says may be
    /// replaced by zeros at any fault; a reference into the mapping allows for that.
    ///
    /// # Errors
    /// If the handler cannot be installed.
    pub unsafe fn new(start: *const u8, len: usize, zeros: Zeros) -> io::Result<Self> {
        if !*INSTALLED.get_or_init(|| install().is_ok()) {
            return Err(io::Error::other("cannot install a handler for SIGBUS"));
        }
        let entry = lock(&FREE).pop().unwrap_or_else(GuardedMapping::add);
        let page_bytes = page_bytes();
        let replaced = if zeros == Zeros::Page { page_bytes } else { 0 };
        entry.change(start.addr(), len.next_multiple_of(page_bytes), replaced);
        Ok(Self(entry))
    }

    /// Returns true after a fault in the mapping.
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.0.change(0, 0, 0);
        lock(&FREE).push(self.0);
    }
}

impl GuardedMapping {
    /// Adds an unused entry at the head of the list.
    fn add() -> &'static Self {
        let entry = Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            next: null(),
        };
        let entry = Box::leak(Box::new(entry));
        let mut head = ENTRIES.load(Ordering::Acquire);
        loop {
            entry.next = head;
            match ENTRIES.compare_exchange_weak(head, entry, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return entry,
                Err(other) => head = other,
            }
        }
    }

    /// Changes an entry that the caller has removed from the free ones.
    fn change(&self, start: usize, len: usize, page_bytes: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page_bytes.store(page_bytes, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Pages that a fault at this address replaces, if it is in the entry. An entry that changes belongs to another
    /// mapping, because a thread that accesses a mapping keeps it.
    fn replaced(&self, address: usize) -> Option<Replaced> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let consistent = sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        if !consistent || address.wrapping_sub(start) >= len {
            return None;
        }
        Some(match address.checked_rem(page_bytes) {
            Some(within) => Replaced { start: address - within, len: page_bytes, prot: ProtFlags::READ },
            None => Replaced { start, len, prot: ProtFlags::READ | ProtFlags::WRITE },
        })
    }
}

/// Pages to replace.
struct Replaced {
    start: usize,
    len: usize,
    prot: ProtFlags,
}

/// Bytes of a page. It makes no system call, so a sandbox permits it.
fn page_bytes() -> usize {
    // SAFETY: only reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("the system has pages")
}

fn install() -> io::Result<()> {
    // SAFETY: all zeros is a `sigaction`: no handler, an empty mask, no flags.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: as above.
    let former: &'static mut libc::sigaction = Box::leak(Box::new(unsafe { zeroed() }));
    // SAFETY: the pointer is to a structure that is never freed.
    if unsafe { libc::sigaction(libc::SIGBUS, null(), former) } != 0 {
        return Err(io::Error::last_os_error());
    }
    FORMER_ACTION.store(former, Ordering::Release);
    // SAFETY: the handler is async-signal-safe (see the module).
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure to a handler with SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    let of_access = matches!(code, libc::BUS_ADRERR | libc::BUS_MCEERR_AR);
    // SAFETY: as above; these codes have an address.
    if of_access && replace(unsafe { (*info).si_addr() }.addr()) {
        return;
    }
    // Not of guarded memory: the former action. A fault is repeated when this returns; a signal from a
    // process is raised again. SAFETY: the action was read by `sigaction`, and `raise` is async-signal-safe.
    unsafe {
        libc::sigaction(signal, FORMER_ACTION.load(Ordering::Acquire), null_mut());
        if !of_access {
            libc::raise(signal);
        }
    }
}

/// Replaces guarded memory at this address by zeros. Returns false if it is not guarded.
fn replace(address: usize) -> bool {
    let mut next: *const GuardedMapping = ENTRIES.load(Ordering::Acquire);
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        if let Some(Replaced { start, len, prot }) = entry.replaced(address) {
            entry.lost.store(true, Ordering::Release);
            FAULTS.fetch_add(1, Ordering::AcqRel);
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            let start = std::ptr::without_provenance_mut(start);
            // SAFETY: the pages may be replaced by zeros at any fault (safety of `MappingGuard::new`); rustix
            // makes the system call itself, so `errno` of the interrupted thread does not change.
            return unsafe { mmap_anonymous(start, len, prot, flags) }.is_ok();
        }
        next = entry.next;
    }
    false
}
