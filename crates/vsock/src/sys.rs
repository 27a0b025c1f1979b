//! All unsafe code: vectored calls on sockets with buffers that Rust never dereferences, and addresses of
//! AF_VSOCK.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use towline_channel::{IOV_MAX, IoBuf, IoBufMut};

use crate::sockets::ReceiveOutcome;

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

// System calls are made directly. The C library's functions are cancellation points, and enabling and
// disabling cancellation is a part of the cost of a short call.

/// Space for the descriptors of one message, of which there are at most 253 (`SCM_MAX_FD`).
#[repr(C, align(8))]
struct ControlSpace([MaybeUninit<u8>; 1040]);

/// Non-blocking `recvmsg(2)` into the first [`IOV_MAX`] of these buffers. Appends the descriptors of the
/// message to `passed`; without it the kernel closes them.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a message that is longer than the buffers; the rest of it is lost.
/// Others are the call's.
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    bufs: &mut [IoBufMut<'_>],
    passed: Option<&mut Vec<OwnedFd>>,
) -> io::Result<ReceiveOutcome> {
    let count = bufs.len().min(IOV_MAX);
    let room: usize = bufs[..count].iter().map(IoBufMut::len).sum();
    // SAFETY: all zero is a valid `msghdr`: null pointers, no lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.as_mut_ptr().cast();
    message.msg_iovlen = count as _;
    let mut control = ControlSpace([MaybeUninit::uninit(); 1040]);
    if passed.is_some() {
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<ControlSpace>() as _;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to an array of `iovec` (the layout of `IoBufMut`) that lives across the call,
    // each of memory that is writable, as `IoBufMut` guarantees, and to the space for ancillary data, or to
    // none.
    let call = || unsafe { libc::syscall(libc::SYS_recvmsg, fd.as_raw_fd(), &raw mut message, flags) };
    let bytes = uninterrupted(call)?;
    if let Some(passed) = passed {
        take_descriptors(&message, passed);
    }
    if message.msg_flags & libc::MSG_TRUNC != 0 {
        let text = format!("a message exceeds the {room} bytes of its buffers");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    // A read stops where descriptors were sent with the data.
    let has_stopped = message.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(ReceiveOutcome { bytes, more: has_stopped || bytes == room, eor: false })
}

/// Repeats a call that a signal has interrupted. Returns the number of bytes that it reports.
fn uninterrupted(mut call: impl FnMut() -> libc::c_long) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Takes the descriptors that a call has received.
fn take_descriptors(message: &libc::msghdr, passed: &mut Vec<OwnedFd>) {
    // SAFETY: the kernel has filled the space for ancillary data, whose length `message` has, with entire
    // headers.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(found) = header.as_ref() {
            if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = found.cmsg_len - libc::CMSG_LEN(0) as usize;
                let numbers = libc::CMSG_DATA(header).cast::<libc::c_int>();
                let own = |index| OwnedFd::from_raw_fd(numbers.add(index).read_unaligned());
                passed.extend((0..bytes / size_of::<libc::c_int>()).map(own));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Non-blocking `sendmsg(2)` that raises no signal.
pub(crate) fn send(fd: BorrowedFd<'_>, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
    // SAFETY: all zero is a valid `msghdr`: null pointers, no lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.as_ptr().cast_mut().cast();
    message.msg_iovlen = bufs.len().min(IOV_MAX) as _;
    // SAFETY: `message` points to an array of `iovec` (the layout of `IoBuf`) that lives across the call,
    // each of memory that is readable, as `IoBuf` guarantees; the kernel only reads both.
    uninterrupted(|| unsafe { libc::syscall(libc::SYS_sendmsg, fd.as_raw_fd(), &raw const message, FLAGS) })
}

/// An address of AF_VSOCK (`sockaddr_vm`).
pub(crate) struct VsockAddress(libc::sockaddr_vm);

impl VsockAddress {
    /// Creates the address of a port of this CID; `None` stands for all CIDs of the host.
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

// SAFETY: `f` gets a pointer to an entire `sockaddr_vm` that lives across the call, and its length.
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
    fn a_read_with_more_buffers_than_a_call_takes_reports_more_data() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(&[7; 1500]).unwrap();
        let mut bytes = [0; 2000];
        let mut bufs: Vec<IoBufMut<'_>> = bytes.chunks_mut(1).map(IoBufMut::from).collect();
        let first = receive(far.as_fd(), &mut bufs, None).unwrap();
        assert_eq!(first, ReceiveOutcome { bytes: IOV_MAX, more: true, eor: false });
        let rest = receive(far.as_fd(), &mut bufs, None).unwrap();
        assert_eq!((rest.bytes, rest.more), (1500 - IOV_MAX, false));
    }

    #[test]
    fn a_truncated_message_is_an_error() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::empty(), None).unwrap();
        send_message(&near, b"four", SendFlags::empty()).unwrap();
        let mut bytes = [0; 3];
        let error = receive(far.as_fd(), &mut [IoBufMut::from(&mut bytes[..])], None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
