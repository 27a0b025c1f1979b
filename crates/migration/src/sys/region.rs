//! A mapping of guest memory, which others may write at any time.
//!
//! The memory is reached as a [`Span`] only, so no reference to its bytes is ever made.
//!
//! Limits: a descriptor's file must not be truncated while it is mapped; access past its end would end the
//! process.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::span::{PAGE_BYTES, Span};

/// A huge page of x86 and most others, to whose multiple a region is aligned.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory for a guest, unmapped on drop. An embedder that maps its guest's memory itself does not need it.
#[derive(Debug)]
pub struct RamMapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: an address and a length; all access is by system calls, volatile or atomic.
unsafe impl Send for RamMapping {}
// SAFETY: as above.
unsafe impl Sync for RamMapping {}

impl RamMapping {
    /// Private memory, zero at first; `length` is a multiple of the page size and not 0.
    ///
    /// # Errors
    /// The length is 0, or the kernel has no memory.
    pub fn anonymous(length: usize) -> io::Result<Self> {
        Self::map(length, MapFlags::PRIVATE, None)
    }

    /// Address space for `length` bytes, a multiple of the page size and not 0, where only written pages take
    /// memory. As [`Self::anonymous`], but of any length: the kernel does not check that there is enough
    /// memory.
    ///
    /// # Errors
    /// The length is 0, or the address space is exhausted.
    pub fn reserved(length: usize) -> io::Result<Self> {
        Self::map(length, MapFlags::PRIVATE | MapFlags::NORESERVE, None)
    }

    /// Private memory in huge pages of 2 MiB, zero at first; `length` is a multiple of that and not 0.
    ///
    /// # Errors
    /// The length is 0, or not enough huge pages are free (`vm.nr_hugepages`).
    pub fn huge(length: usize) -> io::Result<Self> {
        if !length.is_multiple_of(HUGE_PAGE_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Self::map(length, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB, None)
    }

    /// `length` bytes of a file from `offset` on, both multiples of the page size, copied where they are
    /// written.
    ///
    /// # Errors
    /// As [`Self::shared`].
    pub fn copy_on_write(file: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<Self> {
        Self::of_file(file, offset, length, MapFlags::PRIVATE)
    }

    /// `length` bytes of a file or memfd from `offset` on, both multiples of the page size, shared with other
    /// mappings of it.
    ///
    /// # Errors
    /// The file is shorter than that, or cannot be mapped.
    pub fn shared(file: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<Self> {
        Self::of_file(file, offset, length, MapFlags::SHARED)
    }

    fn of_file(file: BorrowedFd<'_>, offset: u64, length: usize, flags: MapFlags) -> io::Result<Self> {
        let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
        let file_length = std::fs::File::from(file.try_clone_to_owned()?).metadata()?.len();
        if end.is_none_or(|end| end > file_length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Self::map(length, flags, Some((file, offset)))
    }

    fn map(length: usize, flags: MapFlags, file: Option<(BorrowedFd<'_>, u64)>) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if length == 0 || !length.is_multiple_of(PAGE_BYTES) {
            return Err(invalid());
        }
        let room = length.checked_add(HUGE_PAGE_BYTES).ok_or_else(invalid)?;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), reserve) }?;
        let before = base.addr().wrapping_neg() % HUGE_PAGE_BYTES;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, flags | MapFlags::FIXED);
        // SAFETY: `before + length` is within the reservation made above, which is ours alone, so MAP_FIXED
        // replaces only our own mapping; the rest of the reservation on either side is unmapped.
        unsafe {
            let start = base.byte_add(before);
            let mapped = match file {
                Some((fd, offset)) => mmap(start, length, access, flags, fd, offset),
                None => mmap_anonymous(start, length, access, flags),
            };
            if let Err(errno) = mapped {
                let _ = munmap(base, room);
                return Err(errno.into());
            }
            if before > 0 {
                let _ = munmap(base, before);
            }
            let after = room - before - length;
            if after > 0 {
                let _ = munmap(start.byte_add(length), after);
            }
            let start = NonNull::new(start.cast()).expect("after a reservation, which is not at 0");
            Ok(Self { start, length })
        }
    }

    /// Returns whole pages to the kernel; those of private memory are zero afterwards.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn discard(&self, offset: usize, length: usize) {
        self.span().discard(offset, length);
    }

    /// The memory, while it is mapped.
    pub fn span(&self) -> Span<'_> {
        // SAFETY: the mapping lives until `self` is dropped, and no references to it exist.
        unsafe { Span::from_raw_parts(self.start, self.length) }
    }
}

impl Drop for RamMapping {
    fn drop(&mut self) {
        // SAFETY: this is what `map` mapped, and every buffer over it borrows `self`.
        let result = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert_eq!(result, Ok(()), "munmap of our own mapping");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn copies_of_any_length_and_place_are_exact() {
        let region = RamMapping::anonymous(2 * PAGE_BYTES).unwrap();
        let region = region.span();
        let bytes: Vec<u8> = (1..=255).collect();
        for offset in 0..17 {
            for length in [0, 1, 7, 8, 9, 15, 16, 17, 255] {
                region.write(offset, &[0; 300]);
                region.write(offset, &bytes[..length]);
                let mut copy = vec![0; length + 1];
                region.read(offset, &mut copy);
                assert_eq!((&copy[..length], copy[length]), (&bytes[..length], 0));
                region.write(0, &[0; 300]);
            }
        }
        assert!(region.is_zero(0, 2 * PAGE_BYTES));
    }

    #[test]
    fn a_region_is_aligned_for_huge_pages() {
        for length in [PAGE_BYTES, 3 * HUGE_PAGE_BYTES + PAGE_BYTES] {
            let region = RamMapping::anonymous(length).unwrap();
            assert!(region.span().address().is_multiple_of(HUGE_PAGE_BYTES));
            region.span().touch(0, length);
            region.span().populate(0, length).unwrap();
        }
    }

    #[test]
    fn a_shared_region_is_the_files_content() {
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 3 * PAGE_BYTES as u64).unwrap();
        let whole = RamMapping::shared(file.as_fd(), 0, 3 * PAGE_BYTES).unwrap();
        let second = RamMapping::shared(file.as_fd(), PAGE_BYTES as u64, PAGE_BYTES).unwrap();
        second.span().write(3, b"here");
        let mut copy = [0; 4];
        whole.span().read(PAGE_BYTES + 3, &mut copy);
        assert_eq!(&copy, b"here");
        let error = RamMapping::shared(file.as_fd(), PAGE_BYTES as u64, 3 * PAGE_BYTES).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    #[should_panic(expected = "1 bytes at 0x1000 of 0x1000")]
    fn nothing_is_reached_behind_the_end() {
        RamMapping::anonymous(PAGE_BYTES).unwrap().span().write(PAGE_BYTES, &[1]);
    }
}
