//! Handles SIGBUS in memory that a frontend shares: an access past the end of a truncated file, or to a huge
//! page that the kernel does not have.
//!
//! ```text
//!   access ─► SIGBUS ─► handler: a guarded mapping? ─ yes ──► zero pages over all of it, marked as lost; the access is repeated
//!                                                    └ no ──► the former action: the process ends
//! ```
//! The thread continues with zeros, and detects between two batches that the memory is lost ([`faults`]). The
//! handler makes one system call (`mmap`), takes no lock and allocates nothing. A system call that accesses
//! such memory fails with `EFAULT` and raises no signal.
//!
//! A signal handler has no argument of its owner, so the list of mappings is a static. Its entries are reused
//! and never freed; each is protected by a sequence counter, so the handler, which may run at any time, never
//! uses an inconsistent one.

use std::io;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

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
    lost: AtomicBool,
    next: *const GuardedMapping,
}

// SAFETY: atomics, and a constant pointer to another entry, which is never freed.
unsafe impl Send for GuardedMapping {}
// SAFETY: as above.
unsafe impl Sync for GuardedMapping {}

/// Keeps a mapping on the handler's list.
#[derive(Debug)]
pub(crate) struct MappingGuard(&'static GuardedMapping);

/// Number of faults of guarded memory in this process.
pub(crate) fn faults() -> u64 {
    FAULTS.load(Ordering::Acquire)
}

impl MappingGuard {
    /// Guards a mapping, until this is dropped.
    ///
    /// # Safety
    /// `start..start + len` is a mapping of the caller that outlives this value and may be replaced by zeros
    /// at any time; no reference points into it.
    ///
    /// # Errors
    /// If the handler cannot be installed.
    pub(crate) unsafe fn new(start: *mut u8, len: usize) -> io::Result<Self> {
        if !*INSTALLED.get_or_init(|| install().is_ok()) {
            return Err(io::Error::other("cannot install a handler for SIGBUS"));
        }
        let entry = free_entries().pop().unwrap_or_else(GuardedMapping::add);
        entry.change(start.addr(), len);
        Ok(Self(entry))
    }

    /// Returns true if the mapping was replaced by zeros.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.0.change(0, 0);
        free_entries().push(self.0);
    }
}

impl GuardedMapping {
    /// Adds an unused entry at the head of the list.
    fn add() -> &'static Self {
        let entry = Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
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
    fn change(&self, start: usize, len: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Start and length, if this address is in the entry. An entry that changes belongs to another mapping,
    /// because a thread that accesses a mapping keeps it.
    fn containing(&self, address: usize) -> Option<(usize, usize)> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let consistent = sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        (consistent && address.wrapping_sub(start) < len).then_some((start, len))
    }
}

fn free_entries() -> MutexGuard<'static, Vec<&'static GuardedMapping>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Replaces the guarded mapping that contains this address by zeros. Returns false if there is none.
fn replace(address: usize) -> bool {
    let mut next: *const GuardedMapping = ENTRIES.load(Ordering::Acquire);
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        if let Some((start, len)) = entry.containing(address) {
            entry.lost.store(true, Ordering::Release);
            FAULTS.fetch_add(1, Ordering::AcqRel);
            return map_zeros(start, len);
        }
        next = entry.next;
    }
    false
}

fn map_zeros(start: usize, len: usize) -> bool {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let start = std::ptr::without_provenance_mut(start);
    // SAFETY: the mapping may be replaced by zeros at any time (safety of `MappingGuard::new`); rustix makes
    // the system call itself, so `errno` of the interrupted thread does not change.
    unsafe { mmap_anonymous(start, len, prot, flags | MapFlags::FIXED) }.is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::sys::Mapping;

    fn mapped(bytes: u64) -> (File, Mapping) {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, bytes).unwrap();
        let mapping = Mapping::guarded(file.try_clone().unwrap().into(), 0, bytes).unwrap();
        (file, mapping)
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_and_others_are_unchanged() {
        let before = faults();
        let ((cut, lost), (_whole, other)) = (mapped(1 << 16), mapped(1 << 16));
        let [lost, other] = [lost, other].map(std::sync::Arc::new);
        let area = |mapping| crate::sys::Area::new(mapping, 0, 1 << 16, 8).unwrap();
        let areas = [area(&lost), area(&other)];
        areas.iter().for_each(|area| area.store_64(8192, 7, Ordering::Relaxed));
        ftruncate(&cut, 4096).unwrap();
        assert!(!lost.is_lost());
        assert_eq!(areas[0].load_64(8192, Ordering::Relaxed), 0);
        areas[0].store_64(8192, 9, Ordering::Relaxed);
        assert_eq!(areas[0].load_64(8192, Ordering::Relaxed), 9);
        assert!(lost.is_lost() && faults() > before);
        assert!(!other.is_lost());
        assert_eq!(areas[1].load_64(8192, Ordering::Relaxed), 7);
        drop((areas, lost));
        // The next guard reuses its entry.
        let (_file, next) = mapped(1 << 16);
        assert!(!next.is_lost());
    }

    #[test]
    fn missing_huge_pages_read_as_zeros() {
        let Ok(fd) = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
            println!("SKIPPED missing_huge_pages_read_as_zeros: no hugetlbfs in this kernel");
            return;
        };
        ftruncate(&fd, 2 << 20).unwrap();
        // Not a multiple of the page size: the kernel maps the whole page.
        let mapping = std::sync::Arc::new(Mapping::guarded(fd, 0, 5000).unwrap());
        let area = crate::sys::Area::new(&mapping, 0, 4096, 8).unwrap();
        assert_eq!(area.load_64(8, Ordering::Relaxed), 0);
        let free = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap();
        assert_eq!(mapping.is_lost(), free.trim() == "0");
    }

    /// In a separate process, which must die of the signal.
    #[test]
    fn a_fault_in_unguarded_memory_ends_the_process() {
        const CHILD: &str = "TOWLINE_TEST_SIGBUS";
        if std::env::var_os(CHILD).is_some() {
            let (_file, _mapping) = mapped(4096);
            let file = File::from(memfd_create("other", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, 4096).unwrap();
            let other = Mapping::new(file.try_clone().unwrap().into(), 0, 4096).unwrap();
            ftruncate(&file, 0).unwrap();
            let area = crate::sys::Area::new(&std::sync::Arc::new(other), 0, 8, 8).unwrap();
            println!("read {}", area.load_64(0, Ordering::Relaxed));
            return;
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "sys::guard::tests::a_fault_in_unguarded_memory_ends_the_process";
        let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    }
}
