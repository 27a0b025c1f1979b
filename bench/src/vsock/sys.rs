//! Listeners of AF_VSOCK, for which the standard library and rustix have no functions.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd as _, OwnedFd};

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, listen as listen_on, socket_with};

/// Length of the backlog.
const BACKLOG: i32 = 128;

/// Listens at a port of this machine. The listener does not block.
pub(super) fn listen(port: u32) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None).context("AF_VSOCK socket")?;
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_vm = unsafe { zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_ANY;
    address.svm_port = port;
    let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address has this type and length, and is only read.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("AF_VSOCK port {port}"));
    }
    listen_on(&fd, BACKLOG)?;
    Ok(fd)
}
