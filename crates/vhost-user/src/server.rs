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
    Address, Cancel, Channel, ConnectOptions, Listener, UnixChannel, connect_with, is_exhausted,
};

use crate::conversation::{Conversation, Workers};
use crate::device::Device;
use crate::record::{Record, RecordError, STORED};
use crate::session::SessionError;
use crate::sys::inherited;

/// How long a frontend may be away, or a step of waiting for one; waiting goes on behind it.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Before a frontend that was lost is connected to again; there is nothing to wait for but time.
const RECONNECT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// After the kernel had no descriptor or no memory for a connection, or the device refused it for now; there is no event for that either.
const EXHAUSTED_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

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
    /// The record of what is in flight.
    #[error(transparent)]
    Record(#[from] RecordError),
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
        let names = inherited::names();
        let is_socket = |index: &usize| names[*index] != STORED;
        match (0..names.len()).filter(is_socket).collect::<Vec<_>>()[..] {
            [] => Ok(None),
            [index] => Self::from_fd(inherited::take(index).map_err(ServeError::Descriptor)?).map(Some),
            ref several => Err(ServeError::Sockets { found: several.len() }),
        }
    }

    /// Serves one frontend after the other until cancelled. What goes wrong with one is logged and ends only that one.
    ///
    /// # Errors
    /// As [`Service::serve`], and [`ServeError::Record`].
    pub fn serve(self, device: &Arc<dyn Device>, cancel: &Cancel) -> Result<(), ServeError> {
        check_queues(device.as_ref())?;
        Service::new(self).serve(device, &Record::new(device.queue_count())?, cancel)
    }
}

/// A device's frontends, and the one that is connected: can be left and served again, also by
/// [another process](crate::hand_over()).
pub struct Service {
    /// `None` once the only connection that there could be is served.
    pub(crate) frontends: Option<Frontends>,
    pub(crate) conversation: Option<Conversation>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let connected = self.conversation.is_some();
        f.debug_struct("Service").field("frontends", &self.frontends).field("connected", &connected).finish()
    }
}

impl Service {
    /// Before the first of them has connected.
    pub fn new(frontends: Frontends) -> Self {
        Self { frontends: Some(frontends), conversation: None }
    }

    /// Serves one frontend after the other until cancelled, or goes on with the one that is connected. What goes wrong with
    /// one is logged and ends only that one. The record, of all of the device's queues, says what is in flight.
    ///
    /// # Errors
    /// [`ServeError::Channel`] if no frontend can be had any more: with `Cancelled` if that was wished; the rings of a
    /// frontend that is connected then run until this value is dropped. With [`Frontends::Connected`] also that
    /// connection's own end. [`ServeError::Queues`].
    pub fn serve(
        &mut self,
        device: &Arc<dyn Device>,
        record: &Record,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        check_queues(device.as_ref())?;
        let mut refused = false;
        loop {
            let outcome = self.converse(device, record, cancel);
            if outcome.is_err() {
                cancel.check()?;
            }
            let connected = self.conversation.take().is_some();
            let passes = outcome.as_ref().is_err_and(ServeError::passes);
            let logged = std::mem::replace(&mut refused, passes) && passes;
            match outcome {
                outcome if self.frontends.is_none() => return outcome,
                Err(error) if !connected && !matches!(error, ServeError::Session { .. }) => {
                    return Err(error);
                }
                Err(error) if !logged => {
                    tracing::error!(%error, device = device.name(), "a frontend's connection ended");
                }
                _ => {}
            }
            if matches!(self.frontends, Some(Frontends::Connect(_))) {
                rest(cancel, if passes { &EXHAUSTED_INTERVAL } else { &RECONNECT_INTERVAL })?;
            }
        }
    }
}

impl Service {
    /// With the one that is connected, or the next.
    fn converse(
        &mut self,
        device: &Arc<dyn Device>,
        record: &Record,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        if self.conversation.is_none() {
            let channel = match self.frontends.take() {
                Some(Frontends::Connected(channel)) => channel,
                Some(frontends) => self.frontends.insert(frontends).next(cancel)?,
                None => return Ok(()),
            };
            // One that is refused for now is closed, as its frontend may wait for an answer with its guest; the last one is kept.
            let last = self.frontends.is_none();
            let waits = |error: &ServeError| error.is_exhausted() || last && error.passes();
            let workers = patiently_while(waits, cancel, || Workers::new(&*channel, device, Some(record)))?;
            self.conversation = Some(Conversation::with(channel, device, workers));
        }
        self.conversation.as_mut().map_or(Ok(()), |conversation| conversation.serve(cancel))
    }
}

impl Frontends {
    /// The next one that connects, or is connected to.
    fn next(&self, cancel: &Cancel) -> Result<Box<dyn Channel>, ServeError> {
        patiently_while(ServeError::is_exhausted, cancel, || self.attempt(cancel))
    }

    fn attempt(&self, cancel: &Cancel) -> Result<Box<dyn Channel>, ServeError> {
        Ok(match self {
            Self::Connected(_) => unreachable!("it is served, and not waited for"),
            Self::Listen(listener) => patiently(|until| listener.accept(until, cancel))?,
            Self::Connect(address) => {
                let options = ConnectOptions { retry: true, ..ConnectOptions::default() };
                patiently(|until| connect_with(address, until, cancel, &options))?
            }
            Self::Inherited(socket) => Box::new(accept(socket, cancel)?),
        })
    }
}

impl ServeError {
    /// Whether it passes when descriptors or memory are free again.
    fn is_exhausted(&self) -> bool {
        match self {
            Self::Channel(error) => is_exhausted(error),
            Self::Descriptor(errno) => {
                [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(errno)
            }
            Self::Session { source, .. } => source.is_exhausted(),
            _ => false,
        }
    }

    /// Whether the device refused this connection and may take the next.
    fn passes(&self) -> bool {
        matches!(self, Self::Session { source, .. } if source.passes())
    }
}

/// Repeats what fails with an error that `waits`: for want of descriptors, memory or threads others may give some back. The log has it once.
fn patiently_while<T>(
    waits: impl Fn(&ServeError) -> bool,
    cancel: &Cancel,
    mut attempt: impl FnMut() -> Result<T, ServeError>,
) -> Result<T, ServeError> {
    let mut logged = false;
    loop {
        match attempt() {
            Err(error) if waits(&error) => {
                if !std::mem::replace(&mut logged, true) {
                    tracing::error!(
                        %error,
                        "no frontend can be served; trying again every second. If descriptors are missing, raise the limit of open files (ulimit -n)"
                    );
                }
                rest(cancel, &EXHAUSTED_INTERVAL)?;
            }
            outcome => return outcome,
        }
    }
}

/// Waits a while, or until cancelled: where there is nothing else to wait for, a processor shall not be kept busy.
fn rest(cancel: &Cancel, interval: &Timespec) -> Result<(), ServeError> {
    match poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(interval)) {
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
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(errno) => return Err(ServeError::Descriptor(errno)),
            }
        }
    }
}

/// Serves one frontend until it goes.
///
/// # Errors
/// [`ServeError::Queues`], [`ServeError::Channel`] (`Cancelled` too), [`ServeError::Session`].
pub fn serve(
    channel: &(dyn Channel + 'static),
    device: &Arc<dyn Device>,
    cancel: &Cancel,
) -> Result<(), ServeError> {
    check_queues(device.as_ref())?;
    Conversation::new(channel, device, None)?.serve(cancel)
}

fn check_queues(device: &dyn Device) -> Result<(), ServeError> {
    match device.queue_count() {
        1..=crate::QUEUES_MAX => Ok(()),
        found => Err(ServeError::Queues { found }),
    }
}
