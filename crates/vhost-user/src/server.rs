//! The socket: who connects to whom, and a conversation over a channel.
//!
//! ```text
//!   Listener / connect / a descriptor ─► Channel ─► serve: header, payload, descriptors ─► Session ─► answer
//! ```
//! One frontend at a time, as QEMU has it: when it goes, all rings rest where they are, and the next one starts anew.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use towline_channel::{
    Address, Cancel, Channel, ChannelExt, ConnectOptions, FDS_MAX, IoBuf, Listener, SendFlags, UnixChannel,
    connect_with,
};

use crate::device::Device;
use crate::message::{HEADER_BYTES, Header, MessageError, Reply, Request};
use crate::session::{Session, SessionError};
use crate::sys::inherited;
use crate::worker::Crew;

/// How long a frontend may be away, or a step of waiting for one; waiting goes on behind it.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Before a frontend that was lost is connected to again; there is nothing to wait for but time.
const RECONNECT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long the rest of a message may take, and an answer to be taken.
const MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// Why a connection ended, other than by the frontend's own wish.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket failed, or was cancelled.
    #[error(transparent)]
    Channel(#[from] towline_channel::Error),
    /// A message that could not be answered any other way.
    #[error("the frontend at {peer} is given up: {source}")]
    Session {
        /// The frontend.
        peer: String,
        /// Why.
        source: SessionError,
    },
    /// A device that no frontend could use.
    #[error("a device has 1 to {most} queues, this one has {found}", most = crate::QUEUES_MAX)]
    Queues {
        /// How many it has.
        found: usize,
    },
    /// More sockets than one device has.
    #[error("the service manager passes {found} sockets, expected 1; give each device a unit of its own")]
    Sockets {
        /// How many it passes.
        found: usize,
    },
    /// A descriptor that is no socket.
    #[error("the descriptor given as a socket: {0}; give a Unix stream socket, listening or connected")]
    Descriptor(Errno),
}

/// Where frontends come from.
#[derive(Debug)]
pub enum Frontends {
    /// They connect to this path; a stale socket there is replaced.
    Listen(Listener),
    /// They listen; connected to again whenever the connection is lost.
    Connect(Address),
    /// A listening socket that somebody else made, a service manager for instance.
    Inherited(OwnedFd),
    /// One connection that somebody else made; served once.
    Connected(Box<dyn Channel>),
}

impl Frontends {
    /// A descriptor from a service manager or a VM's manager, listening or connected.
    ///
    /// # Errors
    /// [`ServeError::Descriptor`] if it is no socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, ServeError> {
        if sockopt::socket_acceptconn(&fd).map_err(ServeError::Descriptor)? {
            return Ok(Self::Inherited(fd));
        }
        Ok(Self::Connected(Box::new(UnixChannel::new(fd, "the given descriptor")?)))
    }

    /// The socket that a service manager has left open for this process, by systemd's protocol (socket activation); `None`
    /// if there is none.
    ///
    /// # Errors
    /// [`ServeError::Sockets`] if there are several, [`ServeError::Descriptor`] if it is no socket.
    pub fn from_service_manager() -> Result<Option<Self>, ServeError> {
        match inherited::count() {
            0 => Ok(None),
            1 => Self::from_fd(inherited::take().map_err(ServeError::Descriptor)?).map(Some),
            found => Err(ServeError::Sockets { found }),
        }
    }

    /// Serves one frontend after the other until cancelled. What goes wrong with one is logged and ends only that one.
    ///
    /// # Errors
    /// [`ServeError::Channel`] if no frontend can be had any more: with `Cancelled` if that was wished. With
    /// [`Frontends::Connected`] also that connection's own end.
    pub fn serve(self, device: &Arc<dyn Device>, cancel: &Cancel) -> Result<(), ServeError> {
        loop {
            let channel = match &self {
                Self::Connected(channel) => return serve(channel.as_ref(), device, cancel),
                Self::Listen(listener) => patiently(|until| listener.accept(until, cancel))?,
                Self::Connect(address) => {
                    let options = ConnectOptions { retry: true, ..ConnectOptions::default() };
                    patiently(|until| connect_with(address, until, cancel, &options))?
                }
                Self::Inherited(socket) => Box::new(accept(socket, cancel)?),
            };
            if let Err(error) = serve(channel.as_ref(), device, cancel) {
                cancel.check()?;
                tracing::error!(%error, device = device.name(), "a frontend's connection ended");
            }
            if matches!(self, Self::Connect(_)) {
                rest(cancel)?;
            }
        }
    }
}

/// A frontend that takes every connection and hangs up at once shall not keep a processor busy.
fn rest(cancel: &Cancel) -> Result<(), ServeError> {
    match poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(&RECONNECT_INTERVAL)) {
        Ok(_) | Err(Errno::INTR) => Ok(cancel.check()?),
        Err(errno) => Err(ServeError::Descriptor(errno)),
    }
}

fn patiently(
    mut step: impl FnMut(Instant) -> towline_channel::Result<Box<dyn Channel>>,
) -> towline_channel::Result<Box<dyn Channel>> {
    loop {
        match step(Instant::now() + PATIENCE) {
            Err(towline_channel::Error::Timeout { .. }) => {}
            other => return other,
        }
    }
}

fn accept(socket: &OwnedFd, cancel: &Cancel) -> Result<UnixChannel, ServeError> {
    loop {
        let mut fds = [socket.as_fd(), cancel.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => cancel.check()?,
            Err(errno) => return Err(ServeError::Descriptor(errno)),
        }
        if !fds[0].revents().is_empty() {
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(UnixChannel::new(fd, "a frontend")?),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(ServeError::Descriptor(errno)),
            }
        }
    }
}

/// Serves one frontend until it goes.
///
/// # Errors
/// [`ServeError::Queues`], [`ServeError::Channel`] (`Cancelled` too), [`ServeError::Session`].
pub fn serve(channel: &dyn Channel, device: &Arc<dyn Device>, cancel: &Cancel) -> Result<(), ServeError> {
    let found = device.queue_count();
    if found == 0 || found > crate::QUEUES_MAX {
        return Err(ServeError::Queues { found });
    }
    channel.set_timeouts(Some(MESSAGE_WITHIN), Some(MESSAGE_WITHIN))?;
    let given_up = |source| ServeError::Session { peer: channel.peer().to_owned(), source };
    let mut session = Session::new(Arc::clone(device), Crew::new(device.as_ref()).map_err(given_up)?);
    loop {
        if !channel.wait_recv(cancel)? {
            return Err(towline_channel::Error::Cancelled.into());
        }
        let Some((header, payload, fds)) = receive(channel, given_up)? else { return Ok(()) };
        let request = Request::decode(header.code, &payload, fds).map_err(SessionError::from);
        tracing::debug!(code = %header.code, need_reply = header.need_reply, "request");
        let outcome = request.and_then(|request| session.handle(request));
        let acknowledges = header.need_reply && session.acknowledges();
        let reply = match outcome {
            Ok(Some(reply)) => reply,
            Ok(None) if acknowledges => Reply::Number(0),
            Ok(None) => continue,
            Err(SessionError::Gone { index }) => return Err(given_up(SessionError::Gone { index })),
            Err(error) if acknowledges => {
                tracing::warn!(%error, "refused");
                Reply::Number(1)
            }
            Err(error) => return Err(given_up(error)),
        };
        answer(channel, &reply.encode(header.code), session.take_answer_fd().as_ref())?;
    }
}

/// Sends an answer; what of it does not go with its descriptor follows.
fn answer(channel: &dyn Channel, bytes: &[u8], fd: Option<&OwnedFd>) -> Result<(), ServeError> {
    let sent = match fd {
        Some(fd) => channel.send_fds(bytes, &[fd.as_fd()])?,
        None => 0,
    };
    Ok(channel.send_all(&[IoBuf::from(&bytes[sent..])], SendFlags::empty())?)
}

type Message = (Header, Vec<u8>, Vec<OwnedFd>);

/// One message; `None` at the end. Descriptors come with its first byte and never with another's: the kernel does not
/// join what has some.
fn receive(
    channel: &dyn Channel,
    given_up: impl Fn(SessionError) -> ServeError,
) -> Result<Option<Message>, ServeError> {
    let mut fds = Vec::new();
    let mut bytes = [0; HEADER_BYTES];
    if fill(channel, &mut bytes, &mut fds)? == 0 {
        return Ok(None);
    }
    let fault = |fault: MessageError| given_up(fault.into());
    let header = Header::parse(&bytes).map_err(fault)?;
    let mut payload = vec![0; header.length];
    let got = fill(channel, &mut payload, &mut fds)?;
    if got < header.length {
        let (peer, wanted) = (channel.peer().to_owned(), header.length);
        return Err(towline_channel::Error::Closed { peer, wanted, got }.into());
    }
    if fds.len() > FDS_MAX {
        let (code, found) = (header.code, fds.len());
        return Err(fault(MessageError::Descriptors { code, found, expected: FDS_MAX }));
    }
    Ok(Some((header, payload, fds)))
}

/// Fills all of it, or nothing at the stream's end. Returns how much.
fn fill(
    channel: &dyn Channel,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, towline_channel::Error> {
    let mut got = 0;
    while got < bytes.len() && fds.len() <= FDS_MAX {
        match channel.recv_fds(&mut bytes[got..], fds)? {
            0 if got == 0 => break,
            0 => {
                let (peer, wanted) = (channel.peer().to_owned(), bytes.len());
                return Err(towline_channel::Error::Closed { peer, wanted, got });
            }
            received => got += received,
        }
    }
    Ok(got)
}
