//! Waiting for the other end.

use crate::exec::ExecChannel;
use crate::file::FileChannel;
use crate::layers;
use crate::lock::lock;
use crate::pending_handshakes::{HandshakeFunction, PendingHandshakes};
use crate::tcp::{self, TcpChannel};
use crate::tls::TlsServer;
use crate::unix::UnixChannel;
use crate::unix_listen::UnixListener;
use crate::wait::Deadline;
use crate::{Address, Cancel, Channel, Error, Result, fd};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Maximum number of connections accepted before completed handshakes are checked.
const ACCEPTED_AT_ONCE_MAX: usize = 64;

/// Options of a listener.
#[derive(Debug, Clone, Default)]
pub struct ListenOptions {
    /// True if zero-copy sends are wanted on the channels, as in [`ConnectOptions`](crate::ConnectOptions).
    pub zero_copy: bool,
    /// Silence of a `tcp:` peer after which its connection ends, as in
    /// [`ConnectOptions`](crate::ConnectOptions).
    pub peer_timeout: Option<Duration>,
    /// TLS credentials; a client must present a certificate.
    pub tls: Option<TlsServer>,
}

/// A listener. Several threads may accept from it.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    // Before the socket that it watches.
    pending: Option<PendingHandshakes>,
    kind: ListenerKind,
    options: ListenOptions,
}

#[derive(Debug)]
enum ListenerKind {
    Tcp(OwnedFd),
    Unix(UnixListener),
    /// The only channel, until it is accepted.
    Single(Mutex<Option<Single>>),
}

#[derive(Debug)]
enum Single {
    Open(Box<dyn Channel>),
    /// Started when it is accepted, so it does not run for a caller that gives up.
    Command(String),
}

/// Returns true if [`Listener::accept`] failed only for now: the kernel has no descriptor or no memory left
/// for a connection (`EMFILE`, `ENFILE`, `ENOBUFS`, `ENOMEM`). The peer stays in the queue, so the listener
/// stays readable: wait before the next attempt.
pub fn is_out_of_resources(error: &Error) -> bool {
    let Error::Io { source, .. } = error else { return false };
    matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

impl Listener {
    /// Listens at an address with the default [`ListenOptions`].
    ///
    /// # Errors
    /// As [`Self::bind_with`].
    pub fn bind(address: &Address) -> Result<Self> {
        Self::bind_with(address, &ListenOptions::default())
    }

    /// Listens at an address.
    ///
    /// - `tcp:` without a host listens on every address of the machine, IPv6 and IPv4; with a name, the first
    ///   that is available.
    /// - `unix:` replaces a socket file without a listener, and removes its own when it is dropped.
    /// - `fd:N` takes the descriptor over, `exec:` starts the command when it is accepted, `file:` is opened
    ///   for reading. Each of them yields one channel.
    ///
    /// # Errors
    /// [`Error::InUse`] if the socket file belongs to another process, [`Error::BadAddress`],
    /// [`Error::Resolve`], otherwise [`Error::Io`].
    pub fn bind_with(address: &Address, options: &ListenOptions) -> Result<Self> {
        address.check_tls(options.tls.is_some())?;
        let single = |single| ListenerKind::Single(Mutex::new(Some(single)));
        let mut local = address.clone();
        let kind = match address {
            Address::Tcp { host, port } => {
                let (fd, bound) = tcp::bind(host, *port, &address.to_string())?;
                local = Address::Tcp { host: bound.ip().to_string(), port: bound.port() };
                ListenerKind::Tcp(fd)
            }
            #[cfg(not(feature = "websocket"))]
            Address::WebSocket { .. } => {
                return Err(Error::unsupported(&address.to_string(), layers::WITHOUT_WEBSOCKET));
            }
            #[cfg(feature = "websocket")]
            Address::WebSocket { secure, host, port, path } => {
                let (fd, bound) = tcp::bind(host, *port, &address.to_string())?;
                let (host, port) = (bound.ip().to_string(), bound.port());
                local = Address::WebSocket { secure: *secure, host, port, path: path.clone() };
                ListenerKind::Tcp(fd)
            }
            Address::Unix(path) => ListenerKind::Unix(UnixListener::bind(path)?),
            Address::Fd(number) => single(Single::Open(fd::open(*number)?)),
            Address::Exec(command) => single(Single::Command(command.clone())),
            Address::File { path, offset } => {
                single(Single::Open(Box::new(FileChannel::open(path, *offset)?)))
            }
        };
        let pending = match (handshake_for(address, options), kind.as_fd()) {
            (Some(open), Some(fd)) => Some(PendingHandshakes::new(fd, open)?),
            _ => None,
        };
        Ok(Self { address: local, pending, kind, options: options.clone() })
    }

    /// Address that it listens on, with the port that was chosen for 0, and the numeric host.
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// The descriptor to poll for peers; `None` where there is nothing to wait for.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.pending {
            Some(pending) => Some(pending.fd()),
            None => self.kind.as_fd(),
        }
    }

    /// Waits for a peer; with TLS or WebSocket, for a completed handshake.
    ///
    /// # Errors
    /// [`Error::Tls`] or [`Error::WebSocket`] if a peer's handshake failed: the listener continues with
    /// others. [`Error::Cancelled`] as soon as the token is cancelled, [`Error::Timeout`] at the deadline,
    /// [`Error::Unsupported`] if there is only one channel and it was accepted before, otherwise
    /// [`Error::Io`], which may be temporary ([`is_out_of_resources`]).
    pub fn accept(&self, deadline: Instant, cancel: &Cancel) -> Result<Box<dyn Channel>> {
        cancel.check()?;
        let until = Deadline::new("accept", self.address.to_string(), deadline, cancel);
        if let ListenerKind::Single(single) = &self.kind {
            let channel = open_single(single, &until)?;
            return match &self.options.tls {
                Some(tls) => layers::tls_server(channel, tls, deadline, cancel),
                None => Ok(channel),
            };
        }
        let fd = self.kind.as_fd().expect("all but single ones have a socket");
        let Some(pending) = &self.pending else {
            loop {
                until.wait(fd, PollFlags::IN)?;
                if let Some(channel) = self.next(fd, &until)? {
                    return Ok(channel);
                }
            }
        };
        loop {
            if let Some(opened) = pending.pop_ready() {
                return opened;
            }
            until.wait(pending.fd(), PollFlags::IN)?;
            for _ in 0..ACCEPTED_AT_ONCE_MAX {
                let Some(connection) = self.next(fd, &until)? else { break };
                pending.start(connection)?;
            }
        }
    }

    /// Accepts a connection; `None` if another thread accepted it.
    fn next(&self, listener: BorrowedFd<'_>, until: &Deadline<'_>) -> Result<Option<Box<dyn Channel>>> {
        let fd = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(fd) => fd,
            // Or the peer gave up before we came.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => return Ok(None),
            Err(errno) => return Err(until.io(errno)),
        };
        Ok(Some(match &self.kind {
            ListenerKind::Tcp(_) => {
                let channel = TcpChannel::new(fd)?.with_peer_timeout(self.options.peer_timeout)?;
                Box::new(channel.with_zero_copy(self.options.zero_copy)?)
            }
            _ => Box::new(UnixChannel::new(fd, until.peer())?),
        }))
    }
}

impl ListenerKind {
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Tcp(fd) => Some(fd.as_fd()),
            Self::Unix(listener) => Some(listener.fd()),
            Self::Single(_) => None,
        }
    }
}

/// The handshake of an accepted connection, if its kind has one.
fn handshake_for(address: &Address, options: &ListenOptions) -> Option<Arc<HandshakeFunction>> {
    let tls = options.tls.clone();
    let path = match address {
        Address::WebSocket { path, .. } => Some(path.clone()),
        _ => None,
    };
    if tls.is_none() && path.is_none() {
        return None;
    }
    Some(Arc::new(move |connection: Box<dyn Channel>, deadline, cancel: &Cancel| {
        let peer = connection.peer().to_owned();
        let opened = || -> Result<Box<dyn Channel>> {
            let secured = match &tls {
                Some(tls) => layers::tls_server(connection, tls, deadline, cancel)?,
                None => connection,
            };
            match &path {
                Some(path) => layers::websocket_server(secured, path, deadline, cancel),
                None => Ok(secured),
            }
        };
        opened().map_err(|error| match error {
            Error::Tls { .. } | Error::WebSocket { .. } => error,
            // The failure is that of the connection, not the listener's.
            error => Error::tls(&peer, error.to_string()),
        })
    }))
}

fn open_single(single: &Mutex<Option<Single>>, until: &Deadline<'_>) -> Result<Box<dyn Channel>> {
    match lock(single).take() {
        Some(Single::Open(channel)) => Ok(channel),
        Some(Single::Command(command)) => Ok(Box::new(ExecChannel::spawn(&command)?)),
        None => Err(Error::unsupported(until.peer(), "a second connection; use tcp: or unix:")),
    }
}
