//! A range of addresses without holes, which AF_XDP registers as its UMEM: private memory, followed by files.
//!
//! ```text
//!   0 ...................... private_bytes ............................. len
//!   private memory, in sections     shared mappings of files, one after the other
//! ```
//! No byte of it becomes a Rust reference, as guests write to the files: bytes are copied in and out.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::segment::checksum::{self, Sum};

/// Bytes that are copied at once to be summed.
const SUM_BYTES: usize = 2048;

/// The mapping. It is shared with its sections, and unmapped with the last of them.
#[derive(Debug)]
pub(crate) struct UmemMapping {
    base: NonNull<u8>,
    len: usize,
    private_bytes: usize,
    section_bytes: usize,
    in_use: Vec<AtomicBool>,
}

// SAFETY: addresses of a mapping that lives as long as this. The files are only copied from; the private part
// is written through an `ArenaSection`, of which there is one for each part.
unsafe impl Send for UmemMapping {}
// SAFETY: as above.
unsafe impl Sync for UmemMapping {}

/// A section of the private part, with exclusive write access.
#[derive(Debug)]
pub(crate) struct ArenaSection {
    mapping: Arc<UmemMapping>,
    start: usize,
}

impl UmemMapping {
    /// Reserves `len` addresses, the first `private_bytes` of them with memory, in sections of
    /// `section_bytes`. The address at `private_bytes` is a multiple of `align`, a power of two.
    pub(crate) fn new(
        len: usize,
        private_bytes: usize,
        align: usize,
        section_bytes: usize,
    ) -> io::Result<Self> {
        assert!(
            private_bytes <= len && align.is_power_of_two(),
            "{private_bytes} of {len} bytes, aligned to {align}"
        );
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let whole =
            len.checked_add(align).filter(|whole| *whole <= isize::MAX as usize).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address chosen by the kernel replaces nothing.
        let start = unsafe { mmap_anonymous(null_mut(), whole, ProtFlags::empty(), flags) }?;
        let lead = (align - (start.addr() + private_bytes) % align) % align;
        // SAFETY: `lead` is at most `align`, and `len + align` bytes are mapped.
        let base = unsafe { start.cast::<u8>().add(lead) };
        let base = NonNull::new(base).expect("the kernel maps nothing at 0");
        let in_use = (0..private_bytes / section_bytes).map(|_| AtomicBool::new(false)).collect();
        let mapping = Self { base, len, private_bytes, section_bytes, in_use };
        // SAFETY: both are parts of the new mapping, before and after `base..base + len`.
        unsafe {
            trim(start.cast(), lead);
            trim(base.as_ptr().add(len), align - lead);
        }
        let (prot, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: it replaces the beginning of the reserved addresses, which are not used yet.
        unsafe { mmap_anonymous(base.as_ptr().cast(), private_bytes, prot, fixed) }?;
        Ok(mapping)
    }

    /// Maps `len` bytes of a file at `at`, after the private part.
    pub(crate) fn map_file(&mut self, at: usize, file: &File, offset: u64, len: usize) -> io::Result<()> {
        let fits = at >= self.private_bytes && at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of a mapping of {} bytes", self.len);
        let (prot, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: it replaces reserved addresses of this mapping, as asserted above, and `&mut self` excludes
        // other users.
        unsafe { mmap(self.base.as_ptr().add(at).cast(), len, prot, fixed, file.as_fd(), offset) }?;
        Ok(())
    }

    /// Address of its first byte, for the kernel.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds bytes to a sum. Each counts with some value that it had, as a guest may be writing them.
    pub(crate) fn sum(&self, at: usize, len: usize, sum: &mut Sum) {
        let mut bytes = [0; SUM_BYTES];
        let mut done = 0;
        while done < len {
            let count = SUM_BYTES.min(len - done);
            let from = self.pointer(at + done, count);
            // SAFETY: `pointer` has asserted that `count` bytes are readable at `from`; `bytes` is a local
            // variable.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), count) };
            sum.append(checksum::of(&bytes[..count]), count);
            done += count;
        }
    }

    fn pointer(&self, at: usize, len: usize) -> *mut u8 {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of a mapping of {} bytes", self.len);
        // SAFETY: asserted above.
        unsafe { self.base.as_ptr().add(at) }
    }
}

/// Unmaps `len` bytes, if there are any.
///
/// # Safety
/// The bytes are a mapping, or a part of one, that is unused now.
unsafe fn trim(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: the caller's promise.
        let unmapped = unsafe { munmap(start.cast(), len) };
        unmapped.expect("a part of a mapping can be unmapped");
    }
}

impl Drop for UmemMapping {
    fn drop(&mut self) {
        // SAFETY: no section is left, as each holds a reference.
        unsafe { trim(self.base.as_ptr(), self.len) };
    }
}

impl ArenaSection {
    /// The section of this index; `None` if it is in use.
    pub(crate) fn acquire(mapping: &Arc<UmemMapping>, index: usize) -> Option<Self> {
        let free = !mapping.in_use.get(index)?.swap(true, Ordering::Acquire);
        free.then(|| Self { mapping: Arc::clone(mapping), start: index * mapping.section_bytes })
    }

    /// Offset in the mapping.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Copies bytes to offset `at` of the section.
    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        let fits = at.checked_add(bytes.len()).is_some_and(|end| end <= self.mapping.section_bytes);
        assert!(fits, "{} bytes at {at} of a section of {} bytes", bytes.len(), self.mapping.section_bytes);
        let to = self.mapping.pointer(self.start + at, bytes.len());
        // SAFETY: the bytes are writable and in this section, which only this value writes; `bytes` is a
        // reference, and thus not in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for ArenaSection {
    fn drop(&mut self) {
        self.mapping.in_use[self.start / self.mapping.section_bytes].store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::Write as _;

    use super::*;

    #[test]
    fn files_follow_the_private_sections() {
        let mut file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&[&[1u8; 4096][..], &[2; 8192]].concat()).unwrap();
        let mut mapping = UmemMapping::new(16384, 8192, 1 << 21, 4096).unwrap();
        assert_eq!((mapping.address() + 8192) % (1 << 21), 0);
        mapping.map_file(8192, &file, 4096, 8192).unwrap();
        let mapping = Arc::new(mapping);
        let mut section = ArenaSection::acquire(&mapping, 1).unwrap();
        assert!(ArenaSection::acquire(&mapping, 1).is_none() && ArenaSection::acquire(&mapping, 2).is_none());
        section.write(4094, &[3, 4]);
        let (mut found, mut wanted) = (Sum::default(), Sum::default());
        mapping.sum(8190, 5, &mut found);
        wanted.add(&[3, 4, 2, 2, 2]);
        assert_eq!(found, wanted);
        drop(section);
        assert!(ArenaSection::acquire(&mapping, 1).is_some());
    }

    #[test]
    #[should_panic(expected = "2 bytes at 4095 of a section of 4096 bytes")]
    fn writes_beyond_a_section_panic() {
        let mapping = Arc::new(UmemMapping::new(8192, 8192, 4096, 4096).unwrap());
        ArenaSection::acquire(&mapping, 0).unwrap().write(4095, &[1, 2]);
    }
}
