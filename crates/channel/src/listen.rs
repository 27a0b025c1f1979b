//! Waiting for the other end.

use crate::exec::ExecChannel;
use crate::file::FileChannel;
use crate::tcp::{self, TcpChannel};
use crate::unix::UnixChannel;
use crate::unix_listen::UnixListener;
use crate::wait::Patience;
use crate::{Address, Cancel, Channel, Error, Result, fd};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Instant;

/// How to listen.
#[derive(Debug, Clone, Default)]
pub struct ListenOptions {
    /// Whether zero-copy sends shall be possible on the channels, as in [`ConnectOptions`](crate::ConnectOptions).
    pub zero_copy: bool,
}

/// A place where others connect. Several threads may accept from one.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    kind: Kind,
    options: ListenOptions,
}

#[derive(Debug)]
enum Kind {
    Tcp(OwnedFd),
    Unix(UnixListener),
    /// What is there from the beginning, until it is fetched.
    Single(Mutex<Option<Single>>),
}

#[derive(Debug)]
enum Single {
    Open(Box<dyn Channel>),
    /// Started when it is fetched: it should not run for a caller who gives up.
    Command(String),
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
    /// - `tcp:` without a host takes every address of the machine, IPv6 and IPv4; with a name, the first that can be had.
    /// - `unix:` replaces a socket file that nobody listens on, and removes its own when it is dropped.
    /// - `fd:N` takes the descriptor over, `exec:` starts the command when it is accepted, `file:` is opened for
    ///   reading. Each of them yields one channel.
    ///
    /// # Errors
    /// [`Error::InUse`] if the socket file belongs to somebody else, [`Error::BadAddress`], [`Error::Resolve`],
    /// otherwise [`Error::Io`].
    pub fn bind_with(address: &Address, options: &ListenOptions) -> Result<Self> {
        let single = |single| Kind::Single(Mutex::new(Some(single)));
        let mut local = address.clone();
        let kind = match address {
            Address::Tcp { host, port } => {
                let (fd, bound) = tcp::bind(host, *port, &address.to_string())?;
                local = Address::Tcp { host: bound.ip().to_string(), port: bound.port() };
                Kind::Tcp(fd)
            }
            Address::Unix(path) => Kind::Unix(UnixListener::bind(path)?),
            Address::Fd(number) => single(Single::Open(fd::open(*number)?)),
            Address::Exec(command) => single(Single::Command(command.clone())),
            Address::File { path, offset } => {
                single(Single::Open(Box::new(FileChannel::open(path, *offset)?)))
            }
        };
        Ok(Self { address: local, kind, options: options.clone() })
    }

    /// Where it listens, with the port really chosen when 0 was asked for, and the numeric host.
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// The descriptor to poll for peers; `None` where there is nothing to wait for.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            Kind::Tcp(fd) => Some(fd.as_fd()),
            Kind::Unix(listener) => Some(listener.fd()),
            Kind::Single(_) => None,
        }
    }

    /// Waits for a peer.
    ///
    /// # Errors
    /// [`Error::Cancelled`] as soon as the token is pulled, [`Error::Timeout`] at the deadline, [`Error::Unsupported`]
    /// if there is only one channel and it was fetched before, otherwise [`Error::Io`].
    pub fn accept(&self, deadline: Instant, cancel: &Cancel) -> Result<Box<dyn Channel>> {
        cancel.check()?;
        let patience = Patience::new("accept", &self.address, deadline, cancel);
        match &self.kind {
            Kind::Tcp(fd) => {
                let channel = TcpChannel::new(next(fd.as_fd(), &patience)?)?;
                Ok(Box::new(channel.with_zero_copy(self.options.zero_copy)?))
            }
            Kind::Unix(listener) => {
                Ok(Box::new(UnixChannel::new(next(listener.fd(), &patience)?, patience.peer())?))
            }
            Kind::Single(single) => match single.lock().expect("no panic while it is held").take() {
                Some(Single::Open(channel)) => Ok(channel),
                Some(Single::Command(command)) => Ok(Box::new(ExecChannel::spawn(&command)?)),
                None => Err(Error::unsupported(patience.peer(), "a second connection; use tcp: or unix:")),
            },
        }
    }
}

fn next(listener: BorrowedFd<'_>, patience: &Patience<'_>) -> Result<OwnedFd> {
    loop {
        patience.wait(listener, PollFlags::IN)?;
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(fd) => return Ok(fd),
            // Another thread was quicker, or the peer gave up before we came.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
            Err(errno) => return Err(Error::io(patience.op(), patience.peer(), errno)),
        }
    }
}
