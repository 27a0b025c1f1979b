//! A device that goes from one process to another while its guest runs: the live upgrade.
//!
//! ```text
//!   process that runs                           its successor
//!                      ◄── HELLO version ──
//!   rings drained, stopped
//!                      ── OFFER, DESCRIPTORS …, what was agreed upon, how the rings start ──►
//!                                               a device with these descriptors, a session as agreed upon
//!                      ◄── READY (or REFUSED why) ──
//!                      ── GO ──►                rings start
//!                      ◄── DONE ──
//! ```
//! Whatever fails before GO, the process that runs starts its rings again and goes on. If the successor dies between GO and
//! DONE, the connection to the frontend is closed instead: where the rings stand is in the guest's memory, and the frontend
//! connects again. Messages are framed as those of vhost-user, with numbers that it does not use; what was agreed upon is
//! its own requests. Frames that are under way may be lost, descriptors are not: the record is handed over too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{Channel, FDS_MAX, UnixChannel};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::conversation::{Conversation, MESSAGE_WITHIN, receive, send};
use crate::device::Device;
use crate::message::{Code, Header};
use crate::record::{Record, RecordError};
use crate::server::{Frontends, ServeError, Service};
use crate::session::{Message, Packed};

/// The version of what is said here.
const VERSION: u32 = 1;
/// How long the successor may take to be ready; the rings rest meanwhile.
const READY_WITHIN: Duration = Duration::from_secs(10);
/// Descriptors of a device at most: a tap's queues.
const OWN_MAX: usize = 512;
/// Requests at most: seven for each of 256 rings, 256 regions, and some.
const MESSAGES_MAX: usize = 4096;

const HELLO: Code = Code(0x7401);
const OFFER: Code = Code(0x7402);
const DESCRIPTORS: Code = Code(0x7403);
const READY: Code = Code(0x7404);
const REFUSED: Code = Code(0x7405);
const GO: Code = Code(0x7406);
const DONE: Code = Code(0x7407);

const RECORD_KEPT: u32 = 1;
const LISTENS: u32 = 2;
const CONNECTED: u32 = 4;

/// Why a device stays where it is.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// It cannot go at this moment.
    #[error("the device cannot be handed over now: {0}; try again")]
    Bound(&'static str),
    /// The other process would not have it.
    #[error("the other process refuses: {0}")]
    Refused(String),
    /// The other process says what it should not.
    #[error(
        "the process that hands over, or takes over, says {found}, expected {expected}; are both towline, of like versions?"
    )]
    Said {
        /// What was said.
        found: String,
        /// What should have been.
        expected: &'static str,
    },
    /// The conversation broke.
    #[error(transparent)]
    Broken(#[from] ServeError),
    /// The record cannot be used.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl From<towline_channel::Error> for HandOverError {
    fn from(error: towline_channel::Error) -> Self {
        Self::Broken(error.into())
    }
}

/// What is left after a hand-over that did not come about.
#[derive(Debug)]
pub struct Left {
    /// To be served on.
    pub service: Service,
    /// Why.
    pub error: HandOverError,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawOffer {
    version: U32,
    flags: U32,
    queues: U32,
    own: U32,
    agreed: U32,
    starts: U32,
}

/// Hands a service over to the process at the other end of this Unix socket, with these descriptors of the device's own.
/// When it returns well, the device is the other process's.
///
/// # Errors
/// Why not, and the service, whose rings run as before.
pub fn hand_over(
    mut service: Service,
    (device, own): (&Arc<dyn Device>, &[BorrowedFd<'_>]),
    record: &Record,
    to: &dyn Channel,
) -> Result<(), Box<Left>> {
    let left = |service, error| Err(Box::new(Left { service, error }));
    if let Err(error) = greeted(to) {
        return left(service, error);
    }
    if let Some(why) = service.conversation.as_ref().and_then(Conversation::is_bound) {
        let _ = say(to, REFUSED, why.as_bytes(), &[]);
        return left(service, HandOverError::Bound(why));
    }
    let (connection, packed) = match service.conversation.take().map(Conversation::pack) {
        None => (None, Packed::default()),
        Some(Ok((channel, packed))) => (Some(channel), packed),
        Some(Err(error)) => return left(service, error.into()),
    };
    let offered = offer(to, &service, (device, own), record, (connection.as_deref(), &packed));
    if let Err(error) = offered.and_then(|()| await_ready(to)) {
        service.conversation = connection.and_then(|channel| resume(channel, packed, device, record));
        return left(service, error);
    }
    let gone =
        say(to, GO, &[], &[]).map_err(HandOverError::from).and_then(|()| expect(to, DONE, "DONE").map(drop));
    if let Err(error) = gone {
        return left(service, error);
    }
    if let Some(Frontends::Listen(listener)) = &mut service.frontends {
        listener.leave_file();
    }
    Ok(())
}

/// As it was before; `None`, and the frontend has to connect again, if it cannot be.
fn resume(
    channel: Box<dyn Channel>,
    packed: Packed,
    device: &Arc<dyn Device>,
    record: &Record,
) -> Option<Conversation> {
    let resumed = Conversation::unpack(channel, packed.agreed, device, Some(record));
    let resumed = resumed.and_then(|mut conversation| {
        conversation.start(packed.starts)?;
        Ok(conversation)
    });
    resumed.inspect_err(|error| tracing::error!(%error, "the frontend has to connect again")).ok()
}

fn greeted(to: &dyn Channel) -> Result<(), HandOverError> {
    to.set_timeouts(Some(READY_WITHIN), Some(MESSAGE_WITHIN))?;
    let (payload, _) = expect(to, HELLO, "HELLO")?;
    match u32::read_from_bytes(&payload) {
        Ok(VERSION) => Ok(()),
        Ok(found) => {
            let why = format!("it speaks version {found} of this, expected {VERSION}");
            let _ = say(to, REFUSED, why.as_bytes(), &[]);
            Err(HandOverError::Refused(why))
        }
        Err(_) => Err(HandOverError::Said {
            found: format!("{} bytes", payload.len()),
            expected: "HELLO and a version",
        }),
    }
}

fn offer(
    to: &dyn Channel,
    service: &Service,
    (device, own): (&Arc<dyn Device>, &[BorrowedFd<'_>]),
    record: &Record,
    (connection, packed): (Option<&dyn Channel>, &Packed),
) -> Result<(), HandOverError> {
    let number = |count: usize| U32::new(u32::try_from(count).expect("far less than 2^32"));
    let mut flags = if record.is_durable() { RECORD_KEPT } else { 0 };
    let mut fds = vec![record.as_fd()];
    let listener = match &service.frontends {
        Some(Frontends::Listen(listener)) => listener.as_fd(),
        Some(Frontends::Inherited(fd)) => Some(fd.as_fd()),
        _ => None,
    };
    if let Some(listener) = listener {
        flags |= LISTENS;
        fds.push(listener);
    }
    if let Some(connection) = connection.and_then(Channel::as_fd) {
        flags |= CONNECTED;
        fds.push(connection);
    }
    fds.extend_from_slice(own);
    let offer = RawOffer {
        version: VERSION.into(),
        flags: flags.into(),
        queues: number(device.queue_count()),
        own: number(own.len()),
        agreed: number(packed.agreed.len()),
        starts: number(packed.starts.len()),
    };
    say(to, OFFER, offer.as_bytes(), &[])?;
    for some in fds.chunks(FDS_MAX) {
        say(to, DESCRIPTORS, &[], some)?;
    }
    for message in packed.agreed.iter().chain(&packed.starts) {
        let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
        say(to, message.code, &message.payload, &fds)?;
    }
    Ok(())
}

fn await_ready(to: &dyn Channel) -> Result<(), HandOverError> {
    expect(to, READY, "READY")?;
    // From here on only its death says that it has failed.
    Ok(to.set_timeouts(None, Some(MESSAGE_WITHIN))?)
}

/// What a process offers that runs a device.
#[derive(Debug)]
pub struct Offer {
    from: Box<dyn Channel>,
    queues: usize,
    record: Record,
    listener: Option<OwnedFd>,
    connection: Option<OwnedFd>,
    own: Vec<OwnedFd>,
    agreed: Vec<Message>,
    starts: Vec<Message>,
}

impl Offer {
    /// Asks the process at the other end of this Unix socket for its device. Until [`Offer::accept`] it can have it back:
    /// dropping this is enough, [`Offer::refuse`] says why.
    ///
    /// # Errors
    /// That it does not give it, or something else than one.
    pub fn ask(from: Box<dyn Channel>) -> Result<Self, HandOverError> {
        from.set_timeouts(Some(READY_WITHIN), Some(MESSAGE_WITHIN))?;
        say(from.as_ref(), HELLO, &VERSION.to_le_bytes(), &[])?;
        let (payload, _) = expect(from.as_ref(), OFFER, "OFFER")?;
        let strange = |found: String| HandOverError::Said { found, expected: "an offer that is possible" };
        let raw =
            RawOffer::read_from_bytes(&payload).map_err(|_| strange(format!("{} bytes", payload.len())))?;
        let count = |number: U32, most: usize| {
            let found = number.get() as usize;
            if found > most {
                Err(strange(format!("{found} of what there is at most {most} of")))
            } else {
                Ok(found)
            }
        };
        let (queues, own) = (count(raw.queues, crate::QUEUES_MAX)?, count(raw.own, OWN_MAX)?);
        let (agreed, starts) = (count(raw.agreed, MESSAGES_MAX)?, count(raw.starts, crate::QUEUES_MAX)?);
        let has = |flag: u32| usize::from(raw.flags.get() & flag != 0);
        let expected = 1 + has(LISTENS) + has(CONNECTED) + own;
        let mut fds = Vec::new();
        while fds.len() < expected {
            let (_, mut some) = expect(from.as_ref(), DESCRIPTORS, "descriptors")?;
            if some.is_empty() || fds.len() + some.len() > expected {
                return Err(strange(format!("{} and {} descriptors", fds.len(), some.len())));
            }
            fds.append(&mut some);
        }
        let mut fds = fds.into_iter();
        let record = Record::open(fds.next().expect("there is one"), queues, "that is handed over")?;
        let record = if raw.flags.get() & RECORD_KEPT != 0 { record } else { record.forgotten() };
        let listener = if has(LISTENS) == 1 { fds.next() } else { None };
        let connection = if has(CONNECTED) == 1 { fds.next() } else { None };
        let own = fds.collect();
        let messages = |count| (0..count).map(|_| message(from.as_ref())).collect::<Result<Vec<_>, _>>();
        let (agreed, starts) = (messages(agreed)?, messages(starts)?);
        Ok(Self { from, queues, record, listener, connection, own, agreed, starts })
    }

    /// The device's own descriptors, once.
    pub fn take_own(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.own)
    }

    /// Says why it is not taken.
    pub fn refuse(self, why: &str) {
        let why: String = why.chars().take(1000).collect();
        let _ = say(self.from.as_ref(), REFUSED, why.as_bytes(), &[]);
    }

    /// Takes the device over: it is this process's when this returns. `frontends` makes of the listening socket what it is
    /// here; without one it says where frontends come from.
    ///
    /// # Errors
    /// That it is another device than the one that runs, or cannot go on; the other process goes on then.
    pub fn accept(
        self,
        device: &Arc<dyn Device>,
        frontends: impl FnOnce(Option<OwnedFd>) -> Option<Frontends>,
    ) -> Result<(Service, Record), HandOverError> {
        let Self { from, queues, record, listener, connection, agreed, starts, .. } = self;
        let from = from.as_ref();
        let refuse = |why: String| {
            let _ = say(from, REFUSED, why.as_bytes(), &[]);
            HandOverError::Refused(why)
        };
        if device.queue_count() != queues {
            let found = device.queue_count();
            return Err(refuse(format!(
                "this device has {found} queues, expected {queues}, as the one that runs"
            )));
        }
        let unpacked = connection.map(|fd| {
            let channel = Box::new(UnixChannel::new(fd, "a frontend that was handed over")?);
            Conversation::unpack(channel, agreed, device, Some(&record))
        });
        let mut conversation = unpacked.transpose().map_err(|error| refuse(error.to_string()))?;
        say(from, READY, &[], &[])?;
        expect(from, GO, "GO")?;
        if let Some(conversation) = &mut conversation {
            conversation.start(starts)?;
        }
        if let Err(error) = say(from, DONE, &[], &[]) {
            tracing::warn!(%error, "the process before did not wait to hear that all is well");
        }
        Ok((Service { frontends: frontends(listener), conversation }, record))
    }
}

fn message(from: &dyn Channel) -> Result<Message, HandOverError> {
    let (Header { code, .. }, payload, fds) = receive(from)?.ok_or_else(|| ended("a request"))?;
    Ok(Message { code, payload, fds })
}

fn say(to: &dyn Channel, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ServeError> {
    let header = Header { code, need_reply: false, length: payload.len() };
    send(to, &[&header.encode(), payload].concat(), fds)
}

fn expect(
    from: &dyn Channel,
    wanted: Code,
    expected: &'static str,
) -> Result<(Vec<u8>, Vec<OwnedFd>), HandOverError> {
    let (Header { code, .. }, payload, fds) = receive(from)?.ok_or_else(|| ended(expected))?;
    match code {
        code if code == wanted => Ok((payload, fds)),
        REFUSED => Err(HandOverError::Refused(String::from_utf8_lossy(&payload).into_owned())),
        code => Err(HandOverError::Said { found: code.to_string(), expected }),
    }
}

fn ended(expected: &'static str) -> HandOverError {
    HandOverError::Said { found: "no more".to_owned(), expected }
}
