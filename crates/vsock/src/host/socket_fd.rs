//! The descriptor of a socket, whose peer may pass descriptors.
//!
//! Linux 6.16 and later refuse them. With an older kernel they are received and closed on another thread, and
//! those that are still queued when the socket is closed too: the last close of a descriptor may wait, and
//! this thread serves a guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use towline_channel::{IoBufMut, refuse_descriptors};

use crate::sockets::ReceiveOutcome;
use crate::sys;

/// Number of messages that the buffer of a Unix socket has room for, and more.
const QUEUED_MAX: usize = 512;

/// Descriptors that the peer passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassedDescriptors {
    /// The kernel refuses them, or the socket's family has none.
    Refused,
    Received,
}

/// A socket.
#[derive(Debug)]
pub(super) struct SocketFd {
    fd: OwnedFd,
    passed: PassedDescriptors,
}

impl SocketFd {
    /// A socket whose peer passes no descriptors: of TCP, or of this process at both ends.
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, passed: PassedDescriptors::Refused }
    }

    /// A Unix socket.
    pub(super) fn unix(fd: OwnedFd) -> Self {
        let passed = match refuse_descriptors(fd.as_fd()) {
            Ok(()) => PassedDescriptors::Refused,
            Err(_) => PassedDescriptors::Received,
        };
        Self { fd, passed }
    }

    /// As [`sys::receive`].
    ///
    /// # Errors
    /// The errors of the call, and [`io::ErrorKind::InvalidData`] for descriptors.
    pub(super) fn receive(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        if self.passed == PassedDescriptors::Refused {
            return sys::receive(self.fd.as_fd(), bufs, None);
        }
        let mut passed = Vec::new();
        let received = sys::receive(self.fd.as_fd(), bufs, Some(&mut passed));
        if passed.is_empty() {
            return received;
        }
        close_apart(passed);
        Err(io::Error::new(io::ErrorKind::InvalidData, "the peer passed descriptors"))
    }

    /// Non-blocking `recv(2)`.
    pub(super) fn recv(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.passed {
            PassedDescriptors::Refused => Ok(recv(&self.fd, bytes, RecvFlags::DONTWAIT)?.0),
            PassedDescriptors::Received => Ok(self.receive(&mut [IoBufMut::from(bytes)])?.bytes),
        }
    }
}

impl AsFd for SocketFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SocketFd {
    fn drop(&mut self) {
        if self.passed == PassedDescriptors::Refused {
            return;
        }
        // The peer sends no more from now on.
        let _ = shutdown(&self.fd, Shutdown::Both);
        let (mut passed, mut bytes) = (Vec::new(), [0; 4096]);
        for _ in 0..QUEUED_MAX {
            let bufs = &mut [IoBufMut::from(&mut bytes[..])];
            let before = passed.len();
            match sys::receive(self.fd.as_fd(), bufs, Some(&mut passed)) {
                Ok(ReceiveOutcome { bytes: 0, .. }) if passed.len() == before => break,
                Err(error) if error.kind() != io::ErrorKind::InvalidData => break,
                _ => {}
            }
        }
        if !passed.is_empty() {
            close_apart(passed);
        }
    }
}

/// Closes descriptors on another thread. A connection that passed some ends, so there is one such thread for
/// each at most.
fn close_apart(passed: Vec<OwnedFd>) {
    // Without a thread they are closed here.
    let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(passed));
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write as _};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair, sockopt,
    };

    use super::*;

    /// Far less than the close of [`lingering`] takes.
    const AT_ONCE: Duration = Duration::from_secs(5);

    /// A TCP connection with unsent data whose last close waits for a minute, and its peer, which ends the
    /// wait.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        sockopt::set_socket_linger(&stream, Some(Duration::from_secs(60))).unwrap();
        (stream, peer)
    }

    fn pass(socket: &OwnedFd, fd: &TcpStream) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(socket, &[IoSlice::new(b"data")], &mut control, SendFlags::DONTWAIT)
    }

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn passed_descriptors_are_refused_or_closed_elsewhere() {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            let (client, near) = pair(kind);
            let refusing = SocketFd::unix(near);
            if refusing.passed == PassedDescriptors::Refused {
                let (stream, _peer) = lingering();
                assert_eq!(pass(&client, &stream), Err(rustix::io::Errno::PERM));
                sockopt::set_socket_linger(&stream, None).unwrap();
            }
            // As with an older kernel: one is received, and another one is queued when the socket is closed.
            let (client, near) = pair(kind);
            let socket = SocketFd { fd: near, passed: PassedDescriptors::Received };
            let ((first, _first_peer), (second, _second_peer)) = (lingering(), lingering());
            for stream in [first, second] {
                assert_eq!(pass(&client, &stream), Ok(4));
            }
            let begun = Instant::now();
            let error = socket.receive(&mut [IoBufMut::from(&mut [0; 64][..])]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            drop(socket);
            assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        }
    }
}
