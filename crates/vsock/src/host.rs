//! The host's side over epoll: listeners, handshakes, connects in progress, connected sockets, and the accept
//! queue for other guests of the process.
//!
//! Sockets are watched edge-triggered: each edge is reported once, and the engine remembers that it may read
//! on. Space in a send buffer is reported only while the buffer is full.

mod connect;
mod handshake;
mod handshake_line;
mod listener;
mod pending_connect;
pub(crate) mod socket;
mod socket_fd;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use towline_channel::{IoBuf, IoBufMut};

use self::handshake::Handshakes;
use self::handshake_line::{HandshakeLine, parse_connect};
pub(crate) use self::listener::HostListener;
use self::pending_connect::PendingConnect;
pub(crate) use self::socket::HostSocket;
use crate::connection::{ConnectionId, ConnectionKey};
use crate::engine::TICK_INTERVAL;
use crate::local_guests::{AcceptQueue, IncomingConnection, LocalGuests};
use crate::packet::{HOST_CID, SeqFlags, ShutdownFlags, SocketType};
use crate::rules::ForwardingRule;
use crate::sockets::{CloseMode, ConnectOutcome, Interest, Peeked, Readiness, ReceiveOutcome, Sockets};

/// Time limit of a handshake.
const HANDSHAKE_TIMEOUT_MS: u64 = 10_000;
/// Maximum number of connections that are accepted before other work has its turn.
const ACCEPTS_MAX: usize = 64;
/// Maximum number of handshakes that are continued without epoll.
const UNWATCHED_MAX: usize = 4;
/// Maximum number of events per call to epoll.
const EVENTS_MAX: usize = 64;
/// Tags of epoll. Connections have their [`ConnectionId`], which never has this bit; all others have it.
const OTHER: u64 = 1 << 63;
/// Kinds of the others, above their number.
const TIMER: u64 = OTHER | 1 << 60;
const ACCEPT_QUEUE: u64 = OTHER | 2 << 60;
const LISTENER: u64 = OTHER | 3 << 60;
const HANDSHAKE: u64 = OTHER | 4 << 60;
const NUMBER: u64 = (1 << 60) - 1;

const READ: epoll::EventFlags = epoll::EventFlags::IN
    .union(epoll::EventFlags::PRI)
    .union(epoll::EventFlags::RDHUP)
    .union(epoll::EventFlags::ET);
const WRITE: epoll::EventFlags = epoll::EventFlags::OUT.union(epoll::EventFlags::ET);
/// Both directions have ended, or the socket has failed.
const CLOSED: epoll::EventFlags = epoll::EventFlags::HUP.union(epoll::EventFlags::ERR);

/// A listener and its destination.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) listener: HostListener,
    /// Port of the guest; `None` if clients choose it by `CONNECT`.
    pub(crate) port: Option<u32>,
}

/// Configuration of the host's side, and its listeners, which exist as long as the device.
#[derive(Debug)]
pub(crate) struct HostConfig {
    pub(crate) listeners: Vec<Listening>,
    /// Connections of the guest lead to this path and `_PORT`.
    pub(crate) uds: Option<PathBuf>,
    pub(crate) rules: Vec<ForwardingRule>,
    pub(crate) cid: u64,
    pub(crate) local_guests: Arc<LocalGuests>,
    pub(crate) accept_queue: Arc<AcceptQueue>,
    /// Maximum number of handshakes in progress.
    pub(crate) handshakes_max: usize,
}

/// Event for the engine.
pub(crate) enum SocketEvent {
    Readable(ConnectionId, Readiness),
    Writable(ConnectionId),
    /// A connect has succeeded, or failed.
    Connected(ConnectionId, Option<HostSocket>),
    /// A peer requests a port of the guest.
    Incoming(IncomingConnection),
}

/// The sockets of one guest.
pub(crate) struct Host {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Interval that the timer is set to.
    timer_interval: Option<Duration>,
    config: Arc<HostConfig>,
    /// Listeners are not watched, because descriptors are exhausted.
    accepts_paused: bool,
    /// Number of polls so far, and of the last one at which a listener was ready.
    polls: u64,
    last_accept: u64,
    handshakes: Handshakes,
    /// Numbers of handshakes that have begun and are not registered: their line usually follows at once.
    unwatched: Vec<u64>,
    pending: HashMap<ConnectionId, PendingConnect>,
    events: VecDeque<SocketEvent>,
    now_ms: u64,
}

fn id_of(tag: u64) -> ConnectionId {
    ConnectionId { index: tag as u32, generation: (tag >> 32) as u32 }
}

fn tag_of(id: ConnectionId) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(id.index) | u64::from(id.generation) << 32)
}

fn flags_of(interest: Interest) -> epoll::EventFlags {
    match interest {
        Interest::Read => READ,
        Interest::ReadWrite => READ | WRITE,
    }
}

impl Host {
    pub(crate) fn new(config: Arc<HostConfig>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let tag = epoll::EventData::new_u64;
        epoll::add(&epoll, &timer, tag(TIMER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, config.accept_queue.as_fd(), tag(ACCEPT_QUEUE), epoll::EventFlags::IN)?;
        for (index, listening) in config.listeners.iter().enumerate() {
            let tag = tag(LISTENER | index as u64);
            epoll::add(&epoll, &listening.listener, tag, epoll::EventFlags::IN)?;
        }
        let handshakes = Handshakes::new(config.handshakes_max);
        Ok(Self {
            epoll,
            timer,
            timer_interval: None,
            config,
            accepts_paused: false,
            polls: 0,
            last_accept: 0,
            handshakes,
            unwatched: Vec::new(),
            pending: HashMap::new(),
            events: VecDeque::new(),
            now_ms: 0,
        })
    }

    /// Polls all sockets without blocking, and queues events for [`Host::next_event`].
    pub(crate) fn poll(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut space = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS_MAX];
        let found = match epoll::wait(&self.epoll, &mut space, Some(&now)) {
            Ok((found, _)) => found,
            Err(rustix::io::Errno::INTR) => return,
            Err(errno) => {
                tracing::error!(%errno, "epoll_wait");
                return;
            }
        };
        self.polls += 1;
        for number in std::mem::take(&mut self.unwatched) {
            self.continue_handshake(number);
        }
        let mut is_timer_due = false;
        for event in found {
            let (tag, flags) = (event.data.u64(), event.flags);
            let number = tag & NUMBER;
            match tag & !NUMBER {
                TIMER => is_timer_due = true,
                ACCEPT_QUEUE => {
                    let incoming = self.config.accept_queue.take_all();
                    self.events.extend(incoming.into_iter().map(SocketEvent::Incoming));
                }
                LISTENER => self.accept(number as usize),
                HANDSHAKE => self.continue_handshake(number),
                _ => self.on_connection(id_of(tag), flags),
            }
        }
        // After what clients have sent in time, if this thread is late.
        if is_timer_due {
            self.on_timer();
        }
    }

    pub(crate) fn next_event(&mut self) -> Option<SocketEvent> {
        self.events.pop_front()
    }

    /// Sets the timer to the shorter of the engine's interval and that of the host's side.
    pub(crate) fn set_timer(&mut self, engine: Option<Duration>) {
        let retries = || self.pending.values().any(|pending| matches!(pending, PendingConnect::Retry(..)));
        let is_needed = self.accepts_paused || !self.handshakes.is_empty() || retries();
        let Some(interval) = engine.into_iter().chain(is_needed.then_some(TICK_INTERVAL)).min() else {
            return;
        };
        if self.timer_interval.is_some_and(|present| present <= interval) {
            return;
        }
        let it_value = Timespec::try_from(interval).expect("an interval is far below 2^63 seconds");
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        match rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.timer_interval = Some(interval),
            Err(errno) => tracing::error!(%errno, "timerfd_settime"),
        }
    }

    fn on_timer(&mut self) {
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        self.timer_interval = None;
        let now_ms = self.read_clock();
        self.handshakes.expire(now_ms, HANDSHAKE_TIMEOUT_MS);
        self.resume_accepts();
        let retries = self.pending.extract_if(|_, pending| matches!(pending, PendingConnect::Retry(..)));
        for (id, pending) in retries.collect::<Vec<_>>() {
            let PendingConnect::Retry(address, kind) = pending else { continue };
            match self.connect_address(id, &address, kind) {
                ConnectOutcome::Connected(socket) => {
                    self.events.push_back(SocketEvent::Connected(id, Some(socket)));
                }
                ConnectOutcome::Refused => self.events.push_back(SocketEvent::Connected(id, None)),
                ConnectOutcome::InProgress => {}
            }
        }
    }

    /// Returns the share of each other guest of the process in this guest's connections.
    pub(crate) fn share_of_peer(&self, connections: usize) -> usize {
        self.config.local_guests.share(self.config.cid, connections)
    }

    /// Reads the clock. Returns the time in milliseconds.
    pub(crate) fn read_clock(&mut self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let part = |number: i64| u64::try_from(number).unwrap_or(0);
        self.now_ms = part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000;
        self.now_ms
    }

    /// Returns the time when the clock was last read.
    pub(crate) fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Stops accepting connections until the next tick; they wait in the backlogs of the listeners.
    fn pause_accepts(&mut self) {
        if !self.accepts_paused {
            self.accepts_paused = true;
            self.watch_listeners(epoll::EventFlags::empty());
        }
    }

    fn resume_accepts(&mut self) {
        if self.accepts_paused {
            self.accepts_paused = false;
            self.watch_listeners(epoll::EventFlags::IN);
        }
    }

    fn watch_listeners(&self, flags: epoll::EventFlags) {
        for (index, listening) in self.config.listeners.iter().enumerate() {
            let tag = epoll::EventData::new_u64(LISTENER | index as u64);
            if let Err(errno) = epoll::modify(&self.epoll, &listening.listener, tag, flags) {
                tracing::error!(%errno, "epoll_ctl");
            }
        }
    }

    fn accept(&mut self, index: usize) {
        // A call that finds the backlog empty costs as much as one that accepts. If there are more, epoll
        // reports it again.
        let is_busy = self.polls - std::mem::replace(&mut self.last_accept, self.polls) <= 1;
        for _ in 0..if is_busy { ACCEPTS_MAX } else { 1 } {
            let Listening { listener, port } = &self.config.listeners[index];
            match (listener.accept(), *port) {
                (Ok(socket), Some(port)) => self.incoming(socket, port),
                (Ok(socket), None) => {
                    let number = self.handshakes.start(socket.expecting_ok(), self.now_ms);
                    self.continue_handshake(number);
                }
                (Err(error), _) if error.kind() == io::ErrorKind::WouldBlock => return,
                (Err(error), _) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot accept connections for a second");
                    self.pause_accepts();
                    return;
                }
            }
        }
    }

    fn incoming(&mut self, socket: HostSocket, port: u32) {
        self.events.push_back(SocketEvent::Incoming(IncomingConnection { port, cid: HOST_CID, socket }));
    }

    fn continue_handshake(&mut self, number: u64) {
        let Some(handshake) = self.handshakes.remove(number) else { return };
        match handshake.socket.receive_line(parse_connect) {
            Ok(HandshakeLine::Complete { port, .. }) => self.incoming(handshake.socket, port),
            Ok(HandshakeLine::Incomplete) => {
                self.handshakes.put_back(number, handshake);
                if self.unwatched.len() < UNWATCHED_MAX {
                    self.unwatched.push(number);
                } else {
                    self.watch_handshake(number);
                }
            }
            Ok(HandshakeLine::Invalid) => tracing::debug!("closed a client that did not send CONNECT PORT"),
            Err(error) => tracing::debug!(%error, "a client closed before it sent CONNECT"),
        }
    }

    /// Registers the handshakes that have begun. Call it before the worker waits.
    pub(crate) fn watch_handshakes(&mut self) {
        for number in std::mem::take(&mut self.unwatched) {
            self.watch_handshake(number);
        }
    }

    fn watch_handshake(&mut self, number: u64) {
        let Some(handshake) = self.handshakes.remove(number) else { return };
        let tag = epoll::EventData::new_u64(HANDSHAKE | number);
        // It is registered already, if this is not the first part of the line.
        match epoll::add(&self.epoll, &handshake.socket, tag, READ) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => self.handshakes.put_back(number, handshake),
            Err(errno) => tracing::warn!(%errno, "epoll_ctl"),
        }
    }

    fn on_connection(&mut self, id: ConnectionId, flags: epoll::EventFlags) {
        if self.pending.contains_key(&id) {
            self.advance_connect(id);
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.events.push_back(SocketEvent::Writable(id));
        }
        if flags.contains(epoll::EventFlags::PRI) {
            self.events.push_back(SocketEvent::Readable(id, Readiness::Urgent));
        }
        let readiness = if flags.intersects(CLOSED) {
            Readiness::Closed
        } else if flags.contains(epoll::EventFlags::RDHUP) {
            Readiness::ReadClosed
        } else if flags.contains(epoll::EventFlags::IN) {
            Readiness::Readable
        } else {
            return;
        };
        self.events.push_back(SocketEvent::Readable(id, readiness));
    }

    fn register(&self, id: ConnectionId, socket: &HostSocket, interest: Interest) -> io::Result<()> {
        // A handshake may have registered it.
        let done = match epoll::add(&self.epoll, socket, tag_of(id), flags_of(interest)) {
            Err(rustix::io::Errno::EXIST) => return self.modify(id, socket, interest),
            done => done,
        };
        done.inspect_err(|errno| tracing::error!(%errno, "epoll_ctl"))?;
        Ok(())
    }

    fn modify(&self, id: ConnectionId, socket: &HostSocket, interest: Interest) -> io::Result<()> {
        let done = epoll::modify(&self.epoll, socket, tag_of(id), flags_of(interest));
        done.inspect_err(|errno| tracing::error!(%errno, "epoll_ctl"))?;
        Ok(())
    }
}

impl AsFd for Host {
    /// Returns the descriptor that is readable when [`Host::poll`] finds events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Sockets for Host {
    type Socket = HostSocket;

    fn connect(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: SocketType,
    ) -> ConnectOutcome<HostSocket> {
        self.connect_key(id, key, kind)
    }

    fn opened(&mut self, id: ConnectionId, socket: &HostSocket) {
        if self.register(id, socket, Interest::Read).is_err() {
            self.events.push_back(SocketEvent::Connected(id, None));
        } else if socket.has_buffered() {
            self.events.push_back(SocketEvent::Readable(id, Readiness::Readable));
        }
    }

    fn accepted(&mut self, _: ConnectionId, socket: &HostSocket, port: u32) -> io::Result<()> {
        if socket.expects_ok { socket.send_line(&format!("OK {port}\n")) } else { Ok(()) }
    }

    fn receive(&mut self, socket: &HostSocket, bufs: &mut [IoBufMut<'_>]) -> io::Result<ReceiveOutcome> {
        socket.receive(bufs)
    }

    fn peek(&mut self, socket: &HostSocket) -> io::Result<Peeked> {
        socket.peek()
    }

    fn send(&mut self, socket: &HostSocket, bufs: &[IoBuf<'_>], flags: SeqFlags) -> io::Result<usize> {
        socket.send(bufs, flags)
    }

    fn enlarge_send_buffer(&mut self, socket: &HostSocket) {
        socket.enlarge_send_buffer();
    }

    fn shutdown(&mut self, socket: &HostSocket, directions: ShutdownFlags) {
        socket.shutdown(directions);
    }

    fn set_interest(&mut self, id: ConnectionId, socket: &HostSocket, interest: Interest) {
        let _ = self.modify(id, socket, interest);
    }

    fn close(&mut self, socket: HostSocket, mode: CloseMode) {
        if mode == CloseMode::Reset {
            socket.reset_on_close();
        }
    }

    fn cancel_connect(&mut self, id: ConnectionId) {
        self.pending.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn a_line_that_has_arrived_counts_however_late_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = HostListener::bind_unix(&path, SocketType::Stream).unwrap();
        let config = HostConfig {
            listeners: vec![Listening { listener, port: None }],
            uds: None,
            rules: Vec::new(),
            cid: 3,
            local_guests: Arc::default(),
            accept_queue: Arc::new(AcceptQueue::new(1).unwrap()),
            handshakes_max: 1,
        };
        let mut host = Host::new(Arc::new(config)).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        // The clock was not read yet: the handshake begins when the machine was started.
        host.poll();
        host.watch_handshakes();
        host.set_timer(Some(Duration::from_millis(1)));
        poll(&mut [PollFd::new(&host.timer, PollFlags::IN)], None).unwrap();
        client.write_all(b"CONNECT 52\n").unwrap();
        host.poll();
        assert!(matches!(host.next_event(), Some(SocketEvent::Incoming(incoming)) if incoming.port == 52));
        assert!(host.read_clock() > HANDSHAKE_TIMEOUT_MS, "its time was over");
    }
}
