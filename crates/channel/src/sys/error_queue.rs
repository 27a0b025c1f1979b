//! The error queue of a socket: what the kernel reports beside the stream.
//!
//! The queue holds zero-copy completions, and other reports that were enabled on the socket (ICMP errors with
//! `IP_RECVERR`, time stamps). Each report is one `struct sock_extended_err` in a control message; see the
//! kernel's `Documentation/networking/msg_zerocopy.rst` and `ip(7)`.

use super::io::{header, retry};
use libc::sock_extended_err;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_EE_ORIGIN_ZEROCOPY` of `linux/errqueue.h`.
pub(crate) const ORIGIN_ZERO_COPY: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED` of `linux/errqueue.h`.
pub(crate) const CODE_COPIED: u8 = 1;

/// Room for control messages: several times what a completion takes (64 bytes with an IPv6 address).
const CONTROL: usize = 512;

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Reads one entry from the queue, without waiting: `None` if it is empty, `Some(None)` for an entry of
/// another shape.
pub(crate) fn read_entry(fd: BorrowedFd<'_>) -> io::Result<Option<Option<sock_extended_err>>> {
    let mut control = Control([0; CONTROL]);
    let mut message = header(std::ptr::null_mut(), 0);
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: `message` has no buffers, and room for control messages that lives across the call and is
    // aligned.
    match retry(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, flags) }) {
        Ok(_) => Ok(Some(find(&message))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// The report among the control messages of a filled `message`.
fn find(message: &libc::msghdr) -> Option<sock_extended_err> {
    // SAFETY: `msg_control` and `msg_controllen` describe memory that the kernel filled; the macros stay
    // inside it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: the macros gave it, so there is a whole, aligned header.
        let found = unsafe { *next };
        let is_error = matches!(
            (found.cmsg_level, found.cmsg_type),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
        );
        // SAFETY: a length without data; nothing is read.
        let whole = unsafe { libc::CMSG_LEN(size_of::<sock_extended_err>() as u32) } as usize;
        if is_error && found.cmsg_len as usize >= whole {
            // SAFETY: the payload is large enough (just compared); any bytes are a valid `sock_extended_err`.
            return Some(unsafe { libc::CMSG_DATA(next).cast::<sock_extended_err>().read_unaligned() });
        }
        // SAFETY: as for the first one.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    None
}

#[cfg(test)]
mod tests {
    use crate::{Channel, ChannelExt, Flushed, IoBuf, IoBufMut, SendFlags, TcpChannel};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};

    /// `SOF_TIMESTAMPING_TX_SOFTWARE | SOFTWARE | OPT_TSONLY` of `linux/net_tstamp.h`.
    const STAMP_EVERY_SEND: libc::c_int = (1 << 1) | (1 << 4) | (1 << 11);

    #[test]
    fn time_stamps_among_the_completions_are_passed_over() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = TcpChannel::new(listener.accept().unwrap().0.into()).unwrap();
        let (option, len) =
            (&STAMP_EVERY_SEND as *const libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
        let raw = near.as_fd().as_raw_fd();
        // SAFETY: `option` points to a constant of `len` bytes.
        let set =
            unsafe { libc::setsockopt(raw, libc::SOL_SOCKET, libc::SO_TIMESTAMPING, option.cast(), len) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        let mut near = TcpChannel::new(near.into()).unwrap();
        near.enable_zero_copy().unwrap();
        let mut room = [0; 3];
        for _ in 0..10 {
            near.send_all(&[IoBuf::from(b"abc")], SendFlags::ZERO_COPY).unwrap();
            far.recv_exact(&mut [IoBufMut::from(&mut room)]).unwrap();
            assert_eq!(near.flush().unwrap(), Flushed::AllCopied);
        }
        let statistics = near.zero_copy_statistics().unwrap();
        assert!(statistics.foreign > 0, "{statistics:?}");
        assert_eq!((statistics.sends, statistics.copied), (10, 10));
    }
}
