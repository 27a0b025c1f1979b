//! State that the kernel keeps of a TCP connection (`TCP_INFO`), also after its failure.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns true if the peer has left segments or probes without an acknowledgement. False of another socket.
pub(crate) fn is_unacknowledged(socket: BorrowedFd<'_>) -> bool {
    // SAFETY: the structure consists of integers, of which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: `info` and `length` live across the call, and `length` is the size of `info`.
    let done = unsafe {
        let (info, length) = (&raw mut info, &raw mut length);
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.cast(), length)
    };
    done == 0 && (info.tcpi_retransmits > 0 || info.tcpi_probes > 0)
}
