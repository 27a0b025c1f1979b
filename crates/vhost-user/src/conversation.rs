//! One frontend's connection: requests come, the session handles them, answers go.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{Cancel, Channel, ChannelExt, FDS_MAX, IoBuf, SendFlags};

use crate::device::Device;
use crate::hangup::Hangup;
use crate::message::{HEADER_BYTES, Header, MessageError, Reply, Request};
use crate::record::Record;
use crate::server::ServeError;
use crate::session::{Message, Packed, Session, SessionError};
use crate::worker::Crew;

/// How long the rest of a message may take, and an answer to be taken.
pub(crate) const MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// A connection with all that was agreed upon. While nobody serves it its rings run on.
pub(crate) struct Conversation<C = Box<dyn Channel>> {
    channel: C,
    session: Session<Crew>,
    hangup: Arc<Hangup>,
}

/// What a connection needs of the system.
pub(crate) struct Workers {
    crew: Crew,
    hangup: Arc<Hangup>,
}

impl Workers {
    pub(crate) fn new(
        channel: &dyn Channel,
        device: &Arc<dyn Device>,
        record: Option<&Record>,
    ) -> Result<Self, ServeError> {
        channel.set_timeouts(Some(MESSAGE_WITHIN), Some(MESSAGE_WITHIN))?;
        let failed = |source: std::io::Error| given_up(channel, SessionError::Descriptor { source });
        let socket = channel.as_fd().map(|fd| fd.try_clone_to_owned()).transpose().map_err(failed)?;
        let hangup = Arc::new(Hangup::new(socket));
        let crew = Crew::new(device.as_ref(), record, &hangup);
        let crew = crew.map_err(|source| given_up(channel, source))?;
        Ok(Self { crew, hangup })
    }
}

impl<C: Deref<Target = dyn Channel>> Conversation<C> {
    /// With a frontend that has just connected.
    pub(crate) fn new(
        channel: C,
        device: &Arc<dyn Device>,
        record: Option<&Record>,
    ) -> Result<Self, ServeError> {
        let workers = Workers::new(&*channel, device, record)?;
        Ok(Self::with(channel, device, workers))
    }

    /// With a frontend for which all that it needs has been made.
    pub(crate) fn with(channel: C, device: &Arc<dyn Device>, workers: Workers) -> Self {
        let Workers { crew, hangup } = workers;
        Self { channel, session: Session::new(Arc::clone(device), crew), hangup }
    }

    /// Serves it until the frontend goes, or `cancel` is pulled between two of its requests: then the error is
    /// `Cancelled`, and it can be served again.
    pub(crate) fn serve(&mut self, cancel: &Cancel) -> Result<(), ServeError> {
        self.session.set_cancel(cancel);
        let served = self.serve_requests(cancel);
        if self.hangup.is_memory_lost() {
            return Err(given_up(&*self.channel, SessionError::MemoryLost));
        }
        served
    }

    fn serve_requests(&mut self, cancel: &Cancel) -> Result<(), ServeError> {
        let channel = &*self.channel;
        loop {
            if !channel.wait_recv(cancel)? {
                return Err(towline_channel::Error::Cancelled.into());
            }
            let Some(message) = receive(channel)? else { return Ok(()) };
            let (Header { code, need_reply, .. }, payload, fds) = message;
            let request = Request::decode(code, &payload, fds).map_err(SessionError::from);
            tracing::debug!(%code, need_reply, "request");
            let outcome = request.and_then(|request| self.session.handle(request));
            let acknowledges = need_reply && self.session.acknowledges();
            let reply = match outcome {
                Ok(Some(reply)) => reply,
                Ok(None) if acknowledges => Reply::Number(0),
                Ok(None) => continue,
                Err(error) if error.is_the_end() => {
                    return Err(given_up(channel, error));
                }
                Err(error) if acknowledges => {
                    tracing::warn!(%error, "refused");
                    Reply::Number(1)
                }
                Err(error) => return Err(given_up(channel, error)),
            };
            let fd = self.session.take_answer_fd();
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            send(channel, &reply.encode(code), &fds)?;
        }
    }

    fn repeat(&mut self, messages: Vec<Message>) -> Result<(), ServeError> {
        for message in messages {
            let handled = message.into_request().and_then(|request| self.session.handle(request));
            handled.map_err(|error| given_up(&*self.channel, error))?;
        }
        Ok(())
    }
}

impl Conversation {
    /// Why it cannot be packed at this moment, if it cannot.
    pub(crate) fn is_bound(&self) -> Option<&'static str> {
        self.session.is_bound()
    }

    /// Stops its rings, and takes down how to get here again.
    pub(crate) fn pack(self) -> Result<(Box<dyn Channel>, Packed), ServeError> {
        match self.session.pack() {
            Ok(packed) => Ok((self.channel, packed)),
            Err(error) => Err(given_up(&*self.channel, error)),
        }
    }

    /// Does again what led to where it was packed. Its rings run only after [`Conversation::start`].
    pub(crate) fn unpack(
        channel: Box<dyn Channel>,
        agreed: Vec<Message>,
        device: &Arc<dyn Device>,
        record: Option<&Record>,
    ) -> Result<Self, ServeError> {
        let mut conversation = Self::new(channel, device, record)?;
        conversation.repeat(agreed)?;
        Ok(conversation)
    }

    /// Has those rings run that ran.
    pub(crate) fn start(&mut self, starts: Vec<Message>) -> Result<(), ServeError> {
        self.repeat(starts)
    }
}

fn given_up(channel: &dyn Channel, source: SessionError) -> ServeError {
    ServeError::Session { peer: channel.peer().to_owned(), source }
}

/// Sends a message; what of it does not go with its descriptors follows.
pub(crate) fn send(channel: &dyn Channel, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ServeError> {
    let sent = if fds.is_empty() { 0 } else { channel.send_fds(bytes, fds)? };
    Ok(channel.send_all(&[IoBuf::from(&bytes[sent..])], SendFlags::empty())?)
}

/// Header, payload, descriptors.
type Received = (Header, Vec<u8>, Vec<OwnedFd>);

/// One message; `None` at the end. Descriptors come with its first byte and never with another's: the kernel does not
/// join what has some.
pub(crate) fn receive(channel: &dyn Channel) -> Result<Option<Received>, ServeError> {
    let mut fds = Vec::new();
    let mut bytes = [0; HEADER_BYTES];
    if fill(channel, &mut bytes, &mut fds)? == 0 {
        return Ok(None);
    }
    let fault = |fault: MessageError| given_up(channel, fault.into());
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
