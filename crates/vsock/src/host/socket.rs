//! Connected sockets of the host, all of them non-blocking.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType as KernelSocketType,
    connect, recv, send, shutdown, socket_with, socketpair, sockopt,
};

use towline_channel::{IOV_MAX, IoBuf, IoBufMut, gather, scatter, total_len};

use super::handshake_line::{HandshakeLine, LINE_BYTES_MAX};
use super::socket_fd::SocketFd;
use crate::credit::WINDOW_FIRST_MAX;
use crate::packet::{SeqFlags, ShutdownFlags, SocketType};
use crate::rules::HostAddress;
use crate::sockets::{Peeked, ReceiveOutcome};
use crate::sys::{self, VsockAddress};

/// Maximum number of empty messages that are dropped at a time.
const EMPTY_MAX: usize = 16;
/// Size of an enlarged send buffer in bytes, which the kernel doubles, within `net.core.wmem_max`: what the
/// guest sends of a first window while the peer reads.
const SEND_BUFFER_BYTES: usize = WINDOW_FIRST_MAX as usize;
/// Flags of every socket.
pub(super) const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A connected socket of the host.
#[derive(Debug)]
pub(crate) struct HostSocket {
    fd: SocketFd,
    kind: SocketType,
    family: Family,
    /// The client waits for `OK`.
    pub(super) expects_ok: bool,
    /// Bytes that were read already: the beginning of a line, or data that followed a line and is the
    /// guest's.
    buffered: RefCell<Vec<u8>>,
    /// The kernel's send buffer can be enlarged, and was not.
    may_enlarge: Cell<bool>,
}

/// Family of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Tcp,
    /// Unix or AF_VSOCK.
    Other,
    /// Between two guests: a byte before each message has its flags, which Unix sockets do not transport.
    Guests,
}

/// State of a connect after its start.
#[derive(Debug)]
pub(super) enum Started {
    Connected(HostSocket),
    /// The socket becomes writable when it is connected, or has failed.
    InProgress(HostSocket),
    /// The backlog of the listener is full.
    BacklogFull,
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the type of sockets of this kind.
pub(super) fn socket_type(kind: SocketType) -> KernelSocketType {
    match kind {
        SocketType::Stream => KernelSocketType::STREAM,
        SocketType::Seqpacket => KernelSocketType::SEQPACKET,
    }
}

impl HostSocket {
    pub(super) fn new(fd: SocketFd, kind: SocketType, family: Family) -> Self {
        if family == Family::Tcp {
            // Packets of the guest are sent as they come; its own stack has coalesced them if it wants that.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
        }
        if kind == SocketType::Seqpacket {
            // A message is sent as a whole or not at all, and may be as long as a window. The kernel doubles
            // the value, up to a limit whose default is sufficient.
            let _ = sockopt::set_socket_send_buffer_size(&fd, WINDOW_FIRST_MAX as usize);
        }
        // TCP sizes its buffers itself, and a message needs a buffer for all of it.
        let may_enlarge = family != Family::Tcp && kind != SocketType::Seqpacket;
        Self {
            fd,
            kind,
            family,
            may_enlarge: Cell::new(may_enlarge),
            expects_ok: false,
            buffered: RefCell::default(),
        }
    }

    /// Returns the socket as one whose client waits for `OK`.
    pub(super) fn expecting_ok(self) -> Self {
        Self { expects_ok: true, ..self }
    }

    pub(crate) fn kind(&self) -> SocketType {
        self.kind
    }

    /// Starts to connect.
    pub(super) fn connect(address: &HostAddress, kind: SocketType) -> io::Result<Started> {
        let (fd, connected) = match address {
            HostAddress::Unix(path) => {
                let fd = SocketFd::unix(socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?);
                let connected = connect(&fd, &SocketAddrUnix::new(path)?);
                (fd, connected)
            }
            HostAddress::Tcp(address) => {
                if kind != SocketType::Stream {
                    return Err(Errno::PROTOTYPE.into());
                }
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = socket_with(family, KernelSocketType::STREAM, FLAGS, None)?;
                let connected = connect(&fd, address);
                (SocketFd::new(fd), connected)
            }
            HostAddress::Vsock { cid, port } => {
                let fd = socket_with(AddressFamily::VSOCK, socket_type(kind), FLAGS, None)?;
                let connected = connect(&fd, &VsockAddress::new(*cid, *port));
                (SocketFd::new(fd), connected)
            }
        };
        let family = if matches!(address, HostAddress::Tcp(_)) { Family::Tcp } else { Family::Other };
        let socket = Self::new(fd, kind, family);
        match connected {
            Ok(()) => Ok(Started::Connected(socket)),
            Err(Errno::INPROGRESS | Errno::INTR) => Ok(Started::InProgress(socket)),
            Err(Errno::AGAIN) => Ok(Started::BacklogFull),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns two sockets for a connection between guests: that of the initiator, and that of the acceptor,
    /// which sends `OK`.
    pub(crate) fn pair(kind: SocketType) -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        let [ours, theirs] = [one, other].map(|fd| Self::new(SocketFd::new(fd), kind, Family::Guests));
        Ok((ours, theirs.expecting_ok()))
    }

    /// Returns the result of a connect that was in progress.
    pub(super) fn connect_result(&self) -> io::Result<()> {
        sockopt::socket_error(&self.fd)??;
        Ok(())
    }

    /// Reads and parses a line. One call may read more than the line; that data is the first that
    /// [`HostSocket::receive`] returns.
    ///
    /// # Errors
    /// The client has closed the socket, or the call's own.
    pub(super) fn receive_line(
        &self,
        parse: fn(&[u8], SocketType) -> HandshakeLine,
    ) -> io::Result<HandshakeLine> {
        let mut buffered = self.buffered.borrow_mut();
        let mut bytes = [0; LINE_BYTES_MAX];
        let before = buffered.len();
        bytes[..before].copy_from_slice(&buffered);
        let count = match self.fd.recv(&mut bytes[before..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => before + count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(HandshakeLine::Incomplete),
            Err(error) => return Err(error),
        };
        let line = parse(&bytes[..count], self.kind);
        let consumed = match (line, self.kind) {
            // The rest of the message is dropped with its line.
            (HandshakeLine::Complete { .. }, SocketType::Seqpacket) => count,
            (HandshakeLine::Complete { length, .. }, SocketType::Stream) => length,
            (HandshakeLine::Incomplete | HandshakeLine::Invalid, _) => 0,
        };
        // An empty vector frees its memory.
        *buffered = bytes[consumed..count].to_vec();
        Ok(line)
    }

    /// Returns true if data of the guest was read with a line.
    pub(super) fn has_buffered(&self) -> bool {
        !self.buffered.borrow().is_empty()
    }

    /// Receives into these buffers.
    pub(super) fn receive(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        let mut buffered = self.buffered.borrow_mut();
        if !buffered.is_empty() {
            let bytes = scatter(&buffered, bufs);
            buffered.drain(..bytes);
            return Ok(ReceiveOutcome { bytes, more: true, eor: false });
        }
        if self.has_flags() { self.receive_with_flags(bufs) } else { self.fd.receive(bufs) }
    }

    fn has_flags(&self) -> bool {
        self.family == Family::Guests && self.kind == SocketType::Seqpacket
    }

    fn receive_with_flags(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        let mut flags = [0];
        let mut all = Vec::with_capacity(bufs.len() + 1);
        all.push(IoBufMut::from(&mut flags));
        all.extend(bufs.iter_mut().map(|buf| buf.prefix(buf.len())));
        let received = self.fd.receive(&mut all)?;
        let eor = SeqFlags::from_bits_truncate(flags[0].into()).contains(SeqFlags::EOR);
        Ok(ReceiveOutcome { bytes: received.bytes.saturating_sub(flags.len()), eor, ..received })
    }

    /// Sends these buffers or a part of them; a message as a whole.
    pub(super) fn send(&self, bufs: &[IoBuf<'_>], flags: SeqFlags) -> io::Result<usize> {
        if !self.has_flags() {
            return sys::send(self.fd.as_fd(), bufs);
        }
        let flags = [flags.bits() as u8];
        let mut copied = Vec::new();
        let mut all = vec![IoBuf::from(&flags[..])];
        if bufs.len() < IOV_MAX {
            all.extend_from_slice(bufs);
        } else {
            // With the flags there is one buffer too many.
            copied.resize(total_len(bufs), 0);
            gather(bufs, &mut copied);
            all.push(IoBuf::from(&copied[..]));
        }
        Ok(sys::send(self.fd.as_fd(), &all)?.saturating_sub(flags.len()))
    }

    /// Enlarges the send buffer, once, so the peer has something to read until the guest has sent more.
    pub(super) fn enlarge_send_buffer(&self) {
        if !self.may_enlarge.replace(false) {
            return;
        }
        // The kernel reports the doubled size.
        let is_smaller =
            sockopt::socket_send_buffer_size(&self.fd).is_ok_and(|size| size < 2 * SEND_BUFFER_BYTES);
        if is_smaller && let Err(errno) = sockopt::set_socket_send_buffer_size(&self.fd, SEND_BUFFER_BYTES) {
            tracing::debug!(%errno, "cannot enlarge a send buffer");
        }
    }

    /// Sends a line, which always fits into the empty buffer of a new socket.
    pub(super) fn send_line(&self, line: &str) -> io::Result<()> {
        let sent = send(&self.fd, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent < line.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
    }

    /// Peeks at the next message, or the next bytes. Empty messages, which vsock does not transport, are
    /// dropped, a few at a time: their sender may be faster than this.
    pub(super) fn peek(&self) -> io::Result<Peeked> {
        let buffered = self.buffered.borrow().len();
        if buffered > 0 {
            return Ok(Peeked::Bytes(buffered));
        }
        for _ in 0..EMPTY_MAX {
            let (_, len) =
                recv(&self.fd, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
            let len = len.saturating_sub(usize::from(self.has_flags()));
            if len > 0 {
                return Ok(Peeked::Bytes(len));
            }
            if self.kind == SocketType::Stream || self.is_at_eof()? {
                return Ok(Peeked::Eof);
            }
            self.drop_message()?;
        }
        Ok(Peeked::Skipped)
    }

    /// Receives and drops an empty message.
    fn drop_message(&self) -> io::Result<()> {
        self.fd.recv(&mut [0]).map(drop)
    }

    /// Returns true if a peek without data is the end of the stream, not an empty message.
    fn is_at_eof(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let ended = fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        Ok(ended && rustix::io::ioctl_fionread(&self.fd)? == 0)
    }

    pub(super) fn shutdown(&self, directions: ShutdownFlags) {
        let sends = directions.contains(ShutdownFlags::SEND);
        let how = match (sends, directions.contains(ShutdownFlags::RECEIVE)) {
            (true, true) => rustix::net::Shutdown::Both,
            (true, false) => rustix::net::Shutdown::Write,
            (false, true) => rustix::net::Shutdown::Read,
            (false, false) => return,
        };
        // It fails if the peer has closed, which has the same effect.
        let _ = shutdown(&self.fd, how);
    }

    /// Makes a TCP connection end with a reset when the socket is closed.
    pub(super) fn reset_on_close(&self) {
        if self.family == Family::Tcp {
            let _ = sockopt::set_socket_linger(&self.fd, Some(std::time::Duration::ZERO));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::handshake_line::{parse_connect, parse_ok};
    use super::*;

    fn received(socket: &HostSocket) -> (Vec<u8>, SeqFlags) {
        let mut bytes = vec![0; 2 * IOV_MAX];
        let received = socket.receive(&mut [IoBufMut::from(&mut bytes[..])]).unwrap();
        bytes.truncate(received.bytes);
        (bytes, received.flags())
    }

    #[test]
    fn messages_between_guests_keep_their_flags() {
        let (one, other) = HostSocket::pair(SocketType::Seqpacket).unwrap();
        other.send_line("OK 7\n").unwrap();
        let line = HandshakeLine::Complete { port: 7, length: 5 };
        assert_eq!(one.receive_line(parse_ok).unwrap(), line);
        let many = vec![IoBuf::from(&b"x"[..]); IOV_MAX];
        for (bufs, flags) in [
            (&[IoBuf::from(&b"one"[..]), IoBuf::from(&b"message"[..])][..], SeqFlags::EOM),
            (&[IoBuf::from(&b"and a record"[..])], SeqFlags::all()),
            (&many[..50], SeqFlags::all()),
        ] {
            let len = total_len(bufs);
            assert_eq!(one.send(bufs, flags).unwrap(), len);
            assert_eq!(other.peek().unwrap(), Peeked::Bytes(len));
            let (bytes, found) = received(&other);
            assert_eq!((bytes.len(), found), (len, flags));
        }
        assert_eq!(one.send(&many, SeqFlags::EOM).unwrap(), IOV_MAX);
        assert_eq!(other.peek().unwrap(), Peeked::Bytes(IOV_MAX));
        drop(one);
        assert_eq!(received(&other).0.len(), IOV_MAX);
        assert_eq!((other.peek().unwrap(), received(&other).0.len()), (Peeked::Eof, 0));
    }

    #[test]
    fn data_that_was_read_with_a_line_comes_first() {
        let (one, other) = HostSocket::pair(SocketType::Stream).unwrap();
        one.send_line("CONN").unwrap();
        assert_eq!(other.receive_line(parse_connect).unwrap(), HandshakeLine::Incomplete);
        assert_eq!(other.receive_line(parse_connect).unwrap(), HandshakeLine::Incomplete);
        one.send_line("ECT 52\nand data").unwrap();
        let line = HandshakeLine::Complete { port: 52, length: 11 };
        assert_eq!(other.receive_line(parse_connect).unwrap(), line);
        one.send_line(" and more").unwrap();
        assert!(other.has_buffered());
        assert_eq!(other.peek().unwrap(), Peeked::Bytes(8));
        let mut bytes = [0; 5];
        let first = other.receive(&mut [IoBufMut::from(&mut bytes)]).unwrap();
        assert_eq!((first, &bytes), (ReceiveOutcome { bytes: 5, more: true, eor: false }, b"and d"));
        assert_eq!((received(&other).0, received(&other).0), (b"ata".to_vec(), b" and more".to_vec()));
        drop(one);
        assert!(!other.has_buffered());
        assert_eq!(other.receive_line(parse_connect).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn the_send_buffer_of_a_stream_is_enlarged_once_and_never_reduced() {
        let size = |socket: &HostSocket| sockopt::socket_send_buffer_size(&socket.fd).unwrap();
        let (one, other) = HostSocket::pair(SocketType::Stream).unwrap();
        let before = size(&one);
        one.enlarge_send_buffer();
        assert!(size(&one) > before, "{} after {before} bytes", size(&one));
        sockopt::set_socket_send_buffer_size(&one.fd, 4096).unwrap();
        one.enlarge_send_buffer();
        assert_eq!(size(&one), 2 * 4096, "an administrator's or an earlier size stays");
        sockopt::set_socket_send_buffer_size_force(&other.fd, 4 * SEND_BUFFER_BYTES)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&other.fd, 4 * SEND_BUFFER_BYTES))
            .unwrap();
        let larger = size(&other);
        other.enlarge_send_buffer();
        assert!(size(&other) >= larger.min(2 * SEND_BUFFER_BYTES));
        let (message, _other) = HostSocket::pair(SocketType::Seqpacket).unwrap();
        let before = size(&message);
        message.enlarge_send_buffer();
        assert_eq!(size(&message), before);
    }

    #[test]
    fn empty_messages_are_dropped_a_few_at_a_time() {
        let (one, other) = HostSocket::pair(SocketType::Seqpacket).unwrap();
        for _ in 0..2 * EMPTY_MAX {
            assert_eq!(one.send(&[], SeqFlags::EOM).unwrap(), 0);
        }
        assert_eq!(one.send(&[IoBuf::from(b"x")], SeqFlags::EOM).unwrap(), 1);
        for _ in 0..2 {
            assert_eq!(other.peek().unwrap(), Peeked::Skipped);
        }
        assert_eq!(other.peek().unwrap(), Peeked::Bytes(1));
    }
}
