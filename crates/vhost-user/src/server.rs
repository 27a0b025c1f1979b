//! The sockets of a device: accepts or makes connections, and serves them.
//!
//! ```text
//!   Listener / connect / a descriptor ─► Channel ─► Connection: header, payload, descriptors ─► Session ─► reply
//! ```
//! One frontend at a time has the device, as QEMU connects. When it disconnects, all rings keep their
//! positions, and the next frontend starts a new session. A second frontend may be connected at the same
//! time, if the device allows it (`standby`).

mod standby;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use towline_channel::{Address, Cancel, Channel, ConnectOptions, Listener, UnixChannel, connect_with};

use crate::backend_error::Persistence;
use crate::connection::{ConnectionResources, FrontendConnection, MESSAGE_WITHIN};
use crate::device::Device;
use crate::orphaned_threads::OrphanedThreads;
use crate::record::{InFlightRecord, RECORD_FD_NAME};
use crate::serve_error::ServeError;
use crate::sys::inherited;

/// Time limit for a frontend to connect: none in the life of a process.
const ATTEMPT_WITHIN: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Interval between attempts to reconnect to a lost frontend, for which there is no event.
const RECONNECT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Interval after the kernel had no descriptor or memory for a connection, or the device refused it
/// temporarily. There is no event for that either.
const EXHAUSTED_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Source of a device's frontends.
#[derive(Debug)]
#[non_exhaustive]
pub enum FrontendSource {
    /// Frontends connect to this path; a stale socket there is replaced.
    Listen(Listener),
    /// The frontend listens here; its connection is re-established whenever it is lost.
    Connect(Address),
    /// A listening socket that another process created, for instance a service manager.
    Inherited(OwnedFd),
    /// One connection that another process made; served once.
    Connected(Box<dyn Channel>),
}

impl FrontendSource {
    /// FrontendSource of a descriptor from a service manager or a VM manager, listening or connected.
    ///
    /// # Errors
    /// [`ServeError::Descriptor`] if it is not a socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, ServeError> {
        if sockopt::socket_acceptconn(&fd).map_err(descriptor_error)? {
            return Ok(Self::Inherited(fd));
        }
        Ok(Self::Connected(Box::new(UnixChannel::new(fd, "the given descriptor")?)))
    }

    /// FrontendSource of the socket that a service manager passed to this process by systemd's protocol
    /// (socket activation); `None` if there was none.
    ///
    /// # Errors
    /// [`ServeError::Sockets`] if there are several, [`ServeError::Descriptor`] if it is not a socket.
    pub fn from_service_manager() -> Result<Option<Self>, ServeError> {
        let names = inherited::names();
        let is_socket = |index: &usize| names[*index] != RECORD_FD_NAME;
        match (0..names.len()).filter(is_socket).collect::<Vec<_>>()[..] {
            [] => Ok(None),
            [index] => Self::from_fd(inherited::take_fd(index).map_err(descriptor_error)?).map(Some),
            ref several => Err(ServeError::Sockets { found: several.len() }),
        }
    }

    /// Serves one frontend after the other until cancelled. An error of one is logged and ends only its
    /// connection.
    ///
    /// # Errors
    /// As [`Service::serve`], and [`ServeError::Record`].
    pub fn serve(self, device: &Arc<dyn Device>, cancel: &Cancel) -> Result<(), ServeError> {
        check_queues(device.as_ref())?;
        Service::new(self).serve(device, &InFlightRecord::new(device.queue_count())?, cancel)
    }

    /// Waits for the next frontend to connect, or connects to it.
    fn next(&self, cancel: &Cancel) -> Result<Box<dyn Channel>, ServeError> {
        retry_while(|found| found == Persistence::Exhausted, cancel, || self.attempt(cancel))
    }

    fn attempt(&self, cancel: &Cancel) -> Result<Box<dyn Channel>, ServeError> {
        let until = Instant::now() + ATTEMPT_WITHIN;
        Ok(match self {
            Self::Connected(_) => unreachable!("a connected frontend is not waited for"),
            Self::Listen(listener) => listener.accept(until, cancel)?,
            Self::Connect(address) => {
                let options = ConnectOptions { retry: true, ..ConnectOptions::default() };
                connect_with(address, until, cancel, &options)?
            }
            Self::Inherited(socket) => Box::new(accept(socket, cancel)?),
        })
    }
}

/// A device's frontends, and the connected one. Serving can be interrupted and resumed.
pub struct Service {
    /// `None` once the only possible connection is taken.
    pub(crate) frontends: Option<FrontendSource>,
    /// The frontend that has the device.
    pub(crate) connection: Option<FrontendConnection>,
    /// A second one, whose rings do not run.
    pub(crate) standby: Option<FrontendConnection>,
    /// Threads of ended connections; no further connection begins while there are any.
    pub(crate) orphans: Arc<OrphanedThreads>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let connected = self.connection.is_some();
        f.debug_struct("Service").field("frontends", &self.frontends).field("connected", &connected).finish()
    }
}

impl Service {
    /// A service without a connected frontend.
    pub fn new(frontends: FrontendSource) -> Self {
        Self { frontends: Some(frontends), connection: None, standby: None, orphans: Arc::default() }
    }

    /// Serves one frontend after the other until cancelled, beginning with the connected one. An error of one
    /// is logged and ends only its connection. The record has the chains in flight of all queues of the
    /// device.
    ///
    /// # Errors
    /// [`ServeError::Channel`] if no further frontend can connect: `Cancelled` if that was the reason; the
    /// rings of a connected frontend then run until this value is dropped. With [`FrontendSource::Connected`]
    /// also the error of that connection. [`ServeError::Queues`].
    pub fn serve(
        &mut self,
        device: &Arc<dyn Device>,
        record: &InFlightRecord,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        check_queues(device.as_ref())?;
        let mut was_temporary = false;
        loop {
            let outcome = self.serve_one(device, record, cancel);
            if let Err(error) = &outcome {
                // A session that failed in a request cannot continue.
                if cancel.is_cancelled() && matches!(error, ServeError::Session { .. }) {
                    tracing::error!(%error, device = device.name(), "closing a connection that failed in a request");
                    self.close_connection();
                }
                cancel.check()?;
            }
            let connected = self.close_connection();
            let temporary =
                outcome.as_ref().is_err_and(|error| error.persistence() == Persistence::Temporary);
            let logged = std::mem::replace(&mut was_temporary, temporary) && temporary;
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
            if matches!(self.frontends, Some(FrontendSource::Connect(_))) {
                wait(cancel, if temporary { &EXHAUSTED_INTERVAL } else { &RECONNECT_INTERVAL })?;
            }
        }
    }

    /// Ends the owner's connection. Returns true if there was one.
    fn close_connection(&mut self) -> bool {
        self.connection.take().map(|connection| connection.close(&self.orphans)).is_some()
    }

    /// Serves the connected frontend, or the next one.
    fn serve_one(
        &mut self,
        device: &Arc<dyn Device>,
        record: &InFlightRecord,
        cancel: &Cancel,
    ) -> Result<(), ServeError> {
        if self.connection.is_none()
            && let Some(mut standby) = self.standby.take()
        {
            standby.take_device()?;
            standby.set_reply_timeout(MESSAGE_WITHIN)?;
            self.connection = Some(standby);
        }
        if self.connection.is_none() {
            let channel = match self.frontends.take() {
                Some(FrontendSource::Connected(channel)) => channel,
                Some(frontends) => self.frontends.insert(frontends).next(cancel)?,
                None => return Ok(()),
            };
            // A connection that is refused temporarily is closed, because its frontend may block its guest
            // while it waits for a reply. The only possible connection is kept.
            let only = self.frontends.is_none();
            let retries = |found| found == Persistence::Exhausted || only && found == Persistence::Temporary;
            let create = || ConnectionResources::new(&*channel, device, Some(record), &self.orphans);
            let resources = retry_while(retries, cancel, create)?;
            self.connection = Some(FrontendConnection::new(channel, device, resources));
        }
        if self.allows_standby(device.as_ref()) {
            return self.serve_pair(device, record, cancel);
        }
        self.connection.as_mut().map_or(Ok(()), |connection| connection.serve(cancel))
    }
}

/// Repeats an attempt whose error `retries`, because other processes may release descriptors, memory or
/// threads. The first error is logged.
fn retry_while<T>(
    retries: impl Fn(Persistence) -> bool,
    cancel: &Cancel,
    mut attempt: impl FnMut() -> Result<T, ServeError>,
) -> Result<T, ServeError> {
    let mut logged = false;
    loop {
        match attempt() {
            Err(error) if retries(error.persistence()) => {
                if !std::mem::replace(&mut logged, true) {
                    tracing::error!(
                        %error,
                        "no frontend can be served; trying again every second. If descriptors are missing, raise the limit of open files (ulimit -n)"
                    );
                }
                wait(cancel, &EXHAUSTED_INTERVAL)?;
            }
            outcome => return outcome,
        }
    }
}

/// Waits for an interval, or until cancelled.
fn wait(cancel: &Cancel, interval: &Timespec) -> Result<(), ServeError> {
    match poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(interval)) {
        Ok(_) | Err(Errno::INTR) => Ok(cancel.check()?),
        Err(errno) => Err(descriptor_error(errno)),
    }
}

fn accept(socket: &OwnedFd, cancel: &Cancel) -> Result<UnixChannel, ServeError> {
    loop {
        let mut fds = [socket.as_fd(), cancel.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => cancel.check()?,
            Err(errno) => return Err(descriptor_error(errno)),
        }
        if !fds[0].revents().is_empty() {
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(UnixChannel::new(fd, "a frontend")?),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(errno) => return Err(descriptor_error(errno)),
            }
        }
    }
}

fn descriptor_error(error: impl Into<io::Error>) -> ServeError {
    ServeError::Descriptor(error.into())
}

/// Serves one frontend until it disconnects.
///
/// # Errors
/// [`ServeError::Queues`], [`ServeError::Channel`] (also `Cancelled`), [`ServeError::Session`].
pub fn serve(
    channel: &(dyn Channel + 'static),
    device: &Arc<dyn Device>,
    cancel: &Cancel,
) -> Result<(), ServeError> {
    check_queues(device.as_ref())?;
    let resources = ConnectionResources::new(channel, device, None, &Arc::default())?;
    FrontendConnection::new(channel, device, resources).serve(cancel)
}

fn check_queues(device: &dyn Device) -> Result<(), ServeError> {
    match device.queue_count() {
        1..=crate::QUEUES_MAX => Ok(()),
        found => Err(ServeError::Queues { found }),
    }
}
