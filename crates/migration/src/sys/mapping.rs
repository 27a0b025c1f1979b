//! Private anonymous memory that only this process writes.

use std::io;
use std::ptr::{self, NonNull};

/// Page-aligned memory, zero at first, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is owned; access goes through `&self` and `&mut self` like that to a `Vec`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&self` only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes, more than 0.
    pub(crate) fn anonymous(length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, length })
    }

    /// The memory.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `length` bytes are mapped readable until drop, and only `&mut self` writes them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The memory, to be written.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `length` bytes are mapped writable until drop, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `anonymous` made, and no reference to it outlives `self`.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert_eq!(result, 0, "munmap of our own mapping");
    }
}
