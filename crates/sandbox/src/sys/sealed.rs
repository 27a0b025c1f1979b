//! Path names in sealed memory. A seccomp filter sees the address of a path and not its text, so the text
//! must not change.

use std::ffi::CString;
use std::io;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use super::done;

/// A path in memory that can be neither written nor unmapped (`mseal(2)`, Linux 6.10).
#[derive(Debug, Clone, Copy)]
pub(crate) struct SealedPath(u64);

impl SealedPath {
    /// Returns its address.
    pub(crate) fn address(self) -> u64 {
        self.0
    }

    /// Removes the file at this path.
    pub(crate) fn unlink(self) -> io::Result<()> {
        let path = self.0 as *const libc::c_char;
        // SAFETY: a `SealedPath` is the address of a NUL-terminated string in memory that is never unmapped.
        done(unsafe { libc::unlinkat(libc::AT_FDCWD, path, 0) }.into())
    }
}

/// Copies the paths into memory that is sealed for the lifetime of the process.
pub(crate) fn seal(names: &[CString]) -> io::Result<Vec<SealedPath>> {
    let bytes: Vec<u8> = names.iter().flat_map(|name| name.as_bytes_with_nul()).copied().collect();
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes.len(), access, MapFlags::PRIVATE) }?;
    // SAFETY: the mapping is new, writable, and at least as long.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.cast(), bytes.len()) };
    // SAFETY: this is the whole mapping, and no reference to it exists.
    unsafe { mprotect(base, bytes.len(), MprotectFlags::READ) }?;
    // SAFETY: the call takes an address, a length and no flags, and only forbids changes of the mapping.
    done(unsafe { libc::syscall(libc::SYS_mseal, base, bytes.len(), 0) })?;
    let mut address = base as u64;
    let sealed = |name: &CString| {
        let path = SealedPath(address);
        address += name.as_bytes_with_nul().len() as u64;
        path
    };
    Ok(names.iter().map(sealed).collect())
}
