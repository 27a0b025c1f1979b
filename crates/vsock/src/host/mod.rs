//! The host's side over epoll: listeners, those who have connected and not yet said where to, connections under way, and
//! the guests of the same process.
//!
//! Sockets are watched by edges: each tells once that there is something new, and the engine remembers that it may read
//! on. A socket is watched for room only while it had none.

mod begin;
mod convention;
mod lending;
mod socket;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::event::{Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use towline_channel::{IoBuf, IoBufMut, ZeroCopySend};

use self::begin::Pending;
use self::convention::Line;
use self::lending::Lenders;
pub(crate) use self::lending::wait_for_freed;
pub(crate) use self::socket::HostSocket;
pub(crate) use self::socket::Listening;
use crate::connection::{ConnectionId, ConnectionKey};
use crate::engine::Readiness;
use crate::local_guests::{Incoming, LocalGuests, Mailbox};
use crate::packet::{HOST_CID, Kind, SeqFlags, ShutdownFlags};
use crate::rules::Rule;
use crate::sockets::{ConnectOutcome, Peeked, Received, Sockets};

/// How long they may take.
const GREETING_MS: u64 = 10_000;
/// Connections that are accepted before others have a turn.
const ACCEPTS: usize = 64;
/// What one look tells at most.
const EVENTS: usize = 64;
/// Ticks of the clock, when somebody waits for time.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// An [`ConnectionId`] never has this bit; what is not a connection has.
const OTHER: u64 = 1 << 63;
/// What it is then, above the index.
const TIMER: u64 = OTHER | 1 << 32;
const MAIL: u64 = OTHER | 2 << 32;
const LISTENER: u64 = OTHER | 3 << 32;
const GREETING: u64 = OTHER | 4 << 32;
const INDEX: u64 = u32::MAX as u64;

/// All that listens for one guest, as long as its device is there.
#[derive(Debug)]
pub(crate) struct Ears {
    /// What each leads to: a port of the guest's, or none if whoever connects says it.
    pub(crate) listening: Vec<(Listening, Option<u32>)>,
    /// Where the guest's own connections go: this path and `_PORT`.
    pub(crate) uds: Option<PathBuf>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) zero_copy_send: ZeroCopySend,
    pub(crate) cid: u64,
    pub(crate) local_guests: Arc<LocalGuests>,
    pub(crate) mailbox: Arc<Mailbox>,
    /// The most handshakes under way.
    pub(crate) greetings_max: usize,
}

/// What happened, for the engine.
pub(crate) enum Event {
    Readable(ConnectionId, Readiness),
    Writable(ConnectionId),
    /// Either something that was lent is free, or the socket has failed.
    Error(ConnectionId),
    Connected(ConnectionId, Option<HostSocket>),
    /// Somebody wants a port of the guest's.
    Open {
        port: u32,
        kind: Kind,
        cid: u64,
        socket: HostSocket,
    },
    Tick,
}

/// Someone who has connected and not yet said where to.
struct Greeting {
    socket: HostSocket,
    since_ms: u64,
    /// In the order in which they came.
    number: u64,
}

/// The sockets of one guest.
pub(crate) struct Host {
    epoll: OwnedFd,
    timer: OwnedFd,
    ticking: bool,
    ears: Arc<Ears>,
    deaf: bool,
    /// How often it was looked, and when a listener last had somebody.
    looks: u64,
    accepted_at: u64,
    greetings: Vec<Option<Greeting>>,
    greeting_count: usize,
    greeted: u64,
    pending: HashMap<ConnectionId, Pending>,
    lenders: Lenders,
    events: VecDeque<Event>,
    now_ms: u64,
}

fn id_of(data: u64) -> ConnectionId {
    ConnectionId { index: data as u32, generation: (data >> 32) as u32 }
}

fn data_of(id: ConnectionId) -> u64 {
    u64::from(id.index) | u64::from(id.generation) << 32
}

const READ: epoll::EventFlags = epoll::EventFlags::IN
    .union(epoll::EventFlags::PRI)
    .union(epoll::EventFlags::RDHUP)
    .union(epoll::EventFlags::ET);
const WRITE: epoll::EventFlags = epoll::EventFlags::OUT.union(epoll::EventFlags::ET);

impl Host {
    pub(crate) fn new(ears: Arc<Ears>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let data = epoll::EventData::new_u64;
        epoll::add(&epoll, &timer, data(TIMER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, ears.mailbox.as_fd(), data(MAIL), epoll::EventFlags::IN)?;
        for (index, (listening, _)) in ears.listening.iter().enumerate() {
            epoll::add(&epoll, listening, data(LISTENER | index as u64), epoll::EventFlags::IN)?;
        }
        let lenders = Lenders::new(ears.zero_copy_send);
        Ok(Self {
            epoll,
            timer,
            ticking: false,
            ears,
            lenders,
            deaf: false,
            looks: 0,
            accepted_at: 0,
            greetings: Vec::new(),
            greeting_count: 0,
            greeted: 0,
            pending: HashMap::new(),
            events: VecDeque::new(),
            now_ms: 0,
        })
    }

    /// Looks at what happened, without waiting. Ask [`Host::next_event`] for it.
    pub(crate) fn look(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut space = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let found = match epoll::wait(&self.epoll, &mut space, Some(&now)) {
            Ok((found, _)) => found,
            Err(rustix::io::Errno::INTR) => return,
            Err(errno) => {
                tracing::error!(%errno, "epoll_wait");
                return;
            }
        };
        self.looks += 1;
        for event in found {
            let (data, flags) = (event.data.u64(), event.flags);
            let index = (data & INDEX) as usize;
            match data & !INDEX {
                TIMER => self.time(),
                MAIL => self.mail(),
                LISTENER => self.accept(index),
                GREETING => self.greet(index),
                _ => self.connection(id_of(data), flags),
            }
        }
    }

    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The clock ticks while somebody waits for time.
    pub(crate) fn keep_time(&mut self, wanted: bool) {
        if self.ticking {
            return;
        }
        let again = || self.pending.values().any(|pending| matches!(pending, Pending::Again(..)));
        if !(wanted || self.deaf || self.greeting_count > 0 || again()) {
            return;
        }
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: TICK };
        match rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.ticking = true,
            Err(errno) => tracing::error!(%errno, "timerfd_settime"),
        }
    }

    fn time(&mut self) {
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        self.ticking = false;
        self.look_at_clock();
        self.events.push_back(Event::Tick);
        let late = |greeting: &Greeting| self.now_ms.saturating_sub(greeting.since_ms) > GREETING_MS;
        for place in &mut self.greetings {
            if place.as_ref().is_some_and(late) {
                *place = None;
                self.greeting_count -= 1;
            }
        }
        self.listen(true);
        let again: Vec<ConnectionId> =
            self.pending.iter().filter(|(_, p)| matches!(p, Pending::Again(..))).map(|(id, _)| *id).collect();
        for id in again {
            if let Some(Pending::Again(place, kind)) = self.pending.remove(&id) {
                let connect = self.begin(id, &place, kind);
                self.tell(id, connect);
            }
        }
    }

    /// How many connections each other guest of the process may have with this one.
    pub(crate) fn sibling_share(&self, connections: usize) -> usize {
        self.ears.local_guests.share(self.ears.cid, connections)
    }

    /// What time it is, in milliseconds.
    pub(crate) fn look_at_clock(&mut self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let part = |number: i64| u64::try_from(number).unwrap_or(0);
        self.now_ms = part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000;
        self.now_ms
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.now_ms
    }

    fn tell(&mut self, id: ConnectionId, connect: ConnectOutcome<HostSocket>) {
        match connect {
            ConnectOutcome::Connected(socket) => self.events.push_back(Event::Connected(id, Some(socket))),
            ConnectOutcome::Refused => self.events.push_back(Event::Connected(id, None)),
            ConnectOutcome::InProgress => {}
        }
    }

    /// Whether more connections are taken; while there is no room they wait in the kernel.
    fn listen(&mut self, wanted: bool) {
        if self.deaf != wanted {
            return;
        }
        self.deaf = !wanted;
        let flags = if wanted { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (index, (listening, _)) in self.ears.listening.iter().enumerate() {
            let data = epoll::EventData::new_u64(LISTENER | index as u64);
            if let Err(errno) = epoll::modify(&self.epoll, listening, data, flags) {
                tracing::error!(%errno, "epoll_ctl");
            }
        }
    }

    fn accept(&mut self, index: usize) {
        let since_ms = self.now_ms;
        // To find that nobody else is there costs the kernel as much as to find somebody. It tells again if there is.
        let crowded = self.looks - std::mem::replace(&mut self.accepted_at, self.looks) <= 1;
        for _ in 0..if crowded { ACCEPTS } else { 1 } {
            let (listening, port) = &self.ears.listening[index];
            match (listening.accept(port.is_none()), *port) {
                (Ok(socket), Some(port)) => {
                    let kind = socket.kind();
                    self.events.push_back(Event::Open { port, kind, cid: HOST_CID, socket });
                }
                (Ok(socket), None) => {
                    self.make_room();
                    let index = self.greetings.iter().position(Option::is_none).unwrap_or_else(|| {
                        self.greetings.push(None);
                        self.greetings.len() - 1
                    });
                    self.greeted += 1;
                    self.greetings[index] = Some(Greeting { socket, since_ms, number: self.greeted });
                    self.greeting_count += 1;
                    self.greet(index);
                }
                (Err(error), _) if error.kind() == io::ErrorKind::WouldBlock => return,
                (Err(error), _) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                (Err(error), _) => {
                    tracing::warn!(%error, "no connection can be accepted for a second");
                    self.listen(false);
                    return;
                }
            }
        }
    }

    /// SeqFlags the oldest handshake if there are as many as there may be: clients that say nothing shut out nobody who does.
    fn make_room(&mut self) {
        if self.greeting_count < self.ears.greetings_max {
            return;
        }
        let there = self.greetings.iter_mut().filter(|place| place.is_some());
        if let Some(oldest) = there.min_by_key(|place| place.as_ref().map(|greeting| greeting.number)) {
            *oldest = None;
            self.greeting_count -= 1;
        }
    }

    /// Someone may have said where to.
    fn greet(&mut self, index: usize) {
        let Some(greeting) = self.greetings.get_mut(index).and_then(Option::take) else { return };
        self.greeting_count -= 1;
        let socket = &greeting.socket;
        match socket.hear(convention::connect) {
            Ok(Line::Whole(port, _)) => {
                let Greeting { socket, .. } = greeting;
                let kind = socket.kind();
                self.events.push_back(Event::Open { port, kind, cid: HOST_CID, socket });
            }
            Ok(Line::More) => {
                let data = epoll::EventData::new_u64(GREETING | index as u64);
                // Known already, if this is not its first part.
                match epoll::add(&self.epoll, socket, data, READ) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => {
                        self.greetings[index] = Some(greeting);
                        self.greeting_count += 1;
                    }
                    Err(errno) => tracing::warn!(%errno, "epoll_ctl"),
                }
            }
            Ok(Line::Wrong) => tracing::debug!("someone connected and did not say CONNECT and a port"),
            Err(error) => tracing::debug!(%error, "someone connected and went"),
        }
    }

    fn mail(&mut self) {
        for Incoming { port, kind, cid, socket } in self.ears.mailbox.take() {
            self.events.push_back(Event::Open { port, kind, cid, socket });
        }
    }

    fn connection(&mut self, id: ConnectionId, flags: epoll::EventFlags) {
        if self.pending.contains_key(&id) {
            self.advance(id);
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.events.push_back(Event::Writable(id));
        }
        if flags.contains(epoll::EventFlags::ERR) {
            self.events.push_back(Event::Error(id));
        }
        if flags.contains(epoll::EventFlags::PRI) {
            self.events.push_back(Event::Readable(id, Readiness::Urgent));
        }
        let news = if flags.contains(epoll::EventFlags::HUP) {
            Readiness::Closed
        } else if flags.contains(epoll::EventFlags::RDHUP) {
            Readiness::ReadClosed
        } else if flags.contains(epoll::EventFlags::IN) {
            Readiness::Readable
        } else {
            return;
        };
        self.events.push_back(Event::Readable(id, news));
    }

    fn watch(&self, id: ConnectionId, socket: &HostSocket, write: bool, known: bool) -> io::Result<()> {
        let flags = if write { READ | WRITE } else { READ };
        let data = epoll::EventData::new_u64(data_of(id));
        let done = match known {
            true => epoll::modify(&self.epoll, socket, data, flags),
            false => epoll::add(&self.epoll, socket, data, flags),
        };
        done.inspect_err(|errno| tracing::error!(%errno, "epoll_ctl"))?;
        Ok(())
    }
}

impl AsFd for Host {
    /// Readable when [`Host::look`] has something to find.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Sockets for Host {
    type Socket = HostSocket;

    fn connect(&mut self, id: ConnectionId, key: ConnectionKey, kind: Kind) -> ConnectOutcome<HostSocket> {
        self.begin_for(id, key, kind)
    }

    fn opened(&mut self, id: ConnectionId, socket: &HostSocket) {
        let data = epoll::EventData::new_u64(data_of(id));
        let added = match epoll::add(&self.epoll, socket, data, READ) {
            Err(rustix::io::Errno::EXIST) => epoll::modify(&self.epoll, socket, data, READ),
            other => other,
        };
        if let Err(errno) = added {
            tracing::error!(%errno, "epoll_ctl");
            self.events.push_back(Event::Connected(id, None));
        } else if socket.has_early() {
            self.events.push_back(Event::Readable(id, Readiness::Readable));
        }
    }

    fn accepted(&mut self, _: ConnectionId, socket: &HostSocket, port: u32) -> io::Result<()> {
        if socket.convention { socket.say(&format!("OK {port}\n")) } else { Ok(()) }
    }

    fn receive(&mut self, socket: &HostSocket, bufs: &mut [IoBufMut<'_>]) -> io::Result<Received> {
        socket.receive(bufs)
    }

    fn front(&mut self, socket: &HostSocket) -> io::Result<Peeked> {
        socket.front()
    }

    fn send(&mut self, socket: &HostSocket, bufs: &[IoBuf<'_>], ends: SeqFlags) -> io::Result<usize> {
        socket.send(bufs, ends)
    }

    fn lends(&mut self, socket: &HostSocket) -> bool {
        self.lenders.lends(socket, self.now_ms)
    }

    fn lend(&mut self, socket: &HostSocket, bufs: &[IoBuf<'_>]) -> io::Result<(usize, Option<u64>)> {
        socket.lend(bufs)
    }

    fn freed(&mut self, socket: &HostSocket) -> u64 {
        self.lenders.freed(socket, self.now_ms)
    }

    fn part(&mut self, socket: &HostSocket, reset: bool) {
        match reset {
            true => socket.disconnect(),
            false => socket.shutdown(ShutdownFlags::all()),
        }
    }

    fn shutdown(&mut self, socket: &HostSocket, what: ShutdownFlags) {
        socket.shutdown(what);
    }

    fn watch_writable(&mut self, id: ConnectionId, socket: &HostSocket, wanted: bool) {
        let _ = self.watch(id, socket, wanted, true);
    }

    fn close(&mut self, socket: HostSocket, reset: bool) {
        if reset {
            socket.make_reset();
        }
        drop(socket);
    }

    fn forget(&mut self, id: ConnectionId) {
        self.pending.remove(&id);
    }
}
