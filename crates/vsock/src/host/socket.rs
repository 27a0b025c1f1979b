//! The calls that make sockets, none of which waits.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, FileType, lstat, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind,
    connect, connect_unspec, listen, recv, send, shutdown, socket_with, socketpair, sockopt,
};

use towline_channel::{IOV_MAX, IoBuf, IoBufMut, gather, scatter, total_len};

use super::convention::{LINE_BYTES_MAX, Line};
use super::lending::Lending;
use crate::credit::WINDOW_FIRST_MAX;
use crate::packet::{Kind, SeqFlags, ShutdownFlags};
use crate::rules::HostAddress;
use crate::sockets::{Peeked, Received};
use crate::sys::{self, VsockAddress};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Empty messages that are skipped at a time.
const EMPTY_MAX: usize = 16;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A socket of the host's side.
#[derive(Debug)]
pub(crate) struct HostSocket {
    fd: OwnedFd,
    kind: Kind,
    /// Of TCP: whose.
    pub(super) peer: Option<IpAddr>,
    pub(super) lending: RefCell<Lending>,
    /// Whoever connected waits for `OK`.
    pub(super) convention: bool,
    /// Read already: the beginning of a line, or what stood right behind one and is the guest's.
    early: RefCell<Vec<u8>>,
    /// Of messages between two guests: a byte before each says what ends with it, which Unix sockets do not carry.
    marked: bool,
}

/// How a connection that was begun stands.
#[derive(Debug)]
pub(super) enum Begun {
    Connected(HostSocket),
    /// Writable when it is connected, or is not.
    Waits(HostSocket),
    /// The listener has no room for now.
    Full,
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket_type(kind: Kind) -> SocketType {
    match kind {
        Kind::Stream => SocketType::STREAM,
        Kind::Seqpacket => SocketType::SEQPACKET,
    }
}

impl HostSocket {
    pub(super) fn new(fd: OwnedFd, kind: Kind, peer: Option<IpAddr>, convention: bool) -> Self {
        if peer.is_some() {
            // Packets of the guest's go out as they come; whoever wants them joined has done so.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
        }
        if kind == Kind::Seqpacket {
            // It takes a message at once or never, and the guest's may be as long as a window. The kernel doubles what it is
            // asked for, as far as its limit goes, whose default is enough.
            let _ = sockopt::set_socket_send_buffer_size(&fd, WINDOW_FIRST_MAX as usize);
        }
        let (lending, early) = (RefCell::default(), RefCell::default());
        Self { fd, kind, peer, lending, convention, early, marked: false }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Begins to connect.
    pub(super) fn begin(place: &HostAddress, kind: Kind) -> io::Result<Begun> {
        let (fd, connected) = match place {
            HostAddress::Unix(path) => {
                let fd = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
                let connected = connect(&fd, &SocketAddrUnix::new(path)?);
                (fd, connected)
            }
            HostAddress::Tcp(address) => {
                if kind != Kind::Stream {
                    return Err(Errno::PROTOTYPE.into());
                }
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
                let connected = connect(&fd, address);
                (fd, connected)
            }
            HostAddress::Vsock { cid, port } => {
                let fd = socket_with(AddressFamily::VSOCK, socket_type(kind), FLAGS, None)?;
                let connected = connect(&fd, &VsockAddress::new(*cid, *port));
                (fd, connected)
            }
        };
        let peer = if let HostAddress::Tcp(address) = place { Some(address.ip()) } else { None };
        let socket = Self::new(fd, kind, peer, false);
        match connected {
            Ok(()) => Ok(Begun::Connected(socket)),
            Err(Errno::INPROGRESS | Errno::INTR) => Ok(Begun::Waits(socket)),
            Err(Errno::AGAIN) => Ok(Begun::Full),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Two that are connected with each other.
    pub(crate) fn pair(kind: Kind) -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        let marked = kind == Kind::Seqpacket;
        let ends = [(one, false), (other, true)];
        let [ours, theirs] = ends.map(|(fd, asks)| Self { marked, ..Self::new(fd, kind, None, asks) });
        Ok((ours, theirs))
    }

    /// What became of a connection that waited.
    pub(super) fn outcome(&self) -> io::Result<()> {
        sockopt::socket_error(&self.fd)??;
        Ok(())
    }

    /// Reads what somebody has said so far, in one call that may take more than the line: what is behind it is the first
    /// that [`HostSocket::receive`] gives. An error if they have gone.
    pub(super) fn hear<T>(&self, parse: fn(&[u8], bool) -> Line<T>) -> io::Result<Line<T>> {
        let mut early = self.early.borrow_mut();
        let mut bytes = [0; LINE_BYTES_MAX];
        let before = early.len();
        bytes[..before].copy_from_slice(&early);
        let count = match recv(&self.fd, &mut bytes[before..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => before + count,
            Err(Errno::AGAIN) => return Ok(Line::More),
            Err(errno) => return Err(errno.into()),
        };
        let line = parse(&bytes[..count], self.kind == Kind::Seqpacket);
        let gone = match &line {
            // The rest of a message goes with its line.
            Line::Whole(..) if self.kind == Kind::Seqpacket => count,
            Line::Whole(_, length) => *length,
            Line::More | Line::Wrong => 0,
        };
        // Of most sockets nothing stays, and then no memory either.
        *early = bytes[gone..count].to_vec();
        Ok(line)
    }

    /// Whether something of the guest's was read with a line.
    pub(super) fn has_early(&self) -> bool {
        !self.early.borrow().is_empty()
    }

    /// Receives into these buffers.
    pub(super) fn receive(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
        let mut early = self.early.borrow_mut();
        if early.is_empty() {
            return if self.marked { self.receive_marked(bufs) } else { sys::receive(self.fd.as_fd(), bufs) };
        }
        let bytes = scatter(&early, bufs);
        early.drain(..bytes);
        Ok(Received { bytes, more: true, record: false })
    }

    fn receive_marked(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
        let mut mark = [0];
        let mut all = Vec::with_capacity(bufs.len() + 1);
        all.push(IoBufMut::from(&mut mark));
        all.extend(bufs.iter_mut().map(|buf| buf.prefix(buf.len())));
        let received = sys::receive(self.fd.as_fd(), &mut all)?;
        let record = SeqFlags::from_bits_truncate(mark[0].into()).contains(SeqFlags::EOR);
        Ok(Received { bytes: received.bytes.saturating_sub(mark.len()), record, ..received })
    }

    /// Sends these, or some of them; a message whole.
    pub(super) fn send(&self, bufs: &[IoBuf<'_>], ends: SeqFlags) -> io::Result<usize> {
        if !self.marked {
            return sys::send(self.fd.as_fd(), bufs);
        }
        let mark = [ends.bits() as u8];
        let mut copied = Vec::new();
        let mut all = vec![IoBuf::from(&mark[..])];
        if bufs.len() < IOV_MAX {
            all.extend_from_slice(bufs);
        } else {
            // One piece too many with the mark.
            copied.resize(total_len(bufs), 0);
            gather(bufs, &mut copied);
            all.push(IoBuf::from(&copied[..]));
        }
        Ok(sys::send(self.fd.as_fd(), &all)?.saturating_sub(mark.len()))
    }

    /// Takes a message of which it is known that it is empty.
    fn skip_message(&self) -> io::Result<()> {
        recv(&self.fd, &mut [0u8; 1][..], RecvFlags::DONTWAIT)?;
        Ok(())
    }

    /// Sends a line, which always fits into a socket that nobody has written to.
    pub(super) fn say(&self, line: &str) -> io::Result<()> {
        let sent = send(&self.fd, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        if sent < line.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
    }

    /// What comes next. Empty messages, which vsock does not carry, are skipped, a few at a time: their sender may be
    /// faster than this.
    pub(super) fn front(&self) -> io::Result<Peeked> {
        let early = self.early.borrow().len();
        if early > 0 {
            return Ok(Peeked::Bytes(early));
        }
        for _ in 0..EMPTY_MAX {
            let (_, len) =
                recv(&self.fd, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
            // Between guests a message has a mark.
            let len = len.saturating_sub(usize::from(self.marked));
            if len > 0 {
                return Ok(Peeked::Bytes(len));
            }
            if self.kind == Kind::Stream || self.is_at_end()? {
                return Ok(Peeked::Eof);
            }
            self.skip_message()?;
        }
        Ok(Peeked::Skipped)
    }

    /// Of one that gives nothing: whether that is not just an empty message.
    fn is_at_end(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let ended = fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        Ok(ended && rustix::io::ioctl_fionread(&self.fd)? == 0)
    }

    pub(super) fn shutdown(&self, what: ShutdownFlags) {
        let how = match (what.contains(ShutdownFlags::SEND), what.contains(ShutdownFlags::RECEIVE)) {
            (true, true) => rustix::net::Shutdown::Both,
            (true, false) => rustix::net::Shutdown::Write,
            (false, true) => rustix::net::Shutdown::Read,
            (false, false) => return,
        };
        // Its other end may have gone: that is what was wanted.
        let _ = shutdown(&self.fd, how);
    }

    /// Resets a connection of TCP, and drops what was not delivered, but keeps the socket, which then tells when nothing
    /// is read any more.
    pub(super) fn disconnect(&self) {
        if let Err(errno) = connect_unspec(&self.fd) {
            // A sandbox without leave to connect: it is reset when it is closed.
            tracing::debug!(%errno, "a connection is not reset at once");
            self.shutdown(ShutdownFlags::all());
        }
    }

    /// Lets its other end see that this is no orderly end.
    pub(super) fn make_reset(&self) {
        if self.peer.is_some() {
            let _ = sockopt::set_socket_linger(&self.fd, Some(std::time::Duration::ZERO));
        }
    }
}

/// A socket that listens. Its file goes with it.
#[derive(Debug)]
pub(crate) struct Listening {
    fd: OwnedFd,
    kind: Kind,
    file: Option<SocketFile>,
}

/// The file of a socket that listens.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        let stat = lstat(path)?;
        Ok(Self { path: path.to_owned(), identity: (stat.st_dev, stat.st_ino) })
    }

    /// Removes it, unless another socket has taken its place meanwhile.
    fn remove(&self) {
        if lstat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity) {
            let _ = unlinkat(CWD, &self.path, rustix::fs::AtFlags::empty());
        }
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Listening {
    /// Listens at a path. What another process left there is replaced; a socket that somebody listens at is not.
    pub(crate) fn unix(path: &Path, kind: Kind) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let fd = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
        if let Err(errno) = bind(&fd, &address) {
            let is_socket =
                lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
            let probe = socket_with(AddressFamily::UNIX, socket_type(kind), FLAGS, None)?;
            if errno != Errno::ADDRINUSE || !is_socket || connect(&probe, &address) != Err(Errno::CONNREFUSED)
            {
                return Err(errno.into());
            }
            unlinkat(CWD, path, rustix::fs::AtFlags::empty())?;
            bind(&fd, &address)?;
        }
        let file = Some(SocketFile::new(path)?);
        let listening = Self { fd, kind, file };
        listen(&listening.fd, BACKLOG)?;
        Ok(listening)
    }

    /// Listens at an address.
    pub(crate) fn tcp(address: &SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        bind(&fd, address)?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: Kind::Stream, file: None })
    }

    /// Listens at a port of the host's own AF_VSOCK.
    fn vsock(cid: Option<u32>, port: u32) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::VSOCK, SocketType::STREAM, FLAGS, None)?;
        bind(&fd, &VsockAddress::new(cid, port))?;
        listen(&fd, BACKLOG)?;
        Ok(Self { fd, kind: Kind::Stream, file: None })
    }

    pub(crate) fn place(place: &HostAddress) -> io::Result<Self> {
        match place {
            HostAddress::Vsock { cid, port } => Self::vsock(*cid, *port),
            HostAddress::Unix(path) => Self::unix(path, Kind::Stream),
            HostAddress::Tcp(address) => Self::tcp(address),
        }
    }

    /// Who comes next; `convention`: who will say where to.
    pub(super) fn accept(&self, convention: bool) -> io::Result<HostSocket> {
        let (fd, from) = acceptfrom_with(&self.fd, FLAGS)?;
        // Of a Unix socket's nameless ends there is none.
        let peer = from.and_then(|from| SocketAddr::try_from(from).ok()).map(|from| from.ip());
        Ok(HostSocket::new(fd, self.kind, peer, convention))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::convention;
    use super::*;

    fn received(socket: &HostSocket) -> (Vec<u8>, SeqFlags) {
        let mut bytes = vec![0; 2 * IOV_MAX];
        let received = socket.receive(&mut [IoBufMut::from(&mut bytes[..])]).unwrap();
        bytes.truncate(received.bytes);
        (bytes, received.ends())
    }

    #[test]
    fn between_guests_a_message_keeps_what_ends_with_it() {
        let (one, other) = HostSocket::pair(Kind::Seqpacket).unwrap();
        other.say("OK 7\n").unwrap();
        assert_eq!(one.hear(convention::ok).unwrap(), Line::Whole(7, 5));
        let many = vec![IoBuf::from(&b"x"[..]); IOV_MAX];
        for (bufs, ends) in [
            (&[IoBuf::from(&b"one"[..]), IoBuf::from(&b"message"[..])][..], SeqFlags::EOM),
            (&[IoBuf::from(&b"and a record"[..])], SeqFlags::all()),
            (&many[..50], SeqFlags::all()),
        ] {
            let len = total_len(bufs);
            assert_eq!(one.send(bufs, ends).unwrap(), len);
            assert_eq!(other.front().unwrap(), Peeked::Bytes(len));
            let (bytes, found) = received(&other);
            assert_eq!((bytes.len(), found), (len, ends));
        }
        assert_eq!(one.send(&many, SeqFlags::EOM).unwrap(), IOV_MAX);
        assert_eq!(other.front().unwrap(), Peeked::Bytes(IOV_MAX));
        drop(one);
        assert_eq!(received(&other).0.len(), IOV_MAX);
        assert_eq!((other.front().unwrap(), received(&other).0.len()), (Peeked::Eof, 0));
    }

    #[test]
    fn what_is_read_with_a_line_comes_first() {
        let (one, other) = HostSocket::pair(Kind::Stream).unwrap();
        one.say("CONN").unwrap();
        assert_eq!(other.hear(convention::connect).unwrap(), Line::More);
        assert_eq!(other.hear(convention::connect).unwrap(), Line::More);
        one.say("ECT 52\nand data").unwrap();
        assert_eq!(other.hear(convention::connect).unwrap(), Line::Whole(52, 11));
        one.say(" and more").unwrap();
        assert!(other.has_early());
        assert_eq!(other.front().unwrap(), Peeked::Bytes(8));
        let mut bytes = [0; 5];
        let first = other.receive(&mut [IoBufMut::from(&mut bytes)]).unwrap();
        assert_eq!((first, &bytes), (Received { bytes: 5, more: true, record: false }, b"and d"));
        assert_eq!((received(&other).0, received(&other).0), (b"ata".to_vec(), b" and more".to_vec()));
        drop(one);
        assert!(!other.has_early());
        assert_eq!(other.hear(convention::connect).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn empty_messages_are_skipped_a_few_at_a_time() {
        let (one, other) = HostSocket::pair(Kind::Seqpacket).unwrap();
        for _ in 0..2 * EMPTY_MAX {
            assert_eq!(one.send(&[], SeqFlags::EOM).unwrap(), 0);
        }
        assert_eq!(one.send(&[IoBuf::from(b"x")], SeqFlags::EOM).unwrap(), 1);
        for _ in 0..2 {
            assert_eq!(other.front().unwrap(), Peeked::Skipped);
        }
        assert_eq!(other.front().unwrap(), Peeked::Bytes(1));
    }

    #[test]
    fn a_file_that_another_socket_has_taken_over_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = Listening::unix(&path, Kind::Stream).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listening::unix(&path, Kind::Stream).unwrap();
        drop(first);
        assert!(path.exists(), "the file of the second one");
        drop(second);
        assert!(!path.exists());
    }
}
