//! TCP channels.
//!
//! `TCP_NODELAY` is on (senders set [`SendFlags::MORE`](crate::SendFlags::MORE) when more follows). A
//! connection whose peer is silent for [`PEER_TIMEOUT`] ends (`ETIMEDOUT`): it acknowledges nothing, takes
//! nothing, or does not answer keepalive probes, which find a dead host while nothing is sent. A host name is
//! resolved on a separate thread, because the system's resolver cannot be interrupted; after a timeout the
//! thread ends when the resolver does.
//!
//! Between two processes of one host the send buffer has a fixed, small size, and a call receives a part of
//! it: data in transit then stays in a processor's cache until it is received, while the sender continues. To
//! another host the size is the kernel's, which adapts it to the path.

use crate::cancel::{event, raise};
use crate::channel::forward_channel;
use crate::socket::{STREAM, Socket};
use crate::sys::iobuf::limit_mut;
use crate::sys::zero_copy::Enabled;
use crate::wait::Deadline;
use crate::zero_copy::ZeroCopy;
use crate::{
    Capabilities, Channel, Error, Flushed, IoBuf, IoBufMut, RecvFlags, Result, SendFlags, ZeroCopyStatistics,
    ZeroCopyTicket, sys, total_len_mut,
};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Silence of a peer after which its connection ends, unless another one is set.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum of the kernel's keepalive time.
const KEEPALIVE_MIN: Duration = Duration::from_secs(1);
/// Maximum number of unanswered keepalive probes; the peer's timeout ends the connection earlier.
const KEEPALIVE_COUNT: u32 = 6;
/// Number of connections that may wait to be accepted; the kernel limits it to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;

/// Send buffer of a connection within this host; the kernel doubles it, for its own bookkeeping. More data in
/// transit would not hide any latency, and less of it is still in the cache when it is read.
const LOCAL_SEND_BUFFER_BYTES: usize = 128 << 10;
/// Maximum length of one receive from such a connection: the sender has room again when the call returns.
/// With longer calls one end would wait most of the time.
const LOCAL_RECEIVE_BYTES: usize = 64 << 10;

/// Name of this end in messages about socket options.
const KERNEL: &str = "this kernel";

/// A TCP connection.
#[derive(Debug)]
pub struct TcpChannel {
    socket: Arc<Socket>,
    zero_copy: Option<Arc<ZeroCopy>>,
    /// Maximum length of one receive.
    receive_bytes_max: usize,
}

impl TcpChannel {
    /// Takes a connected TCP socket and sets its options.
    ///
    /// # Errors
    /// [`Error::Io`] if it is not a TCP socket.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let remote = net::getpeername(&fd).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
        let local = net::getsockname(&fd).ok().and_then(|any| SocketAddr::try_from(any).ok());
        let peer = remote.map_or_else(|| "tcp:?".to_owned(), |address| format!("tcp:{address}"));
        let failed = |errno| Error::io("setsockopt", &peer, errno);
        prepare(&fd).map_err(failed)?;
        set_peer_timeout(&fd, PEER_TIMEOUT).map_err(failed)?;
        let receive_bytes_max = match (local, remote) {
            (Some(local), Some(remote)) if is_within_host(local.ip(), remote.ip()) => {
                sockopt::set_socket_send_buffer_size(&fd, LOCAL_SEND_BUFFER_BYTES).map_err(failed)?;
                LOCAL_RECEIVE_BYTES
            }
            _ => usize::MAX,
        };
        let socket = Arc::new(Socket::new(fd, peer, STREAM)?);
        Ok(Self { socket, zero_copy: None, receive_bytes_max })
    }

    /// Enables zero-copy sends (`SO_ZEROCOPY`) and with them [`Capabilities::ZERO_COPY`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the kernel lacks it, or if a former owner of the socket used it: the
    /// numbering of sends is unknown then.
    pub fn enable_zero_copy(&mut self) -> Result<()> {
        if self.zero_copy.is_some() {
            return Ok(());
        }
        let failed = |errno| Error::io("setsockopt(SO_ZEROCOPY)", self.peer(), errno);
        let unsupported = |what| Err(Error::unsupported(self.peer(), what));
        match sys::zero_copy::enable(self.socket.fd()).map_err(failed)? {
            Enabled::Now => {}
            Enabled::Before => return unsupported("zero-copy: SO_ZEROCOPY was set by its former owner"),
            Enabled::Never => return unsupported("zero-copy: this kernel has no SO_ZEROCOPY for it"),
        }
        self.zero_copy = Some(Arc::new(ZeroCopy::new(Arc::clone(&self.socket))));
        Ok(())
    }

    /// Sets the silence of the peer after which the connection ends.
    pub(crate) fn with_peer_timeout(self, timeout: Option<Duration>) -> Result<Self> {
        if let Some(timeout) = timeout {
            let set = set_peer_timeout(self.socket.fd(), timeout);
            set.map_err(|errno| Error::io("setsockopt", self.peer(), errno))?;
        }
        Ok(self)
    }

    /// Enables zero-copy if requested; without support the channel lacks the capability.
    pub(crate) fn with_zero_copy(mut self, asked: bool) -> Result<Self> {
        match if asked { self.enable_zero_copy() } else { Ok(()) } {
            Ok(()) | Err(Error::Unsupported { .. }) => Ok(self),
            Err(error) => Err(error),
        }
    }
}

impl Channel for TcpChannel {
    forward_channel!(socket: peer, calls, set_timeouts, as_fd);

    fn splice_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_fd()
    }

    fn capabilities(&self) -> Capabilities {
        let zero_copy = self.zero_copy.as_ref().map_or(Capabilities::empty(), |_| Capabilities::ZERO_COPY);
        self.socket.capabilities() | zero_copy
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
        match &self.zero_copy {
            Some(zero_copy) if flags.contains(SendFlags::ZERO_COPY) => zero_copy.send(bufs, flags),
            _ => self.socket.send(bufs, flags),
        }
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
        // A peek makes no room for the sender.
        if flags.contains(RecvFlags::PEEK) || total_len_mut(bufs) <= self.receive_bytes_max {
            return self.socket.recv(bufs, flags);
        }
        self.socket.recv(&mut limit_mut(bufs, self.receive_bytes_max), flags)
    }

    fn flush(&self) -> Result<Flushed> {
        self.zero_copy.as_ref().map_or(Ok(Flushed::Done), |zero_copy| zero_copy.flush())
    }

    fn zero_copy_ticket(&self) -> ZeroCopyTicket {
        self.zero_copy.as_ref().map_or_else(ZeroCopyTicket::default, ZeroCopy::zero_copy_ticket)
    }

    fn zero_copy_statistics(&self) -> Option<ZeroCopyStatistics> {
        self.zero_copy.as_ref().map(|zero_copy| zero_copy.statistics())
    }

    fn shutdown(&self, how: Shutdown) -> Result<()> {
        if let Some(zero_copy) = self.zero_copy.as_ref().filter(|_| how == Shutdown::Both) {
            zero_copy.end();
        }
        self.socket.shutdown(how)
    }

    fn reset(&self) -> Result<()> {
        if self.zero_copy.is_none() {
            return Ok(());
        }
        // Unlike a close, which would wait for the last ticket.
        net::connect_unspec(self.socket.fd()).map_err(|errno| Error::io("reset", self.peer(), errno))
    }
}

impl Drop for TcpChannel {
    fn drop(&mut self) {
        // Leases keep the socket: the peer should see the end now, and not when the last of them is dropped.
        if self.zero_copy.as_ref().is_some_and(|zero_copy| Arc::strong_count(zero_copy) > 1) {
            let _ = self.shutdown(Shutdown::Both);
        }
    }
}

/// Returns true if this kernel lets a TCP socket send without a copy. Where it does, the way to the peer may
/// still make it copy.
///
/// # Errors
/// [`Error::Unsupported`] if it does not, [`Error::Io`] if the check fails.
pub fn check_zero_copy() -> Result<()> {
    let failed = |source: io::Error| Error::io("setsockopt(SO_ZEROCOPY)", KERNEL, source);
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let socket = socket(&any).map_err(|errno| failed(errno.into()))?;
    match sys::zero_copy::enable(socket.as_fd()).map_err(failed)? {
        Enabled::Now | Enabled::Before => Ok(()),
        Enabled::Never => Err(Error::unsupported(KERNEL, "zero-copy sends: it has no SO_ZEROCOPY")),
    }
}

/// Tries each address of the host in turn; each gets its share of the time that is left.
pub(crate) fn connect(host: &str, port: u16, deadline: &Deadline<'_>) -> Result<TcpChannel> {
    connect_any(&resolve(host, port, deadline)?, deadline)?.ok_or_else(|| nothing_found(host))
}

/// `None` without an address. The error is a refusal if one refused: then the peer may listen later, and others
/// (a family that this host has no route for) say nothing about it.
fn connect_any(addresses: &[SocketAddr], deadline: &Deadline<'_>) -> Result<Option<TcpChannel>> {
    let mut failure: Option<Error> = None;
    for (i, address) in addresses.iter().enumerate() {
        match connect_one(address, &deadline.share(addresses.len() - i)) {
            Ok(fd) => return TcpChannel::new(fd).map(Some),
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(error) => {
                let refused = failure.filter(|before| before.raw_os_error() == Some(libc::ECONNREFUSED));
                failure = refused.or(Some(error));
            }
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Listens at the first address of the host that can be bound, and returns it.
pub(crate) fn bind(host: &str, port: u16, peer: &str) -> Result<(OwnedFd, SocketAddr)> {
    let addresses = match host {
        "" => addresses([Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()], port),
        _ => match numeric(host) {
            Some(ip) => addresses([ip], port),
            None => look_up(host, port)?,
        },
    };
    let mut failure = None;
    for address in addresses {
        match bind_one(&address) {
            Ok(bound) => return Ok(bound),
            Err(errno) => failure = Some(Error::io("bind", peer, errno)),
        }
    }
    Err(failure.unwrap_or_else(|| nothing_found(host)))
}

fn prepare(fd: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)
}

/// The kernel ends the connection with the first timer after that time without an acknowledgement, a taken
/// byte, or an answered probe.
fn set_peer_timeout(fd: impl AsFd, timeout: Duration) -> Result<(), Errno> {
    let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&fd, milliseconds)?;
    sockopt::set_tcp_keepidle(&fd, (timeout / 3).max(KEEPALIVE_MIN))?;
    sockopt::set_tcp_keepintvl(&fd, (timeout / 6).max(KEEPALIVE_MIN))?;
    sockopt::set_tcp_keepcnt(&fd, KEEPALIVE_COUNT)
}

/// Returns true if a connection between these addresses never leaves this host.
fn is_within_host(local: IpAddr, remote: IpAddr) -> bool {
    let (local, remote) = (local.to_canonical(), remote.to_canonical());
    local == remote || (local.is_loopback() && remote.is_loopback())
}

fn connect_one(address: &SocketAddr, deadline: &Deadline<'_>) -> Result<OwnedFd> {
    let fd = socket(address).map_err(|errno| deadline.io(errno))?;
    match net::connect(&fd, address) {
        Ok(()) => return Ok(fd),
        // An interrupted connect continues in the background, as if it were in progress.
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(deadline.io(errno)),
    }
    deadline.wait(fd.as_fd(), PollFlags::OUT)?;
    match sockopt::socket_error(&fd) {
        Ok(Ok(())) => Ok(fd),
        Ok(Err(errno)) | Err(errno) => Err(deadline.io(errno)),
    }
}

fn bind_one(address: &SocketAddr) -> Result<(OwnedFd, SocketAddr), Errno> {
    let fd = socket(address)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&fd, false)?;
    }
    net::bind(&fd, address)?;
    net::listen(&fd, BACKLOG)?;
    let local = SocketAddr::try_from(net::getsockname(&fd)?)?;
    Ok((fd, local))
}

fn socket(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

fn resolve(host: &str, port: u16, deadline: &Deadline<'_>) -> Result<Vec<SocketAddr>> {
    if host.is_empty() {
        return Ok(addresses([Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()], port));
    }
    if let Some(ip) = numeric(host) {
        return Ok(addresses([ip], port));
    }
    let done = Arc::new(event()?);
    let (answer, answers) = mpsc::channel();
    let (name, bell) = (host.to_owned(), Arc::clone(&done));
    let thread = std::thread::Builder::new().name("resolve".to_owned());
    let work = move || {
        // The receiver is gone after a cancellation or timeout.
        let _ = answer.send(look_up(&name, port));
        raise(bell.as_fd());
    };
    thread.spawn(work).map_err(Error::NoThread)?;
    deadline.wait(done.as_fd(), PollFlags::IN)?;
    answers.recv().unwrap_or_else(|_| Err(nothing_found(host)))
}

fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found = (host, port).to_socket_addrs();
    found.map(Iterator::collect).map_err(|source| Error::Resolve { host: host.to_owned(), source })
}

/// `0` is how QEMU's users write "any IPv4 address".
fn numeric(host: &str) -> Option<IpAddr> {
    if host == "0" { Some(Ipv4Addr::UNSPECIFIED.into()) } else { host.parse().ok() }
}

fn addresses<const N: usize>(ips: [IpAddr; N], port: u16) -> Vec<SocketAddr> {
    ips.map(|ip| SocketAddr::new(ip, port)).to_vec()
}

fn nothing_found(host: &str) -> Error {
    let source = io::Error::new(io::ErrorKind::NotFound, "the resolver knows no address of it");
    Error::Resolve { host: host.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChannelExt;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn connections_within_the_host_are_recognised() {
        let is_local =
            |local: &str, remote: &str| is_within_host(local.parse().unwrap(), remote.parse().unwrap());
        assert!(is_local("127.0.0.1", "127.0.0.1") && is_local("127.0.0.1", "127.0.0.2"));
        assert!(is_local("::1", "::1") && is_local("::ffff:127.0.0.1", "127.0.0.1"));
        assert!(is_local("192.0.2.1", "192.0.2.1") && is_local("::ffff:192.0.2.1", "::ffff:192.0.2.1"));
        assert!(!is_local("192.0.2.1", "192.0.2.2") && !is_local("127.0.0.1", "192.0.2.1"));
        assert!(!is_local("2001:db8::1", "2001:db8::2"));
    }

    #[test]
    fn a_refusal_is_reported_where_another_address_cannot_be_reached() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let refusing = listener.local_addr().unwrap();
        drop(listener);
        // No TCP connection leads to a broadcast address.
        let unreachable = SocketAddr::from((Ipv4Addr::BROADCAST, refusing.port()));
        let cancel = crate::Cancel::new().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let deadline = Deadline::new("connect", "peer".into(), deadline, &cancel);
        for addresses in [[refusing, unreachable], [unreachable, refusing]] {
            let error = connect_any(&addresses, &deadline).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{error}");
        }
    }

    #[test]
    fn a_connection_within_the_host_has_a_small_send_buffer_at_both_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        for stream in [near, far] {
            let channel = TcpChannel::new(stream.into()).unwrap();
            let found = sockopt::socket_send_buffer_size(channel.socket.fd()).unwrap();
            assert_eq!(found, 2 * LOCAL_SEND_BUFFER_BYTES, "the kernel doubles it");
        }
    }

    #[test]
    fn a_silent_peer_has_a_limit_from_the_beginning() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let channel = TcpChannel::new(near.into()).unwrap();
        let found = |channel: &TcpChannel| {
            let fd = channel.socket.fd();
            let idle = sockopt::tcp_keepidle(fd).unwrap();
            (sockopt::tcp_user_timeout(fd).unwrap(), idle + 3 * sockopt::tcp_keepintvl(fd).unwrap())
        };
        assert_eq!(found(&channel), (30_000, Duration::from_secs(25)));
        let channel = channel.with_peer_timeout(Some(Duration::from_secs(2))).unwrap();
        assert_eq!(found(&channel), (2000, Duration::from_secs(4)));
    }

    #[test]
    fn a_call_within_the_host_receives_a_limited_part() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = TcpChannel::new(listener.accept().unwrap().0.into()).unwrap();
        // Within the send buffer, so the call returns.
        let sent: Vec<u8> = (0..LOCAL_RECEIVE_BYTES + 4096).map(|i| (i % 251) as u8).collect();
        let near = TcpChannel::new(near.into()).unwrap();
        near.send_all(&[IoBuf::from(&sent[..])], SendFlags::empty()).unwrap();
        let mut received = vec![0; sent.len()];
        let whole = received.len();
        while far.recv(&mut [IoBufMut::from(&mut received[..])], RecvFlags::PEEK).unwrap() < whole {}
        let (first, second) = received.split_at_mut(1000);
        let mut bufs = [IoBufMut::from(first), IoBufMut::from(second)];
        assert_eq!(far.recv(&mut bufs, RecvFlags::empty()).unwrap(), LOCAL_RECEIVE_BYTES);
        far.recv_exact(&mut [IoBufMut::from(&mut received[LOCAL_RECEIVE_BYTES..])]).unwrap();
        assert_eq!(received, sent);
    }
}
