//! All that is unsafe: the vectored calls on sockets over buffers that Rust never looks into, and addresses of AF_VSOCK.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use towline_channel::{IOV_MAX, IoBuf, IoBufMut};

use crate::sockets::Received;

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

// The calls are made without the C library's own functions, which are points at which a thread can be cancelled: to allow
// that and to forbid it again is a part of what a short call costs.

/// `recvmsg(2)` that does not wait.
pub(crate) fn receive(fd: BorrowedFd<'_>, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
    let room: usize = bufs.iter().map(IoBufMut::len).sum();
    let count = bufs.len().min(IOV_MAX);
    // SAFETY: all zero is a valid `msghdr`: null pointers, no lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.as_mut_ptr().cast();
    message.msg_iovlen = count as _;
    loop {
        // SAFETY: `message` points to an array of `iovec` (the layout of `IoBufMut`) that lives across the call, each over
        // memory that is writable by its maker's promise. There is no room for ancillary data.
        let done =
            unsafe { libc::syscall(libc::SYS_recvmsg, fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        if let Ok(bytes) = usize::try_from(done) {
            // A socket stops where somebody has sent descriptors, which are dropped here.
            let stopped = message.msg_flags & libc::MSG_CTRUNC != 0;
            return Ok(Received { bytes, more: stopped || bytes == room, record: false });
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// `sendmsg(2)` that does not wait and raises no signal.
pub(crate) fn send(fd: BorrowedFd<'_>, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
    // SAFETY: all zero is a valid `msghdr`: null pointers, no lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.as_ptr().cast_mut().cast();
    message.msg_iovlen = bufs.len().min(IOV_MAX) as _;
    loop {
        // SAFETY: `message` points to an array of `iovec` (the layout of `IoBuf`) that lives across the call, each over
        // memory that is readable by its maker's promise; the kernel only reads both.
        let done = unsafe { libc::syscall(libc::SYS_sendmsg, fd.as_raw_fd(), &raw const message, FLAGS) };
        if let Ok(bytes) = usize::try_from(done) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// An address of AF_VSOCK (`sockaddr_vm`).
pub(crate) struct VsockAddress(libc::sockaddr_vm);

impl VsockAddress {
    /// A port of this context; none: of whatever contexts this machine has.
    pub(crate) fn new(cid: Option<u32>, port: u32) -> Self {
        Self(libc::sockaddr_vm {
            svm_family: libc::AF_VSOCK as libc::sa_family_t,
            svm_reserved1: 0,
            svm_port: port,
            svm_cid: cid.unwrap_or(libc::VMADDR_CID_ANY),
            svm_zero: [0; 4],
        })
    }
}

// SAFETY: `f` gets a pointer to a whole `sockaddr_vm` that lives across the call, and its length.
unsafe impl SocketAddrArg for VsockAddress {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f((&raw const self.0).cast(), size_of::<libc::sockaddr_vm>() as SocketAddrLen)
    }
}
