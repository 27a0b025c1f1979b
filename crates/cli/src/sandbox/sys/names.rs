//! Names in memory that nothing in this process can change any more, so that a filter, which sees an address and not what is
//! there, can tell them from others.

use std::ffi::CString;
use std::io;

/// A path at an address that stays what it is (`mseal(2)`, Linux 6.10).
#[derive(Debug, Clone, Copy)]
pub(in crate::sandbox) struct SealedName(u64);

impl SealedName {
    /// Where it is.
    pub(in crate::sandbox) fn address(self) -> u64 {
        self.0
    }

    /// Removes the file of this name.
    pub(in crate::sandbox) fn unlink(self) -> io::Result<()> {
        let name = self.0 as *const libc::c_char;
        // SAFETY: a `SealedName` is the address of a string that ends with a zero, in memory that is never unmapped.
        answer(unsafe { libc::unlinkat(libc::AT_FDCWD, name, 0) })
    }
}

/// Puts the names where they stay for as long as this process is.
pub(in crate::sandbox) fn seal(names: &[CString]) -> io::Result<Vec<SealedName>> {
    let bytes: Vec<u8> = names.iter().flat_map(|name| name.as_bytes_with_nul()).copied().collect();
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses an address where nothing is.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes.len(), access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is ours, new, writable, and at least as long.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.cast(), bytes.len()) };
    // SAFETY: the whole mapping, of which there is no reference.
    answer(unsafe { libc::mprotect(base, bytes.len(), libc::PROT_READ) })?;
    // SAFETY: the call takes an address, a length and no flags, and only takes rights away.
    let sealed = unsafe { libc::syscall(libc::SYS_mseal, base, bytes.len(), 0) };
    if sealed != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut address = base as u64;
    let place = |name: &CString| {
        let place = SealedName(address);
        address += name.as_bytes_with_nul().len() as u64;
        place
    };
    Ok(names.iter().map(place).collect())
}

fn answer(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
