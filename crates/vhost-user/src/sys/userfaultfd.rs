//! A userfaultfd over shared memory, whose faults the frontend resolves.
//!
//! The frontend reads the descriptor, fetches the page into the shared file and wakes the waiting thread.
//! Formats and numbers: `include/uapi/linux/userfaultfd.h`. (The crate `userfaultfd` needs libclang to
//! build.)

use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general::{
    UFFD_API, UFFDIO_REGISTER_MODE_MISSING, uffdio_api, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::Mapping;

/// Type of the ioctls (`UFFDIO`).
const TYPE: u8 = 0xaa;

// The numbers include the sizes of the structures, so this checks both against the header.
const _: () = {
    assert!(UFFDIO_API == opcode::read_write::<uffdio_api>(TYPE, 0x3f));
    assert!(UFFDIO_REGISTER == opcode::read_write::<uffdio_register>(TYPE, 0x00));
};

/// A userfaultfd. When the last of its descriptors is closed, its registrations end, and missing pages read
/// as zeros.
#[derive(Debug)]
pub(crate) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Creates a userfaultfd, also for faults within system calls, because devices pass guest memory to the
    /// kernel.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_PTRACE where `vm.unprivileged_userfaultfd` is 0; `ENOSYS`.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the descriptor is used only for the regions of `register`.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?;
        let mut api = uffdio_api { api: UFFD_API.into(), features: 0, ioctls: 0 };
        // SAFETY: the number belongs to this structure (asserted above), which the kernel fills in.
        unsafe { ioctl(&fd, Updater::<{ UFFDIO_API }, _>::new(&mut api)) }?;
        Ok(Self(fd))
    }

    /// Registers a mapping: a thread that accesses a missing page of it waits until the page arrives.
    ///
    /// # Errors
    /// `EINVAL`: the kernel does not support this kind of memory.
    pub(crate) fn register(&self, mapping: &Mapping) -> io::Result<()> {
        let (start, len) = mapping.span();
        let range = uffdio_range { start: start.addr() as u64, len: len as u64 };
        let mut register = uffdio_register { range, mode: UFFDIO_REGISTER_MODE_MISSING.into(), ioctls: 0 };
        // SAFETY: the number belongs to this structure (asserted above). The range is mapped, by `mapping`;
        // later accesses wait, and read what the frontend writes there, like those of any process that shares
        // the file.
        Ok(unsafe { ioctl(&self.0, Updater::<{ UFFDIO_REGISTER }, _>::new(&mut register)) }?)
    }

    /// A duplicate of the descriptor, for the frontend.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}
