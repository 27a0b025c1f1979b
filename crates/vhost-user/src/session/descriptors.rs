//! Descriptors of a request, before any other call on them.
//!
//! A call on a file of FUSE or of a network file system waits for its server, and after SIGKILL too. That
//! includes `fstat`, a read of mapped memory, and `close`. A frontend may be that server itself.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx};

use super::{Rings, Session, SessionError};
use crate::message::{LogMemory, Request, VringFd};

/// `STATX_ATTR_IMMUTABLE`: file systems on the disks of a host support it, also those without a block device
/// (btrfs, zfs, overlay).
const IMMUTABLE: u64 = 0x10;

impl<R: Rings> Session<R> {
    /// Refuses a request with a file that another process or host serves. A separate thread closes the file.
    pub(super) fn check_descriptors(&self, request: Request) -> Result<Request, SessionError> {
        if descriptors(&request).into_iter().all(is_local) {
            return Ok(request);
        }
        match std::thread::Builder::new().name("close".into()).spawn(move || drop(request)) {
            Ok(thread) => self.orphans.add(thread),
            Err(error) => tracing::warn!(%error, "cannot close the frontend's descriptors in a thread"),
        }
        Err(SessionError::RemoteFile)
    }
}

fn descriptors(request: &Request) -> Vec<BorrowedFd<'_>> {
    match request {
        Request::SetMemTable(regions) => regions.iter().map(|(_, fd)| fd.as_fd()).collect(),
        Request::AddMemReg(_, fd)
        | Request::SetDeviceStateFd(_, fd)
        | Request::SetLogBase(LogMemory { fd, .. }) => vec![fd.as_fd()],
        Request::SetLogFd(fd)
        | Request::SetVringKick(VringFd { fd, .. })
        | Request::SetVringCall(VringFd { fd, .. })
        | Request::SetVringErr(VringFd { fd, .. }) => fd.iter().map(AsFd::as_fd).collect(),
        _ => Vec::new(),
    }
}

/// Returns true if the kernel itself serves the file. Neither call here is passed on to a server.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    // memfd, tmpfs, hugetlbfs.
    if fcntl_get_seals(fd).is_ok() {
        return true;
    }
    let cached = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = statx(fd, c"", cached, StatxFlags::TYPE) else { return false };
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile | FileType::Directory | FileType::Symlink => {
            stat.stx_dev_major != 0 || stat.stx_attributes_mask.bits() & IMMUTABLE != 0
        }
        // Pipes, sockets, devices, eventfds.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// A file of FUSE has the properties of these files of /proc: no seals, no block device, no attributes.
    #[test]
    fn files_that_the_kernel_serves_are_local() {
        let of_disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        assert!(is_local(of_disk.as_fd()), "the file system of the sources");
        assert!(is_local(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap().as_fd()));
        assert!(is_local(tempfile::tempfile_in("/dev/shm").unwrap().as_fd()));
        assert!(is_local(eventfd(0, EventfdFlags::CLOEXEC).unwrap().as_fd()));
        assert!(is_local(rustix::pipe::pipe().unwrap().0.as_fd()));
        assert!(is_local(File::open("/dev/null").unwrap().as_fd()));
        for other in ["/proc/self/status", "/proc/self"] {
            assert!(!is_local(File::open(other).unwrap().as_fd()), "{other}");
        }
    }
}
