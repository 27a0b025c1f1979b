//! The connection of one frontend: receives requests, has the session handle them, sends replies.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Cancel, Channel, ChannelExt, FDS_MAX, IoBuf, SendFlags};

use crate::device::Device;
use crate::hangup::Hangup;
use crate::message::{HEADER_BYTES, MessageError, MessageHeader, Reply, Request};
use crate::orphaned_threads::OrphanedThreads;
use crate::record::InFlightRecord;
use crate::serve_error::ServeError;
use crate::session::{SavedRequest, SavedSession, Session, SessionError};
use crate::worker::WorkerPool;

/// Time limit for the rest of a message, and for sending a reply.
pub(crate) const MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// State of the connection after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    Connected,
    Disconnected,
}

/// Role of a frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// As before.
    Owned,
    /// It was another one's until now.
    Taken,
}

/// A connection and its session. The rings run on while it is not served.
pub(crate) struct FrontendConnection<C = Box<dyn Channel>> {
    channel: C,
    session: Session<WorkerPool>,
    hangup: Arc<Hangup>,
    /// Time limit for the rest of a message.
    message_within: Duration,
    /// Ends the wait for it.
    cancel: Option<Cancel>,
}

/// System resources of a connection, which may be exhausted.
pub(crate) struct ConnectionResources {
    workers: WorkerPool,
    hangup: Arc<Hangup>,
    orphans: Arc<OrphanedThreads>,
}

impl ConnectionResources {
    pub(crate) fn new(
        channel: &dyn Channel,
        device: &Arc<dyn Device>,
        record: Option<&InFlightRecord>,
        orphans: &Arc<OrphanedThreads>,
    ) -> Result<Self, ServeError> {
        channel.set_timeouts(Some(MESSAGE_WITHIN), Some(MESSAGE_WITHIN))?;
        let failed = |source: SessionError| ServeError::session(channel.peer(), source);
        let count = orphans.count();
        if count > 0 {
            return Err(failed(SessionError::OrphanedThreads { count }));
        }
        let socket = channel.as_fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let socket = socket.map_err(|source| failed(SessionError::Descriptor { source }))?;
        let hangup = Arc::new(Hangup::new(socket));
        let workers = WorkerPool::new(device.as_ref(), record, &hangup, orphans).map_err(failed)?;
        Ok(Self { workers, hangup, orphans: Arc::clone(orphans) })
    }
}

impl<C: Deref<Target = dyn Channel>> FrontendConnection<C> {
    /// The connection of a frontend that has just connected.
    pub(crate) fn new(
        channel: C,
        device: &Arc<dyn Device>,
        record: Option<&InFlightRecord>,
        orphans: &Arc<OrphanedThreads>,
    ) -> Result<Self, ServeError> {
        let resources = ConnectionResources::new(&*channel, device, record, orphans)?;
        Ok(Self::with(channel, device, resources))
    }

    /// The connection of a frontend that has just connected, with its resources.
    pub(crate) fn with(channel: C, device: &Arc<dyn Device>, resources: ConnectionResources) -> Self {
        let ConnectionResources { workers, hangup, orphans } = resources;
        let session = Session::new(Arc::clone(device), orphans, workers);
        Self { channel, session, hangup, message_within: MESSAGE_WITHIN, cancel: None }
    }

    /// Serves the frontend until it disconnects, or `cancel` is cancelled between two of its requests: then the error is
    /// `Cancelled`, and the connection can be served again.
    pub(crate) fn serve(&mut self, cancel: &Cancel) -> Result<(), ServeError> {
        self.set_cancel(cancel);
        while self.channel.wait_recv(cancel)? {
            if self.serve_request(|| Ok(Claim::Owned))? == Peer::Disconnected {
                return Ok(());
            }
        }
        self.check_memory()?;
        Err(towline_channel::Error::Cancelled.into())
    }

    /// Cancels waiting requests when `cancel` is cancelled.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.session.set_cancel(cancel);
        self.cancel = Some(cancel.clone());
    }

    /// Serves one request, which is waited for. `claim` is called before one that concerns the device.
    pub(crate) fn serve_request(
        &mut self,
        claim: impl FnOnce() -> Result<Claim, SessionError>,
    ) -> Result<Peer, ServeError> {
        let served = self.serve_message(claim);
        self.check_memory()?;
        served
    }

    fn check_memory(&self) -> Result<(), ServeError> {
        if self.hangup.is_memory_lost() { Err(self.failed(SessionError::MemoryLost)) } else { Ok(()) }
    }

    fn serve_message(
        &mut self,
        claim: impl FnOnce() -> Result<Claim, SessionError>,
    ) -> Result<Peer, ServeError> {
        let limit = MessageLimit { within: self.message_within, cancel: self.cancel.as_ref() };
        let Some(message) = receive(&*self.channel, limit)? else { return Ok(Peer::Disconnected) };
        let ReceivedMessage { header: MessageHeader { code, need_reply, .. }, payload, fds } = message;
        tracing::debug!(%code, need_reply, "request");
        let request = Request::decode(code, &payload, fds).map_err(SessionError::from);
        let outcome = request.and_then(|request| {
            if self.session.concerns_device(&request) && claim()? == Claim::Taken {
                self.session.take_device()?;
            }
            self.session.handle(request)
        });
        let acknowledges = need_reply && self.session.has_reply_ack();
        let reply = match outcome {
            Ok(Some(reply)) => reply,
            Ok(None) if acknowledges => Reply::Number(0),
            Ok(None) => return Ok(Peer::Connected),
            Err(error) if acknowledges && !error.is_fatal() => {
                tracing::warn!(%error, "request refused");
                Reply::Number(1)
            }
            Err(error) => return Err(self.failed(error)),
        };
        let fd = self.session.take_reply_fd();
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        send(&*self.channel, &reply.encode(code), &fds)?;
        Ok(Peer::Connected)
    }

    fn replay(&mut self, requests: Vec<SavedRequest>) -> Result<(), ServeError> {
        for request in requests {
            let handled = request.decode().and_then(|request| self.session.handle(request));
            handled.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn failed(&self, source: SessionError) -> ServeError {
        ServeError::session(self.channel.peer(), source)
    }
}

impl FrontendConnection {
    /// Reason that prevents a live upgrade at this moment.
    pub(crate) fn upgrade_obstacle(&self) -> Option<&'static str> {
        self.session.upgrade_obstacle()
    }

    /// Returns true if a ring runs.
    pub(crate) fn is_running(&self) -> bool {
        self.session.is_running()
    }

    /// Sets the device up as this frontend has negotiated it.
    pub(crate) fn take_device(&mut self) -> Result<(), ServeError> {
        self.session.take_device().map_err(|error| self.failed(error))
    }

    /// Sets the time limit for the rest of a message, and for sending a reply.
    pub(crate) fn set_message_timeout(&mut self, within: Duration) -> Result<(), ServeError> {
        self.message_within = within;
        Ok(self.channel.set_timeouts(Some(within), Some(within))?)
    }

    /// The descriptor that is readable when a request has arrived; `None` for channels that have none.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_fd()
    }

    /// Stops the rings, and saves the session.
    pub(crate) fn save(self) -> Result<(Box<dyn Channel>, SavedSession), ServeError> {
        match self.session.save() {
            Ok(saved) => Ok((self.channel, saved)),
            Err(error) => Err(ServeError::session(self.channel.peer(), error)),
        }
    }

    /// Restores a saved session. Its rings are started by [`FrontendConnection::start`].
    pub(crate) fn restore(
        channel: Box<dyn Channel>,
        negotiated: Vec<SavedRequest>,
        device: &Arc<dyn Device>,
        record: Option<&InFlightRecord>,
        orphans: &Arc<OrphanedThreads>,
    ) -> Result<Self, ServeError> {
        let mut connection = Self::new(channel, device, record, orphans)?;
        connection.replay(negotiated)?;
        Ok(connection)
    }

    /// Starts the rings that ran when the session was saved.
    pub(crate) fn start(&mut self, starts: Vec<SavedRequest>) -> Result<(), ServeError> {
        self.replay(starts)
    }
}

/// Sends a message. Bytes that do not fit beside the descriptors follow them.
pub(crate) fn send(channel: &dyn Channel, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ServeError> {
    let sent = if fds.is_empty() { 0 } else { channel.send_fds(bytes, fds)? };
    Ok(channel.send_all(&[IoBuf::from(&bytes[sent..])], SendFlags::empty())?)
}

/// Limit of the wait for the rest of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MessageLimit<'a> {
    pub(crate) within: Duration,
    /// Ends the wait when it is cancelled.
    pub(crate) cancel: Option<&'a Cancel>,
}

impl MessageLimit<'_> {
    /// Between two processes of towline.
    pub(crate) const UPGRADE: Self = Self { within: MESSAGE_WITHIN, cancel: None };
}

/// A message as received.
pub(crate) struct ReceivedMessage {
    pub(crate) header: MessageHeader,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Receives one message; `None` at the end of the stream. Waits for its first byte as long as the channel does, and for the rest
/// within the limit. Descriptors arrive with the first byte of their message, and never
/// with bytes of another one, because the kernel does not coalesce across them.
pub(crate) fn receive(
    channel: &dyn Channel,
    limit: MessageLimit<'_>,
) -> Result<Option<ReceivedMessage>, ServeError> {
    let mut fds = Vec::new();
    let mut bytes = [0; HEADER_BYTES];
    let first = channel.recv_fds(&mut bytes, &mut fds)?;
    if first == 0 {
        return Ok(None);
    }
    let rest = MessageRest { channel, limit, began: Instant::now() };
    rest.fill(&mut bytes, first, &mut fds)?;
    let fault = |fault: MessageError| ServeError::session(channel.peer(), fault.into());
    let header = MessageHeader::parse(&bytes).map_err(fault)?;
    let mut payload = vec![0; header.length];
    rest.fill(&mut payload, 0, &mut fds)?;
    if fds.len() > FDS_MAX {
        let (code, found) = (header.code, fds.len());
        return Err(fault(MessageError::Descriptors { code, found, expected: FDS_MAX }));
    }
    Ok(Some(ReceivedMessage { header, payload, fds }))
}

/// The rest of a message whose first byte has arrived.
struct MessageRest<'a> {
    channel: &'a dyn Channel,
    limit: MessageLimit<'a>,
    began: Instant,
}

impl MessageRest<'_> {
    /// Fills `bytes`, of which the first `got` have arrived, or stops at too many descriptors.
    fn fill(&self, bytes: &mut [u8], mut got: usize, fds: &mut Vec<OwnedFd>) -> Result<(), ServeError> {
        while got < bytes.len() && fds.len() <= FDS_MAX {
            self.wait()?;
            match self.channel.recv_fds(&mut bytes[got..], fds)? {
                0 => {
                    let (peer, wanted) = (self.channel.peer().to_owned(), bytes.len());
                    return Err(towline_channel::Error::Closed { peer, wanted, got }.into());
                }
                received => got += received,
            }
        }
        Ok(())
    }

    /// Waits for more of the message. A frontend may send it byte by byte, so the time limit is that of the whole.
    fn wait(&self) -> Result<(), ServeError> {
        let Some(fd) = self.channel.as_fd() else { return Ok(()) };
        let left = self.limit.within.saturating_sub(self.began.elapsed());
        let fds = [Some(fd), self.limit.cancel.map(Cancel::as_fd)].into_iter().flatten();
        let mut polled: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let ready = if left.is_zero() { Ok(0) } else { poll(&mut polled, Some(&timeout)) };
        match ready {
            Ok(_) if polled[0].revents().is_empty() => {
                let after = self.began.elapsed();
                Err(ServeError::session(self.channel.peer(), SessionError::IncompleteMessage { after }))
            }
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(ServeError::Descriptor(errno.into())),
        }
    }
}
