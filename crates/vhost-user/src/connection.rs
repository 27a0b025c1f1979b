//! The connection of one frontend: receives requests, has the session handle them, sends replies.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use towline_channel::{Cancel, Channel, ChannelExt, FDS_MAX, IoBuf, SendFlags};

use crate::device::Device;
use crate::hangup::Hangup;
use crate::message::{HEADER_BYTES, MessageError, MessageHeader, Reply, Request, RequestCode};
use crate::orphaned_threads::OrphanedThreads;
use crate::record::InFlightRecord;
use crate::serve_error::ServeError;
use crate::session::{Session, SessionError};
use crate::worker::WorkerPool;

/// Time limit for the rest of a message, and for sending a reply.
pub(crate) const MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// State of the connection after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    Connected,
    Disconnected,
}

/// Permits a frontend to take the device over from another one.
pub(crate) type Claim<'c> = &'c mut dyn FnMut() -> Result<(), SessionError>;

/// A connection and its session. The rings run on while it is not served.
pub(crate) struct FrontendConnection<C = Box<dyn Channel>> {
    channel: C,
    session: Session<WorkerPool>,
    hangup: Arc<Hangup>,
    incoming: IncomingMessage,
    /// Ends the wait for the rest of a message.
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
    /// The connection of a frontend that has just connected, with its resources.
    pub(crate) fn new(channel: C, device: &Arc<dyn Device>, resources: ConnectionResources) -> Self {
        let ConnectionResources { workers, hangup, orphans } = resources;
        let session = Session::new(Arc::clone(device), orphans, workers);
        Self { channel, session, hangup, incoming: IncomingMessage::default(), cancel: None }
    }

    /// Serves the frontend until it disconnects, or `cancel` is cancelled between two of its requests: then
    /// the error is `Cancelled`, and the connection can be served again.
    pub(crate) fn serve(&mut self, cancel: &Cancel) -> Result<(), ServeError> {
        self.set_cancel(cancel);
        while self.channel.wait_recv(cancel)? {
            if self.serve_request(None)? == Peer::Disconnected {
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

    /// Serves one request, or receives a part of it if the frontend has a claim: the owner does not wait for
    /// the rest then. The claim is called before a request that concerns the device.
    pub(crate) fn serve_request(&mut self, claim: Option<Claim<'_>>) -> Result<Peer, ServeError> {
        let served = self.serve_message(claim);
        self.check_memory()?;
        served
    }

    fn check_memory(&self) -> Result<(), ServeError> {
        if self.hangup.is_memory_lost() { Err(self.failed(SessionError::MemoryLost)) } else { Ok(()) }
    }

    fn serve_message(&mut self, claim: Option<Claim<'_>>) -> Result<Peer, ServeError> {
        let (MessageHeader { code, need_reply, .. }, request) = loop {
            match self.incoming.receive(&*self.channel)? {
                Arrival::Message(header, request) => break (header, request),
                Arrival::End => return Ok(Peer::Disconnected),
                Arrival::Part if claim.is_some() => return Ok(Peer::Connected),
                Arrival::Part => self.incoming.wait(&*self.channel, self.cancel.as_ref())?,
            }
        };
        tracing::debug!(%code, need_reply, "request");
        let outcome = request.map_err(SessionError::from).and_then(|request| {
            if let Some(claim) = claim
                && self.session.concerns_device(&request)
            {
                claim()?;
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
            // The guest's network works without it, and no frontend waits for it.
            Err(error @ SessionError::Refused { request: "SEND_RARP", .. }) => {
                tracing::warn!(%error, "the guest is not announced");
                return Ok(Peer::Connected);
            }
            Err(error) => return Err(self.failed(error)),
        };
        let fd = self.session.take_reply_fd();
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        send(&*self.channel, &reply.encode(code), &fds)?;
        Ok(Peer::Connected)
    }

    fn failed(&self, source: SessionError) -> ServeError {
        ServeError::session(self.channel.peer(), source)
    }
}

impl FrontendConnection {
    /// Returns true if a ring runs.
    pub(crate) fn is_running(&self) -> bool {
        self.session.is_running()
    }

    /// Sets the device up as this frontend has negotiated it.
    pub(crate) fn take_device(&mut self) -> Result<(), ServeError> {
        self.session.take_device().map_err(|error| self.failed(error))
    }

    /// Sets the time limit for sending a reply.
    pub(crate) fn set_reply_timeout(&mut self, within: Duration) -> Result<(), ServeError> {
        Ok(self.channel.set_timeouts(Some(MESSAGE_WITHIN), Some(within))?)
    }

    /// Deadline for the rest of a partially received message.
    pub(crate) fn complete_until(&self) -> Option<Instant> {
        self.incoming.began.map(|began| began + MESSAGE_WITHIN)
    }

    /// Ends the session, and then closes what the frontend has sent, which may wait in the kernel.
    pub(crate) fn close(self, orphans: &OrphanedThreads) {
        let Self { channel, session, hangup, incoming, .. } = self;
        drop(session);
        orphans.drop_apart((channel, hangup, incoming));
    }

    /// The descriptor that is readable when a request has arrived; `None` for channels that have none.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_fd()
    }
}

/// Sends a message. Bytes that do not fit beside the descriptors follow them.
pub(crate) fn send(channel: &dyn Channel, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ServeError> {
    let sent = if fds.is_empty() { 0 } else { channel.send_fds(bytes, fds)? };
    Ok(channel.send_all(&[IoBuf::from(&bytes[sent..])], SendFlags::empty())?)
}

/// The next message, of which a part may have arrived. Descriptors that are not accepted stay in it, so they
/// are closed with the connection.
#[derive(Default)]
struct IncomingMessage {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// When its first byte arrived.
    began: Option<Instant>,
}

/// Part of a message that has arrived.
enum Arrival {
    Message(MessageHeader, Result<Request, MessageError>),
    Part,
    End,
}

impl IncomingMessage {
    /// Receives more of the message, by one call, which waits if nothing has arrived. Descriptors arrive with
    /// the first byte of their message, and never with bytes of another one, because the kernel does not
    /// coalesce across them.
    fn receive(&mut self, channel: &dyn Channel) -> Result<Arrival, ServeError> {
        let fault = |fault: MessageError| ServeError::session(channel.peer(), fault.into());
        let (begin, wanted) = (
            self.bytes.len(),
            HEADER_BYTES + self.header().map_err(fault)?.map_or(0, |header| header.length),
        );
        self.bytes.resize(wanted, 0);
        let received = channel.recv_fds(&mut self.bytes[begin..], &mut self.fds);
        self.bytes.truncate(begin + received.as_ref().map_or(0, |received| *received));
        let got = self.bytes.len();
        if received? == 0 {
            let peer = channel.peer().to_owned();
            return if got == 0 {
                Ok(Arrival::End)
            } else {
                Err(towline_channel::Error::Closed { peer, wanted, got }.into())
            };
        }
        self.began.get_or_insert_with(Instant::now);
        let header = self.header().map_err(fault)?;
        let code = header.map_or(RequestCode(0), |header| header.code);
        if self.fds.len() > FDS_MAX {
            let found = self.fds.len();
            return Err(fault(MessageError::Descriptors { code, found, expected: FDS_MAX }));
        }
        // The last close of a socket may wait for its peer (`SO_LINGER`), so none gets into the session.
        if self.fds.iter().any(|fd| sockopt::socket_type(fd).is_ok()) {
            return Err(fault(MessageError::Socket { code }));
        }
        match header {
            Some(header) if got == HEADER_BYTES + header.length => {
                let Self { bytes, fds, .. } = std::mem::take(self);
                let request = Request::decode(header.code, &bytes[HEADER_BYTES..], fds);
                Ok(Arrival::Message(header, request))
            }
            _ => Ok(Arrival::Part),
        }
    }

    /// The header, once it has arrived.
    fn header(&self) -> Result<Option<MessageHeader>, MessageError> {
        self.bytes.first_chunk().map(MessageHeader::parse).transpose()
    }

    /// Waits for more of the message. A frontend may send it byte by byte, so the time limit is that of the
    /// whole.
    fn wait(&self, channel: &dyn Channel, cancel: Option<&Cancel>) -> Result<(), ServeError> {
        let Some(fd) = channel.as_fd() else { return Ok(()) };
        let after = self.began.map_or(Duration::ZERO, |began| began.elapsed());
        let left = MESSAGE_WITHIN.saturating_sub(after);
        let fds = [Some(fd), cancel.map(Cancel::as_fd)].into_iter().flatten();
        let mut polled: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(left).expect("at most MESSAGE_WITHIN");
        // Also when no time is left: this process may have been stopped, and the rest has arrived.
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) if polled[0].revents().is_empty() => {
                Err(ServeError::session(channel.peer(), SessionError::IncompleteMessage { after }))
            }
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(ServeError::Descriptor(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use towline_channel::UnixChannel;

    use super::*;

    #[test]
    fn a_message_that_has_arrived_is_complete_however_late_it_is_read() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let channel = UnixChannel::new(far.into(), "a frontend").unwrap();
        let mut message = IncomingMessage::default();
        near.write_all(&[1, 0]).unwrap();
        assert!(matches!(message.receive(&channel), Ok(Arrival::Part)));
        // As after this process was stopped for longer than the time limit.
        message.began = message.began.and_then(|began| began.checked_sub(2 * MESSAGE_WITHIN));
        let late = message.wait(&channel, None).unwrap_err();
        assert!(
            matches!(late, ServeError::Session { source: SessionError::IncompleteMessage { .. }, .. }),
            "{late}"
        );
        near.write_all(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        message.wait(&channel, None).unwrap();
        let arrival = message.receive(&channel);
        assert!(matches!(arrival, Ok(Arrival::Message(_, Ok(Request::GetFeatures)))));
    }
}
