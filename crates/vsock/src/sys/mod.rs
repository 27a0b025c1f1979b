//! All that is unsafe: the vectored calls on sockets over buffers that Rust never looks into, and addresses of AF_VSOCK.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use towline_channel::{IOV_MAX, IoBuf, IoBufMut};

use crate::sockets::Received;

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

// The calls are made without the C library's own functions, which are points at which a thread can be cancelled: to allow
// that and to forbid it again is a part of what a short call costs.

/// `recvmsg(2)` that does not wait, into the first [`IOV_MAX`] of these buffers. A message that is longer than they are is an
/// error of the kind [`io::ErrorKind::InvalidData`]: the rest of it is lost.
pub(crate) fn receive(fd: BorrowedFd<'_>, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
    let count = bufs.len().min(IOV_MAX);
    let room: usize = bufs[..count].iter().map(IoBufMut::len).sum();
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
            if message.msg_flags & libc::MSG_TRUNC != 0 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a message is longer than the {room} bytes that it was given room for"),
                ));
            }
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send as send_message, socketpair};

    use super::*;

    #[test]
    fn more_buffers_than_a_call_takes_do_not_hide_what_is_left() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(&[7; 1500]).unwrap();
        let mut bytes = [0; 2000];
        let mut bufs: Vec<IoBufMut<'_>> = bytes.chunks_mut(1).map(IoBufMut::from).collect();
        let first = receive(far.as_fd(), &mut bufs).unwrap();
        assert_eq!(first, Received { bytes: IOV_MAX, more: true, record: false });
        let rest = receive(far.as_fd(), &mut bufs).unwrap();
        assert_eq!((rest.bytes, rest.more), (1500 - IOV_MAX, false));
    }

    #[test]
    fn a_message_that_is_cut_is_an_error() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::empty(), None).unwrap();
        send_message(&near, b"four", SendFlags::empty()).unwrap();
        let mut bytes = [0; 3];
        let error = receive(far.as_fd(), &mut [IoBufMut::from(&mut bytes[..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
