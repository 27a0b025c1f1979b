//! The vectored system calls over [`IoBuf`] and [`IoBufMut`]. Each is retried when a signal interrupts it.

use super::cursor::{window, window_mut};
use super::iobuf::{IoBuf, IoBufMut};
use crate::{RecvFlags, SendFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `sendmsg(2)`, never with a `SIGPIPE`. With `ZERO_COPY` (`MSG_ZEROCOPY`) the kernel reads the buffers after
/// the call too; that they stay mapped until then is not a matter of safety, as it pins their pages.
pub(crate) fn sendmsg(fd: BorrowedFd<'_>, bufs: &[IoBuf<'_>], how: SendFlags) -> io::Result<usize> {
    let Some(bufs) = window(bufs) else { return Ok(0) };
    let flag = |asked, flag| if how.contains(asked) { flag } else { 0 };
    let flags = libc::MSG_NOSIGNAL
        | flag(SendFlags::MORE, libc::MSG_MORE)
        | flag(SendFlags::ZERO_COPY, libc::MSG_ZEROCOPY);
    let message = header(bufs.as_ptr().cast_mut().cast(), bufs.len());
    // SAFETY: `message` points to an array of `iovec` (the layout of `IoBuf`) that lives across the call,
    // each over memory that is readable by its maker's promise; the kernel only reads both.
    retry(|| unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) })
}

/// `recvmsg(2)` without ancillary data.
pub(crate) fn recvmsg(fd: BorrowedFd<'_>, bufs: &mut [IoBufMut<'_>], how: RecvFlags) -> io::Result<usize> {
    let Some(bufs) = window_mut(bufs) else { return Ok(0) };
    let peek = if how.contains(RecvFlags::PEEK) { libc::MSG_PEEK } else { 0 };
    let flags = libc::MSG_CMSG_CLOEXEC | peek;
    let mut message = header(bufs.as_mut_ptr().cast(), bufs.len());
    // SAFETY: `message` points to an array of `iovec` (the layout of `IoBufMut`) that lives across the call,
    // each over memory that is writable and not otherwise used, by its maker's promise.
    retry(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, flags) })
}

/// A call of three arguments, without the C library, whose own may be points at which a thread is cancelled:
/// to allow that and to forbid it again is a part of what a short call costs.
///
/// # Safety
/// As the call's own.
unsafe fn direct(
    number: libc::c_long,
    fd: BorrowedFd<'_>,
    pointer: *const libc::c_void,
    count: usize,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(number, fd.as_raw_fd(), pointer, count) as isize }
}

/// `writev(2)`, retried when a signal interrupts it.
///
/// # Errors
/// The call's own.
pub fn writev(fd: BorrowedFd<'_>, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
    let Some(bufs) = window(bufs) else { return Ok(0) };
    // SAFETY: as in `sendmsg`; `window` keeps the count within `IOV_MAX`. One buffer needs no array to be
    // copied.
    retry(|| unsafe {
        match bufs {
            [one] => direct(libc::SYS_write, fd, one.iov().iov_base, one.len()),
            many => direct(libc::SYS_writev, fd, many.as_ptr().cast(), many.len()),
        }
    })
}

/// `readv(2)`, retried when a signal interrupts it.
///
/// # Errors
/// The call's own.
pub fn readv(fd: BorrowedFd<'_>, bufs: &mut [IoBufMut<'_>]) -> io::Result<usize> {
    let Some(bufs) = window_mut(bufs) else { return Ok(0) };
    // SAFETY: as in `recvmsg`; `window_mut` keeps the count within `IOV_MAX`. As in `writev`.
    retry(|| unsafe {
        match &mut *bufs {
            [one] => direct(libc::SYS_read, fd, one.iov().iov_base, one.len()),
            many => direct(libc::SYS_readv, fd, many.as_mut_ptr().cast(), many.len()),
        }
    })
}

/// `pwritev(2)`.
pub(crate) fn pwritev(fd: BorrowedFd<'_>, bufs: &[IoBuf<'_>], offset: u64) -> io::Result<usize> {
    let Some(bufs) = window(bufs) else { return Ok(0) };
    let offset = file_offset(offset)?;
    // SAFETY: as in `sendmsg`; `window` keeps the count within `IOV_MAX`.
    retry(|| unsafe {
        libc::pwritev(fd.as_raw_fd(), bufs.as_ptr().cast(), bufs.len() as libc::c_int, offset)
    })
}

/// `preadv(2)`.
pub(crate) fn preadv(fd: BorrowedFd<'_>, bufs: &mut [IoBufMut<'_>], offset: u64) -> io::Result<usize> {
    let Some(bufs) = window_mut(bufs) else { return Ok(0) };
    let offset = file_offset(offset)?;
    let count = bufs.len() as libc::c_int;
    // SAFETY: as in `recvmsg`; `window_mut` keeps the count within `IOV_MAX`.
    retry(|| unsafe { libc::preadv(fd.as_raw_fd(), bufs.as_mut_ptr().cast(), count, offset) })
}

pub(super) fn header(iov: *mut libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all zero is a valid `msghdr`: null pointers, no lengths (the C library has padding in it that a
    // struct expression could not name).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov;
    message.msg_iovlen = count as _;
    message
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}

pub(super) fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(n) = usize::try_from(call()) {
            return Ok(n);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
