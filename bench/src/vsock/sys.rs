//! Listeners of AF_VSOCK, for which the standard library and rustix have no functions.

use std::fs::File;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context, Result};

/// Length of the backlog.
const BACKLOG: libc::c_int = 128;

/// A listener at a port of this machine.
pub(super) struct VsockListener(OwnedFd);

impl VsockListener {
    /// Listens at this port.
    pub(super) fn bind(port: u32) -> Result<Self> {
        // SAFETY: the call has no pointers.
        let number = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        let fd = owned(number).context("AF_VSOCK socket")?;
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_vm = unsafe { zeroed() };
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_cid = libc::VMADDR_CID_ANY;
        address.svm_port = port;
        let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        // SAFETY: the address has this type and length, and is only read.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) };
        // SAFETY: the call has no pointers.
        if bound < 0 || unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) } < 0 {
            return Err(io::Error::last_os_error()).with_context(|| format!("AF_VSOCK port {port}"));
        }
        Ok(Self(fd))
    }

    /// Accepts a connection, which is read and written as a file.
    pub(super) fn accept(&self) -> Result<File> {
        let null = std::ptr::null_mut();
        // SAFETY: without an address nothing is written.
        let number = unsafe { libc::accept4(self.0.as_raw_fd(), null, null.cast(), libc::SOCK_CLOEXEC) };
        Ok(owned(number).context("accept")?.into())
    }
}

fn owned(number: libc::c_int) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
