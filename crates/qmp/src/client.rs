//! One connection to one monitor.
//!
//! A client executes one command at a time, or several in order ([`Client::execute_all`]). The reply is
//! matched by its `id`; a late reply to a command that timed out is discarded. Events that arrive before the
//! reply are queued. A thread that waits for events and must also be able to send a command polls:
//! [`Client::next_event`] with `Duration::ZERO` costs one system call.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value, json};

use crate::codec::{CodecError, Decoder, Event, Greeting, Message, excerpt};
use crate::connection::{FDS_MAX, Interruption, MonitorConnection, PeerCredentials};
use crate::error::{DisconnectReason, Error};
use crate::request::{Command, CommandReply, CommandRequest, typed};

/// Default deadline of a command.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// The command that ends the negotiation.
const NEGOTIATE: &str = "qmp_capabilities";
/// Commands that are sent before the first of their replies is read: their lines fit into any socket's
/// buffer.
const IN_FLIGHT_MAX: usize = 32;
/// Default maximum number of unread events; beyond it the oldest is dropped.
pub const EVENTS_MAX: usize = 1024;
/// Maximum number of events, and of replies to a former client, that may precede the greeting.
const BEFORE_GREETING_MAX: usize = 1024;
/// Reads after a deadline has passed, of 64 KiB each: more than a socket holds of what arrived before, on a host that was busy, and an end to
/// a peer that sends without one.
const LATE_READS_MAX: u32 = 16;

/// Deadlines and limits of a client.
#[derive(Clone, Debug)]
pub struct Options {
    /// Deadline of each command.
    pub deadline: Duration,
    /// Deadline of connecting and of the greeting, each.
    pub greeting_deadline: Duration,
    /// Maximum number of unread events; beyond it the oldest is dropped.
    pub events_max: usize,
    /// Negotiate out-of-band execution ([`Client::execute_out_of_band`]) where the monitor offers it.
    pub out_of_band: bool,
    /// Descriptor that becomes readable when the caller wants to wait no longer, and stays so: connecting,
    /// the greeting, a reply and an event then end with [`Error::Cancelled`].
    pub interrupt: Option<Arc<OwnedFd>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: DEADLINE,
            greeting_deadline: DEADLINE,
            events_max: EVENTS_MAX,
            out_of_band: false,
            interrupt: None,
        }
    }
}

/// Commands that were sent and whose replies were not read ([`Client::connect_ahead`]).
#[derive(Debug)]
#[must_use = "QEMU executes them, and their replies must be read"]
pub struct Submitted {
    commands: Vec<(u64, Cow<'static, str>)>,
}

/// A QMP connection, past its greeting.
#[derive(Debug)]
pub struct Client {
    socket: String,
    connection: MonitorConnection,
    decoder: Decoder,
    /// Unread ones.
    events: VecDeque<Event>,
    events_max: usize,
    events_dropped: u64,
    greeting: Greeting,
    deadline: Duration,
    next_id: u64,
    disconnected: Option<DisconnectReason>,
    /// Commands that were sent and not replied to.
    unanswered: usize,
    /// Out-of-band execution was negotiated.
    out_of_band: bool,
}

impl Client {
    /// Connects to the monitor at `path` and negotiates.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Refused`], [`Error::Busy`] and [`Error::Connect`] before the connection
    /// is established; then as [`Client::from_stream`].
    pub fn connect(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        Self::open(path.as_ref(), options)?.negotiate(options)
    }

    /// Negotiates on a connected stream; errors name it `name`.
    ///
    /// # Errors
    /// [`Error::NoGreeting`] from a monitor in use by another client, [`Error::NotQmp`] from anything that is
    /// not a QMP server, [`Error::Disconnected`] if it closes, and as for the command `qmp_capabilities`.
    pub fn from_stream(
        stream: UnixStream,
        name: impl Into<String>,
        options: &Options,
    ) -> Result<Self, Error> {
        let connection = MonitorConnection::new(stream, options.interrupt.clone());
        Self::new(connection, name.into(), options).negotiate(options)
    }

    /// Connects to the monitor of a QEMU that is being started, and sends it these commands before its
    /// greeting, so QEMU reads them while it creates its machine and executes them at once. Returns when it
    /// has answered; [`Client::replies`] reads the replies. Out-of-band execution is not negotiated.
    ///
    /// QEMU reads a monitor byte by byte, with several system calls for each: a few hundred bytes take it a
    /// millisecond.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_ahead(
        path: impl AsRef<Path>,
        options: &Options,
        requests: &[CommandRequest],
    ) -> Result<(Self, Submitted), Error> {
        let started = Instant::now();
        let mut client = Self::open(path.as_ref(), options)?;
        // It is the first client of this QEMU, which reads byte by byte.
        client.next_id = 1;
        let negotiate = CommandRequest::raw(NEGOTIATE, None);
        let negotiated = client.submit("execute", &negotiate, &[], started)?;
        let submitted = client.submit_all(requests)?;
        client.greeting = client.await_greeting(options.greeting_deadline)?;
        client.reply_to(negotiated, NEGOTIATE, started)?;
        Ok((client, submitted))
    }

    /// Reads the replies to commands that were sent, in their order.
    ///
    /// # Errors
    /// As [`Client::execute_all`].
    pub fn replies(&mut self, submitted: Submitted) -> Result<Vec<CommandReply>, Error> {
        let mut replies = Vec::with_capacity(submitted.commands.len());
        for (id, name) in submitted.commands {
            let value = match self.reply_to(id, &name, Instant::now()) {
                Ok(value) => Ok(value),
                Err(refusal @ Error::Refusal { .. }) => Err(refusal),
                Err(error) => return Err(error),
            };
            replies.push(CommandReply { socket: self.socket.clone(), value });
        }
        Ok(replies)
    }

    /// Connects to the monitor at `path`, without its greeting.
    fn open(path: &Path, options: &Options) -> Result<Self, Error> {
        let connection =
            MonitorConnection::connect(path, options.greeting_deadline, options.interrupt.clone())?;
        Ok(Self::new(connection, path.display().to_string(), options))
    }

    fn new(connection: MonitorConnection, socket: String, options: &Options) -> Self {
        Self {
            socket,
            connection,
            decoder: Decoder::new(),
            events: VecDeque::new(),
            events_max: options.events_max.max(1),
            events_dropped: 0,
            greeting: Greeting::default(),
            deadline: options.deadline,
            next_id: first_id(),
            disconnected: None,
            unanswered: 0,
            out_of_band: false,
        }
    }

    fn negotiate(mut self, options: &Options) -> Result<Self, Error> {
        self.greeting = self.await_greeting(options.greeting_deadline)?;
        let is_offered = self.greeting.capabilities.iter().any(|name| name == "oob");
        self.out_of_band = options.out_of_band && is_offered;
        let enable = self.out_of_band.then(|| Map::from_iter([("enable".into(), json!(["oob"]))]));
        self.execute_raw(NEGOTIATE, enable)?;
        Ok(self)
    }

    /// Waits for the greeting. Before it QEMU may send an event, and the last replies to a former client that
    /// was killed.
    fn await_greeting(&mut self, within: Duration) -> Result<Greeting, Error> {
        let started = Instant::now();
        let mut before = 0;
        let found = self.find("the greeting", after(started, within), |message| match message {
            Message::Greeting(greeting) => Ok(Ok(greeting)),
            other @ Message::Other(_) => Ok(Err(excerpt(format!("{other:?}").as_bytes()))),
            _ if before == BEFORE_GREETING_MAX => Ok(Err(format!("{BEFORE_GREETING_MAX} other messages"))),
            early => {
                before += 1;
                Err(early)
            }
        });
        let socket = self.socket.clone();
        match found {
            Ok(Some(Ok(greeting))) => Ok(greeting),
            Ok(Some(Err(found))) => Err(not_qmp(socket, found)),
            Ok(None) => Err(Error::NoGreeting { socket, waited: started.elapsed() }),
            Err(Error::Disconnected { by: DisconnectReason::InvalidData(error), .. }) => {
                let found = match error {
                    CodecError::NotJson { excerpt } => excerpt,
                    other => other.to_string(),
                };
                Err(not_qmp(socket, found))
            }
            Err(other) => Err(other),
        }
    }

    /// Runs a command within the client's deadline.
    ///
    /// # Errors
    /// [`Error::Refusal`] with QEMU's words, [`Error::Timeout`], [`Error::Disconnected`], [`Error::Shape`].
    pub fn execute<C: Command>(&mut self, command: &C) -> Result<C::Return, Error> {
        self.execute_with_fds(command, &[])
    }

    /// As [`Client::execute`], but out of band: QEMU executes it at once, even while its main loop is
    /// blocked, for instance on guest memory that is unreadable until this command. Without negotiated
    /// out-of-band execution the command is executed in order.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn execute_out_of_band<C: Command>(&mut self, command: &C) -> Result<C::Return, Error> {
        let verb = if self.out_of_band { "exec-oob" } else { "execute" };
        self.execute_as(verb, command, &[])
    }

    /// As [`Client::execute`], passing file descriptors with the command (`add-fd`, `getfd`). The caller's
    /// descriptors stay open.
    ///
    /// # Errors
    /// As [`Client::execute`].
    ///
    /// # Panics
    /// With more than 16 descriptors.
    pub fn execute_with_fds<C: Command>(
        &mut self,
        command: &C,
        fds: &[BorrowedFd<'_>],
    ) -> Result<C::Return, Error> {
        self.execute_as("execute", command, fds)
    }

    fn execute_as<C: Command>(
        &mut self,
        verb: &str,
        command: &C,
        fds: &[BorrowedFd<'_>],
    ) -> Result<C::Return, Error> {
        let request = CommandRequest::new(command)?;
        let value = self.transact(verb, &request, fds)?;
        typed::<C>(&value, &self.socket)
    }

    /// Executes several commands in order with one round trip for each few of them: all are sent before the
    /// first reply is awaited. QEMU executes all of them, also if it refuses one.
    ///
    /// # Errors
    /// [`Error::Timeout`] and [`Error::Disconnected`]; a refusal is the reply to its command.
    pub fn execute_all(&mut self, requests: &[CommandRequest]) -> Result<Vec<CommandReply>, Error> {
        let mut replies = Vec::with_capacity(requests.len());
        for requests in requests.chunks(IN_FLIGHT_MAX) {
            let submitted = self.submit_all(requests)?;
            replies.extend(self.replies(submitted)?);
        }
        Ok(replies)
    }

    fn submit_all(&mut self, requests: &[CommandRequest]) -> Result<Submitted, Error> {
        let mut commands = Vec::with_capacity(requests.len());
        for request in requests {
            let id = self.submit("execute", request, &[], Instant::now())?;
            commands.push((id, request.name.clone()));
        }
        Ok(Submitted { commands })
    }

    /// Executes a command that has no type in this crate.
    ///
    /// # Errors
    /// As [`Client::execute`], save [`Error::Shape`].
    pub fn execute_raw(&mut self, name: &str, arguments: Option<Map<String, Value>>) -> Result<Value, Error> {
        self.transact("execute", &CommandRequest::raw(name, arguments), &[])
    }

    fn transact(
        &mut self,
        verb: &str,
        request: &CommandRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Value, Error> {
        assert!(fds.len() <= FDS_MAX, "at most {FDS_MAX} descriptors go with a command");
        let started = Instant::now();
        let id = self.submit(verb, request, fds, started)?;
        self.reply_to(id, &request.name, started)
    }

    /// Sends a command, and returns the id of its reply.
    fn submit(
        &mut self,
        verb: &str,
        request: &CommandRequest,
        fds: &[BorrowedFd<'_>],
        started: Instant,
    ) -> Result<u64, Error> {
        let id = self.next_id;
        self.next_id += 1;
        let mut line = json!({ "id": id });
        line[verb] = request.name.as_ref().into();
        if !request.arguments.is_null() {
            line["arguments"] = request.arguments.clone();
        }
        self.send(&request.name, &line, fds, started)?;
        self.unanswered += 1;
        Ok(id)
    }

    /// Waits for the reply to the command with this id, until the deadline of a command that began then.
    fn reply_to(&mut self, id: u64, name: &str, started: Instant) -> Result<Value, Error> {
        let socket = self.socket.clone();
        let reply = self.find(name, after(started, self.deadline), |message| match message {
            Message::Return { id: Some(found), value, .. } if found == id => Ok(Ok(value)),
            Message::Error { id: found, class, desc, .. } if found.as_ref().is_none_or(|f| *f == id) => {
                Ok(Err(Error::Refusal { command: name.into(), socket: socket.clone(), class, desc }))
            }
            other => Err(other),
        })?;
        reply.unwrap_or_else(|| Err(self.timeout(name, started)))
    }

    fn send(
        &mut self,
        name: &str,
        request: &Value,
        fds: &[BorrowedFd<'_>],
        started: Instant,
    ) -> Result<(), Error> {
        if let Some(by) = &self.disconnected {
            return Err(self.disconnected_during(name, by.clone()));
        }
        tracing::trace!(socket = self.socket, %request, "QMP command");
        let mut line = request.to_string().into_bytes();
        line.extend_from_slice(b"\r\n");
        match self.connection.send(&line, fds, after(started, self.deadline)) {
            Ok(()) => Ok(()),
            Err(Interruption::Deadline { sent_bytes: 0 }) => Err(self.timeout(name, started)),
            Err(Interruption::Cancelled) => Err(Error::Cancelled { socket: self.socket.clone() }),
            Err(Interruption::Deadline { .. }) => {
                self.disconnected = Some(DisconnectReason::PartialSend);
                Err(self.timeout(name, started))
            }
            Err(Interruption::Disconnected(by)) => {
                // QEMU's last messages, above all the event with the reason.
                let _ = self.find(name, Instant::now(), Err::<(), _>);
                self.disconnected = Some(by.clone());
                Err(self.disconnected_during(name, by))
            }
        }
    }

    /// Waits for the next event, oldest unread first. `None` if none arrives within that time.
    ///
    /// # Errors
    /// [`Error::Disconnected`], after the last unread event was returned.
    pub fn next_event(&mut self, within: Duration) -> Result<Option<Event>, Error> {
        self.find_event("waiting for events", |_| true, after(Instant::now(), within))
    }

    /// Waits for an event that `wanted` accepts; others stay unread, in order.
    ///
    /// # Errors
    /// [`Error::NoEvent`] after `within`, [`Error::Cancelled`], [`Error::Disconnected`].
    pub fn wait_event(
        &mut self,
        wanted: impl FnMut(&Event) -> bool,
        within: Duration,
    ) -> Result<Event, Error> {
        let started = Instant::now();
        let found = self.find_event("waiting for an event", wanted, after(started, within))?;
        found.ok_or_else(|| Error::NoEvent { socket: self.socket.clone(), waited: started.elapsed() })
    }

    /// The first event that `wanted` accepts; `None` if there is none until then.
    fn find_event(
        &mut self,
        during: &str,
        mut wanted: impl FnMut(&Event) -> bool,
        until: Instant,
    ) -> Result<Option<Event>, Error> {
        if let Some(at) = self.events.iter().position(&mut wanted) {
            return Ok(self.events.remove(at));
        }
        self.find(during, until, |message| match message {
            Message::Event(event) if wanted(&event) => Ok(event),
            other => Err(other),
        })
    }

    /// Queues an event, and logs any other message that is not the awaited reply.
    fn queue(&mut self, message: Message) {
        match message {
            Message::Event(event) => {
                if self.events.len() == self.events_max
                    && let Some(oldest) = self.events.pop_front()
                {
                    self.events_dropped += 1;
                    tracing::warn!(
                        event = oldest.name,
                        max = self.events_max,
                        "QMP events unread; the oldest is dropped"
                    );
                }
                self.events.push_back(event);
            }
            Message::Return { id, .. } | Message::Error { id, .. } => {
                tracing::debug!(socket = self.socket, ?id, "QMP answer after its deadline is discarded");
            }
            other => tracing::warn!(socket = self.socket, ?other, "QMP message of an unknown kind"),
        }
    }

    /// The first message that `pick` takes; `None` if there is none at the deadline. The others are queued.
    fn find<T>(
        &mut self,
        during: &str,
        until: Instant,
        mut pick: impl FnMut(Message) -> Result<T, Message>,
    ) -> Result<Option<T>, Error> {
        let mut late_reads = 0;
        loop {
            if let Some(by) = &self.disconnected {
                return Err(self.disconnected_during(during, by.clone()));
            }
            let by = match self.decoder.next_message() {
                Ok(Some(message)) => {
                    if matches!(message, Message::Return { .. } | Message::Error { .. }) {
                        self.unanswered = self.unanswered.saturating_sub(1);
                    }
                    match pick(message) {
                        Ok(found) => return Ok(Some(found)),
                        Err(other) => self.queue(other),
                    }
                    continue;
                }
                Ok(None) if late_reads == LATE_READS_MAX => return Ok(None),
                Ok(None) => match self.connection.receive(until) {
                    Ok(bytes) => {
                        self.decoder.feed(bytes);
                        late_reads += u32::from(Instant::now() >= until);
                        continue;
                    }
                    Err(Interruption::Deadline { .. }) => return Ok(None),
                    Err(Interruption::Cancelled) => {
                        return Err(Error::Cancelled { socket: self.socket.clone() });
                    }
                    Err(Interruption::Disconnected(by)) => by,
                },
                Err(error) => DisconnectReason::InvalidData(error),
            };
            self.disconnected = Some(by);
        }
    }

    /// Number of commands that QEMU has not replied to yet. With out-of-band execution it stops to read at eight.
    pub fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Checks that the server has not closed the connection. Costs one system call; events that have arrived
    /// stay unread.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn check_connected(&mut self) -> Result<(), Error> {
        self.find("checking the connection", Instant::now(), Err::<(), _>).map(drop)
    }

    /// The server's greeting.
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// The socket's path, or the name given to the stream.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// Number of unread events that were dropped.
    pub fn events_dropped(&self) -> u64 {
        self.events_dropped
    }

    /// The deadline of each command.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Sets the deadline of each command from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Sets the descriptor that ends waits ([`Options::interrupt`]) from now on.
    pub fn set_interrupt(&mut self, interrupt: Option<Arc<OwnedFd>>) {
        self.connection.set_interrupt(interrupt);
    }

    /// The process at the other end.
    ///
    /// # Errors
    /// The system's errors; `None` for a socket of a kind that has none.
    pub fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        self.connection.peer_credentials()
    }

    fn timeout(&self, name: &str, started: Instant) -> Error {
        Error::Timeout { command: name.into(), socket: self.socket.clone(), waited: started.elapsed() }
    }

    fn disconnected_during(&self, during: &str, by: DisconnectReason) -> Error {
        Error::Disconnected { socket: self.socket.clone(), during: during.into(), by }
    }
}

/// Id of a client's first command. QEMU may send it the reply to a command of a former client, also after the
/// greeting: their ids differ.
fn first_id() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.map_or(1, |since| since.subsec_nanos().into())
}

/// A deadline; if the clock cannot represent it, a day from now.
fn after(start: Instant, within: Duration) -> Instant {
    start.checked_add(within).unwrap_or_else(|| start + Duration::from_secs(86_400))
}

fn not_qmp(socket: String, found: String) -> Error {
    let hint = if found.contains("(qemu)") || found.contains("monitor") {
        "this is QEMU's human monitor: use the socket given with -qmp"
    } else {
        "use the socket given with -qmp"
    };
    Error::NotQmp { socket, found, hint }
}
