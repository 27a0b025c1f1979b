//! A stretch of addresses in which memory of several owners lies without a hole: what AF_XDP takes its packets from.
//!
//! ```text
//!   0 ............ own ................................................ len
//!   ours, in sections   files that others write as well, beside each other
//! ```
//! Nothing in it ever becomes a Rust reference: bytes are copied, in and out.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::segment::checksum::{self, Sum};

/// Bytes that are copied at a time to be summed.
const SUM_BYTES: usize = 2048;

/// See the module. Unmapped when the last of its sections is gone.
#[derive(Debug)]
pub(crate) struct Span {
    base: NonNull<u8>,
    len: usize,
    own: usize,
    section_bytes: usize,
    taken: Vec<AtomicBool>,
}

// SAFETY: addresses of a mapping that lives as long as this. What others write is only copied; what is ours is written
// through a `Section`, of which there is one for each part.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

/// A part of what is ours, which only its holder writes.
#[derive(Debug)]
pub(crate) struct Section {
    span: Arc<Span>,
    start: usize,
}

impl Span {
    /// Reserves `len` addresses and makes the first `own` of them memory, in sections of `section_bytes`. The address at `own`
    /// is a multiple of `align`, a power of two.
    pub(crate) fn new(len: usize, own: usize, align: usize, section_bytes: usize) -> io::Result<Self> {
        assert!(own <= len && align.is_power_of_two(), "{own} of {len} bytes, aligned to {align}");
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let whole =
            len.checked_add(align).filter(|whole| *whole <= isize::MAX as usize).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice replaces nothing.
        let start = unsafe { mmap_anonymous(null_mut(), whole, ProtFlags::empty(), flags) }?;
        let lead = (align - (start.addr() + own) % align) % align;
        // SAFETY: `lead` is at most `align`, of which there is room before `len`.
        let base = unsafe { start.cast::<u8>().add(lead) };
        let base = NonNull::new(base).expect("the kernel maps nothing at 0");
        let taken = (0..own / section_bytes).map(|_| AtomicBool::new(false)).collect();
        let span = Self { base, len, own, section_bytes, taken };
        // SAFETY: both are of the mapping just made, before and behind what stays.
        unsafe {
            trim(start.cast(), lead);
            trim(base.as_ptr().add(len), align - lead);
        }
        let (prot, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: it replaces the beginning of the reserved addresses, which nobody uses.
        unsafe { mmap_anonymous(base.as_ptr().cast(), own, prot, fixed) }?;
        Ok(span)
    }

    /// Puts `len` bytes of a file at `at`, behind what is ours. Before the span is shared.
    pub(crate) fn place(&mut self, at: usize, file: &File, offset: u64, len: usize) -> io::Result<()> {
        let fits = at >= self.own && at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of a span of {} bytes", self.len);
        let (prot, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: it replaces reserved addresses of this span, which was compared just now and nobody else has.
        unsafe { mmap(self.base.as_ptr().add(at).cast(), len, prot, fixed, file.as_fd(), offset) }?;
        Ok(())
    }

    /// Where it begins, for the kernel.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds bytes that others may be writing: of each some value that it had.
    pub(crate) fn sum(&self, at: usize, len: usize, sum: &mut Sum) {
        let mut bytes = [0; SUM_BYTES];
        let mut done = 0;
        while done < len {
            let here = SUM_BYTES.min(len - done);
            let from = self.pointer(at + done, here);
            // SAFETY: `here` bytes are readable at `from`, which `pointer` compared; `bytes` is this function's own.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), here) };
            sum.append(checksum::of(&bytes[..here]), here);
            done += here;
        }
    }

    fn pointer(&self, at: usize, len: usize) -> *mut u8 {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {at} of a span of {} bytes", self.len);
        // SAFETY: it was compared just now.
        unsafe { self.base.as_ptr().add(at) }
    }
}

/// Unmaps `len` bytes, if there are any.
///
/// # Safety
/// They are a mapping, or a part of one, that nobody uses.
unsafe fn trim(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: the caller's promise.
        let unmapped = unsafe { munmap(start.cast(), len) };
        unmapped.expect("a part of a mapping can be unmapped");
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone now.
        unsafe { trim(self.base.as_ptr(), self.len) };
    }
}

impl Section {
    /// The section of this number, if nobody has it.
    pub(crate) fn take(span: &Arc<Span>, index: usize) -> Option<Self> {
        let free = !span.taken.get(index)?.swap(true, Ordering::Acquire);
        free.then(|| Self { span: Arc::clone(span), start: index * span.section_bytes })
    }

    /// Where it begins in the span.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Copies bytes to `at` of the section.
    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        let fits = at.checked_add(bytes.len()).is_some_and(|end| end <= self.span.section_bytes);
        assert!(fits, "{} bytes at {at} of a section of {} bytes", bytes.len(), self.span.section_bytes);
        let to = self.span.pointer(self.start + at, bytes.len());
        // SAFETY: the bytes are writable and in this section, which only the holder of this value writes; `bytes` is a
        // reference and thus not of a span.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        self.span.taken[self.start / self.span.section_bytes].store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::Write as _;

    use super::*;

    #[test]
    fn files_lie_behind_what_is_ours() {
        let mut file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&[&[1u8; 4096][..], &[2; 8192]].concat()).unwrap();
        let mut span = Span::new(16384, 8192, 1 << 21, 4096).unwrap();
        assert_eq!((span.address() + 8192) % (1 << 21), 0);
        span.place(8192, &file, 4096, 8192).unwrap();
        let span = Arc::new(span);
        let mut section = Section::take(&span, 1).unwrap();
        assert!(Section::take(&span, 1).is_none() && Section::take(&span, 2).is_none());
        section.write(4094, &[3, 4]);
        let (mut found, mut wanted) = (Sum::default(), Sum::default());
        span.sum(8190, 5, &mut found);
        wanted.add(&[3, 4, 2, 2, 2]);
        assert_eq!(found, wanted);
        drop(section);
        assert!(Section::take(&span, 1).is_some());
    }

    #[test]
    #[should_panic(expected = "2 bytes at 4095 of a section of 4096 bytes")]
    fn a_section_ends() {
        let span = Arc::new(Span::new(8192, 8192, 4096, 4096).unwrap());
        Section::take(&span, 0).unwrap().write(4095, &[1, 2]);
    }
}
