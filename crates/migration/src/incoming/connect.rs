//! Telling the connections of one migration apart.
//!
//! The first four bytes of QEMU's connections identify them: "QEVM" begins a main channel, the multifd magic
//! a lane. Connections with other or no first bytes are unrelated: they are kept without disturbing the
//! others and dropped at the end. Where a channel cannot be peeked, or no other can come, the first is the
//! main channel, as QEMU connects it first.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Capabilities, Channel, ChannelExt, ConnectOptions, Error as ChannelError, IoBuf,
    IoBufMut, Listener, RecvFlags, SendFlags, connect_with, describe_plain,
};
use towline_protocol::configuration;
use towline_protocol::multifd::{self, INIT_BYTES, Init, LaneRegistry};

use super::refuse::{drain, refuse};
use super::wait::{Ready, wait};
use crate::gate::would_receive;
use crate::lock::lock;
use crate::{Error, Result};

/// Timeout for excess connections to identify themselves as lanes.
pub(super) const EXTRA_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of such connections that are examined.
const EXTRA_MAX: usize = 16;
/// Maximum number of connections beside the lanes that wait for their first bytes; the oldest is dropped.
const UNRELATED_MAX: usize = 64;
/// Maximum number of lanes of a refused migration that are closed after its main channel.
const REFUSED_MAX: usize = 256;
/// Timeout for the rest of a partially received init packet.
const PEEK_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which a connection that has sent less than its magic is peeked at: it would be ready all the
/// time.
const PEEK_INTERVAL: Duration = Duration::from_millis(10);

/// The connections of one incoming migration.
#[derive(Debug)]
pub struct Connections {
    /// The main channel, of which nothing was read.
    pub main: Arc<dyn Channel>,
    /// The lanes in the order of their numbers, whose init packets were read.
    pub lanes: Vec<Arc<dyn Channel>>,
    /// The uuid that the lanes carry.
    pub uuid: Option<[u8; 16]>,
    /// The listener, on which any further connection is in excess.
    others: Option<NonLaneChannels>,
    /// Excess lanes; they are closed after the main channel.
    refused: Mutex<Vec<Arc<dyn Channel>>>,
}

#[derive(Debug)]
struct NonLaneChannels {
    listener: Listener,
    /// Connections that have not identified themselves.
    unknown: Mutex<Vec<UnidentifiedConnection>>,
}

/// Accepts a main channel before `deadline`, and `lanes` lanes within `lanes_timeout` of it.
///
/// # Errors
/// No connection in time; too few lanes; a lane's number is used twice or too high, or its uuid differs.
pub fn gather(
    listener: Listener,
    lanes: usize,
    deadline: Instant,
    lanes_timeout: Duration,
    cancel: &Cancel,
) -> Result<Connections> {
    let mut gathering = Gathering::new(lanes);
    if let Err(error) = gather_into(&mut gathering, &listener, deadline, lanes_timeout, cancel) {
        gathering.refuse(&listener);
        return Err(error);
    }
    let Gathering { main, lanes, registry, candidates, refused, .. } = gathering;
    let main = main.expect("complete");
    let lanes = lanes.into_iter().map(|lane| lane.expect("complete")).collect();
    // A single channel has no others.
    let is_single = listener.as_fd().is_none();
    let others = (!is_single).then(|| NonLaneChannels { listener, unknown: Mutex::new(candidates) });
    Ok(Connections { main, lanes, uuid: registry.uuid(), others, refused: Mutex::new(refused) })
}

/// First byte of a connection that a destination makes to a source.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ConnectionKind {
    Main = b'm' as isize,
    Lane = b'l' as isize,
}

/// Connects to a source that listens for its destination ([`outgoing::accept`](crate::outgoing::accept)). Each lane may take `timeout`
/// to identify itself.
///
/// # Errors
/// The address cannot be reached by `deadline`, or refuses; those of [`Connections::connected`].
pub fn connect(
    address: &Address,
    lanes: usize,
    options: &ConnectOptions,
    deadline: Instant,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<Connections> {
    let connected = |kind: ConnectionKind| -> Result<Arc<dyn Channel>> {
        let channel = connect_with(address, deadline, cancel, options)?;
        channel.send_all(&[IoBuf::from(&[kind as u8][..])], SendFlags::empty())?;
        Ok(channel.into())
    };
    let main = connected(ConnectionKind::Main)?;
    let lanes: Vec<_> = (0..lanes).map(|_| connected(ConnectionKind::Lane)).collect::<Result<_>>()?;
    Connections::connected(main, &lanes, timeout)
}

fn gather_into(
    gathering: &mut Gathering,
    listener: &Listener,
    deadline: Instant,
    lanes_timeout: Duration,
    cancel: &Cancel,
) -> Result<()> {
    let started = Instant::now();
    let mut lanes_deadline = None;
    while !gathering.is_complete() {
        let deadline = lanes_deadline.unwrap_or(deadline);
        if Instant::now() >= deadline {
            return Err(gathering.missing(listener, started, lanes_timeout));
        }
        // A single channel is the main channel, and no other comes.
        let single = listener.as_fd().is_none();
        if single && gathering.main.is_some() {
            return Err(gathering.missing(listener, started, Duration::ZERO));
        }
        let watched = gathering.candidates.iter().map(UnidentifiedConnection::watched);
        let ready = wait(listener, watched, deadline, cancel)?;
        if ready.listener {
            match listener.accept(Instant::now(), cancel) {
                Ok(channel) => gathering.accepted(Arc::from(channel), single, deadline)?,
                Err(ChannelError::Timeout { .. }) => {}
                // An untrusted connection is unrelated.
                Err(error @ (ChannelError::Tls { .. } | ChannelError::WebSocket { .. })) => {
                    tracing::warn!(%error, "a connection was dropped");
                }
                Err(error) => return Err(error.into()),
            }
        }
        gathering.sort(&ready)?;
        if gathering.main.is_some() {
            lanes_deadline = lanes_deadline.or(Some(deadline.min(Instant::now() + lanes_timeout)));
        }
    }
    Ok(())
}

impl Connections {
    /// A migration over one channel, without lanes.
    pub fn single(main: Arc<dyn Channel>) -> Self {
        Self { main, lanes: Vec::new(), uuid: None, others: None, refused: Mutex::default() }
    }

    /// A migration over connected channels. Reads the first bytes of the lanes, which may be in any order;
    /// each may take `timeout`.
    ///
    /// # Errors
    /// A lane is silent, its number is used twice or too high, or its uuid differs.
    pub fn connected(main: Arc<dyn Channel>, lanes: &[Arc<dyn Channel>], timeout: Duration) -> Result<Self> {
        let mut gathering = Gathering::new(lanes.len());
        for lane in lanes {
            gathering.read_lane(lane, timeout)?;
        }
        let lanes = gathering.lanes.into_iter().flatten().collect();
        Ok(Self { main, lanes, uuid: gathering.registry.uuid(), others: None, refused: Mutex::default() })
    }

    /// The channel that carries everything but lanes.
    pub fn main_channel(&self) -> Arc<dyn Channel> {
        Arc::clone(&self.main)
    }

    /// After a successful migration: holds the connections until the source has closed its main channel, for
    /// at most this time. If a lane breaks before its source is done, the source reports a failure and
    /// resumes its guest.
    pub fn linger(self, at_most: Duration) {
        if !self.lanes.is_empty() && self.main.set_timeouts(Some(at_most), None).is_ok() {
            drain(self.main.as_ref(), Instant::now() + at_most);
        }
    }

    /// Refuses a migration: shuts its main channel down, and its lanes when the source has closed them, or a
    /// second later. A QEMU may hang if all are dropped at once.
    pub fn refuse(&self) {
        let refused = lock(&self.refused);
        refuse(&self.main, self.lanes.iter().chain(refused.iter()));
    }

    /// Checks that the source opened no more lanes than expected. Call it when the source has opened all.
    /// Connections that did not identify themselves in time are dropped.
    pub(crate) fn refuse_extra(&self, patience: Duration) -> Result<()> {
        let Some(others) = &self.others else { return Ok(()) };
        let mut unknown = lock(&others.unknown);
        let cancel = Cancel::new()?;
        let deadline = Instant::now() + patience;
        let mut left = EXTRA_MAX;
        let mut unrelated = UnrelatedConnections::default();
        loop {
            // The source has opened all its connections; only their first bytes are waited for.
            let until = if unknown.is_empty() { Instant::now() } else { deadline };
            let watched = unknown.iter().map(UnidentifiedConnection::watched);
            let ready = wait(&others.listener, watched, until, &cancel)?;
            if ready.listener && left > 0 {
                left -= 1;
                if let Ok(channel) = others.listener.accept(Instant::now(), &cancel) {
                    self.extra(Arc::from(channel), &mut unknown)?;
                    continue;
                }
            }
            for mut candidate in std::mem::take(&mut *unknown) {
                match candidate.peek_first_bytes(&ready)? {
                    Classified::Lane(init) => return Err(self.too_many(candidate.channel, &init)),
                    Classified::Unknown => unknown.push(candidate),
                    Classified::Main | Classified::Unrelated => unrelated.add(&candidate),
                }
            }
            if unknown.is_empty() || left == 0 || Instant::now() >= deadline {
                unknown.drain(..).for_each(|candidate| unrelated.add(&candidate));
                return Ok(());
            }
        }
    }

    /// Handles a connection accepted after all were complete.
    fn extra(&self, channel: Arc<dyn Channel>, unknown: &mut Vec<UnidentifiedConnection>) -> Result<()> {
        if can_wait(channel.as_ref()) {
            unknown.push(UnidentifiedConnection::new(channel));
            return Ok(());
        }
        match receive_init(channel.as_ref(), EXTRA_TIMEOUT) {
            Ok(init) => Err(self.too_many(channel, &init)),
            Err(error) => {
                tracing::warn!(peer = channel.peer(), %error, "dropped a connection that is not a lane");
                Ok(())
            }
        }
    }

    fn too_many(&self, channel: Arc<dyn Channel>, init: &Init) -> Error {
        lock(&self.refused).push(channel);
        Error::LaneTooMany { id: init.id, expected: self.lanes.len() }
    }
}

struct Gathering {
    main: Option<Arc<dyn Channel>>,
    lanes: Vec<Option<Arc<dyn Channel>>>,
    registry: LaneRegistry,
    /// Connections that have not identified themselves, the oldest first.
    candidates: Vec<UnidentifiedConnection>,
    /// Lanes that were not registered.
    refused: Vec<Arc<dyn Channel>>,
    unrelated: UnrelatedConnections,
}

/// Connections that were dropped because they belong to no migration. All lanes of a source that dies do, so
/// the first is warned of at once, and the number of the others at the end.
#[derive(Debug, Default)]
struct UnrelatedConnections {
    dropped: usize,
}

impl UnrelatedConnections {
    fn add(&mut self, connection: &UnidentifiedConnection) {
        let (peer, why) = (connection.channel.peer(), connection.why.as_deref());
        self.dropped += 1;
        if self.dropped == 1 {
            tracing::warn!(peer, why, "dropped an unrelated connection");
        } else {
            tracing::debug!(peer, why, "dropped an unrelated connection");
        }
    }
}

impl Drop for UnrelatedConnections {
    fn drop(&mut self) {
        if self.dropped > 1 {
            tracing::warn!(connections = self.dropped - 1, "dropped further unrelated connections");
        }
    }
}

#[derive(Debug)]
struct UnidentifiedConnection {
    channel: Arc<dyn Channel>,
    /// The part of its init packet that was read; empty before its magic was seen.
    init: Vec<u8>,
    /// Earliest time of the next peek.
    next_peek: Instant,
    /// Reason why it is unrelated, if known.
    why: Option<String>,
}

/// Result of peeking at a candidate.
enum Classified {
    Main,
    Lane(Init),
    Unrelated,
    Unknown,
}

impl Gathering {
    fn new(lanes: usize) -> Self {
        let registry = LaneRegistry::new(lanes);
        let lanes = (0..lanes).map(|_| None).collect();
        Self {
            main: None,
            lanes,
            registry,
            candidates: Vec::new(),
            refused: Vec::new(),
            unrelated: UnrelatedConnections::default(),
        }
    }

    /// Ends the connections accepted so far, and those in progress.
    fn refuse(mut self, listener: &Listener) {
        // The caller's cancellation does not apply here.
        let (Some(main), Ok(cancel)) = (&self.main, Cancel::new()) else { return };
        self.refused.extend(self.candidates.drain(..).map(|candidate| candidate.channel));
        while listener.as_fd().is_some() && self.refused.len() < REFUSED_MAX {
            let Ok(channel) = listener.accept(Instant::now(), &cancel) else { break };
            self.refused.push(Arc::from(channel));
        }
        refuse(main, self.lanes.iter().flatten().chain(&self.refused));
    }

    fn is_complete(&self) -> bool {
        self.main.is_some() && self.lanes.iter().all(Option::is_some)
    }

    /// The error at the deadline.
    fn missing(&self, listener: &Listener, started: Instant, waited: Duration) -> Error {
        if self.main.is_some() {
            let (connected, expected) = (self.lanes.iter().flatten().count(), self.lanes.len());
            return Error::LanesMissing { connected, expected, waited };
        }
        let peer = listener.local_address().to_string();
        ChannelError::Timeout { op: "accept a main channel", peer, after: started.elapsed() }.into()
    }

    fn accepted(&mut self, channel: Arc<dyn Channel>, single: bool, deadline: Instant) -> Result<()> {
        if !single && can_wait(channel.as_ref()) {
            if self.candidates.len() == self.lanes.len() + UNRELATED_MAX {
                self.unrelated.add(&self.candidates.remove(0));
            }
            self.candidates.push(UnidentifiedConnection::new(channel));
            return Ok(());
        }
        if self.main.is_none() {
            self.main = Some(channel);
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.read_lane(&channel, left)
    }

    fn read_lane(&mut self, channel: &Arc<dyn Channel>, timeout: Duration) -> Result<()> {
        let init = receive_init(channel.as_ref(), timeout)?;
        self.register(channel, &init)
    }

    fn register(&mut self, channel: &Arc<dyn Channel>, init: &Init) -> Result<()> {
        channel.set_timeouts(None, None)?;
        if usize::from(init.id) >= self.lanes.len() {
            self.refused.push(Arc::clone(channel));
            return Err(Error::LaneTooMany { id: init.id, expected: self.lanes.len() });
        }
        let index = self.registry.register(init).map_err(Error::protocol(channel.peer()))?;
        self.lanes[index] = Some(Arc::clone(channel));
        Ok(())
    }

    /// Classifies the candidates that are readable.
    fn sort(&mut self, ready: &Ready) -> Result<()> {
        for mut candidate in std::mem::take(&mut self.candidates) {
            match candidate.peek_first_bytes(ready)? {
                Classified::Main if self.main.is_none() => {
                    candidate.channel.set_timeouts(None, None)?;
                    self.main = Some(candidate.channel);
                }
                Classified::Lane(init) => self.register(&candidate.channel, &init)?,
                Classified::Main | Classified::Unrelated => self.unrelated.add(&candidate),
                Classified::Unknown => self.candidates.push(candidate),
            }
        }
        Ok(())
    }
}

impl UnidentifiedConnection {
    fn new(channel: Arc<dyn Channel>) -> Self {
        // A cipher returns nothing before a whole record has arrived.
        if let Err(error) = channel.set_timeouts(Some(PEEK_TIMEOUT), None) {
            tracing::debug!(peer = channel.peer(), %error, "set_timeouts");
        }
        Self { channel, init: Vec::new(), next_peek: Instant::now(), why: None }
    }

    /// Handles a connection that ended, failed, or sent other bytes.
    fn classify_unrelated(&mut self, peeked: Result<usize, ChannelError>, first: &[u8]) -> Classified {
        self.why = match peeked {
            Ok(_) if describe_plain(first) == Some("TLS") => Some(
                "it begins with TLS: turn TLS on here, or off there (tls-creds at the source's QEMU)".into(),
            ),
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        Classified::Unrelated
    }

    /// The channel, and the time before which it is left alone.
    fn watched(&self) -> (&Arc<dyn Channel>, Instant) {
        (&self.channel, self.next_peek)
    }

    /// Peeks at the received bytes of a connection that is ready; does not wait.
    fn peek_first_bytes(&mut self, ready: &Ready) -> Result<Classified> {
        if !ready.has(&self.channel) || !would_receive(self.channel.as_ref()) {
            return Ok(Classified::Unknown);
        }
        if self.init.is_empty() {
            let mut magic = [0; 4];
            let peeked = self.channel.recv(&mut [IoBufMut::from(&mut magic)], RecvFlags::PEEK);
            match (peeked, u32::from_be_bytes(magic)) {
                (Ok(4), configuration::MAGIC) => return Ok(Classified::Main),
                (Ok(4), multifd::MAGIC) => {}
                (Ok(1..4), _) => {
                    self.next_peek = Instant::now() + PEEK_INTERVAL;
                    return Ok(Classified::Unknown);
                }
                (Err(ChannelError::Timeout { .. }), _) => return Ok(Classified::Unknown),
                (peeked, _) => return Ok(self.classify_unrelated(peeked, &magic)),
            }
        }
        let (mut bytes, had) = ([0; INIT_BYTES], self.init.len());
        match self.channel.recv(&mut [IoBufMut::from(&mut bytes[had..])], RecvFlags::empty()) {
            Err(ChannelError::Timeout { .. }) => return Ok(Classified::Unknown),
            Ok(0) => return Ok(Classified::Unrelated),
            Err(error) => return Ok(self.classify_unrelated(Err(error), &[])),
            Ok(received) => self.init.extend_from_slice(&bytes[had..had + received]),
        }
        match self.init.as_slice().try_into() {
            Ok(init) => {
                Ok(Classified::Lane(Init::decode(init).map_err(Error::protocol(self.channel.peer()))?))
            }
            Err(_) => Ok(Classified::Unknown),
        }
    }
}

/// Returns true if the channel can be polled with others and peeked.
fn can_wait(channel: &dyn Channel) -> bool {
    channel.capabilities().contains(Capabilities::PEEK) && channel.as_fd().is_some()
}

fn receive_init(channel: &dyn Channel, timeout: Duration) -> Result<Init> {
    let mut bytes = [0; INIT_BYTES];
    channel.set_timeouts(Some(timeout), None)?;
    channel.recv_exact(&mut [IoBufMut::from(&mut bytes[..])])?;
    Init::decode(&bytes).map_err(Error::protocol(channel.peer()))
}
