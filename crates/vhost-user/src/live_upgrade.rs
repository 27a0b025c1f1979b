//! Live upgrade: moves a device to another process while its guest runs.
//!
//! ```text
//!   current process                             new process
//!                      ◄── HELLO version ──
//!   rings drained, stopped
//!                      ── OFFER, DESCRIPTORS …, negotiated state, start of the rings ──►
//!                                               a device with these descriptors, the session restored
//!                      ◄── READY (or REFUSED reason) ──
//!                      ── COMMIT ──►            rings start
//!                      ◄── DONE ──
//! ```
//! After an error before COMMIT the current process restarts its rings and keeps the device. If the new process dies between
//! COMMIT and DONE, the connection to the frontend is closed instead: the state of the rings is in guest memory, and the
//! frontend connects again. Messages are framed like those of vhost-user, with codes that it does not use; the session travels
//! as its own requests. Packets under way may be lost, descriptors are not, because the in-flight record is moved too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{Channel, FDS_MAX, UnixChannel};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::connection::{FrontendConnection, MESSAGE_WITHIN, MessageLimit, ReceivedMessage, receive, send};
use crate::device::Device;
use crate::message::{MessageHeader, RequestCode};
use crate::orphaned_threads::OrphanedThreads;
use crate::record::{InFlightRecord, RecordError};
use crate::serve_error::ServeError;
use crate::server::{FrontendSource, Service};
use crate::session::{SavedRequest, SavedSession};

/// Version of this protocol.
const VERSION: u32 = 1;
/// Time limit for the new process to be ready. The rings are stopped meanwhile.
const READY_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of a device's own descriptors: the queues of a tap.
const DEVICE_FDS_MAX: usize = 512;
/// Maximum number of requests: seven for each of 256 rings, 256 regions, and a few more.
const REQUESTS_MAX: usize = 4096;

const HELLO: RequestCode = RequestCode(0x7401);
const OFFER: RequestCode = RequestCode(0x7402);
const DESCRIPTORS: RequestCode = RequestCode(0x7403);
const READY: RequestCode = RequestCode(0x7404);
const REFUSED: RequestCode = RequestCode(0x7405);
const COMMIT: RequestCode = RequestCode(0x7406);
const DONE: RequestCode = RequestCode(0x7407);

/// Flags of an offer.
const RECORD_IS_DURABLE: u32 = 1;
const HAS_LISTENER: u32 = 2;
const HAS_CONNECTION: u32 = 4;

/// Error of a live upgrade. The device stays in its process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpgradeError {
    /// The device is busy with an operation that cannot be interrupted.
    #[error("the device cannot be moved to another process now: {0}; try again")]
    Busy(&'static str),
    /// The other process refused.
    #[error("the other process refuses the live upgrade: {0}")]
    Refused(String),
    /// The other process sent an unexpected message.
    #[error(
        "live upgrade: the other process sent {found}, expected {expected}; are both towline, of similar versions?"
    )]
    UnexpectedMessage {
        /// The message.
        found: String,
        /// The expected message.
        expected: &'static str,
    },
    /// The connection to the other process or to the frontend failed.
    #[error(transparent)]
    Connection(#[from] ServeError),
    /// The in-flight record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl From<towline_channel::Error> for UpgradeError {
    fn from(error: towline_channel::Error) -> Self {
        Self::Connection(error.into())
    }
}

/// A live upgrade that failed.
#[derive(Debug)]
pub struct AbortedUpgrade {
    /// The service, to be served further.
    pub service: Service,
    /// The error.
    pub error: UpgradeError,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawOffer {
    version: U32,
    flags: U32,
    queues: U32,
    device_fds: U32,
    negotiated: U32,
    starts: U32,
}

/// Moves a service to the process at the other end of this Unix socket, with the device's own descriptors. On success the
/// device belongs to the other process.
///
/// # Errors
/// The error, with the service, whose rings run as before.
pub fn live_upgrade(
    mut service: Service,
    device: &Arc<dyn Device>,
    device_fds: &[BorrowedFd<'_>],
    record: &InFlightRecord,
    to: &dyn Channel,
) -> Result<(), Box<AbortedUpgrade>> {
    let aborted = |service, error| Err(Box::new(AbortedUpgrade { service, error }));
    if let Err(error) = receive_hello(to) {
        return aborted(service, error);
    }
    let pair = service.standby.as_ref().map(|_| "two frontends are connected");
    if let Some(obstacle) =
        pair.or(service.connection.as_ref().and_then(FrontendConnection::upgrade_obstacle))
    {
        let _ = send_message(to, REFUSED, obstacle.as_bytes(), &[]);
        return aborted(service, UpgradeError::Busy(obstacle));
    }
    let (channel, session) = match service.connection.take().map(FrontendConnection::save) {
        None => (None, SavedSession::default()),
        Some(Ok((channel, session))) => (Some(channel), session),
        Some(Err(error)) => {
            // The frontend connects again, to this process or, with the next request, to the other one.
            let reason = format!("{error}; the frontend has to connect again; then request the device again");
            let _ = send_message(to, REFUSED, reason.as_bytes(), &[]);
            return aborted(service, error.into());
        }
    };
    let fds =
        OfferedFds { record, listener: listener_fd(&service), connection: channel.as_deref(), device_fds };
    let offered = send_offer(to, device.queue_count(), &fds, &session);
    if let Err(error) = offered.and_then(|()| receive_ready(to)) {
        service.connection =
            channel.and_then(|channel| resume(channel, session, device, record, &service.orphans));
        return aborted(service, error);
    }
    let committed = send_message(to, COMMIT, &[], &[]).map_err(UpgradeError::from);
    if let Err(error) = committed.and_then(|()| expect(to, DONE, "DONE")) {
        return aborted(service, error);
    }
    if let Some(FrontendSource::Listen(listener)) = &mut service.frontends {
        listener.leave_file();
    }
    Ok(())
}

/// Restores the connection in this process; `None` if that fails, and the frontend has to connect again.
fn resume(
    channel: Box<dyn Channel>,
    session: SavedSession,
    device: &Arc<dyn Device>,
    record: &InFlightRecord,
    orphans: &Arc<OrphanedThreads>,
) -> Option<FrontendConnection> {
    let restored = FrontendConnection::restore(channel, session.negotiated, device, Some(record), orphans);
    let restored = restored.and_then(|mut connection| {
        connection.start(session.starts)?;
        Ok(connection)
    });
    restored.inspect_err(|error| tracing::error!(%error, "the frontend has to connect again")).ok()
}

fn receive_hello(to: &dyn Channel) -> Result<(), UpgradeError> {
    to.set_timeouts(Some(READY_WITHIN), Some(MESSAGE_WITHIN))?;
    let ReceivedMessage { payload, .. } = expect(to, HELLO, "HELLO")?;
    match u32::read_from_bytes(&payload) {
        Ok(VERSION) => Ok(()),
        Ok(found) => {
            let reason = format!("it has version {found} of the protocol, expected {VERSION}");
            let _ = send_message(to, REFUSED, reason.as_bytes(), &[]);
            Err(UpgradeError::Refused(reason))
        }
        Err(_) => {
            let found = format!("{} bytes", payload.len());
            Err(UpgradeError::UnexpectedMessage { found, expected: "HELLO and a version" })
        }
    }
}

/// Descriptors that travel with an offer.
struct OfferedFds<'a> {
    record: &'a InFlightRecord,
    listener: Option<BorrowedFd<'a>>,
    connection: Option<&'a dyn Channel>,
    device_fds: &'a [BorrowedFd<'a>],
}

fn listener_fd(service: &Service) -> Option<BorrowedFd<'_>> {
    match &service.frontends {
        Some(FrontendSource::Listen(listener)) => listener.as_fd(),
        Some(FrontendSource::Inherited(fd)) => Some(fd.as_fd()),
        _ => None,
    }
}

fn send_offer(
    to: &dyn Channel,
    queues: usize,
    offered: &OfferedFds<'_>,
    session: &SavedSession,
) -> Result<(), UpgradeError> {
    let number = |count: usize| U32::new(u32::try_from(count).expect("far less than 2^32"));
    let mut flags = if offered.record.is_durable() { RECORD_IS_DURABLE } else { 0 };
    let mut fds = vec![offered.record.as_fd()];
    if let Some(listener) = offered.listener {
        flags |= HAS_LISTENER;
        fds.push(listener);
    }
    if let Some(connection) = offered.connection.and_then(Channel::as_fd) {
        flags |= HAS_CONNECTION;
        fds.push(connection);
    }
    fds.extend_from_slice(offered.device_fds);
    let offer = RawOffer {
        version: VERSION.into(),
        flags: flags.into(),
        queues: number(queues),
        device_fds: number(offered.device_fds.len()),
        negotiated: number(session.negotiated.len()),
        starts: number(session.starts.len()),
    };
    send_message(to, OFFER, offer.as_bytes(), &[])?;
    for chunk in fds.chunks(FDS_MAX) {
        send_message(to, DESCRIPTORS, &[], chunk)?;
    }
    for request in session.negotiated.iter().chain(&session.starts) {
        let fds: Vec<_> = request.fds.iter().map(AsFd::as_fd).collect();
        send_message(to, request.code, &request.payload, &fds)?;
    }
    Ok(())
}

fn receive_ready(to: &dyn Channel) -> Result<(), UpgradeError> {
    expect(to, READY, "READY")?;
    // From here on a failure of the other process shows only as its death.
    Ok(to.set_timeouts(None, Some(MESSAGE_WITHIN))?)
}

/// Offer of a device by the process that runs it.
#[derive(Debug)]
pub struct UpgradeOffer {
    from: Box<dyn Channel>,
    queues: usize,
    record: InFlightRecord,
    listener: Option<OwnedFd>,
    connection: Option<OwnedFd>,
    device_fds: Vec<OwnedFd>,
    session: SavedSession,
}

impl UpgradeOffer {
    /// Requests the device of the process at the other end of this Unix socket. Until [`UpgradeOffer::accept`] that process
    /// keeps it if this value is dropped; [`UpgradeOffer::refuse`] also reports a reason.
    ///
    /// # Errors
    /// If the process refuses, or sends anything but a valid offer.
    pub fn request(from: Box<dyn Channel>) -> Result<Self, UpgradeError> {
        from.set_timeouts(Some(READY_WITHIN), Some(MESSAGE_WITHIN))?;
        send_message(from.as_ref(), HELLO, &VERSION.to_le_bytes(), &[])?;
        let ReceivedMessage { payload, .. } = expect(from.as_ref(), OFFER, "OFFER")?;
        let raw = RawOffer::read_from_bytes(&payload)
            .map_err(|_| invalid_offer(format!("an offer of {} bytes", payload.len())))?;
        let queues = bounded(raw.queues, crate::QUEUES_MAX, "queues")?;
        let device_fds = bounded(raw.device_fds, DEVICE_FDS_MAX, "descriptors of the device")?;
        let negotiated = bounded(raw.negotiated, REQUESTS_MAX, "requests")?;
        let starts = bounded(raw.starts, crate::QUEUES_MAX, "starts of rings")?;
        let has = |flag: u32| raw.flags.get() & flag != 0;
        let count = 1 + usize::from(has(HAS_LISTENER)) + usize::from(has(HAS_CONNECTION)) + device_fds;
        let mut fds = receive_fds(from.as_ref(), count)?.into_iter();
        let record = fds.next().expect("at least one was received");
        let record = InFlightRecord::open(record, queues, "of the other process")?;
        let record = if has(RECORD_IS_DURABLE) { record } else { record.into_volatile() };
        let listener = if has(HAS_LISTENER) { fds.next() } else { None };
        let connection = if has(HAS_CONNECTION) { fds.next() } else { None };
        let device_fds = fds.collect();
        let requests =
            |count| (0..count).map(|_| receive_request(from.as_ref())).collect::<Result<Vec<_>, _>>();
        let session = SavedSession { negotiated: requests(negotiated)?, starts: requests(starts)? };
        Ok(Self { from, queues, record, listener, connection, device_fds, session })
    }

    /// Returns the device's own descriptors, once.
    pub fn take_device_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.device_fds)
    }

    /// Refuses the device with a reason.
    pub fn refuse(self, reason: &str) {
        let reason: String = reason.chars().take(1000).collect();
        let _ = send_message(self.from.as_ref(), REFUSED, reason.as_bytes(), &[]);
    }

    /// Accepts the device, which belongs to this process on success. `frontends` wraps the listening socket; without a socket
    /// it returns the source of further frontends.
    ///
    /// # Errors
    /// If it is another device than the running one, or cannot be restored; the other process keeps the device then.
    pub fn accept(
        self,
        device: &Arc<dyn Device>,
        frontends: impl FnOnce(Option<OwnedFd>) -> Option<FrontendSource>,
    ) -> Result<(Service, InFlightRecord), UpgradeError> {
        let Self { from, queues: expected, record, listener, connection, session, .. } = self;
        let from = from.as_ref();
        let refuse = |reason: String| {
            let _ = send_message(from, REFUSED, reason.as_bytes(), &[]);
            UpgradeError::Refused(reason)
        };
        let found = device.queue_count();
        if found != expected {
            let reason =
                format!("this device has {found} queues, expected {expected}, as the running one has");
            return Err(refuse(reason));
        }
        let orphans = Arc::default();
        let restored = connection.map(|fd| {
            let channel = Box::new(UnixChannel::new(fd, "a frontend of the other process")?);
            FrontendConnection::restore(channel, session.negotiated, device, Some(&record), &orphans)
        });
        let mut connection = restored.transpose().map_err(|error| refuse(error.to_string()))?;
        send_message(from, READY, &[], &[])?;
        expect(from, COMMIT, "COMMIT")?;
        if let Some(connection) = &mut connection {
            connection.start(session.starts)?;
        }
        if let Err(error) = send_message(from, DONE, &[], &[]) {
            tracing::warn!(%error, "the previous process ended before the live upgrade was complete");
        }
        Ok((Service::with(frontends(listener), connection, orphans), record))
    }
}

fn bounded(number: U32, most: usize, what: &str) -> Result<usize, UpgradeError> {
    let found = number.get() as usize;
    if found > most {
        return Err(invalid_offer(format!(
            "an offer with {found} {what}, of which there are at most {most}"
        )));
    }
    Ok(found)
}

fn invalid_offer(found: String) -> UpgradeError {
    UpgradeError::UnexpectedMessage { found, expected: "a valid offer" }
}

fn receive_fds(from: &dyn Channel, expected: usize) -> Result<Vec<OwnedFd>, UpgradeError> {
    let mut fds = Vec::new();
    while fds.len() < expected {
        let mut message = expect(from, DESCRIPTORS, "descriptors")?;
        if message.fds.is_empty() || fds.len() + message.fds.len() > expected {
            let found = fds.len() + message.fds.len();
            return Err(invalid_offer(format!("an offer with {found} descriptors instead of {expected}")));
        }
        fds.append(&mut message.fds);
    }
    Ok(fds)
}

fn receive_request(from: &dyn Channel) -> Result<SavedRequest, UpgradeError> {
    let message = receive(from, MessageLimit::UPGRADE)?.ok_or_else(|| closed("a request"))?;
    Ok(SavedRequest { code: message.header.code, payload: message.payload, fds: message.fds })
}

fn send_message(
    to: &dyn Channel,
    code: RequestCode,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), ServeError> {
    let header = MessageHeader { code, need_reply: false, length: payload.len() };
    send(to, &[&header.encode(), payload].concat(), fds)
}

/// Receives a message with the code `wanted`.
fn expect(
    from: &dyn Channel,
    wanted: RequestCode,
    expected: &'static str,
) -> Result<ReceivedMessage, UpgradeError> {
    let message = receive(from, MessageLimit::UPGRADE)?.ok_or_else(|| closed(expected))?;
    match message.header.code {
        code if code == wanted => Ok(message),
        REFUSED => Err(UpgradeError::Refused(String::from_utf8_lossy(&message.payload).into_owned())),
        code => Err(UpgradeError::UnexpectedMessage { found: code.to_string(), expected }),
    }
}

fn closed(expected: &'static str) -> UpgradeError {
    UpgradeError::UnexpectedMessage { found: "the end of the stream".to_owned(), expected }
}
