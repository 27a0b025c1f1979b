//! Write protection that the kernel lifts at the first write: userfaultfd in its asynchronous mode.
//!
//! ```text
//!   userfaultfd() ─► UFFDIO_API ─► UFFDIO_REGISTER (WP) ─► UFFDIO_WRITEPROTECT …  writes lift it …  UFFDIO_UNREGISTER
//! ```
//!
//! The descriptor is never read: a write to a protected page only clears the page's mark, and the written
//! pages are found in the pagemap ([`super::Pagemap`]). Formats and numbers:
//! `include/uapi/linux/userfaultfd.h`, Linux 6.7. As no fault is handled here, the descriptor is created for
//! user mode only, which needs no privilege.

use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED,
    UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range, uffdio_register,
    uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::Span;

/// Requested features of the kernel.
pub(crate) const FEATURES: u64 =
    (UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_HUGETLBFS_SHMEM) as u64;
/// `UFFDIO_WRITEPROTECT_MODE_WP`, which bindgen cannot read from its header.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// `UFFDIO`, the ioctls' type.
const TYPE: u8 = 0xaa;

// The numbers hold the sizes of the structures: both are as in the header, or this does not compile.
const _: () = {
    assert!(UFFDIO_API == opcode::read_write::<uffdio_api>(TYPE, 0x3f));
    assert!(UFFDIO_REGISTER == opcode::read_write::<uffdio_register>(TYPE, 0x00));
    assert!(UFFDIO_UNREGISTER == opcode::read::<uffdio_range>(TYPE, 0x01));
    assert!(UFFDIO_WRITEPROTECT == opcode::read_write::<uffdio_writeprotect>(TYPE, 0x06));
    assert!(UFFD_API == 0xaa && FEATURES == (1 << 15 | 1 << 13 | 1 << 12));
    assert!(size_of::<uffdio_api>() == 24 && std::mem::offset_of!(uffdio_api, features) == 8);
    assert!(size_of::<uffdio_range>() == 16 && std::mem::offset_of!(uffdio_range, len) == 8);
    assert!(size_of::<uffdio_register>() == 32 && std::mem::offset_of!(uffdio_register, mode) == 16);
    assert!(size_of::<uffdio_writeprotect>() == 24 && std::mem::offset_of!(uffdio_writeprotect, mode) == 16);
};

/// A userfaultfd that write-protects asynchronously. Closing it lifts the protection.
#[derive(Debug)]
pub(crate) struct Userfault {
    fd: OwnedFd,
}

impl Userfault {
    /// Opens it with [`FEATURES`].
    ///
    /// # Errors
    /// `EPERM`, `ENOSYS`: not for this process, or not in this kernel; `EINVAL`: the kernel lacks a feature.
    pub(crate) fn open() -> io::Result<Self> {
        let user_mode = UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: the descriptor is used only for what `register` is given.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | user_mode) }?;
        let this = Self { fd };
        let mut api = uffdio_api { api: UFFD_API.into(), features: FEATURES, ioctls: 0 };
        // SAFETY: UFFDIO_API reads and writes one `uffdio_api`.
        unsafe { this.ioctl::<UFFDIO_API, _>(&mut api) }?;
        Ok(this)
    }

    /// Registers memory; nothing is protected yet.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has it; `EINVAL`: it is not all mapped, or not at bounds of its huge
    /// pages.
    pub(crate) fn register(&self, span: &Span<'_>) -> io::Result<()> {
        let mut register = uffdio_register {
            range: range(span, 0, span.length()),
            mode: UFFDIO_REGISTER_MODE_WP.into(),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER reads and writes one `uffdio_register`; the span is mapped, and
        // asynchronous write protection changes nothing that a program can see.
        unsafe { self.ioctl::<UFFDIO_REGISTER, _>(&mut register) }
    }

    /// Protects the pages of `length` bytes from `offset` on, and marks those that are not there yet.
    ///
    /// # Errors
    /// The range is not registered, or there is no memory for page tables.
    pub(crate) fn protect(&self, span: &Span<'_>, offset: usize, length: usize) -> io::Result<()> {
        let mut protect =
            uffdio_writeprotect { range: range(span, offset, length), mode: WRITEPROTECT_MODE_WP };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `uffdio_writeprotect`; else as for `register`.
        unsafe { self.ioctl::<UFFDIO_WRITEPROTECT, _>(&mut protect) }
    }

    /// Lifts everything from memory that was registered.
    ///
    /// # Errors
    /// The mapping has changed.
    pub(crate) fn unregister(&self, span: &Span<'_>) -> io::Result<()> {
        let mut whole = range(span, 0, span.length());
        // SAFETY: UFFDIO_UNREGISTER reads one `uffdio_range`; else as for `register`.
        unsafe { self.ioctl::<UFFDIO_UNREGISTER, _>(&mut whole) }
    }

    /// # Safety
    /// `argument` is of the type that this request reads and writes.
    unsafe fn ioctl<const REQUEST: Opcode, T>(&self, argument: &mut T) -> io::Result<()> {
        loop {
            // SAFETY: the caller vouches for the argument, which lives until the call returns.
            match unsafe { ioctl(&self.fd, Updater::<REQUEST, T>::new(argument)) } {
                // EAGAIN: the address space was changing (a fork, an mmap); nothing was done.
                Err(Errno::INTR | Errno::AGAIN) => {}
                result => return Ok(result?),
            }
        }
    }
}

fn range(span: &Span<'_>, offset: usize, length: usize) -> uffdio_range {
    assert!(offset.checked_add(length).is_some_and(|end| end <= span.length()), "not within the span");
    uffdio_range { start: (span.address() + offset) as u64, len: length as u64 }
}
