//! Page faults of ours that somebody else resolves: a userfaultfd over shared memory.
//!
//! Nobody here reads the descriptor: the frontend does, fetches the page into the shared file and wakes who waits. Formats
//! and numbers: `include/uapi/linux/userfaultfd.h`. (The crate `userfaultfd` wants libclang to build.)

use std::io;
use std::os::fd::OwnedFd;

use linux_raw_sys::general::{
    UFFD_API, UFFDIO_REGISTER_MODE_MISSING, uffdio_api, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::Mapping;

/// `UFFDIO`, the ioctls' type.
const TYPE: u8 = 0xaa;

// The numbers hold the sizes of the structures: both are as in the header, or this does not compile.
const _: () = {
    assert!(UFFDIO_API == opcode::read_write::<uffdio_api>(TYPE, 0x3f));
    assert!(UFFDIO_REGISTER == opcode::read_write::<uffdio_register>(TYPE, 0x00));
};

/// A userfaultfd. When the last of its descriptors is closed, nothing is watched any more, and pages that are not there
/// read as zeros.
#[derive(Debug)]
pub(crate) struct Faults(OwnedFd);

impl Faults {
    /// A new one, also for faults within system calls: devices hand guest memory to the kernel.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_PTRACE where `vm.unprivileged_userfaultfd` is 0; `ENOSYS`.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the descriptor is used for regions only that `watch` is given.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?;
        let mut api = uffdio_api { api: UFFD_API.into(), features: 0, ioctls: 0 };
        // SAFETY: the number belongs to this structure (asserted above), which the kernel fills in.
        unsafe { ioctl(&fd, Updater::<{ UFFDIO_API }, _>::new(&mut api)) }?;
        Ok(Self(fd))
    }

    /// Whoever touches a page of it that is in no process yet waits until it is.
    ///
    /// # Errors
    /// `EINVAL`: the kernel cannot watch this kind of memory.
    pub(crate) fn watch(&self, mapping: &Mapping) -> io::Result<()> {
        let (start, len) = mapping.span();
        let range = uffdio_range { start: start.addr() as u64, len: len as u64 };
        let mut register = uffdio_register { range, mode: UFFDIO_REGISTER_MODE_MISSING.into(), ioctls: 0 };
        // SAFETY: the number belongs to this structure (asserted above). The range is mapped, by `mapping`; whoever touches
        // it afterwards waits, and reads what the frontend put there, as everybody who shares the file would.
        Ok(unsafe { ioctl(&self.0, Updater::<{ UFFDIO_REGISTER }, _>::new(&mut register)) }?)
    }

    /// The descriptor once more, for who resolves the faults.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}
